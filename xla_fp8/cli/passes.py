"""`xla-fp8 passes`: the passes there are, and the pipeline that runs by default."""

from __future__ import annotations

import argparse
import inspect

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_OK, UsageError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "passes",
        help="list the passes",
        description="Lists the passes, one line each; those of the default pipeline with their place in it. "
        "With names, prints all that is said about each.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("names", nargs="*", metavar="PASS", help="print the whole description of this pass")
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.cli import outputs
    from xla_fp8.passes import DEFAULT_PIPELINE, PASSES

    paint = options.stdout_color(arguments)
    descriptions = {name: inspect.getdoc(cls) or "" for name, cls in PASSES.items()}
    if arguments.names:
        unknown = [name for name in arguments.names if name not in descriptions]
        if unknown:
            raise UsageError(f"there is no pass {unknown[0]!r}; the passes are {', '.join(sorted(descriptions))}")
        parts = [f"{paint(name, 'heading')}: {descriptions[name]}\n" for name in arguments.names]
        outputs.write_stdout("\n".join(parts))
        return EXIT_OK
    width = max(map(len, descriptions))
    lines = [paint("In the default pipeline, in this order:", "heading")]
    lines += [_line(number, name, descriptions, width) for number, name in enumerate(DEFAULT_PIPELINE, 1)]
    others = sorted(set(descriptions) - set(DEFAULT_PIPELINE))
    if others:
        lines += ["", paint("Only by name (--passes):", "heading")]
        lines += [_line(None, name, descriptions, width) for name in others]
    outputs.write_stdout("\n".join(lines) + "\n")
    return EXIT_OK


def _line(number: int | None, name: str, descriptions: dict[str, str], width: int) -> str:
    first = descriptions[name].partition("\n")[0]
    return f"  {number or '':>2}  {name:<{width}}  {first}".rstrip()
