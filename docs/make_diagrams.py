"""Draws the diagram of the default pipeline for the documentation, from the source.

    python docs/make_diagrams.py

The passes are `xla_fp8.passes.DEFAULT_PIPELINE`, each with the first sentence of its docstring. A test checks that the
file is what this script writes.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from xla_fp8.passes import DEFAULT_PIPELINE, PASSES

DOCS = Path(__file__).resolve().parent
DIAGRAMS = DOCS / "diagrams"

_WIDTH, _ROW, _GAP, _MARGIN, _NAME = 980, 34, 22, 12, 250


def pipeline() -> str:
    """HLO text, the passes in order, HLO text."""
    rows = [("HLO text", "hlo.parse: text to IR; XLA's parser is asked too", False)]
    for name in DEFAULT_PIPELINE:
        summary = (PASSES[name].__doc__ or "").strip().partition("\n\n")[0]
        rows.append((name, " ".join(summary.split()), True))
    rows.append(("HLO text", "hlo.to_text: IR to text; XLA's parser and StableHLO's verifier are asked", False))
    return _drawing("The default pipeline", rows)


def _drawing(title: str, rows: list[tuple[str, str, bool]]) -> str:
    """Boxes top to bottom, each (name, the sentence beside it, whether it is a pass); on white, for dark pages too."""
    height = _MARGIN * 2 + len(rows) * _ROW + (len(rows) - 1) * _GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="13">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    center = _MARGIN + _NAME / 2
    for index, (name, meaning, is_pass) in enumerate(rows):
        top = _MARGIN + index * (_ROW + _GAP)
        middle = top + _ROW / 2 + 4.5
        fill = "#e8f0fe" if is_pass else "#f1f3f4"
        parts += [
            f'<rect x="{_MARGIN}" y="{top}" width="{_NAME}" height="{_ROW}" rx="5" fill="{fill}" stroke="#5f6368"/>',
            f'<text x="{center:g}" y="{middle:g}" text-anchor="middle">{escape(name)}</text>',
            f'<text x="{_MARGIN + _NAME + 14}" y="{middle:g}" font-size="12">{escape(meaning)}</text>',
        ]
        if index + 1 < len(rows):
            tip = top + _ROW + _GAP
            parts += [
                f'<line x1="{center:g}" y1="{top + _ROW}" x2="{center:g}" y2="{tip - 6}" stroke="#5f6368"/>',
                f'<path d="M{center - 4:g} {tip - 7} h8 l-4 6 z" fill="#5f6368"/>',
            ]
    return "\n".join([*parts, "</svg>", ""])


FILES = {"pipeline.svg": pipeline}


def main() -> None:
    DIAGRAMS.mkdir(exist_ok=True)
    for name, draw in FILES.items():
        (DIAGRAMS / name).write_text(draw())


if __name__ == "__main__":
    main()
