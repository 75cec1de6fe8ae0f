"""A report as HTML: a page that needs no other file, or the part of one that a notebook shows.

An entry has its reason, what to change, its pictures and its source lines; each box of a picture leads to the entry and
to the source line of its instruction.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import html
import re
from collections.abc import Iterator, Sequence

from xla_fp8.graph.pictures import Box, BoxKind, Flow
from xla_fp8.graph.svg import Link, svg
from xla_fp8.hlo import HloError, HloInstruction, SourceLocation, instruction_text
from xla_fp8.report.pictures import Modules, Pictures, entries_of
from xla_fp8.report.report import Entry, Report, readable
from xla_fp8.report.source_text import SourceText
from xla_fp8.report.style import INSPECTOR, PAGE_STYLE, SCRIPT, STYLE

_MOST_PICTURES = 300
_LONGEST_HLO = 500
_LABELS: dict[BoxKind, str] = {"rewritten": "rewritten", "refused": "refused", "other": "not FP8"}
_QUIET_RE = re.compile(r", (?:metadata|backend_config)=\{.*\}")


@dataclasses.dataclass(frozen=True)
class Section:
    """One report of a page.

    Attributes:
        heading: "" for none.
        modules: what the pictures are drawn from; without them only graphs are drawn.
    """

    heading: str
    report: Report
    modules: Modules | None = None


def page(title: str, sections: Sequence[Section], *, everything: bool) -> str:
    """A whole page.

    Args:
        title: of the page.
        everything: see `Report.to_text`.
    """
    sources = SourceText()
    bodies = []
    for number, section in enumerate(sections):
        heading = f"<h2>{html.escape(section.heading)}</h2>\n" if section.heading else ""
        body = _Body(section, f"r{number}-", sources, everything)
        bodies.append(f"<section>\n{heading}{body.text()}</section>\n")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}{PAGE_STYLE}</style>\n</head>\n"
        f'<body class="xla-fp8">\n<h1>{html.escape(title)}</h1>\n{"".join(bodies)}'
        f"{_listing(sources, '')}{INSPECTOR}<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def fragment(report: Report) -> str:
    """What goes into a page of somebody else's, which runs no script of ours."""
    prefix = "x" + hashlib.sha1(report.to_json().encode()).hexdigest()[:8]
    sources = SourceText()
    body = _Body(Section("", report), prefix, sources, everything=False, listing=prefix).text()
    return f'<div class="xla-fp8">\n<style>{STYLE}</style>\n{body}{_listing(sources, prefix)}</div>\n'


