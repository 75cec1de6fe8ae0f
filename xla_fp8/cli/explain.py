"""`xla-fp8 explain`: what became of each convolution and dot, and what would make the rest match."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import TYPE_CHECKING

from xla_fp8.cli import color, options
from xla_fp8.cli.errors import EXIT_ERROR, EXIT_OK

if TYPE_CHECKING:
    from xla_fp8.cli.inputs import Source
    from xla_fp8.hlo.xla_process import XlaProcess
    from xla_fp8.report import Modules, Report

_EPILOG = """\
--format=json prints {"rewritten": [...], "refused": [...]}; each entry has instruction, op, source ("file.py:42" or
null), reason, advice, graph, computation, is_fp8, rule, saved_bytes and file.
status: 0 done, 1 an error, or with --strict a refused FP8 convolution (or quantization, where --passes names
dynamic-quantize-rewriter), 2 wrong usage
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="say which convolutions and dots are rewritten, and why the others are not",
        description="Runs the passes, writes no HLO, and has one entry for each convolution and dot.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    options.add_inputs(parser)
    options.add_output(parser)
    parser.add_argument("--format", choices=("text", "json", "markdown", "html"), default="text")
    parser.add_argument(
        "--all",
        action="store_true",
        help="in text, markdown and html: reason and advice also where no FP8 tensor is an operand; of several inputs "
        "also those without convolutions and dots",
    )
    parser.add_argument(
        "--passes", type=options.pass_list_type, metavar="A,B,...", help="instead of the default pipeline"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 when an FP8 convolution was refused")
    options.add_pipeline(parser)
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.cli import inputs, outputs, pipeline
    from xla_fp8.hlo.xla_process import XlaProcess

    reports: list[_Explained] = []

    def explain(source: Source) -> int:
        reports.append(_explained(source, arguments, xla))
        return EXIT_OK

    sources = inputs.find(arguments.inputs)
    with XlaProcess() as xla:
        status = pipeline.for_each(sources, arguments, explain)
    if reports:
        outputs.write(arguments.output, _render(reports, arguments))
    if arguments.strict and any(entry.op != "dot" for each in reports for entry in each.report.refused_fp8):
        status = max(status, EXIT_ERROR)
    return status


@dataclasses.dataclass(frozen=True)
class _Explained:
    """The report of one input, and for pictures its module before and after."""

    name: str
    report: Report
    modules: Modules | None


def _explained(source: Source, arguments: argparse.Namespace, xla: XlaProcess) -> _Explained:
    from xla_fp8.cli import inputs, pipeline
    from xla_fp8.report import Modules

    text, module = inputs.load(source, xla, verify_with_xla=arguments.xla_verify)
    with inputs.placed_errors(text, source.name, module):
        if (problem := pipeline.why_no_pass_may_run(module, arguments.passes)) is not None:
            raise problem
        modules = Modules(module.clone(), module) if arguments.format == "html" else None
        return _Explained(source.name, pipeline.run_passes(module, arguments, arguments.passes), modules)


def _render(reports: list[_Explained], arguments: argparse.Namespace) -> str:
    several = len(reports) > 1
    if arguments.format == "json":
        return _json(reports)
    if arguments.format == "html":
        from xla_fp8.report import html

        title = "FP8 report" if several else f"FP8 report: {reports[0].name}"
        sections = [html.Section(each.name if several else "", each.report, each.modules) for each in reports]
        return html.page(title, sections, everything=arguments.all)
    shown = [each for each in reports if arguments.all or not several or each.report.rewritten or each.report.refused]
    without = len(reports) - len(shown)  # most modules that XLA dumps of a program are of this kind
    note = [f"{without} of {len(reports)} modules have no convolutions and no dots; --all shows them\n"] * bool(without)
    if arguments.format == "markdown":
        tables = [
            (f"## {each.name}\n\n" if several else "") + each.report.to_markdown(everything=arguments.all)
            for each in shown
        ]
        return "\n".join(tables + note)
    to_stdout = arguments.output == "-"
    paint = color.choose(arguments.color, sys.stdout) if to_stdout else color.Color(arguments.color == "always")
    width = color.width_of(sys.stdout) if to_stdout else None
    texts = [
        (paint(f"== {each.name}", "heading") + "\n" if several else "")
        + each.report.to_text(everything=arguments.all, width=width, paint=paint)
        for each in shown
    ]
    return "\n".join(texts + note)


def _json(reports: list[_Explained]) -> str:
    merged = {
        part: [{**entry, "file": each.name} for each in reports for entry in each.report.to_dict()[part]]
        for part in ("rewritten", "refused")
    }
    return json.dumps(merged, indent=2) + "\n"
