"""An HLO module: header, stack-frame tables and computations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from xla_fp8.hlo.attributes import AttributeMap
from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.errors import HloAttributeError, HloMutationError
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.opcodes import COMPUTATION_ATTRIBUTES
from xla_fp8.hlo.stack_frames import SourceLocation, StackFrameTables

_NAME_RE = re.compile(r"[A-Za-z_][\w.\-]*")
_FRAME_RE = re.compile(r"\bstack_frame_id=([0-9]{1,18})")


@dataclasses.dataclass(frozen=True)
class PrintStyle:
    """How the text was written, so that it comes back the same way.

    Attributes:
        percent: XLA's long form: names with `%`, and `/*index=5*/` before every fifth operand; else its short form.
        operand_types: operands with their shapes before them.
    """

    percent: bool = True
    operand_types: bool = False


class HloModule:
    """A module, in the order of its text.

    Attributes:
        name: after `HloModule`; XLA's choice (`module_main`, `_`) for text without a header.
        attributes: of the header (entry_computation_layout, input_output_alias, ...), as text.
        tables: FileNames, FunctionNames, FileLocations, StackFrames of new dumps.
        filename: where the text came from, for messages.
    """

    def __init__(self, name: str, filename: str | None = None) -> None:
        self.name = name
        self.filename = filename
        self.attributes = AttributeMap()
        self.tables = StackFrameTables()
        self.style = PrintStyle()
        self._computations: dict[str, HloComputation] = {}
        self._entry: HloComputation | None = None

    @property
    def computations(self) -> list[HloComputation]:
        return list(self._computations.values())

    @property
    def entry(self) -> HloComputation:
        """The ENTRY computation; the last one where none is marked."""
        if self._entry is not None:
            return self._entry
        if not self._computations:
            raise HloMutationError("the module has no computations")
        return self.computations[-1]

    @property
    def has_marked_entry(self) -> bool:
        return self._entry is not None

    def set_entry(self, computation: HloComputation) -> None:
        self._entry = computation

    def computation(self, name: str) -> HloComputation:
        """The computation of that name, with or without `%`. Raises HloAttributeError."""
        found = self._computations.get(name.lstrip("%"))
        if found is None:
            raise HloAttributeError(f"there is no computation {name!r} in module {self.name}")
        return found

    def add_computation(self, computation: HloComputation, *, before: HloComputation | None = None) -> HloComputation:
        """Adds a computation at the end, or before another: text must define what it calls first."""
        if computation.name in self._computations:
            raise HloMutationError(f"module {self.name} already has a computation {computation.name}")
        if before is None:
            self._computations[computation.name] = computation
        else:
            items = list(self._computations.items())
            at = next(i for i, (_, c) in enumerate(items) if c is before)
            items.insert(at, (computation.name, computation))
            self._computations = dict(items)
        computation.module = self
        return computation

    def remove_computation(self, computation: HloComputation) -> None:
        """Removes a computation that nothing calls; the caller has made sure of that."""
        if computation is self.entry:
            raise HloMutationError(f"{computation.name} is the entry computation")
        del self._computations[computation.name]

    def rename_computations(self, names: Mapping[str, str]) -> None:
        """Gives computations other names, which are free: old name → new name. What calls them follows."""
        for computation in self._computations.values():
            for instruction in computation:
                for attribute in COMPUTATION_ATTRIBUTES if instruction.called_computation_names else ():
                    if (text := instruction.attr(attribute)) is not None:
                        renamed = _NAME_RE.sub(lambda match: names.get(match[0], match[0]), text)
                        instruction.attributes[attribute] = renamed
            computation.name = names.get(computation.name, computation.name)
        self._computations = {computation.name: computation for computation in self._computations.values()}

    def unique_computation_name(self, prefix: str) -> str:
        """`prefix`, or `prefix.N` where that is taken."""
        name, number = prefix, 0
        while name in self._computations:
            number += 1
            name = f"{prefix}.{number}"
        return name

    def called_computations(self) -> set[HloComputation]:
        """The entry and every computation that can be reached from it through calls."""
        seen = {self.entry}
        pending = [self.entry]
        while pending:
            for instruction in pending.pop():
                for called in instruction.called_computations:
                    if called not in seen:
                        seen.add(called)
                        pending.append(called)
        return seen

    def source_location(self, instruction: HloInstruction) -> SourceLocation | None:
        """The user's file and line that the metadata names; None where the dump has no such metadata."""
        metadata = instruction.metadata
        if metadata.source_file:
            return SourceLocation(metadata.source_file, metadata.source_line, "")
        return self.tables.location(metadata.stack_frame_id)

    def drop_unused_frames(self) -> None:
        """Leaves of the stack frames those that metadata names and their callers, numbered anew."""
        texts = {i: i.attr("metadata") or "" for computation in self._computations.values() for i in computation}
        used = (int(match[1]) for text in texts.values() for match in _FRAME_RE.finditer(text))
        self.tables, numbers = self.tables.only(used)
        for instruction, text in texts.items():
            if renumbered := _FRAME_RE.sub(lambda match: f"stack_frame_id={numbers.get(int(match[1]), 0)}", text):
                instruction.attributes["metadata"] = renumbered

    @property
    def instruction_count(self) -> int:
        return sum(len(c) for c in self._computations.values())

    def clone(self) -> HloModule:
        """An independent copy."""
        from xla_fp8.hlo.parser import parse
        from xla_fp8.hlo.printer import to_text

        return parse(to_text(self), self.filename)

    def replace_contents_with(self, other: HloModule) -> None:
        """Becomes what `other` is; `other` must not be used afterwards. How a failed pipeline is undone."""
        self.name, self.filename, self.attributes = other.name, other.filename, other.attributes
        self.tables, self.style = other.tables, other.style
        self._computations, self._entry = other._computations, other._entry
        for computation in self._computations.values():
            computation.module = self

    def __repr__(self) -> str:
        return f"<HloModule {self.name}, {len(self._computations)} computations, {self.instruction_count} instructions>"