class _Body:
    """The part of a page about one report. Its ids start with `prefix`, those of source lines with `listing`."""

    def __init__(self, section: Section, prefix: str, sources: SourceText, everything: bool, listing: str = "") -> None:
        self.report, self.modules = section.report, section.modules
        self.prefix, self.listing = prefix, listing
        self.sources, self.everything = sources, everything
        self.entries = entries_of(section.report)
        self.pictures = Pictures([entry for entry, _ in self.entries], section.modules)

    def text(self) -> str:
        report = self.report
        parts = [f'<p class="summary">{html.escape(report.summary)}</p>\n']
        if report.target:
            parts.append(f'<p class="target">Target: {html.escape(report.target)}</p>\n')
        if report.saved_note:
            parts.append(f'<p class="saved">It {html.escape(report.saved_note)}.</p>\n')
        if report.metadata_note:
            parts.append(f'<p class="note">Note: {html.escape(report.metadata_note)}</p>\n')
        if not self.entries:
            parts.append("<p>There are no convolutions and no dots.</p>\n")
        if self.modules is not None and 1 < len(self.entries) <= _MOST_PICTURES:
            parts.append(self._overview())
        if len(self.entries) > _MOST_PICTURES:
            parts.append(f'<p class="note">The first {_MOST_PICTURES} entries have pictures.</p>\n')
        parts += [self._entry(number) for number in range(len(self.entries))]
        parts += self._casts()
        return "".join(parts)

    def _casts(self) -> Iterator[str]:
        if not self.report.casts:
            return
        yield f'<p class="note">{html.escape(self.report.casts_note)}</p>\n<ul>\n'
        for reason, left in self.report.left_casts.items():
            yield f"<li>{left.count} left to XLA ({html.escape(', '.join(left.places))}): {html.escape(reason)}</li>\n"
        yield "</ul>\n"

    def _id(self, number: int) -> str:
        return f"{self.prefix}e{number}"

    def _overview(self) -> str:
        names = collections.Counter(entry.instruction for entry, _ in self.entries)
        titles = [
            entry.instruction if names[entry.instruction] == 1 else f"{entry.instruction} in {entry.computation}"
            for entry, _ in self.entries
        ]
        flow = self.pictures.overview(titles, [kind for _, kind in self.entries])
        links = {title: Link(f"#{self._id(number)}") for number, title in enumerate(titles)}
        return (
            f"<details open><summary>what feeds what: {len(flow.boxes)} convolutions and dots</summary>\n"
            f'<div class="overview">{svg(flow, links)}</div></details>\n'
        )

    def _entry(self, number: int) -> str:
        entry, kind = self.entries[number]
        told = kind != "other" or self.everything
        label = _LABELS[kind]
        parts = [
            f'<article class="entry {kind}" id="{self._id(number)}" '
            f'data-title="{html.escape(f"{label} {entry.instruction}")}">\n'
            f'<span class="where">{self._location(entry)}</span><span class="status">{label}</span>'
            f"<code>{html.escape(entry.instruction)}</code>"
        ]
        if entry.graph:
            parts.append(f'<p><code class="graph">{html.escape(entry.graph)}</code></p>')
        if entry.saved_bytes:
            parts.append(f'<p class="saved">saves {readable(entry.saved_bytes)} of memory traffic</p>')
        if told and entry.reason:
            why = f"stops because: {entry.reason}" if entry.graph else entry.reason
            parts.append(f'<p class="reason">{html.escape(why)}</p>')
        if told and entry.advice:
            parts.append(f'<p class="advice"><strong>What to change:</strong> {html.escape(entry.advice)}</p>')
        if told and entry.rule:
            parts.append(f'<p class="rule">rule: <code>{html.escape(entry.rule)}</code></p>')
        if callers := self._callers(number):
            parts.append(f'<p class="callers">called from {callers}</p>')
        if number < _MOST_PICTURES and (flows := self.pictures.of(number)):
            drawn = "\n".join(self._picture(number, heading, flow) for heading, flow in flows)
            is_open = " open" if kind != "other" else ""
            parts.append(f'<details{is_open}><summary>graph</summary><div class="pictures">{drawn}</div></details>')
        return "\n".join([*parts, "</article>\n"])

    def _picture(self, number: int, heading: str, flow: Flow) -> str:
        faults = self.pictures.at_fault(number) if heading != "after" else set()
        links = {
            title: self._link(number, box, box.instruction, title in faults)
            for title, box in flow.boxes.items()
            if box.instruction is not None
        }
        return f"<div><h4>{heading}</h4>{svg(flow, links)}</div>"

    def _link(self, number: int, box: Box, instruction: HloInstruction, is_at_fault: bool) -> Link:
        """Where a box leads: another entry's own box there, others to their source line, else to their own entry."""
        of = self.pictures.instructions.get(instruction, number)
        location = _location(instruction)
        source = self._source(location)
        href = source if source and of == number else self._id(of)
        data = {
            "hlo": _short_hlo(instruction),
            "entry": self._id(of),
            "at": str(location) if location else "",
            "source": source,
        }
        is_own = of == number and instruction in self.pictures.instructions and box.kind == "instruction"
        return Link(f"#{href}", data, "marked" if is_at_fault else "own" if is_own else "")

    def _location(self, entry: Entry) -> str:
        file, _, line = (entry.source or "").rpartition(":")
        return self._place(SourceLocation(file, int(line), "")) if line.isdigit() else html.escape(entry.source or "")

    def _callers(self, number: int) -> str:
        own = self.pictures.own(number)
        if own is None:
            return ""
        stack = own.module.tables.stack(own.metadata.stack_frame_id)[1:]
        return ", ".join(map(self._place, stack))

    def _place(self, location: SourceLocation) -> str:
        """`file:line`, a link where the line can be shown."""
        text = f"<code>{html.escape(str(location))}</code>"
        source = self._source(location)
        return f'<a href="#{source}">{text}</a>' if source else text

    def _source(self, location: SourceLocation | None) -> str:
        """The id of a line in the listing; "" where it is not there."""
        if location is None or not self.sources.has(location.file, location.line):
            return ""
        return _line_id(self.listing, self.sources.number(location.file), location.line)


def _listing(sources: SourceText, prefix: str) -> str:
    """The source lines that anything leads to, with those around them."""
    parts = []
    for number, (file, windows) in enumerate(sources.windows().items()):
        parts.append(f"<h3><code>{html.escape(file)}</code></h3>\n")
        for window in windows:
            lines = "".join(
                f'<span id="{_line_id(prefix, number, line)}"><i>{line}</i>{html.escape(text)}</span>'
                for line, text in window
            )
            parts.append(f'<pre class="source">{lines}</pre>\n')
    body = "".join(parts)
    return f"<details open><summary>source lines</summary>\n{body}</details>\n" if body else ""


def _line_id(prefix: str, file: int, line: int) -> str:
    return f"{prefix}s{file}-{line}"


def _location(instruction: HloInstruction) -> SourceLocation | None:
    try:
        return instruction.module.source_location(instruction)
    except HloError:
        return None


def _short_hlo(instruction: HloInstruction) -> str:
    text = _QUIET_RE.sub("", instruction_text(instruction))
    return text if len(text) <= _LONGEST_HLO else text[: _LONGEST_HLO - 1] + "…"
