"""`xla-fp8 opt`: HLO in, passes, HLO out."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from xla_fp8.cli import color, options
from xla_fp8.cli.errors import EXIT_OK, CliError, UsageError

if TYPE_CHECKING:
    from xla_fp8.cli.inputs import Source
    from xla_fp8.hlo import HloModule
    from xla_fp8.hlo.xla_process import XlaProcess
    from xla_fp8.passes import PipelineOptions
    from xla_fp8.report import Report

_EPILOG = """\
examples:
  xla-fp8 opt module_0001.jit_f.before_optimizations.txt -o out.hlo
  xla-fp8 opt in.hlo --passes= -o -              only read and print
  xla-fp8 opt dumps/ -o rewritten/               every *before_optimizations* file of a directory
  xla-fp8 opt in.hlo --print-after-all -o /dev/null
status: 0 done, 1 an error (OUT is left as it was), 2 wrong usage
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "opt",
        help="run passes over HLO and write the result",
        description="Runs passes over HLO and writes the result. A module without FP8 chains comes out as it went in.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    options.add_inputs(parser)
    options.add_output(parser, "a file, a directory (several inputs)")
    parser.add_argument(
        "--passes",
        type=options.pass_list_type,
        metavar="A,B,...",
        help="run these passes instead of the default pipeline (`xla-fp8 passes` lists both); empty runs none",
    )
    options.add_pipeline(parser)
    parser.add_argument("--verify-input", action="store_true", help="verify the module before the first pass")
    parser.add_argument("--verify-each", action="store_true", help="verify after each pass: says which one broke it")
    parser.add_argument("--fuel", type=options.natural, metavar="N", help="stop after N rewrites, to bisect a bad one")
    for when in ("before", "after"):
        parser.add_argument(
            f"--print-{when}",
            type=options.pass_list_type,
            default=(),
            metavar="A,B,...",
            help=f"print the module on stderr {when} these passes",
        )
        parser.add_argument(f"--print-{when}-all", action="store_true", help=f"... {when} every pass")
    parser.add_argument("--stats", action="store_true", help="print counts on stderr")
    parser.add_argument("--time-passes", action="store_true", help="print each pass's time on stderr")
    parser.add_argument("--report", action="store_true", help="print what was rewritten, and why not, on stderr")
    parser.add_argument("--fail-if-unchanged", action="store_true", help="exit with 1 when the passes change nothing")
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.cli import inputs, pipeline
    from xla_fp8.hlo.xla_process import XlaProcess

    sources = inputs.find(arguments.inputs)
    outputs = _output_paths(arguments, sources)
    with XlaProcess() as xla:
        return pipeline.for_each(sources, arguments, lambda source: _opt(source, outputs[source], arguments, xla))


def _output_paths(arguments: argparse.Namespace, sources: list[Source]) -> dict[Source, str]:
    """Where the result of each input goes."""
    out: str = arguments.output
    several = len(arguments.inputs) > 1 or any(path != "-" and os.path.isdir(path) for path in arguments.inputs)
    if out == "-" or not (several or os.path.isdir(out) or out.endswith("/")):
        return dict.fromkeys(sources, out)
    is_file_name = os.path.splitext(out)[1] in (".hlo", ".txt", ".gz")
    if not os.path.isdir(out) and (os.path.exists(out) or is_file_name):
        raise UsageError(f"several inputs, or a directory of them, need a directory for -o, and {out} is none")
    paths = {source: os.path.join(out, source.output_name) for source in sources}
    by_path: dict[str, Source] = {}
    for source, path in paths.items():
        if path in by_path:
            raise UsageError(f"{by_path[path].name} and {source.name} would both be written to {path}")
        by_path[path] = source
    os.makedirs(out, exist_ok=True)
    return paths


