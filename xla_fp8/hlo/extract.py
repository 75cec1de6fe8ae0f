"""A computation of a module as a module of its own."""

from __future__ import annotations

import re

from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.module import HloModule
from xla_fp8.hlo.parser import parse
from xla_fp8.hlo.printer import computation_text

_NAME_RE = re.compile(r'"(?:[^"\\]|\\.)*+"|%([A-Za-z_][\w.-]*)')
_FRAME_RE = re.compile(r"\bstack_frame_id=([0-9]{1,18})")


def extract(computation: HloComputation, name: str) -> HloModule:
    """A new module named `name`: a copy of `computation` as its entry, with what it calls and its stack frames.

    Names are numbered anew, each base name by itself, so that the result does not depend on what else the module holds.
    The header has no attributes: layouts of parameters and results are those of their shapes.
    """
    module = computation.module
    reached = {computation}
    pending = [computation]
    while pending:
        for instruction in pending.pop():
            pending += [called for called in instruction.called_computations if called not in reached]
            reached.update(instruction.called_computations)
    text = "\n".join(
        computation_text(each, is_entry=each is computation) for each in module.computations if each in reached
    )
    tables, numbers = module.tables.only(int(match[1]) for match in _FRAME_RE.finditer(text))
    text = _FRAME_RE.sub(lambda match: f"stack_frame_id={numbers.get(int(match[1]), 0)}", text)
    part = parse(f"HloModule {name}\n\n{_renamed(text)}", module.filename)
    part.tables = tables
    return part


def _renamed(text: str) -> str:
    """HLO text in XLA's long form (with `%`), its names numbered in the order in which they first occur."""
    names: dict[str, str] = {}
    counts: dict[str, int] = {}

    def renamed(match: re.Match[str]) -> str:
        old = match[1]
        if old is None:  # a string: what looks like a name in it is none
            return match[0]
        if old not in names:
            base = re.sub(r"(\.[0-9]+)+$", "", old)
            counts[base] = counts.get(base, 0) + 1
            names[old] = f"{base}.{counts[base]}"
        return f"%{names[old]}"

    return _NAME_RE.sub(renamed, text)
