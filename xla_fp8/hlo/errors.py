"""The errors of the HLO layer. Each says what is wrong, where, and carries the parts a tool may want."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error


class HloError(XlaFp8Error):
    """Anything that is wrong with an HLO module."""


class HloParseError(HloError):
    """Text that is not HLO.

    Attributes:
        message: what is wrong, in one sentence.
        filename: the file the text came from, or None.
        line, column: 1-based position in the text.
        line_text: the line itself.
    """

    def __init__(self, message: str, filename: str | None, line: int, column: int, line_text: str) -> None:
        self.message = message
        self.filename = filename
        self.line = line
        self.column = column
        self.line_text = line_text
        shown, caret = _window_around(line_text, column)
        where = f"{filename or '<hlo>'}:{line}:{column}"
        super().__init__(f"{where}: error: {message}\n{shown}\n{' ' * caret}^")

    @classmethod
    def at(cls, message: str, text: str, position: int, filename: str | None = None) -> HloParseError:
        """The error for offset `position` of `text`; line and column are counted here, only when something fails."""
        position = max(0, min(position, len(text)))
        found = text[position : position + 1]
        if found and ord(found) < 32 and not found.isspace():
            name = "NUL" if found == "\0" else f"control character 0x{ord(found):02x}"
            message = f"unexpected {name} in the text: is this a binary file? ({message})"
        start = text.rfind("\n", 0, position) + 1
        end = text.find("\n", position)
        line_text = text[start : end if end >= 0 else len(text)]
        return cls(message, filename, text.count("\n", 0, position) + 1, position - start + 1, line_text)


class HloAttributeError(HloError):
    """An attribute whose text does not say what its name promises."""


class HloVerifyError(HloError):
    """A module that breaks a rule of HLO.

    Attributes:
        rule: the rule's name, e.g. "operands", "broadcast", "control-predecessors".
        message: what is wrong, in one sentence.
        computation, instruction: names, or None where the rule is not about one.
        source: the user's "file.py:42" where the metadata has it, else None.
        text: the instruction as it is printed, or "".
    """

    def __init__(
        self,
        rule: str,
        message: str,
        computation: str | None = None,
        instruction: str | None = None,
        source: str | None = None,
        text: str = "",
    ) -> None:
        self.rule = rule
        self.message = message
        self.computation = computation
        self.instruction = instruction
        self.source = source
        self.text = text
        where = ", ".join(
            f"{kind} {name}" for kind, name in (("computation", computation), ("instruction", instruction)) if name
        )
        source = f" ({source})" if source else ""
        shown = f"\n  {text if len(text) <= 240 else text[:237] + '...'}" if text else ""
        super().__init__(f"{where or 'module'}{source}: rule {rule!r}: {message}{shown}")


class HloMutationError(HloError):
    """A change that would leave the module broken: wrong shape, foreign operand, an instruction still in use."""


def _window_around(line: str, column: int, width: int = 160) -> tuple[str, int]:
    """The part of `line` around `column` (constants make lines of megabytes) and the caret's offset in it."""
    line = line.replace("\t", " ").rstrip("\r")
    caret = max(column - 1, 0)
    if len(line) <= width:
        return line, caret
    first = max(0, caret - width // 2)
    shown = line[first : first + width]
    prefix = "..." if first else ""
    suffix = "..." if first + width < len(line) else ""
    return f"{prefix}{shown}{suffix}", caret - first + len(prefix)
