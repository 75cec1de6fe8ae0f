"""Draws the custom calls of a module that have a graph, and what they were before: text, dot, svg or html."""

from __future__ import annotations

import html
import shutil
import subprocess
from typing import Literal, get_args

from xla_fp8.graph.errors import GraphError
from xla_fp8.graph.pictures import BoxKind, Flow, Picture, pictures
from xla_fp8.hlo import HloModule

Format = Literal["text", "dot", "svg", "html"]

_NOTHING = "No custom call of this module has a serialized graph."
_FILL: dict[BoxKind, str] = {
    "operand": "#e8eaed",
    "instruction": "#fff4d6",
    "node": "#d7e8ff",
    "result": "#d9f2e0",
    "user": "#ffffff",
}


def draw(module: HloModule, format: Format = "text", before: HloModule | None = None) -> str:
    """Draws the module around each custom call that has a graph: operands, graph nodes, results and their users.

    Args:
        module: the module after the passes.
        format: "text" is ASCII; "dot" is Graphviz input; "svg" is one image, laid out by Graphviz; "html" is one page
            that needs nothing else, with an image for each call, or boxes in a list where there is no Graphviz.
        before: the module before the passes, to be shown beside. What a call replaced is found by name: passes keep the
            names of what they do not replace.

    Raises:
        GraphError: a custom call has a string that is not a graph, or too few operands for it; or "svg" without
            Graphviz's `dot`.
    """
    drawn = pictures(module, before)
    if format == "text":
        return "\n\n".join(map(_text, drawn)) + "\n" if drawn else _NOTHING + "\n"
    if format == "dot":
        return _dot(drawn)
    if format == "svg":
        return _svg(_dot(drawn))
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
    return _digraph(lines)


def _digraph(lines: list[str]) -> str:
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
        lines.append(f'{_quote(prefix + box.title)} [label={label}, fillcolor="{_FILL[box.kind]}"];')
    return lines + [f"{_quote(prefix + source)} -> {_quote(prefix + target)};" for source, target in flow.arrows]


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _svg(dot: str) -> str:
    program = shutil.which("dot")
    if program is None:
        raise GraphError(
            "svg needs Graphviz's dot, which is not on the PATH. Install it (Debian, Ubuntu: apt install graphviz), "
            "or ask for dot, text or html, which need nothing"
        )
    done = subprocess.run([program, "-Tsvg"], input=dot, capture_output=True, text=True, check=False, encoding="utf-8")
    if done.returncode != 0:
        raise GraphError(f"Graphviz's dot failed with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _html(drawn: list[Picture]) -> str:
    sections = [_section(picture) for picture in drawn] or [f"<p>{_NOTHING}</p>"]
    return _PAGE.replace("BODY", "\n".join(sections))


def _section(picture: Picture) -> str:
    columns = [f"<div><h3>{name}</h3>\n{_html_flow(flow)}</div>" for name, flow in _parts(picture)]
    heading = f"<h2>{html.escape(picture.title)}</h2>"
    return f"<section>{heading}\n<div class=columns>\n" + "\n".join(columns) + "\n</div></section>"


def _html_flow(flow: Flow) -> str:
    if shutil.which("dot"):
        svg = _svg(_digraph(_dot_flow(flow)))
        return svg[svg.index("<svg") :]  # an XML declaration may not stand inside a page
    rows = []
    for box in flow.boxes.values():
        inputs = "".join(f" <i>{html.escape(source)}</i>" for source in flow.inputs(box.title))
        reads = f"<span>reads{inputs}</span>" if inputs else ""
        rows.append(
            f"<li class={box.kind}><b>{html.escape(box.title)}</b> <code>{html.escape(box.detail)}</code>{reads}</li>"
        )
    return "<ol>\n" + "\n".join(rows) + "\n</ol>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>FP8 graphs</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 2em; color: #202124; background: #ffffff; }
h2 { font-size: 1.05em; overflow-wrap: anywhere; } h3 { font-size: 0.95em; color: #5f6368; margin: 0.5em 0; }
section { border: 1px solid #dadce0; border-radius: 8px; padding: 0 1em 1em; margin-bottom: 1.5em; }
.columns { display: flex; flex-wrap: wrap; gap: 2em; align-items: flex-start; }
ol { list-style: none; margin: 0; padding: 0; }
li { border: 1px solid #5f6368; border-radius: 6px; padding: 0.3em 0.7em; margin: 0.4em 0; }
li span { display: block; color: #5f6368; font-size: 0.9em; }
STYLES
</style></head>
<body>
<h1>FP8 graphs</h1>
BODY
</body></html>
""".replace("STYLES", "\n".join(f"li.{kind} {{ background: {colour}; }}" for kind, colour in _FILL.items()))
