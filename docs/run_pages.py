"""Runs the code blocks of the documentation and compares, or with --update rewrites, the output that they show.

    python docs/run_pages.py README.md docs/*.md             exit 1 where a page says something that is not so
    python docs/run_pages.py --update README.md docs/*.md    puts the real output into the pages

What a block means:

- ```python runs, in one namespace for each page and in a scratch directory for each page. Where its first line is
  `# NAME.py`, it is only saved there, for a command to run.
- ```text output, right behind a Python block, is what that block prints.
- ```console: each line that starts with `$ ` is a command, the lines below it are its output (stdout and stderr, on a
  terminal of 110 columns). Commands without output below them are not compared. `# exits with 1` behind a command
  says which status is expected. `xla-fp8` runs in this process, other commands in bash, and those that set up an
  environment (NOT_RUN) not at all.
- In output, `...` stands for any text. --update leaves output alone while it still matches; a line that is only `?`
  never does, so it is where --update is to put an output for the first time.
- ```hlo is HLO text, not run; a first line `// NAME.hlo` saves it for a command to read.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COLUMNS = 110
HOME = "/home/me/project"
"""What pages show in place of the scratch directory (as long as the name of one, so that lines wrap alike)."""
NOT_RUN = ("pip ", "python -m venv", ". ", "make ", "git ", "cd ", "nsys ")
"""How commands begin that set up an environment or take minutes."""

_FENCE_RE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SAVED_RE = re.compile(r"(?:#|//) ([\w./-]+\.(?:py|hlo))\n")
_STATUS_RE = re.compile(r"\s+# exits with (\d+)$")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        info: what stands behind the opening fence.
        text: the lines between the fences.
        line: of the page, that the text starts on; from 1.
        start: offset of the text in the page.
    """

    info: str
    text: str
    line: int
    start: int


@dataclasses.dataclass(frozen=True)
class Output:
    """An output that a page shows, and the real one.

    Attributes:
        line: of the page.
        start, end: offsets in the page.
    """

    what: str
    line: int
    start: int
    end: int
    shown: str
    real: str

    @property
    def agrees(self) -> bool:
        return matches(self.shown, self.real)


class PageError(Exception):
    """A block that does not run, or a command with another status than the page says."""


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [
        Block(m[1].strip(), m[2], text.count("\n", 0, m.start(2)) + 1, m.start(2)) for m in _FENCE_RE.finditer(text)
    ]


def matches(shown: str, real: str) -> bool:
    """Whether `real` is what a page shows: `...` for any text; how lines are wrapped and padded does not matter."""
    pattern = re.escape(" ".join(shown.split())).replace(re.escape("..."), ".*?")
    return re.fullmatch(pattern, " ".join(real.split())) is not None


def commands(block: Block) -> Iterator[tuple[str, int, int, int]]:
    """The commands of a console block: (command, line, start and end of the output that is shown below it)."""
    offset, line = block.start, block.line
    found: list[tuple[str, int, int, int]] = []
    for text in block.text.splitlines(keepends=True):
        end = offset + len(text)
        if text.startswith("$ "):
            found.append((text[2:].rstrip("\n"), line, end, end))
        elif found and found[-1][0].endswith("\\") and found[-1][2] == offset:
            command, first, _, _ = found[-1]
            found[-1] = (command[:-1] + text.strip(), first, end, end)
        elif found:
            found[-1] = (*found[-1][:3], end)
        offset, line = end, line + 1
    return iter(found)


