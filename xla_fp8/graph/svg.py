"""A flow of boxes and arrows as SVG, laid out by `layered`; nothing outside of Python is needed."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence

from xla_fp8.graph.layered import Layout, Point, layout
from xla_fp8.graph.pictures import Box, BoxKind, Flow

COLORS: dict[BoxKind, str] = {
    "operand": "#e8eaed",
    "instruction": "#fff4d6",
    "node": "#d7e8ff",
    "result": "#d9f2e0",
    "user": "#ffffff",
    "rewritten": "#d9f2e0",
    "refused": "#fbd9d5",
    "other": "#e8eaed",
}
"""The fill of a box by its kind, on a white page."""

STYLE = """
svg.flow text { font: 12px ui-monospace, monospace; text-anchor: middle; fill: #202124; }
svg.flow text.detail { font-size: 11px; fill: #5f6368; }
svg.flow rect { stroke: #5f6368; }
svg.flow path { fill: none; stroke: #80868b; }
svg.flow path.far { opacity: 0.25; }
svg.flow path.tip { fill: #80868b; stroke: none; }
svg.flow .marked rect { stroke: #b42318; stroke-width: 2.5; }
""" + "".join(f"svg.flow .{kind} rect {{ fill: {color}; }}\n" for kind, color in COLORS.items())

_CHARACTER, _DETAIL_CHARACTER = 7.3, 6.7  # widths of a monospace font of 12 and 11 pixels, rounded up
_HEIGHT, _MARGIN, _LONGEST = 38.0, 6.0, 40
_FAR = 4 * _HEIGHT  # of an arrow that goes straight behind the boxes


@dataclasses.dataclass(frozen=True)
class Link:
    """What a box leads to.

    Attributes:
        href: where a click goes.
        data: `data-` attributes, for a script.
        style: one more class of the box: "marked" is the one at fault, "own" the one that the picture is about.
    """

    href: str
    data: Mapping[str, str] = dataclasses.field(default_factory=dict)
    style: str = ""


@dataclasses.dataclass(frozen=True)
class Image:
    """What stands inside an `<svg>` element of this size, in pixels."""

    content: str
    width: float
    height: float


def svg(flow: Flow, links: Mapping[str, Link] | None = None) -> str:
    """One `<svg class="flow">` element; its page needs `STYLE`, or styles of its own.

    Args:
        links: by title, for the boxes that lead somewhere.
    """
    drawn = image(flow, links)
    return (
        f'<svg class="flow" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {drawn.width:.0f} {drawn.height:.0f}" '
        f'width="{drawn.width:.0f}" height="{drawn.height:.0f}">\n{drawn.content}\n</svg>'
    )


def image(flow: Flow, links: Mapping[str, Link] | None = None) -> Image:
    """The boxes and arrows of a flow, to be put into an `<svg>` element."""
    shown = {box.title: _Shown(box, _short(box.title), _short(box.detail)) for box in flow.boxes.values()}
    placed = layout({title: (box.width, _HEIGHT) for title, box in shown.items()}, flow.arrows)
    arrows = [_arrow(route) for route in placed.routes]
    boxes = [_box(box, placed, (links or {}).get(title)) for title, box in shown.items()]
    return Image("\n".join(arrows + boxes), placed.width + 2 * _MARGIN, placed.height + 2 * _MARGIN)


@dataclasses.dataclass(frozen=True)
class _Shown:
    box: Box
    title: str
    detail: str

    @property
    def width(self) -> float:
        return max(len(self.title) * _CHARACTER, len(self.detail) * _DETAIL_CHARACTER) + 16


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _arrow(route: Sequence[Point]) -> str:
    """A smooth line through the points, and its tip."""
    moved = [(x + _MARGIN, y + _MARGIN) for x, y in route]
    (x0, y0), (tip_x, tip_y) = moved[0], moved[-1]
    line = [f"M{x0:.0f} {y0:.0f}"]
    for (x1, y1), (x2, y2) in zip(moved, [*moved[1:-1], (tip_x, tip_y - 5)], strict=False):
        middle = (y1 + y2) / 2
        line.append(f"C{x1:.0f} {middle:.0f} {x2:.0f} {middle:.0f} {x2:.0f} {y2:.0f}")
    tip = f"M{tip_x - 3.5:.1f} {tip_y - 6:.1f}h7l-3.5 6z"
    far = ' class="far"' if len(route) == 2 and tip_y - y0 > _FAR else ""
    return f'<path{far} d="{"".join(line)}"/><path class="tip" d="{tip}"/>'


def _box(shown: _Shown, placed: Layout, link: Link | None) -> str:
    x, y = placed.centers[shown.box.title]
    x, y = x + _MARGIN, y + _MARGIN
    classes = f"box {shown.box.kind} {link.style if link else ''}".strip()
    group = (
        f'<g class="{classes}"><title>{html.escape(shown.box.title)}: {html.escape(shown.box.detail)}</title>'
        f'<rect x="{x - shown.width / 2:.1f}" y="{y - _HEIGHT / 2:.1f}" width="{shown.width:.1f}" '
        f'height="{_HEIGHT:.0f}" rx="5"/>'
        f'<text x="{x:.1f}" y="{y - 3:.1f}">{html.escape(shown.title)}</text>'
        f'<text class="detail" x="{x:.1f}" y="{y + 12:.1f}">{html.escape(shown.detail)}</text></g>'
    )
    if link is None:
        return group
    data = "".join(f' data-{name}="{html.escape(value)}"' for name, value in link.data.items() if value)
    return f'<a href="{html.escape(link.href)}"{data}>{group}</a>'
