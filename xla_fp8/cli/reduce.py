"""`xla-fp8 reduce`: shrinks an HLO module while a command finds it interesting."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_OK

if TYPE_CHECKING:
    from xla_fp8.hlo import HloModule

_EPILOG = """\
The command is run by the shell for each candidate; {} in it is the candidate's file, which is appended where there is
no {}. Exit status 0 means interesting, as for llvm-reduce; `!` turns a command around.
examples:
  xla-fp8 reduce big.hlo --interesting='! xla-fp8 run {} --target=h200'
  xla-fp8 reduce big.hlo --interesting='xla-fp8 explain {} --format=json | grep -q wrong-clamp-bounds' -o small.hlo
The best module so far is written whenever there is a better one, so that ^C loses nothing.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "reduce",
        help="shrink a module while a command finds it interesting",
        description="Shrinks an HLO module while a command finds it interesting: drops outputs, instructions, "
        "parameters and attributes, and makes dimensions smaller.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("input", metavar="FILE", help="HLO text or proto, - for stdin")
    parser.add_argument("--interesting", required=True, metavar="CMD", help="exits with 0 for what is to be kept")
    parser.add_argument("-o", "--output", metavar="OUT", help="default: FILE with .reduced.hlo for its ending")
    parser.add_argument(
        "--timeout", type=options.natural, default=60, metavar="S", help="seconds a command may take (60)"
    )
    options.add_xla_verify(parser)
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.cli import inputs, outputs
    from xla_fp8.hlo import to_text
    from xla_fp8.hlo.xla_process import XlaProcess
    from xla_fp8.reduce import reduce

    source = inputs.one(arguments.input)
    output = arguments.output or ("-" if source.path == "-" else f"{os.path.splitext(source.path)[0]}.reduced.hlo")
    with XlaProcess() as xla:
        module = inputs.load(source, xla, verify_with_xla=arguments.xla_verify)[1]
    size = module.instruction_count

    def tell(step: str, better: HloModule) -> None:
        print(f"{step}: {better.instruction_count} of {size} instructions", file=sys.stderr)
        if output != "-":
            outputs.write(output, to_text(better))

    with tempfile.TemporaryDirectory(prefix="xla-fp8-reduce-") as folder:
        path = os.path.join(folder, "candidate.hlo")
        reduced = reduce(
            module, lambda text: _is_interesting(text, path, arguments.interesting, arguments.timeout), tell
        )
    outputs.write(output, to_text(reduced))
    print(f"{reduced.instruction_count} of {size} instructions are left, in {output}", file=sys.stderr)
    return EXIT_OK


def _is_interesting(text: str, path: str, command: str, timeout: int) -> bool:
    """Runs the command on a file with this text; one that takes too long is not interesting."""
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)
    quoted = shlex.quote(path)
    command = command.replace("{}", quoted) if "{}" in command else f"{command} {quoted}"
    try:
        done = subprocess.run(command, shell=True, capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
