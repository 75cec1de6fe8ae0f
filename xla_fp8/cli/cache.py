"""`xla-fp8 cache`: shows or deletes what the autotuner found."""

from __future__ import annotations

import argparse
import dataclasses
import json

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_OK


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "cache",
        help="show or clear the autotuner's choices",
        description="The choices are files in XLA_FP8_CACHE_DIR, by default ~/.cache/xla_fp8.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "action", choices=("show", "clear", "path"), help="list them, delete them, or say where they are"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text", help="how to show them")
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.backends import cache

    if arguments.action == "path":
        print(cache.folder())
    elif arguments.action == "clear":
        print(f"{cache.clear()} choices deleted from {cache.folder()}")
    elif arguments.format == "json":
        print(json.dumps([dataclasses.asdict(choice) for choice in cache.choices()], indent=2))
    else:
        _show(cache.folder(), list(cache.choices()))
    return EXIT_OK


def _show(folder: object, choices: list[object]) -> None:
    from xla_fp8.backends.cache import Choice
    from xla_fp8.backends.call_text import CallTextError, decode

    print(f"{len(choices)} choices in {folder}")
    for choice in choices:
        assert isinstance(choice, Choice)
        try:
            call = decode(choice.key["call"])
            shapes = " x ".join(shape.text_without_layout for shape in call.operand_shapes[:2])
            what = f"{call.graph}  {shapes} {call.window}"
        except (CallTextError, KeyError):
            what = "a call that this version does not read"
        first = choice.first_microseconds
        gain = f", {first / choice.microseconds:.2f}x the heuristic's choice" if first else ""
        print(f"\n{what}\n  {choice.key.get('device', '?')}: {choice.config}, {choice.microseconds:.1f} us{gain}")
        print(f"  best of {choice.candidates}, found in {choice.tuning_seconds:.1f} s on {choice.date}")
