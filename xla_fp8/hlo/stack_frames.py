"""The FileNames, FunctionNames, FileLocations and StackFrames tables between a dump's header and its computations.

Since 2025 XLA prints where instructions come from once, in tables, and metadata holds a `stack_frame_id`. The tables
are kept as text and read when a source line is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from xla_fp8.hlo.attributes import quote, unquote

SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")

_NAME_RE = re.compile(r'([0-9]{1,18})\s+("(?:[^"\\]|\\.)*+")', re.S)
_RECORD_RE = re.compile(r"([0-9]{1,18})\s+\{([^}]*)\}")
_T = TypeVar("_T")
_FIELD_RE = re.compile(r"(\w+)=([0-9]{1,18})")


@dataclasses.dataclass(frozen=True, slots=True)
class SourceLocation:
    """A line of the user's program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclasses.dataclass(frozen=True)
class StackFrameTables:
    """Section name → its lines as written (without the section's name)."""

    sections: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.sections)

    def location(self, stack_frame_id: int) -> SourceLocation | None:
        """Where the innermost frame of `stack_frame_id` stands; None where the tables do not say."""
        stack = self.stack(stack_frame_id)
        return stack[0] if stack else None

    def stack(self, stack_frame_id: int) -> list[SourceLocation]:
        """The frames of `stack_frame_id`, innermost first.

        The printed parent_frame_id is one higher than the frame's number: 1 means that there is no parent.
        """
        frames: list[SourceLocation] = []
        seen: set[int] = set()
        while stack_frame_id > 0 and stack_frame_id not in seen:
            seen.add(stack_frame_id)
            frame = self._frames.get(stack_frame_id)
            location = self._locations.get(frame.get("file_location_id", 0)) if frame else None
            if frame is None or location is None:
                break
            file = self._files.get(location.get("file_name_id", 0), "")
            function = self._functions.get(location.get("function_name_id", 0), "")
            frames.append(SourceLocation(file, location.get("line", 0), function))
            stack_frame_id = frame.get("parent_frame_id", 1) - 1
        return frames

    def only(self, stack_frame_ids: Iterable[int]) -> tuple[StackFrameTables, dict[int, int]]:
        """The tables of some frames and their callers, numbered anew, and the new number of each frame."""
        kept: set[int] = set()
        for frame in set(stack_frame_ids):
            while frame in self._frames and frame not in kept:
                kept.add(frame)
                frame = self._frames[frame].get("parent_frame_id", 1) - 1
        frames = {old: self._frames[old] for old in sorted(kept)}
        locations = _used(self._locations, frames, "file_location_id")
        files = _used(self._files, locations, "file_name_id")
        functions = _used(self._functions, locations, "function_name_id")
        frame_numbers = _numbers(frames)
        of_location = {"file_name_id": _numbers(files), "function_name_id": _numbers(functions)}
        of_frame = {
            "file_location_id": _numbers(locations),
            # Printed one higher than the parent's number; 1, no parent, stays.
            "parent_frame_id": {old + 1: new + 1 for old, new in frame_numbers.items()},
        }
        sections = (
            _section("FileNames", [quote(name) for name in files.values()]),
            _section("FunctionNames", [quote(name) for name in functions.values()]),
            _section("FileLocations", [_record(record, of_location) for record in locations.values()]),
            _section("StackFrames", [_record(record, of_frame) for record in frames.values()]),
        )
        return StackFrameTables(sections if frames else ()), frame_numbers

    def _text(self, section: str) -> str:
        return dict(self.sections).get(section, "")

    @functools.cached_property
    def _files(self) -> dict[int, str]:
        return {int(m[1]): unquote(m[2]) for m in _NAME_RE.finditer(self._text("FileNames"))}

    @functools.cached_property
    def _functions(self) -> dict[int, str]:
        return {int(m[1]): unquote(m[2]) for m in _NAME_RE.finditer(self._text("FunctionNames"))}

    @functools.cached_property
    def _locations(self) -> dict[int, dict[str, int]]:
        return self._records("FileLocations")

    @functools.cached_property
    def _frames(self) -> dict[int, dict[str, int]]:
        return self._records("StackFrames")

    def _records(self, section: str) -> dict[int, dict[str, int]]:
        return {
            int(m[1]): {name: int(value) for name, value in _FIELD_RE.findall(m[2])}
            for m in _RECORD_RE.finditer(self._text(section))
        }


def _used(table: Mapping[int, _T], by: Mapping[int, Mapping[str, int]], field: str) -> dict[int, _T]:
    """The rows of `table` that the rows of another one name in `field`."""
    used = {record.get(field, 0) for record in by.values()}
    return {number: table[number] for number in sorted(used) if number in table}


def _numbers(rows: Iterable[int]) -> dict[int, int]:
    return {old: new for new, old in enumerate(rows, 1)}


def _record(record: Mapping[str, int], renumbered: Mapping[str, Mapping[int, int]]) -> str:
    fields = {name: renumbered.get(name, {}).get(value, value) for name, value in record.items()}
    return "{" + " ".join(f"{name}={value}" for name, value in fields.items()) + "}"


def _section(name: str, rows: list[str]) -> tuple[str, str]:
    return name, "\n".join(f"{number} {row}" for number, row in enumerate(rows, 1))
