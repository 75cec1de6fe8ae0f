"""The errors of the graph layer. Each says what is wrong, in which node, and what a right one looks like."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error

_MARGIN = 60
"""How much of the text is shown on each side of an error, in characters."""


class GraphError(XlaFp8Error):
    """Nodes that do not make a graph: an unknown op, an operand that is not defined, two endpoints, ..."""


class GraphStringError(GraphError):
    """Text that is not a serialized graph.

    Attributes:
        message: what is wrong, in one sentence.
        text: the whole string.
        position: 0-based offset of the error in `text`.
    """

    def __init__(self, message: str, text: str, position: int) -> None:
        self.message = message
        self.text = text
        self.position = position
        first, last = max(0, position - _MARGIN), position + _MARGIN
        shown = "".join(c if c.isprintable() else "?" for c in text[first:last])
        before, after = "..." if first else "", "..." if last < len(text) else ""
        caret = " " * (len(before) + position - first) + "^"
        super().__init__(f"graph string, offset {position}: {message}\n{before}{shown}{after}\n{caret}")


class GraphTypeError(GraphError):
    """A graph that does not fit the operands or the result of its custom call."""
