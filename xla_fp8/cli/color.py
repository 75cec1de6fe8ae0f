"""Colour on a terminal, none in a pipe: plain ANSI sequences, and when to use them."""

from __future__ import annotations

import os
import shutil
from typing import TextIO

_CODES = {
    "error": "1;31",
    "refused": "1;31",
    "rewritten": "1;32",
    "not FP8": "2",
    "advice": "36",
    "graph": "34",
    "note": "2",
    "summary": "1",
    "heading": "1",
}

CHOICES = ("auto", "always", "never")


class Color:
    """Paints text, or leaves it as it is: `color("refused", "refused")`."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def __call__(self, text: str, role: str) -> str:
        """`text` in the colour of `role`; unpainted where the role has none."""
        code = _CODES.get(role)
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled and code and text else text


def choose(when: str, stream: TextIO) -> Color:
    """The colour for a stream.

    Args:
        when: "always", "never", or "auto": on a terminal, unless NO_COLOR is set (no-color.org) or TERM is dumb.
        stream: where the text goes.
    """
    if when != "auto":
        return Color(when == "always")
    return Color(is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:  # closed
        return False


def width_of(stream: TextIO) -> int | None:
    """Columns of the terminal behind `stream`; None where it is none, so that a pipe gets one line for each thing."""
    return shutil.get_terminal_size().columns if is_terminal(stream) else None
