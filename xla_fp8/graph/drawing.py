"""Draws the custom calls of a module that have a graph, and what they were before: text, dot, svg or html."""

from __future__ import annotations

import html
from typing import Literal, get_args

from xla_fp8.graph import svg
from xla_fp8.graph.errors import GraphError
from xla_fp8.graph.pictures import Flow, Picture, pictures
from xla_fp8.hlo import HloModule

Format = Literal["text", "dot", "svg", "html"]

_NOTHING = "No custom call of this module has a serialized graph."


def draw(module: HloModule, format: Format = "text", before: HloModule | None = None) -> str:
    """Draws the module around each custom call that has a graph: operands, graph nodes, results and their users.

    Args:
        module: the module after the passes.
        format: "text" is ASCII; "dot" is Graphviz input; "svg" is one image; "html" is one page that needs nothing
            else, with an image for each call.
        before: the module before the passes, to be shown beside. What a call replaced is found by name: passes keep the
            names of what they do not replace.

    Raises:
        GraphError: a custom call has a string that is not a graph, or too few operands for it.
    """
    drawn = pictures(module, before)
    if format == "text":
        return "\n\n".join(map(_text, drawn)) + "\n" if drawn else _NOTHING + "\n"
    if format == "dot":
        return _dot(drawn)
    if format == "svg":
        return _svg(drawn)
    if format == "html":
        return _html(drawn)
    raise GraphError(f"unknown format {format!r}; the formats are {', '.join(get_args(Format))}")


def _text(picture: Picture) -> str:
    lines = [picture.title]
    for name, flow in _parts(picture):
        lines.append(f"  {name}:")
        titles = max(map(len, flow.boxes), default=0)
        details = max((len(box.detail) for box in flow.boxes.values()), default=0)
        for box in flow.boxes.values():
            inputs = flow.inputs(box.title)
            row = f"    {box.title:<{titles}}  {box.detail:<{details}}"
            lines.append(f"{row}  <- {', '.join(inputs)}" if inputs else row.rstrip())
    return "\n".join(lines)


def _parts(picture: Picture) -> list[tuple[str, Flow]]:
    return [(name, flow) for name, flow in (("before", picture.before), ("after", picture.after)) if flow is not None]


def _dot(drawn: list[Picture]) -> str:
    lines = [] if drawn else [f"  nothing [label={_quote(_NOTHING)}];"]
    for number, picture in enumerate(drawn):
        lines += [f"  subgraph cluster_{number} {{", f"    label={_quote(picture.title)};"]
        for name, flow in reversed(_parts(picture)):  # Graphviz puts the last cluster leftmost
            lines += [f"    subgraph cluster_{number}_{name} {{", f"      label={name};"]
            lines += [f"      {line}" for line in _dot_flow(flow, prefix=f"{number} {name} ")]
            lines.append("    }")
        lines.append("  }")
    style = [
        '  graph [rankdir=TB, fontname="sans-serif", labeljust=l, style=rounded, color="#9aa0a6"];',
        '  node [shape=box, style="rounded,filled", fontname="sans-serif", fontsize=11, color="#5f6368"];',
        '  edge [color="#5f6368", arrowsize=0.7];',
    ]
    return "\n".join(["digraph graphs {", *style, *lines, "}"]) + "\n"


def _dot_flow(flow: Flow, prefix: str = "") -> list[str]:
    lines = []
    for box in flow.boxes.values():
        label = _quote(f"{box.title}\n{box.detail}")
        lines.append(f'{_quote(prefix + box.title)} [label={label}, fillcolor="{svg.COLORS[box.kind]}"];')
    return lines + [f"{_quote(prefix + source)} -> {_quote(prefix + target)};" for source, target in flow.arrows]


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _svg(drawn: list[Picture]) -> str:
    """The pictures from top to bottom, each with what was before on the left."""
    parts, width, height = [], 0.0, _GAP
    for title, flows in [(p.title, _parts(p)) for p in drawn] or [(_NOTHING, [])]:
        parts.append(f'<text class="heading" x="{_GAP}" y="{height + _GAP / 2:g}">{html.escape(title)}</text>')
        left, top, lowest = _GAP, height + 1.5 * _GAP, 0.0
        for name, flow in flows:
            image = svg.image(flow)
            parts.append(f'<text class="heading" x="{left:g}" y="{top:g}">{name}</text>')
            parts.append(f'<g transform="translate({left:.0f} {top + _GAP / 2:.0f})">\n{image.content}\n</g>')
            left, lowest = left + image.width + 2 * _GAP, max(lowest, image.height)
        width, height = max(width, left, _GAP + 7 * len(title)), top + lowest + 2 * _GAP
    size = f'width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg class="flow" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size}>',
            f"<style>{svg.STYLE}svg.flow text.heading {{ text-anchor: start; }}</style>",
            f'<rect {size} style="fill: #ffffff; stroke: none"/>',
            *parts,
            "</svg>\n",
        ]
    )


_GAP = 24.0


def _html(drawn: list[Picture]) -> str:
    sections = [_section(picture) for picture in drawn] or [f"<p>{_NOTHING}</p>"]
    return _PAGE.replace("BODY", "\n".join(sections))


def _section(picture: Picture) -> str:
    columns = [f"<div><h3>{name}</h3>\n{svg.svg(flow)}</div>" for name, flow in _parts(picture)]
    heading = f"<h2>{html.escape(picture.title)}</h2>"
    return f"<section>{heading}\n<div class=columns>\n" + "\n".join(columns) + "\n</div></section>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>FP8 graphs</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #202124; background: #ffffff; }
h2 { font-size: 1.05em; overflow-wrap: anywhere; } h3 { font-size: 0.95em; color: #5f6368; margin: 0.5em 0; }
section { border: 1px solid #dadce0; border-radius: 8px; padding: 0 1em 1em; margin-bottom: 1.5em; }
.columns { display: flex; flex-wrap: wrap; gap: 2em; align-items: flex-start; }
.columns div { overflow-x: auto; }
STYLES
</style></head>
<body>
<h1>FP8 graphs</h1>
BODY
</body></html>
""".replace("STYLES", svg.STYLE)
