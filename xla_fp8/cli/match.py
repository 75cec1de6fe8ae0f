"""`xla-fp8 match`: tries a pattern on a module."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_ERROR, EXIT_OK

if TYPE_CHECKING:
    from xla_fp8.cli.color import Color
    from xla_fp8.hlo import HloModule
    from xla_fp8.match import Match, Pattern

_EPILOG = """\
examples:
  xla-fp8 match in.hlo --pattern 'm.convert(m.op()).with_element_type("f8e4m3fn")'
  xla-fp8 match in.hlo --pattern 'm.maximum_any_order(m.op().capture("x"), m.broadcast(m.constant_scalar(0)))'
status, as of grep: 0 with a match, 1 without one or on an error, 2 wrong usage
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "match",
        help="list the instructions that a pattern matches",
        description="Lists the instructions that a pattern of xla_fp8.match matches, with captures and source lines. "
        "Without a match it says what came nearest.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("input", metavar="FILE", help="HLO text or proto, gzip of either, or - for stdin")
    parser.add_argument(
        "--pattern", required=True, metavar="EXPRESSION", help="a Python expression over m, the module xla_fp8.match"
    )
    options.add_xla_verify(parser)
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8 import match as m
    from xla_fp8.cli import inputs, outputs
    from xla_fp8.cli.errors import UsageError
    from xla_fp8.hlo.xla_process import XlaProcess

    try:
        pattern = m.evaluate_pattern(arguments.pattern)
    except m.PatternError as error:
        raise UsageError(f"--pattern: {error}") from None
    source = inputs.one(arguments.input)
    with XlaProcess() as xla:
        text, module = inputs.load(source, xla, verify_with_xla=arguments.xla_verify)
    paint = options.stdout_color(arguments)
    with inputs.placed_errors(text, source.name, module):
        found = [_lines(match, paint) for match in m.find_all(module, pattern)]
        nearest = "" if found else _nearest(module, pattern)
    if not found:
        print(f"{source.name}: no match{nearest}", file=sys.stderr)
        return EXIT_ERROR
    outputs.write_stdout("".join(found))
    return EXIT_OK


def _lines(match: Match, paint: Color) -> str:
    """One match: the instruction's text with its source line, then what each name captured."""
    from xla_fp8.hlo import instruction_text

    instruction = match.instruction
    location = instruction.module.source_location(instruction)
    computation = instruction.parent.name if instruction.parent else ""
    place = f"{location}: " if location else ""
    lines = [f"{paint(f'{place}in {computation}', 'note')}\n  {paint(instruction_text(instruction), 'summary')}\n"]
    lines += [
        f"    {paint(name, 'graph')} = {instruction_text(captured)}\n" for name, captured in match.captures.items()
    ]
    return "".join(lines)


def _nearest(module: HloModule, pattern: Pattern) -> str:
    """The instruction that got furthest into the pattern, and what differed there."""
    from xla_fp8.match import difference

    nearest = None
    for computation in module.computations:
        for instruction in computation:
            found = difference(instruction, pattern)
            if found is not None and found.depth and (nearest is None or found.depth > nearest.depth):
                nearest = found
    return f"; the nearest: {nearest}" if nearest else ""
