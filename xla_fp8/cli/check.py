"""`xla-fp8 check`: which FP8 graphs of a module the target's cuDNN can run, asked without a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_ERROR, EXIT_OK, CliError, UsageError

if TYPE_CHECKING:
    from xla_fp8.cli.inputs import Source
    from xla_fp8.hlo.xla_process import XlaProcess

_EPILOG = """\
examples:
  xla-fp8 check module.hlo --target=h200
  xla-fp8 check module.hlo --device-properties=my_gpu.json     written by: xla-fp8 doctor --save-target=my_gpu.json
A yes means that cuDNN proposes a plan; it is built on the device. Where cuDNN is not installed, rules answer.
status: 0 every FP8 graph has a plan, 1 one has none or an error, 2 wrong usage
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "check",
        help="ask cuDNN which FP8 graphs of a module it can run, without a GPU",
        description="Makes the FP8 graphs of HLO and asks cuDNN (or, where it is not installed, rules) about each, and "
        "about those that it has already.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    options.add_inputs(parser)
    options.add_target(parser)
    parser.add_argument(
        "--supports",
        choices=("cudnn", "rules"),
        default="cudnn",
        help="who is asked: the cuDNN that is installed (cudnn, the default; rules where none is), or the rules of "
        "docs/backends.md (rules: the same on every machine)",
    )
    options.add_xla_verify(parser)
    parser.add_argument("--device-properties", type=Path, metavar="JSON", help="of the device, in cuDNN's form")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="what to print")
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.cli import inputs, pipeline
    from xla_fp8.hlo.xla_process import XlaProcess

    if arguments.device_properties and arguments.supports == "rules":
        raise UsageError("--device-properties is for cuDNN, and --supports=rules does not ask it")
    properties = arguments.device_properties.read_text() if arguments.device_properties else None
    found: list[dict[str, object]] = []
    with XlaProcess() as xla:
        status = pipeline.for_each(
            inputs.find(arguments.inputs), arguments, lambda source: _check(source, arguments, properties, xla, found)
        )
    if arguments.format == "json":
        print(json.dumps(found, indent=2))
    return status


def _check(
    source: Source,
    arguments: argparse.Namespace,
    properties: str | None,
    xla: XlaProcess,
    found: list[dict[str, object]],
) -> int:
    import dataclasses

    from xla_fp8 import passes
    from xla_fp8.backends import cudnn
    from xla_fp8.cli import inputs
    from xla_fp8.passes.base import source_of
    from xla_fp8.target import GraphCall, Target

    text, module = inputs.load(source, xla, verify_with_xla=arguments.xla_verify)
    target = arguments.target if arguments.target is not None else Target.default()
    answers: list[tuple[GraphCall, cudnn.Support]] = []

    def supports(call: GraphCall) -> cudnn.Support:
        by_rules = arguments.supports == "rules"
        answer = cudnn.support_by_rules(call, target) if by_rules else cudnn.support(call, target, properties)
        if call.is_dot:
            return answer  # no business of cuDNN's: the dot stays one
        answers.append((call, answer))
        return dataclasses.replace(answer, ok=True)  # so that the graph is made, and the next one asked about

    asked: list[tuple[str, str | None]] = []
    with inputs.placed_errors(text, source.name, module):
        for instruction in (i for computation in module.computations for i in computation):
            call = GraphCall.of(instruction)
            if call is not None and not call.is_dot:
                asked.append((instruction.name, source_of(instruction)))
                supports(call)
        report = passes.run(module, None, dataclasses.replace(target, supports=supports), dialect=arguments.dialect)
    asked += [(entry.instruction, entry.source) for entry in report.rewritten]
    if len(answers) != len(asked):
        raise CliError(f"{len(asked)} graphs are there, but {len(answers)} were asked about")
    paint = options.stdout_color(arguments)
    if arguments.format == "text":
        print(paint(f"{source.name} on {target}", "heading"))
        if not answers:
            print("  no FP8 graph: nothing to ask (xla-fp8 explain says why)")
    for (name, line), (call, answer) in zip(asked, answers, strict=True):
        found.append(
            {
                "file": source.name,
                "instruction": name,
                "source": line,
                "graph": str(call.graph),
                **{key: value for key, value in dataclasses.asdict(answer).items() if key != "source"},
                "answered_by": answer.source,
            }
        )
        if arguments.format == "text":
            mark = paint("yes", "rewritten") if answer.ok else paint("no", "refused")
            where = f", {line}" if line else ""
            print(f"  {mark:<3} {name}{where}: {call.graph}")
            print(f"      {answer}")
    return EXIT_OK if all(answer.ok for _, answer in answers) else EXIT_ERROR
