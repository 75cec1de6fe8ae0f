"""A golden file: its RUN: lines, and new CHECK lines made of what they print.

The rules are those of lit and FileCheck, as far as `xla-fp8 ... | filecheck %s` needs them.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Iterator

from xla_fp8.cli.errors import CliError

_RUN_RE = re.compile(r"^\s*(?://|;|#)\s*RUN:\s*(.*?)\s*$")
FOLDER = "\0"  # stands in an output where the folder of the file was: another one in the next clone
_SKIPPED_RE = re.compile(r', metadata=\{(?:[^"{}]|"(?:[^"\\]|\\.)*")*\}|' + FOLDER)
_SPECIAL_RE = re.compile(r"\{\{|\[\[")  # FileCheck reads a regular expression or a variable here
_SUPPORTED = "`// RUN: [not] xla-fp8 ARGUMENTS [2>&1] [| xla-fp8 ARGUMENTS ...] | filecheck %s [--check-prefix=NAME]`"


@dataclasses.dataclass(frozen=True)
class Run:
    """One RUN: line.

    Attributes:
        commands: the arguments of each xla-fp8, before %s is put in; each reads what the one before prints.
        prefix: of the check lines that its output is compared with.
        fails: whether the last command must fail (`not xla-fp8 ...`).
        merges_stderr: whether its stderr is checked too (`2>&1`).
    """

    commands: tuple[tuple[str, ...], ...]
    prefix: str = "CHECK"
    fails: bool = False
    merges_stderr: bool = False


def runs(text: str) -> list[Run]:
    """The RUN: lines of a golden file.

    Raises:
        CliError: there is none, or one of a form that cannot be followed.
    """
    commands: list[str] = []
    continues = False
    for line in text.splitlines():
        if match := _RUN_RE.match(line):
            command = match[1]
            if continues:
                commands[-1] += " " + command.removesuffix("\\").rstrip()
            else:
                commands.append(command.removesuffix("\\").rstrip())
            continues = command.endswith("\\")
    if not commands:
        raise CliError(f"there is no RUN: line; expected {_SUPPORTED}")
    return [_run(command) for command in commands]


def _run(command: str) -> Run:
    refused = CliError(f"cannot follow `RUN: {command}`: only {_SUPPORTED} is understood; write these checks by hand")
    try:
        lexer = shlex.shlex(command, posix=True, punctuation_chars="|&;<>()")
        lexer.whitespace_split = True
        words = list(lexer)
    except ValueError:
        raise refused from None
    *producers, checker = _split(words, "|")
    if not producers or any(producer[:1] != ["xla-fp8"] for producer in producers[:-1]):
        raise refused
    last = producers[-1]
    merges_stderr = last[-3:] == ["2", ">&", "1"] or last[-1:] == ["2>&1"]
    if merges_stderr:
        last = last[: -1 if last[-1] == "2>&1" else -3]
    fails = last[:1] == ["not"]
    producers[-1] = last[fails:]
    for producer in producers:
        if producer[:1] != ["xla-fp8"] or any(re.fullmatch(r"[|&;<>()]+", word) for word in producer):
            raise refused
    if not checker or checker[0].lower() != "filecheck" or "%s" not in checker:
        raise refused
    options = [word for word in checker[1:] if word != "%s"]
    prefix = "CHECK"
    for option in options:
        match = re.fullmatch(r"--?check-prefix(?:es)?=([\w-]+)", option)
        if match is None:
            raise refused
        prefix = match[1]
    return Run(tuple(tuple(producer[1:]) for producer in producers), prefix, fails, merges_stderr)


def _split(words: list[str], separator: str) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for word in words:
        if word == separator:
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def updated(text: str, outputs: list[tuple[str, str]]) -> str:
    """The golden file with new check lines.

    HLO, RUN lines and comments stay. The new lines stand where the first old one stood; in a file without any, before
    the HLO.

    Args:
        text: the file.
        outputs: (prefix, what was printed) for each RUN line.

    Raises:
        CliError: two RUN lines with one prefix print different things.
    """
    by_prefix: dict[str, str] = {}
    for prefix, output in outputs:
        if by_prefix.setdefault(prefix, output) != output:
            raise CliError(f"RUN lines with prefix {prefix} print different things: give each its own --check-prefix")
    is_check = _check_line(tuple(by_prefix))
    kept: list[str] = []
    place: int | None = None
    for line in text.splitlines():
        if is_check(line):
            place = len(kept) if place is None else place
        else:
            kept.append(line)
    if place is None:
        place = next((at for at, line in enumerate(kept) if line.strip() and not _is_comment(line)), len(kept))
    above, below = kept[:place], kept[place:]
    while above and not above[-1].strip():
        above.pop()
    while below and not below[0].strip():
        below.pop(0)
    blocks: list[str] = []
    for prefix, output in by_prefix.items():
        blocks += ["", *checks(prefix, output)]
    return "\n".join([*above, *blocks, "", *below]) + "\n"


def checks(prefix: str, output: str) -> Iterator[str]:
    """Check lines for an output: a label for each computation and a line for each instruction, or, where it is no HLO,
    a line for each line."""
    lines = output.splitlines()
    if any(_opens_computation(line) for line in lines):
        yield from _hlo_checks(prefix, lines)
        return
    kind = ""
    for line in lines:
        if line.strip():
            yield from _line_check(prefix, kind, line)
            kind = "-NEXT"
        elif kind:
            yield f"// {prefix}-EMPTY:"


def _hlo_checks(prefix: str, lines: list[str]) -> Iterator[str]:
    inside = False
    first = True
    for line in lines:
        if _opens_computation(line):
            if not first:
                yield ""
            yield from _line_check(prefix, "-LABEL", line)
            inside, first = True, False
        elif inside:
            yield from _line_check(prefix, "-NEXT", line)
            inside = not line.startswith("}")


def _opens_computation(line: str) -> bool:
    return re.match(r"(ENTRY )?%?[A-Za-z_][\w.\-]* ?(\(.*\) -> .*)?\{$", line) is not None


def _line_check(prefix: str, kind: str, line: str) -> Iterator[str]:
    """One line of output as a check; metadata, which names files and lines of whoever made the dump, is skipped."""
    for part in _SKIPPED_RE.split(line.strip()):
        if part:
            literal = "{LITERAL}" if _SPECIAL_RE.search(part) else ""
            yield f"// {prefix}{kind}{literal}: {part}"
            kind = "-SAME"


def _check_line(prefixes: tuple[str, ...]) -> Callable[[str], bool]:
    names = "|".join(map(re.escape, prefixes))
    kinds = r"(-(DAG|COUNT-\d+|NOT|EMPTY|NEXT|SAME|LABEL))?(\{LITERAL\})?"
    pattern = re.compile(rf"^\s*(//|;|#)\s*({names}){kinds}:")
    return lambda line: pattern.match(line) is not None


def _is_comment(line: str) -> bool:
    return line.lstrip().startswith(("//", ";", "#"))
