"""A report as text: one line for each convolution and dot, in groups, refusals with what to do about them.

rewritten  conv.1  model.py:42  1:[f32]conv();2:[f8e4m3fn]scale(1);

refused    conv.7  model.py:57  no clamp before the convert to f8e4m3fn
           advice: clamp to [-448, 448] before the convert

1 rewritten, 1 refused, 0 without FP8 operands
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator

from xla_fp8.report.report import Entry, Report

Paint = Callable[[str, str], str]

ROLES = ("rewritten", "refused", "not FP8", "advice", "graph", "note", "summary")
"""What `paint` is told about a text: the kind of entry it stands for, or its part in one."""

_LABEL_WIDTH = max(map(len, ROLES[:3])) + 2
_MOST_PLACES = 3  # of one reason
_MAX_COLUMN = 48  # a longer name pushes its own line, not everybody's


def plain(text: str, role: str) -> str:
    """The paint of a pipe: none."""
    return text


def render(report: Report, *, everything: bool, width: int | None, paint: Paint) -> str:
    """See `Report.to_text`."""
    entries = [*report.rewritten, *report.refused]
    columns = _Columns(_width(entry.instruction for entry in entries), _width(entry.source or "" for entry in entries))
    groups = [
        [_entry(entry, "rewritten", entry.graph or "", columns, width, paint) for entry in report.rewritten],
        [_entry(entry, "refused", entry.reason, columns, width, paint) for entry in report.refused_fp8],
        [
            _entry(entry, "not FP8", entry.reason if everything else "", columns, width, paint, advise=everything)
            for entry in report.refused_without_fp8
        ],
    ]
    parts = ["\n".join(group) for group in groups if group]
    if not entries:
        parts.append("no convolutions and no dots")
    if report.casts:
        parts.append("\n".join(_casts(report, everything, width, paint)))
    target = f"; target {report.target}" if report.target else ""
    ending = paint(report.summary, "summary") + target
    if report.metadata_note and entries:
        ending += "\n" + _wrapped(f"note: {report.metadata_note}", "", width, paint, "note")
    if report.saved_note:
        ending += "\n" + _wrapped(report.saved_note, "", width, paint, "note")
    parts.append(ending)
    return "\n\n".join(parts) + "\n"


class _Columns:
    """How wide the columns of names and of source lines are."""

    def __init__(self, instruction: int, source: int) -> None:
        self.instruction = instruction
        self.source = source


def _width(texts: Iterable[str]) -> int:
    return max((len(text) for text in texts if len(text) <= _MAX_COLUMN), default=0)


def _entry(
    entry: Entry, role: str, what: str, columns: _Columns, width: int | None, paint: Paint, *, advise: bool = True
) -> str:
    head = f"{entry.instruction:<{columns.instruction}}"
    if columns.source or entry.source:  # a source too long for the column is shown all the same
        head += f"  {entry.source or '-':<{columns.source}}"
    label = paint(role, role) + " " * (_LABEL_WIDTH - len(role))
    indent = " " * _LABEL_WIDTH
    if role == "rewritten":  # a graph is there to be copied: never wrapped
        lines = [f"{label}{head}  {paint(what, 'graph')}"]
        if entry.reason:  # why the graph is no longer
            lines.append(_wrapped(f"stops because: {entry.reason}", indent, width, paint, ""))
    elif width is None or _LABEL_WIDTH + len(head) + 2 + len(what) <= width:
        lines = [f"{label}{head}  {what}".rstrip()]
    else:
        lines = [label + head.rstrip(), _wrapped(what, indent, width, paint, "")]
    if advise and entry.advice:
        lines.append(_wrapped(f"advice: {entry.advice}", indent, width, paint, "advice"))
    return "\n".join(lines)


def _casts(report: Report, everything: bool, width: int | None, paint: Paint) -> Iterator[str]:
    """What is left to XLA, by reason, and the kernels where everything is asked for."""
    yield paint(report.casts_note, "summary")
    for cast in report.casts if everything else ():
        if cast.operations:
            gives = f"{cast.place}: {cast.operations} operations give {', '.join(cast.types)}"
            yield _wrapped(gives, "  ", width, paint, "")
    for reason, left in report.left_casts.items():
        shown = left.places if everything else left.places[:_MOST_PLACES]
        more = f" and {len(left.places) - len(shown)} more places" if len(left.places) > len(shown) else ""
        yield _wrapped(f"{left.count} left to XLA ({', '.join(shown)}{more}): {reason}", "  ", width, paint, "")


def _wrapped(text: str, indent: str, width: int | None, paint: Paint, role: str) -> str:
    """`text` behind `indent`, on as many lines as `width` asks for; painted line by line, so no colour spills."""
    lines = [text]
    if width:
        lines = textwrap.wrap(text, max(width - len(indent), 40), break_long_words=False, break_on_hyphens=False)
    return "\n".join(indent + (paint(line, role) if role else line) for line in lines)
