"""Where the time of each row goes, as bars beside those of bf16: an SVG of results.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.models.rows import BASELINE, Row

_COLOURS = {
    "convolution": "#3b6ea5",
    "depthwise": "#1f4e79",
    "matmul": "#6fa8dc",
    "attention": "#a3c9e8",
    "quantization": "#d9822b",
    "norms and sums": "#7aa974",
    "pointwise": "#b5cfae",
    "copies": "#999999",
    "unknown": "#cccccc",
}


def plot(rows: list[Row], found: dict[str, Any], path: Path) -> bool:
    """Draws the rows that have a profile and a baseline; False where matplotlib is not installed, or there are none.

    A bar is as long as a step takes, in parts of the step in bf16; its parts are the profile's, so scaled.
    """
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ImportError:
        return False
    drawn = [row for row in rows if _is_drawn(row, found)]
    if not drawn:
        return False
    pyplot.rcParams.update({"svg.hashsalt": "models", "svg.fonttype": "none", "font.size": 8})
    figure, axis = pyplot.subplots(figsize=(8, 0.5 + 0.24 * len(drawn)))
    for number, row in enumerate(drawn):
        facts = found[row.name]
        baseline = found[f"{row.case} {BASELINE}"]["ms"]
        parts: dict[str, float] = facts["profile"]["ms"]
        left = 0.0
        for kind, ms in parts.items():
            width = ms / sum(parts.values()) * facts["ms"] / baseline
            axis.barh(-number, width, left=left, color=_COLOURS[kind])
            left += width
        axis.text(left + 0.01, -number, f"{facts['ms']:.2f} ms, {baseline / facts['ms']:.2f}x", va="center")
    axis.set_yticks([-number for number in range(len(drawn))], [row.name for row in drawn])
    axis.set(xlabel="time of a step, that of bf16 being 1")
    axis.margins(x=0.2)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=colour) for colour in _COLOURS.values()]
    axis.legend(handles, _COLOURS, ncols=-(-len(_COLOURS) // 2), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)
    return True


def _is_drawn(row: Row, found: dict[str, Any]) -> bool:
    facts = found.get(row.name, {})
    return bool(facts.get("profile", {}).get("ms")) and "ms" in found.get(f"{row.case} {BASELINE}", {})
