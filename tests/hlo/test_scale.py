"""Deep and wide modules: 100,000 instructions in a chain, 100,000 operands of a tuple, thousands of computations.

Nothing here may recurse or take quadratic time. The limits are many times what is needed on a slow machine, and far
below what quadratic time would take.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from xla_fp8 import hlo

SIZE = 100_000


def chain(size: int) -> str:
    lines = "".join(f"  %n{i} = f32[]{{:T(128)}} negate(%n{i - 1})\n" for i in range(1, size))
    return f"HloModule deep\n\nENTRY %e (n0: f32[]) -> f32[] {{\n  %n0 = f32[] parameter(0)\n{lines}}}\n\n"


def wide(size: int) -> str:
    lines = "".join(f"  %n{i} = f32[] negate(%n0)\n" for i in range(1, size))
    shape = ", ".join(f"/*index={i}*/f32[]" if i and i % 5 == 0 else "f32[]" for i in range(size))
    operands = ", ".join(f"/*index={i}*/%n{i}" if i and i % 5 == 0 else f"%n{i}" for i in range(size))
    return (
        f"HloModule wide\n\nENTRY %e (n0: f32[]) -> ({shape}) {{\n  %n0 = f32[] parameter(0)\n{lines}"
        f"  ROOT %t = ({shape}) tuple({operands})\n}}\n\n"
    )


def calls(size: int) -> str:
    """`size` computations, each calling the one before."""
    first = "%c0 (p: f32[]) -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n\n"
    rest = "".join(
        f"%c{i} (p: f32[]) -> f32[] {{\n  %p = f32[] parameter(0)\n"
        f"  ROOT %c = f32[] call(%p), to_apply=%c{i - 1}\n}}\n\n"
        for i in range(1, size)
    )
    return f"HloModule calls\n\n{first}{rest}".replace(f"%c{size - 1} (", f"ENTRY %c{size - 1} (")


def controls(size: int) -> str:
    """Each instruction waits for the one before."""
    lines = "".join(f"  %n{i} = f32[] negate(%n0), control-predecessors={{%n{i - 1}}}\n" for i in range(1, size))
    return f"HloModule controls\n\nENTRY %e (n0: f32[]) -> f32[] {{\n  %n0 = f32[] parameter(0)\n{lines}}}\n\n"


@pytest.fixture(autouse=True)
def linear_time() -> object:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 60


@pytest.mark.parametrize("make", [chain, wide, controls], ids=lambda f: f.__name__)
def test_parse_verify_traverse_print(make: Callable[[int], str]) -> None:
    text = make(SIZE)
    module = hlo.parse(text)
    hlo.verify(module)
    entry = module.entry
    assert len(entry) in (SIZE, SIZE + 1)
    order = entry.post_order()
    assert order == entry.instructions
    reached = entry.reachable_from(entry.parameters)
    assert len(reached) == len(entry)
    assert hlo.to_text(module).replace("ROOT ", "") == text.replace("ROOT ", "")


def test_thousands_of_computations() -> None:
    text = calls(20_000)
    module = hlo.parse(text)
    hlo.verify(module)
    assert len(module.called_computations()) == 20_000
    assert not module.entry.has_side_effect
    assert hlo.to_text(module) == text


@pytest.mark.parametrize("make", [chain, wide], ids=lambda f: f.__name__)
def test_remove_dead_takes_everything(make: Callable[[int], str]) -> None:
    entry = hlo.parse(make(SIZE)).entry
    entry.set_root(entry.parameters[0])
    assert entry.remove_dead() >= SIZE - 1
    assert len(entry) == 1
    hlo.verify(entry.module)


def test_replace_one_that_has_100_000_users() -> None:
    entry = hlo.parse(wide(SIZE)).entry
    old = entry.parameters[0]
    new = entry.create("constant", hlo.Shape.array("f32"), payload="1", before=old)
    entry.replace_all_uses_with(old, new)
    assert (old.user_count, new.user_count) == (0, SIZE)
    hlo.verify(entry.module)


def test_a_rewrite_of_every_instruction_of_a_chain() -> None:
    entry = hlo.parse(chain(SIZE)).entry
    for instruction in entry.instructions[1:]:
        new = entry.create("abs", instruction.shape, [instruction.operand(0)], before=instruction)
        entry.replace(instruction, new)
    assert len(entry) == SIZE
    assert entry.root.opcode == "abs"
    hlo.verify(entry.module)


def test_a_constant_of_a_million_elements() -> None:
    constant = f"s8[1000000]{{0}} constant({{{'1, ' * 999999}2}})"
    text = f"HloModule m\n\nENTRY %e () -> s8[1000000] {{\n  ROOT %c = {constant}\n}}\n\n"
    module = hlo.parse(text)
    hlo.verify(module)
    assert hlo.to_text(module) == text
    assert module.entry.root.constant_value().sum() == 1_000_001
