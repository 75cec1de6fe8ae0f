"""A computation of a module as a module of its own."""

from __future__ import annotations

import re

from xla_fp8.hlo.attributes import AttributeMap
from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.module import HloModule

_NAME_RE = re.compile(r'"(?:[^"\\]|\\.)*+"|%([A-Za-z_][\w.-]*)')
_NUMBERS_RE = re.compile(r"(?:\.[0-9]+)+$")


def extract(computation: HloComputation, name: str) -> HloModule:
    """A new module named `name`: a copy of `computation` as its entry, which has that name too, with what it calls.

    All other names are numbered anew, each base name by itself, so that the result does not depend on what else the
    module holds; in XLA's short form (without `%`) they stay as they are. The stack frames are those of the whole
    module: `HloModule.drop_unused_frames` leaves those that are used. The header has no attributes: layouts of
    parameters and results are those of their shapes.
    """
    whole = computation.module
    part = HloModule(name, whole.filename)
    part.tables, part.style = whole.tables, whole.style
    names = _Names(whole.style.percent)
    names.known[computation.name] = name
    reached = _reached(computation)
    for original in whole.computations:
        if original in reached:
            copy = part.add_computation(_copied(original, part, names))
            if original is computation:
                part.set_entry(copy)
    return part


def _reached(computation: HloComputation) -> set[HloComputation]:
    reached = {computation}
    pending = [computation]
    while pending:
        for instruction in pending.pop():
            if called := set(instruction.called_computations) - reached:
                pending += called
                reached |= called
    return reached


def _copied(original: HloComputation, module: HloModule, names: _Names) -> HloComputation:
    """A computation of `module`; what `original` calls has been copied before, or is so under the name it has."""
    copy = HloComputation(names.of(original.name), module, original.has_program_shape)
    copy.trailing_attributes = AttributeMap(original.trailing_attributes)
    copies: dict[HloInstruction, HloInstruction] = {}
    for instruction in original:
        attributes = instruction.attribute_text
        if "%" in attributes:
            attributes = names.in_text(attributes)
        operands = tuple([copies[operand] for operand in instruction.operands])
        name, shape, payload = names.of(instruction.name), instruction._shape, instruction.payload
        made = HloInstruction(name, instruction.opcode, shape, operands, payload, attributes, copy)
        copies[instruction] = copy._names[name] = made
        copy._append_parsed(made)
    copy._root = copies[original.root]
    return copy


class _Names:
    """New names, numbered in the order in which they are asked for."""

    def __init__(self, renames: bool) -> None:
        self.known: dict[str, str] = {}
        self._renames = renames
        self._counts: dict[str, int] = {}

    def of(self, name: str) -> str:
        new = self.known.get(name)
        if new is None:
            new = name
            if self._renames:
                base = _NUMBERS_RE.sub("", name)
                count = self._counts[base] = self._counts.get(base, 0) + 1
                new = f"{base}.{count}"
            self.known[name] = new
        return new

    def in_text(self, attributes: str) -> str:
        # In a string, what looks like a name is none.
        return _NAME_RE.sub(lambda match: match[0] if match[1] is None else f"%{self.of(match[1])}", attributes)