def run_page(page: Path, directory: Path) -> Iterator[Output]:
    """Runs a page's blocks in `directory`; gives each output that the page shows.

    Raises:
        PageError: a block raises, or a command ends with an unexpected status.
    """
    text = page.read_text()
    namespace: dict[str, Any] = {"__name__": page.stem}
    printed = ""
    for block in blocks(text):
        language = block.info.split()[:1]
        saved = _SAVED_RE.match(block.text)
        if language in (["python"], ["hlo"]) and saved:
            (directory / saved[1]).write_text(block.text)
        elif language == ["python"]:
            printed = _run_python(block, page, namespace, directory)
        elif block.info == "text output":
            end = block.start + len(block.text)
            yield Output("the Python block above", block.line, block.start, end, block.text, printed)
        elif language == ["console"]:
            for command, line, start, end in commands(block):
                shown = text[start:end]
                if command.startswith(NOT_RUN):
                    continue
                real = _run_command(command, directory, f"{page.name}:{line}")
                if shown.strip():
                    yield Output(command, line, start, end, shown, real)


def _run_python(block: Block, page: Path, namespace: dict[str, Any], directory: Path) -> str:
    printed = io.StringIO()
    try:
        # The empty lines make a traceback name the line of the page.
        code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
        with contextlib.chdir(directory), contextlib.redirect_stdout(printed):
            exec(code, namespace)
    except Exception as error:
        raise PageError(f"{page.name}:{block.line}: {type(error).__name__}: {error}") from error
    return printed.getvalue()


class _Terminal(io.StringIO):
    """Somewhere to write that says it is a terminal, so that commands wrap as a reader sees it."""

    def isatty(self) -> bool:
        return True


def _run_command(line: str, directory: Path, where: str) -> str:
    """What a command prints."""
    expected = int(match[1]) if (match := _STATUS_RE.search(line)) else 0
    command = _STATUS_RE.sub("", line)
    words = shlex.split(command)
    if words[0] == "xla-fp8" and not {"|", ">", "&&", "<"} & set(words):
        status, output = _run_in_process(words[1:], directory)
    else:
        status, output = _run_in_bash(command, directory)
    output = output.replace(str(directory), HOME)
    if status != expected:
        raise PageError(f"{where}: `{command}` ends with {status}, not {expected}:\n{output}")
    return output


def _run_in_process(arguments: list[str], directory: Path) -> tuple[int, str]:
    from xla_fp8.cli.main import main

    terminal = _Terminal()
    kept = {name: os.environ.get(name) for name in ("COLUMNS", "NO_COLOR")}
    os.environ.update(COLUMNS=str(COLUMNS), NO_COLOR="1")
    try:
        with contextlib.chdir(directory), contextlib.redirect_stdout(terminal), contextlib.redirect_stderr(terminal):
            status = main(arguments)
    finally:
        for name, value in kept.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return status, terminal.getvalue()


def _run_in_bash(command: str, directory: Path) -> tuple[int, str]:
    python = shlex.quote(sys.executable)
    functions = f'xla-fp8() {{ {python} -m xla_fp8 "$@"; }}; python() {{ {python} "$@"; }}\n'
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": str(COLUMNS), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-c", functions + command],
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def updated(text: str, outputs: list[Output]) -> str:
    """The page with real output where what it shows does not match."""
    for output in sorted(outputs, key=lambda o: o.start, reverse=True):
        if not output.agrees:
            text = f"{text[: output.start]}{output.real.rstrip()}\n{text[output.end :]}"
    return text


def difference(page: Path, output: Output) -> str:
    lines = difflib.unified_diff(output.shown.splitlines(), output.real.splitlines(), "shown", "real", lineterm="")
    return f"{page.name}:{output.line}: {output.what}\n" + "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    parser.add_argument("--update", action="store_true", help="write the real output into the pages")
    arguments = parser.parse_args()
    status = 0
    for page in arguments.pages:
        with tempfile.TemporaryDirectory() as scratch:
            try:
                outputs = list(run_page(page, Path(scratch)))
            except PageError as error:
                print(error, file=sys.stderr)
                status = 1
                continue
        if arguments.update:
            page.write_text(updated(page.read_text(), outputs))
            continue
        for output in outputs:
            if not output.agrees:
                print(difference(page, output), file=sys.stderr)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
