"""`xla-fp8 graph`: a drawing of each graph custom call, and of what it replaced."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_OK

if TYPE_CHECKING:
    from xla_fp8.hlo import HloModule


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "graph",
        help="draw the graphs of a module, before and after",
        description="Draws the module around each graph custom call. A file without any goes through the default "
        "pipeline first and is drawn before and after it.",
    )
    parser.set_defaults(run=run)
    parser.add_argument("input", metavar="FILE", help="HLO text or proto, gzip of either, or - for stdin")
    options.add_output(parser)
    parser.add_argument("--format", choices=("text", "dot", "svg", "html"), default="text", help="dot is for Graphviz")
    parser.add_argument("--before", metavar="FILE", help="the module that FILE was made from, to show beside it")
    options.add_pipeline(parser)
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.cli import inputs, outputs, pipeline
    from xla_fp8.graph.drawing import draw
    from xla_fp8.hlo.xla_process import XlaProcess

    source = inputs.one(arguments.input)
    with XlaProcess() as xla:
        text, module = inputs.load(source, xla, verify_with_xla=arguments.xla_verify)
        before = None
        if arguments.before:
            before = inputs.load(inputs.one(arguments.before), xla, verify_with_xla=arguments.xla_verify)[1]
    with inputs.placed_errors(text, source.name, module):
        if before is None and not _has_graph(module):
            if (problem := pipeline.why_no_pass_may_run(module, None)) is not None:
                raise problem
            before = module.clone()
            pipeline.run_passes(module, arguments)
        drawing = draw(module, arguments.format, before)
    outputs.write(arguments.output, drawing)
    return EXIT_OK


def _has_graph(module: HloModule) -> bool:
    from xla_fp8.graph.custom_call import graph_of

    return any(graph_of(i) is not None for c in module.computations for i in c if i.opcode == "custom-call")