def _opt(source: Source, output: str, arguments: argparse.Namespace, xla: XlaProcess) -> int:
    """One input from reading to writing; returns the exit status."""
    from xla_fp8 import hlo
    from xla_fp8.cli import inputs, outputs, pipeline

    text, module = inputs.load(source, xla, verify_with_xla=arguments.xla_verify)
    names = arguments.passes
    before = _size(module)
    with inputs.placed_errors(text, source.name, module):
        if arguments.verify_input:
            hlo.verify(module)
        if (problem := pipeline.why_no_pass_may_run(module, names)) is not None:
            placed = inputs.placed(problem, text, source.name, module)
            warning = options.stderr_color(arguments)("warning:", "error")
            print(
                str(placed).replace("error:", f"{warning} no pass was run, because the module is not sound:", 1),
                file=sys.stderr,
            )
            names = ()
        report = pipeline.run_passes(module, arguments, names, _pipeline_options(arguments))
    result = hlo.to_text(module)
    if arguments.xla_verify:
        _check_result(text, result, report, xla)
    several = output == "-" and len(arguments.inputs) > 1
    outputs.write(output, f"// {source.name}\n{result}" if several else result)
    _print_extras(report, before, _size(module), arguments)
    if arguments.fail_if_unchanged and not report.changed:
        raise CliError("the passes changed nothing (--fail-if-unchanged)")
    return EXIT_OK


def _pipeline_options(arguments: argparse.Namespace) -> PipelineOptions:
    from xla_fp8.passes import PipelineOptions

    return PipelineOptions(
        verify_input=False,  # done above, where it decides whether to pass the module through
        verify_each=arguments.verify_each,
        fuel=arguments.fuel,
        print_before=frozenset(arguments.print_before),
        print_after=frozenset(arguments.print_after),
        print_before_all=arguments.print_before_all,
        print_after_all=arguments.print_after_all,
    )


def _check_result(text: str, result: str, report: Report, xla: XlaProcess) -> None:
    """Is what we are about to write HLO to XLA, and to StableHLO's verifier where the input was?

    Raises:
        CliError: it is not: a bug of a pass, so nothing is written.
    """
    advice = "This is a bug in xla-fp8: nothing was written. --verify-each names the pass, --fuel=N the rewrite"
    answer = xla.check(result)
    if not answer.ok:
        place = f"line {answer.line}: " if answer.line else ""
        raise CliError(f"XLA's parser rejects the result: {place}{answer.message}. {advice}")
    if report.changed:
        answer = xla.stablehlo(result)
        # Some HLO has no StableHLO form; that is no news if the input had none either.
        if not answer.ok and xla.stablehlo(text).ok:
            raise CliError(f"StableHLO's verifier rejects the result: {answer.message}. {advice}")


def _size(module: HloModule) -> tuple[int, int]:
    """Computations and instructions."""
    return len(module.computations), module.instruction_count


def _print_extras(
    report: Report, before: tuple[int, int], after: tuple[int, int], arguments: argparse.Namespace
) -> None:
    """What --report, --stats and --time-passes ask for, on stderr."""
    paint = options.stderr_color(arguments)
    parts = []
    if arguments.report:
        parts.append(report.to_text(width=color.width_of(sys.stderr), paint=paint))
    if arguments.stats:
        parts.append(_stats(report, before, after, paint))
    if arguments.time_passes:
        parts.append(_times(report, paint))
    sys.stderr.write("\n".join(parts))


def _stats(report: Report, before: tuple[int, int], after: tuple[int, int], paint: color.Color) -> str:
    rows = [
        ("computations", f"{before[0]} -> {after[0]}"),
        ("instructions", f"{before[1]} -> {after[1]}"),
        ("convolutions and dots", report.summary),
        *((f"rewrites by {timing.name}", str(timing.rewrites)) for timing in report.timings),
    ]
    return _table("Statistics", rows, paint)


def _times(report: Report, paint: color.Color) -> str:
    total = sum(timing.seconds for timing in report.timings)
    rows = [
        (timing.name, f"{timing.seconds * 1e3:9.2f} ms  {timing.seconds / total if total else 0:6.1%}")
        for timing in report.timings
    ]
    return _table("Time in passes", [*rows, ("total", f"{total * 1e3:9.2f} ms")], paint)


def _table(heading: str, rows: list[tuple[str, str]], paint: color.Color) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([paint(heading, "heading"), *(f"  {name:<{width}}  {value}" for name, value in rows)]) + "\n"
