"""Shrinks an HLO module while it stays interesting: what llvm-reduce does for LLVM IR.

Each kind of step below yields smaller candidates of a module; the first that verifies and is still interesting takes
its place. Rounds go on until none helps. A step says what to change by position or name, so that it can be tried on a
fresh copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from xla_fp8.errors import XlaFp8Error
from xla_fp8.hlo import HloComputation, HloError, HloInstruction, HloModule, Shape, parse, to_text, verify
from xla_fp8.hlo.stack_frames import StackFrameTables

Change = Callable[[HloModule], bool]
"""Changes a copy of the module; returns False where there is nothing to change."""

_UNNEEDED_ATTRIBUTES = ("metadata", "sharding", "frontend_attributes", "origin", "control-predecessors")
_DIMENSION_RE = re.compile(r"(?<![\w.])\d+(?![\w.])")


class NotInterestingError(XlaFp8Error):
    """The module that was given is not interesting to begin with."""


def reduce(
    module: HloModule,
    is_interesting: Callable[[str], bool],
    on_progress: Callable[[str, HloModule], None] = lambda step, module: None,
) -> HloModule:
    """The smallest module found that is still interesting.

    Args:
        module: left as it is.
        is_interesting: asked about the text of each candidate; every candidate passes `hlo.verify`. Asked once a text.
        on_progress: called with the kind of step and the new best module whenever there is one.

    Raises:
        NotInterestingError: `is_interesting` says no to the module itself.
    """
    text = to_text(module)
    if not is_interesting(text):
        raise NotInterestingError("the module is not interesting to begin with: the command fails on it as it is")
    seen = {text}
    best = module.clone()
    progress = True
    while progress:
        progress = False
        for name, step in STEPS.items():
            while (better := _first(best, step, is_interesting, seen)) is not None:
                best, progress = better, True
                on_progress(name, best)
    return best


def _first(
    best: HloModule,
    step: Callable[[HloModule], Iterator[Change]],
    is_interesting: Callable[[str], bool],
    seen: set[str],
) -> HloModule | None:
    """What the first change of a step that is valid and interesting makes of `best`; later ones are tried on top."""
    found: HloModule | None = None
    for change in step(best):
        candidate = (found or best).clone()
        try:
            if not change(candidate):
                continue
            _clean(candidate)
            verify(candidate)
            text = to_text(candidate)
            candidate = parse(text)
        except HloError:
            continue
        if text in seen:
            continue
        seen.add(text)
        if is_interesting(text):
            found = candidate
    return found


def _clean(module: HloModule) -> None:
    """Removes what is dead, and header attributes that no longer fit the entry's parameters and result."""
    for computation in module.computations:
        computation.remove_dead()
    reachable = module.called_computations()
    for computation in module.computations:
        if computation not in reachable:
            module.remove_computation(computation)
    for name in ("entry_computation_layout", "input_output_alias", "buffer_donor"):
        module.attributes.pop(name, None)


# -------------------------------------------------------------------- the steps


def _outputs(module: HloModule) -> Iterator[Change]:
    """The root's operands instead of the root; then fewer outputs."""
    root = module.entry.root

    def use(index: int) -> Change:
        def change(module: HloModule) -> bool:
            entry = module.entry
            if index >= len(entry.root.operands):
                return False
            entry.set_root(entry.root.operand(index))
            return True

        return change

    def keep(start: int, end: int) -> Change:
        def change(module: HloModule) -> bool:
            root = module.entry.root
            if root.opcode != "tuple" or end > len(root.operands):
                return False
            kept = [*root.operands[:start], *root.operands[end:]]
            smaller = module.entry.create("tuple", Shape.tuple([o.shape for o in kept]), kept, name=root.name)
            module.entry.set_root(smaller)
            return True

        return change

    yield from (use(index) for index in range(len(root.operands)))
    if root.opcode == "tuple":
        yield from (keep(start, end) for start, end in _chunks(len(root.operands)))


def _instructions(module: HloModule) -> Iterator[Change]:
    """Parameters (in the entry) or zeros instead of runs of instructions, long runs first."""
    for computation in module.computations:
        names = [i.name for i in computation if i.opcode not in ("parameter", "constant", "tuple") and _is_plain(i)]
        for start, end in _chunks(len(names)):
            yield _replacing(computation.name, names[start:end])


def _replacing(computation_name: str, names: list[str]) -> Change:
    def change(module: HloModule) -> bool:
        computation = module.computation(computation_name)
        old = [computation.instruction(name) for name in names if name in computation]
        old = [instruction for instruction in old if instruction.users or instruction.is_root]
        for instruction in old:
            computation.replace_all_uses_with(instruction, _stand_in(computation, instruction))
        return bool(old)

    return change


def _stand_in(computation: HloComputation, old: HloInstruction) -> HloInstruction:
    if computation.is_entry:
        number = str(len(computation.parameters))
        return computation.create("parameter", old.shape, name="p", before=old, payload=number)
    zero = computation.create("constant", Shape(old.shape.element_type), before=old, payload=_zero(old.shape))
    if old.shape.is_scalar:
        return zero
    return computation.create("broadcast", old.shape, [zero], before=old, attributes={"dimensions": "{}"})


