"""`xla-fp8 reduce`: what is left of a module, that it is valid, and what happens when nothing is interesting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from xla_fp8 import _jax_compat, hlo
from xla_fp8.hlo import HloModule
from xla_fp8.reduce import NotInterestingError, reduce

MODULE = """\
HloModule m, entry_computation_layout={(f32[64,8]{1,0}, s32[4]{0})->(f32[64]{0}, f32[64,8]{1,0}, s32[4]{0})}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[64,8], i: s32[4]) -> (f32[64], f32[64,8], s32[4]) {
  %x = f32[64,8]{1,0} parameter(0)
  %i = s32[4]{0} parameter(1)
  %table = f32[64,8]{1,0} constant({...})
  %sine = f32[64,8]{1,0} sine(%x), metadata={op_name="sin" source_file="a.py" source_line=1}
  %tanh = f32[64,8]{1,0} tanh(%sine)
  %scaled = f32[64,8]{1,0} multiply(%tanh, %table)
  %zero = f32[] constant(0)
  %total = f32[64]{0} reduce(%scaled, %zero), dimensions={1}, to_apply=%sum
  %j = s32[4]{0} negate(%i)
  ROOT %out = (f32[64]{0}, f32[64,8]{1,0}, s32[4]{0}) tuple(%total, %scaled, %j)
}
"""


def opcodes(module: HloModule) -> list[str]:
    return [instruction.opcode for computation in module.computations for instruction in computation]


def reduced(contains: str, text: str = MODULE) -> HloModule:
    """What is left of the module when only one opcode is of interest; every candidate must be valid to XLA."""

    def is_interesting(candidate: str) -> bool:
        _jax_compat.hlo_text_to_module(candidate)
        return contains in opcodes(hlo.parse(candidate))

    module = reduce(hlo.parse(text), is_interesting)
    hlo.verify(module)
    return module


def test_only_what_is_interesting_is_left() -> None:
    module = reduced("tanh")
    assert opcodes(module) == ["parameter", "tanh"]
    assert module.entry.root.shape.dimensions == (1, 1)
    assert len(module.entry.parameters) == 1
    assert "metadata" not in hlo.to_text(module)
    assert not module.attributes


def test_computations_go_with_their_last_caller_and_stay_with_one() -> None:
    assert len(reduced("sine").computations) == 1
    assert len(reduced("reduce").computations) == 2


def test_outputs_are_dropped_where_a_tuple_is_interesting() -> None:
    module = reduce(hlo.parse(MODULE), lambda text: " tuple(" in text and "negate" in text)
    assert opcodes(module) == ["parameter", "negate", "tuple"]
    assert len(module.entry.root.operands) == 1


def test_unused_parameters_go_where_one_of_them_is_interesting() -> None:
    unused = "".join(f"  p{n} = {kind}[4] parameter({n})\n" for n, kind in enumerate(("u8", "s32", "s8", "u16")))
    module = hlo.parse(f"HloModule m\n\nENTRY main {{\n{unused}  ROOT x = f32[4] parameter(4)\n}}\n")
    left = reduce(module, lambda candidate: "s32" in candidate)
    assert [p.shape.element_type for p in left.entry.parameters] == ["s32", "f32"]


def test_the_original_is_left_as_it_is_and_nothing_is_asked_twice() -> None:
    module = hlo.parse(MODULE)
    asked: list[str] = []

    def is_interesting(text: str) -> bool:
        asked.append(text)
        return "negate" in text

    reduce(module, is_interesting)
    assert hlo.to_text(module) == hlo.to_text(hlo.parse(MODULE))
    assert len(asked) == len(set(asked))


def test_a_module_that_is_not_interesting_is_told() -> None:
    with pytest.raises(NotInterestingError, match="not interesting to begin with"):
        reduce(hlo.parse(MODULE), lambda text: False)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "big.hlo"
    path.write_text(MODULE)
    return path


@pytest.mark.parametrize("command", ["grep -q tanh {}", "grep -q tanh"])
def test_the_command_decides(cli: Callable, big: Path, command: str) -> None:
    done = cli("reduce", big, f"--interesting={command}")
    assert done.status == 0
    module = hlo.parse((big.parent / "big.reduced.hlo").read_text())
    assert opcodes(module) == ["parameter", "tanh"]
    assert "2 of 13 instructions are left" in done.err
    assert big.read_text() == MODULE


def test_a_command_that_fails_leaves_no_file(cli: Callable, big: Path) -> None:
    done = cli("reduce", big, "--interesting=false", "-o", big.parent / "out.hlo")
    assert done.status == 1
    assert "not interesting to begin with" in done.err
    assert not (big.parent / "out.hlo").exists()


def test_a_command_that_takes_too_long_is_not_interesting(cli: Callable, big: Path) -> None:
    done = cli("reduce", big, "--interesting=sleep 20 #", "--timeout=1")
    assert done.status == 1


def test_to_stdout(cli: Callable, big: Path) -> None:
    done = cli("reduce", big, "--interesting=grep -q negate", "-o", "-")
    assert done.status == 0
    assert opcodes(hlo.parse(done.out)) == ["parameter", "negate"]
