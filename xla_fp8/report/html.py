"""A report as HTML: a page that needs no other file, or the part of one that a notebook shows."""

from __future__ import annotations

import html
from collections.abc import Sequence

from xla_fp8.report.report import Entry, Report

_STYLE = """
.xla-fp8 { --line: #d9dde3; --soft: #667085; --good: #1a7f4b; --bad: #b42318; --plain: #667085; --code: #f4f6f8;
  color: #1d2330; background: #fff; font: 14px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { .xla-fp8 { --line: #353b45; --soft: #98a2b3; --good: #4ac285; --bad: #f97066;
  --plain: #98a2b3; --code: #20252d; color: #e6e9ee; background: #14181e; } }
.xla-fp8 table { border-collapse: collapse; width: 100%; margin: .75rem 0 1.5rem; }
.xla-fp8 th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12px; }
.xla-fp8 th, .xla-fp8 td { border-bottom: 1px solid var(--line); padding: .45rem .8rem .45rem 0; vertical-align: top;
  text-align: left; }
.xla-fp8 code { font: 12.5px/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
.xla-fp8 td.what { width: 60%; }
.xla-fp8 td.what > code { background: var(--code); border-radius: 4px; padding: .1rem .35rem; }
.xla-fp8 .status { font-weight: 600; white-space: nowrap; }
.xla-fp8 .rewritten { color: var(--good); }
.xla-fp8 .refused { color: var(--bad); }
.xla-fp8 .other { color: var(--plain); }
.xla-fp8 .advice, .xla-fp8 .note, .xla-fp8 .target { color: var(--soft); }
.xla-fp8 .reason, .xla-fp8 .advice { display: block; margin-top: .2rem; }
.xla-fp8 .summary { font-size: 16px; margin: 0; }
.xla-fp8 p { margin: .3rem 0; }
"""

_PAGE_STYLE = """
body.xla-fp8 { margin: 2rem auto; max-width: 72rem; padding: 0 1.5rem; }
.xla-fp8 h1 { font-size: 22px; } .xla-fp8 h2 { font-size: 17px; margin-top: 2rem; }
"""


def page(title: str, reports: Sequence[tuple[str, Report]], *, everything: bool) -> str:
    """A whole page.

    Args:
        title: of the page.
        reports: (heading, report) pairs; an empty heading is left out.
        everything: see `Report.to_text`.
    """
    sections = []
    for heading, report in reports:
        head = f"<h2>{html.escape(heading)}</h2>\n" if heading else ""
        sections.append(f"<section>\n{head}{_body(report, everything)}</section>\n")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}{_PAGE_STYLE}</style>\n</head>\n"
        f'<body class="xla-fp8">\n<h1>{html.escape(title)}</h1>\n{"".join(sections)}</body>\n</html>\n'
    )


def fragment(report: Report) -> str:
    """What goes into a page of somebody else's."""
    return f'<div class="xla-fp8">\n<style>{_STYLE}</style>\n{_body(report, everything=False)}</div>\n'


def _body(report: Report, everything: bool) -> str:
    parts = [f'<p class="summary">{html.escape(report.summary)}</p>\n']
    if report.target:
        parts.append(f'<p class="target">Target: {html.escape(report.target)}</p>\n')
    if report.metadata_note:
        parts.append(f'<p class="note">Note: {html.escape(report.metadata_note)}</p>\n')
    rows = [_row(entry, "rewritten", "rewritten", True) for entry in report.rewritten]
    rows += [_row(entry, "refused", "refused", True) for entry in report.refused_fp8]
    rows += [_row(entry, "not FP8", "other", everything) for entry in report.refused_without_fp8]
    if rows:
        parts.append(
            "<table>\n<thead><tr><th></th><th>instruction</th><th>source</th><th>graph, or reason and advice</th></tr>"
            f"</thead>\n<tbody>\n{''.join(rows)}</tbody>\n</table>\n"
        )
    else:
        parts.append("<p>There are no convolutions and no dots.</p>\n")
    return "".join(parts)


def _row(entry: Entry, status: str, style: str, details: bool) -> str:
    what = f"<code>{html.escape(entry.graph)}</code>" if entry.graph else ""
    if details and entry.reason:
        why = f"stops because: {entry.reason}" if entry.graph else entry.reason
        what += f'<span class="reason">{html.escape(why)}</span>'
    if details and entry.advice:
        what += f'<span class="advice">{html.escape(entry.advice)}</span>'
    return (
        f'<tr><td class="status {style}">{status}</td><td><code>{html.escape(entry.instruction)}</code></td>'
        f'<td><code>{html.escape(entry.source or "")}</code></td><td class="what">{what}</td></tr>\n'
    )
