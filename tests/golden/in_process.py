"""Runs golden files whose RUN: lines are pipes of `xla-fp8` into `filecheck` in this process.

lit starts two or three processes for each line, which takes thirty times as long as what they do.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import filecheck.main
from lit import Test

from xla_fp8.cli import golden_file
from xla_fp8.cli.errors import CliError
from xla_fp8.cli.main import main

_KEYWORD_RE = re.compile(r"(?<!\w)(XFAIL|REQUIRES|UNSUPPORTED|ALLOW_RETRIES|DEFINE|REDEFINE|END)[:.]")


def runs(path: Path) -> list[golden_file.Run]:
    """The RUN: lines of a file; none where only lit can run them: they need a shell, or expect a command to fail."""
    text = path.read_text()
    if _KEYWORD_RE.search(text):
        return []
    try:
        found = golden_file.runs(text)
    except CliError:
        return []
    words = [word for run in found for command in run.commands for word in command]
    needs_lit = any(run.fails or run.merges_stderr for run in found) or any("%" in w.replace("%s", "") for w in words)
    return [] if needs_lit else found


def result(path: Path) -> Test.Result:
    """Runs a file that has `runs`; lit's result."""
    for run in runs(path):
        output = b""
        for command in run.commands:
            arguments = [word.replace("%s", str(path)) for word in command]
            status, output, errors = _captured(lambda arguments=arguments: main(arguments), output)
            if status:
                return Test.Result(Test.FAIL, f"xla-fp8 {' '.join(arguments)}: status {status}\n{errors}")
        checker = ["filecheck", str(path), f"--check-prefix={run.prefix}"]
        status, _, errors = _captured(lambda checker=checker: filecheck.main.main(checker), output)
        if status:
            return Test.Result(Test.FAIL, f"{' '.join(checker)}: status {status}\n{errors}\n{output.decode()}")
    return Test.Result(Test.PASS)


def _captured(program: Callable[[], int | None], stdin: bytes) -> tuple[int, bytes, str]:
    """Runs a program with `stdin` as its input: its status, and what it writes to stdout and stderr."""
    source, out, err = (io.TextIOWrapper(io.BytesIO(data), encoding="utf-8") for data in (stdin, b"", b""))
    with mock.patch("sys.stdin", source), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = program() or 0
        except SystemExit as end:  # how filecheck ends
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    for stream in (out, err):
        stream.flush()
    return status, out.buffer.getvalue(), err.buffer.getvalue().decode()
