"""The entry point of `xla-fp8`: finds the command, and turns every anticipated error into a message and a status.

Status: 0 done, 1 an error, 2 wrong usage, 130 interrupted, 141 nobody reads our output any more.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence

from xla_fp8 import __version__
from xla_fp8.cli import (
    cache,
    check,
    color,
    doctor,
    errors,
    explain,
    graph,
    match,
    opt,
    passes,
    reduce,
    run,
    update_checks,
)
from xla_fp8.errors import XlaFp8Error

COMMANDS = (opt, explain, check, match, graph, passes, reduce, run, doctor, cache, update_checks)
"""Modules with `add_parser(subparsers)`; what a command needs is imported when it runs, so that `--help` is quick."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status; raises nothing that was anticipated.

    Args:
        argv: the arguments without the program's name; `sys.argv[1:]` by default.
    """
    when = "auto"
    _open_standard_streams()
    try:
        arguments = build_parser().parse_args(argv)
        when = arguments.color
        status = arguments.run(arguments)
        sys.stdout.flush()
    except SystemExit as end:  # argparse: --help, --version, wrong usage
        return end.code if isinstance(end.code, int) else errors.EXIT_OK
    except BrokenPipeError:
        # Python flushes stdout once more as it ends; that must have somewhere to go.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return errors.EXIT_BROKEN_PIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    except (XlaFp8Error, OSError) as error:
        print(errors.describe(error, None, color.choose(when, sys.stderr)), file=sys.stderr)
        return errors.EXIT_USAGE if isinstance(error, errors.UsageError) else errors.EXIT_ERROR
    return int(status)


def _open_standard_streams() -> None:
    """Puts /dev/null where the caller has closed a standard stream, as services do: Python has None there."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            stream = open(os.devnull, "r" if name == "stdin" else "w", encoding="utf-8")  # noqa: SIM115, for good
            setattr(sys, name, stream)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="xla-fp8",
        description="Rewrites FP8 quantize/dequantize chains around convolutions in HLO into cuDNN graphs.",
        epilog="xla-fp8 COMMAND --help says more about each.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the versions that matter and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


class _Version(argparse.Action):
    """Looks the versions up when they are asked for, not at every start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            jaxlib = metadata.version("jaxlib")
        except metadata.PackageNotFoundError:
            jaxlib = "not installed"
        print(f"xla-fp8 {__version__} (jaxlib {jaxlib}, Python {sys.version.split()[0]})")
        parser.exit()
