"""A report as Markdown: a table of what was rewritten and one of what was not."""

from __future__ import annotations

from collections.abc import Iterable

from xla_fp8.report.report import Report


def render(report: Report, *, everything: bool) -> str:
    """See `Report.to_markdown`."""
    target = f" Target: {report.target}." if report.target else ""
    parts = [f"**{report.summary}.**{_cell(target)}"]
    if report.metadata_note:
        parts.append(f"> {_cell(report.metadata_note)}")
    if report.rewritten:
        rows = [
            (_code(e.instruction), _code(e.source or ""), _code(e.graph or ""), _cell(e.reason), _cell(e.advice))
            for e in report.rewritten
        ]
        header = ("instruction", "source", "graph", "why it stops there", "advice")
        shown = len(header) if any(row[3] or row[4] for row in rows) else 3
        parts.append("### Rewritten\n\n" + _table(header[:shown], [row[:shown] for row in rows]))
    if report.refused_fp8:
        refusals = [
            (_code(e.instruction), _code(e.source or ""), _cell(e.reason), _cell(e.advice)) for e in report.refused_fp8
        ]
        parts.append("### Refused\n\n" + _table(("instruction", "source", "reason", "advice"), refusals))
    if others := report.refused_without_fp8:
        columns: tuple[str, ...] = ("instruction", "op", "source")
        rest: list[tuple[str, ...]] = [(_code(e.instruction), _cell(e.op), _code(e.source or "")) for e in others]
        if everything:
            columns = (*columns, "reason", "advice")
            rest = [(*row, _cell(e.reason), _cell(e.advice)) for row, e in zip(rest, others, strict=True)]
        parts.append("### Without FP8 operands\n\n" + _table(columns, rest))
    if report.casts:
        found = report.left_casts.items()
        casts = [(str(left.count), _cell(reason), ", ".join(map(_code, left.places))) for reason, left in found]
        table = "\n\n" + _table(("left to XLA", "reason", "source"), casts) if casts else ""
        parts.append(f"### Casts to FP8\n\n{_cell(report.casts_note)}.{table}")
    return "\n\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [_row(header), _row(("---",) * len(header)), *map(_row, rows)]
    return "\n".join(lines)


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    """Text that Markdown leaves as it is, on one line."""
    text = " ".join(text.split()) if "\n" in text else text
    for special in "\\`*_<>[]|":
        text = text.replace(special, "\\" + special)
    return text


def _code(text: str) -> str:
    """A code span; a `|` in it would end the cell even there."""
    return f"`{text.replace('`', chr(39)).replace('|', chr(92) + '|')}`" if text else ""
