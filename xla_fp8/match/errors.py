"""The error of the matcher: a pattern that cannot be, or text that is not a pattern."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error


class PatternError(XlaFp8Error):
    """A pattern that is put together wrongly.

    Attributes:
        message: what is wrong, in one sentence.
        text: the line of a pattern expression that the error is in; None for a pattern built in Python.
        position: 0-based offset of the error in `text`.
    """

    def __init__(self, message: str, text: str | None = None, position: int = 0) -> None:
        self.message = message
        self.text = text
        self.position = position
        where = "" if text is None else f"\n{text}\n{' ' * position}^"
        super().__init__(f"{message}{where}")
