"""The errors of the command line, and how any error is shown to a person."""

from __future__ import annotations

from xla_fp8.cli.color import Color
from xla_fp8.errors import XlaFp8Error

EXIT_OK, EXIT_ERROR, EXIT_USAGE = 0, 1, 2
EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 130, 141
"""What a shell reports for a program that SIGINT or SIGPIPE ended."""


class CliError(XlaFp8Error):
    """A file that cannot be read or written, or is not what it should be.

    Attributes:
        filename: the file, where the message does not say.
    """

    def __init__(self, message: str, filename: str | None = None) -> None:
        super().__init__(message)
        self.filename = filename


class UsageError(XlaFp8Error):
    """Arguments that do not go together. Exit status 2."""


def describe(error: Exception, name: str | None, color: Color) -> str:
    """An anticipated error as text for stderr.

    Args:
        error: an XlaFp8Error or OSError.
        name: the input it is about, when its message does not say.
        color: of stderr.
    """
    from xla_fp8.hlo.errors import HloParseError

    mark = color("error:", "error")
    if isinstance(error, HloParseError):  # opens with file:line:column: error:
        return str(error).replace("error:", mark, 1)
    if isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        return f"{error.filename or name or 'xla-fp8'}: {mark} {what}"
    filename = error.filename if isinstance(error, CliError) else None
    return f"{filename or name or 'xla-fp8'}: {mark} {error}"