def _constants(module: HloModule) -> Iterator[Change]:
    """Zeros instead of array constants."""

    def change(computation_name: str, name: str) -> Change:
        return _replacing(computation_name, [name])

    for computation in module.computations:
        for i in computation:
            if i.opcode == "constant" and _is_plain(i) and i.shape.rank:
                yield change(computation.name, i.name)


def _operands(module: HloModule) -> Iterator[Change]:
    """An operand of the same shape instead of an instruction."""

    def change(computation_name: str, name: str, index: int) -> Change:
        def apply(module: HloModule) -> bool:
            computation = module.computation(computation_name)
            if name not in computation:
                return False
            instruction = computation.instruction(name)
            computation.replace_all_uses_with(instruction, instruction.operand(index))
            return True

        return apply

    for computation in module.computations:
        for i in computation:
            for index, operand in enumerate(i.operands):
                if i.has_shape and operand.has_shape and operand.shape.compatible(i.shape):
                    yield change(computation.name, i.name, index)


def _parameters(module: HloModule) -> Iterator[Change]:
    """Fewer unused parameters of the entry, many at once first, and one parameter instead of two of one shape."""

    def unused(module: HloModule) -> list[str]:
        parameters = module.entry.parameters
        return [p.name for p in parameters if not p.users and not p.is_root and not p.has_control_dependencies]

    def drop(names: list[str]) -> Change:
        def change(module: HloModule) -> bool:
            entry = module.entry
            there = [name for name in names if name in entry]
            for name in there:
                entry.remove(entry.instruction(name))
            for number, parameter in enumerate(entry.parameters):
                parameter.payload = str(number)
            return bool(there)

        return change

    def merge(name: str, other: str) -> Change:
        def change(module: HloModule) -> bool:
            entry = module.entry
            if name not in entry or other not in entry:
                return False
            entry.replace_all_uses_with(entry.instruction(other), entry.instruction(name))
            return drop([other])(module)

        return change

    names = unused(module)
    yield from (drop(names[start:end]) for start, end in _chunks(len(names)))
    parameters = module.entry.parameters
    for index, parameter in enumerate(parameters):
        for other in parameters[index + 1 :]:
            if parameter.shape.compatible(other.shape):
                yield merge(parameter.name, other.name)
                break


def _attributes(module: HloModule) -> Iterator[Change]:
    """No metadata, shardings and control edges; no stack-frame tables; no header attributes."""

    def drop(name: str) -> Change:
        def change(module: HloModule) -> bool:
            found = [i for c in module.computations for i in c if i.has_attribute(name)]
            for instruction in found:
                del instruction.attributes[name]
            return bool(found)

        return change

    def drop_header(name: str) -> Change:
        return lambda module: module.attributes.pop(name, None) is not None

    def drop_tables(module: HloModule) -> bool:
        module.tables = StackFrameTables()
        return True

    yield from (drop(name) for name in _UNNEEDED_ATTRIBUTES)
    yield drop_tables
    yield from (drop_header(name) for name in list(module.attributes))


def _sizes(module: HloModule) -> Iterator[Change]:
    """Smaller dimensions: every dimension of one size gets another, in all shapes at once."""
    sizes = sorted({n for s in _array_shapes(module) for n in s.dimensions}, reverse=True)
    for size in sizes:
        for smaller in dict.fromkeys((1, 2, size // 4, size // 2)):
            if 0 < smaller < size:
                yield _resizing(size, smaller)


def _resizing(size: int, smaller: int) -> Change:
    def resized(shape: Shape) -> Shape:
        text = re.sub(
            r"\[[^\]]*\]",
            lambda m: _DIMENSION_RE.sub(lambda n: str(smaller) if n[0] == str(size) else n[0], m[0]),
            str(shape),
        )
        return Shape.parse(text)

    def change(module: HloModule) -> bool:
        for computation in module.computations:
            for instruction in computation:
                if instruction.opcode == "constant" and str(size) in map(str, instruction.shape.dimensions):
                    return False
                instruction.shape = resized(instruction.shape)
        return True

    return change


STEPS: dict[str, Callable[[HloModule], Iterator[Change]]] = {
    "outputs": _outputs,
    "instructions": _instructions,
    "operands": _operands,
    "parameters": _parameters,
    "constants": _constants,
    "attributes": _attributes,
    "sizes": _sizes,
}
"""The kinds of step, in the order in which each round tries them: those that remove most first."""


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    """Runs [start, end) of `count` things: all of them, halves, quarters, ..., each by itself."""
    size = count
    while size:
        yield from ((start, min(start + size, count)) for start in range(0, count, size))
        size //= 2


def _is_plain(instruction: HloInstruction) -> bool:
    """Whether a parameter or zeros can stand in for it: an array of a type that has a zero."""
    return instruction.has_shape and instruction.shape.is_array and not instruction.shape.is_dynamic


def _zero(shape: Shape) -> str:
    return {"pred": "false", "c64": "(0, 0)", "c128": "(0, 0)"}.get(shape.element_type, "0")


def _array_shapes(module: HloModule) -> Iterator[Shape]:
    for computation in module.computations:
        for instruction in computation:
            if instruction.has_shape:
                yield from _leaves(instruction.shape)


def _leaves(shape: Shape) -> Iterator[Shape]:
    if shape.is_tuple:
        for inner in shape.tuple_shapes:
            yield from _leaves(inner)
    elif shape.is_array:
        yield shape
