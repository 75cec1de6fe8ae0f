"""`xla-fp8 update-checks`: rewrites the CHECK lines of golden tests from what their commands really print."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from xla_fp8.cli import golden_file, options, outputs
from xla_fp8.cli.errors import EXIT_OK, CliError

if TYPE_CHECKING:
    from xla_fp8.cli.inputs import Source

_EPILOG = """\
Understood: // RUN: [not] xla-fp8 ARGUMENTS [2>&1] [| xla-fp8 ARGUMENTS ...] | filecheck %s [--check-prefix=NAME]
Every check line of the prefix is replaced: a CHECK-LABEL for each computation, a CHECK-NEXT for each instruction,
metadata left out. Read the difference before you commit it: the new lines say what happens, not what should.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "update-checks",
        help="rewrite the CHECK lines of golden .hlo tests",
        description="Runs the RUN: lines of golden .hlo files and rewrites their CHECK lines from the output.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("files", nargs="+", metavar="FILE")
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.cli import pipeline
    from xla_fp8.cli.inputs import Source

    return pipeline.for_each([Source(path) for path in arguments.files], arguments, _update)


def _update(source: Source) -> int:
    from xla_fp8.cli import inputs

    text = inputs.decode(inputs.read(source), source.name)
    shown = golden_file.FOLDER + os.path.basename(source.path)
    results = [(run.prefix, _output_of(run, source.path).replace(source.path, shown)) for run in golden_file.runs(text)]
    new = golden_file.updated(text, results)
    if new == text:
        print(f"{source.path}: up to date")
    else:
        outputs.write(source.path, new)
        print(f"{source.path}: updated")
    return EXIT_OK


def _output_of(run: golden_file.Run, path: str) -> str:
    """What the commands of a RUN line print, in the environment that lit gives them (hlo_fixtures/lit.cfg.py)."""
    output = ""
    for index, command in enumerate(run.commands):
        is_last = index == len(run.commands) - 1
        arguments = [argument.replace("%s", path) for argument in command]
        done = subprocess.run(
            [sys.executable, "-m", "xla_fp8", *arguments],
            input=output,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if run.merges_stderr and is_last else subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"},
            encoding="utf-8",
            check=False,
        )
        output = done.stdout
        if (done.returncode != 0) != (run.fails and is_last):
            shown = f"xla-fp8 {' '.join(arguments)}"
            expected = "fails" if done.returncode else "succeeds, but the RUN line says `not`"
            raise CliError(f"`{shown}` {expected} (status {done.returncode}):\n{(done.stderr or output).strip()}")
    return output
