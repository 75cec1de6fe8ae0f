"""`xla-fp8 run`: a module before and after the pipeline, or two modules, on the same inputs, compared."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_ERROR, EXIT_OK, CliError, UsageError

if TYPE_CHECKING:
    from xla_fp8.backends.compare import Array, Difference, Tolerance
    from xla_fp8.backends.executable import Executable
    from xla_fp8.hlo import HloModule
    from xla_fp8.hlo.xla_process import XlaProcess

_EPILOG = """\
Graph custom calls run through the reference backend, on any platform.

What counts as equal, unless --tolerance says otherwise (docs/numbers.md has the measurements):
  FP8 outputs    of an f32 program: at most one step apart, in at most 0.5% of the elements
                 of an f16 program: 5% may differ, 3% by more than a step; bf16: 20% and 5%
  other outputs  apart by at most 1e-5 (f32), 0.02 (f16), 0.1 (bf16) of the output's largest value
examples:
  xla-fp8 run module_0001.jit_f.before_optimizations.txt
  xla-fp8 run before.hlo after.hlo --inputs=captured.npz --iterations=20
status: 0 equal, 1 a mismatch or an error, 2 wrong usage
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "run",
        help="run a module before and after the pipeline (or two modules) and compare",
        description="Runs HLO before and after the pipeline, or two modules, on the same inputs, and compares.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("first", metavar="A.hlo", help="the reference: HLO text or proto, - for stdin")
    parser.add_argument("second", nargs="?", metavar="B.hlo", help="what to compare with (default: A, rewritten)")
    parser.add_argument("--inputs", metavar="FILE.npz", help="arrays by parameter name or number (default: random)")
    parser.add_argument("--seed", type=options.natural, default=0, metavar="N", help="of the random inputs (default 0)")
    parser.add_argument(
        "--tolerance",
        type=_tolerance,
        metavar="X",
        help="|a - b| may be X times the output's largest |a|, whatever its type; 0 asks for equality",
    )
    parser.add_argument("--platform", metavar="NAME", help="cpu, cuda, ... (default: JAX's)")
    parser.add_argument(
        "--iterations", type=options.natural, default=0, metavar="N", help="time N runs of each and print the median"
    )
    parser.add_argument(
        "--passes", type=options.pass_list_type, metavar="A,B,...", help="instead of the default pipeline"
    )
    options.add_pipeline(parser)
    options.add_common(parser)


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, not {text!r}")
    return value


def run(arguments: argparse.Namespace) -> int:
    from xla_fp8.backends.compare import TOLERANCES, Tolerance, working_type
    from xla_fp8.backends.inputs import random_inputs, read_inputs
    from xla_fp8.cli import inputs
    from xla_fp8.hlo.xla_process import XlaProcess

    if arguments.second is not None and (arguments.passes is not None or arguments.target is not None):
        raise UsageError("--passes and --target rewrite A; with B.hlo nothing is rewritten")
    sources = [inputs.one(path) for path in (arguments.first, arguments.second) if path is not None]
    with XlaProcess() as xla:
        (text, first), *others = [inputs.load(source, xla, verify_with_xla=arguments.xla_verify) for source in sources]
        given = read_inputs(arguments.inputs, first) if arguments.inputs else None
        if others:
            second = others[0][1]
        else:
            with inputs.placed_errors(text, sources[0].name, first):
                second = _rewritten(first, arguments)
        names = (sources[0].name, sources[1].name if others else f"{sources[0].name}, rewritten")
        a = _compile(names[0], first, arguments.platform, xla)
        b = _compile(names[1], second, arguments.platform, xla)
    _same_interface(a, b)
    arrays = random_inputs(a.parameters, arguments.seed) if given is None else given
    tolerance = Tolerance(arguments.tolerance) if arguments.tolerance is not None else TOLERANCES[working_type(first)]
    mismatches = _print_table(a, a(*arrays), b(*arrays), tolerance, arguments)
    if arguments.iterations:
        _print_times(a, b, arrays, arguments.iterations)
    return EXIT_ERROR if mismatches else EXIT_OK


def _rewritten(module: HloModule, arguments: argparse.Namespace) -> HloModule:
    from xla_fp8.cli import pipeline

    rewritten = module.clone()
    report = pipeline.run_passes(rewritten, arguments, arguments.passes)
    print(f"{len(report.rewritten)} rewritten, {len(report.refused)} not, for {report.target}", file=sys.stderr)
    if not report.changed:
        print("the passes changed nothing: this compares the module with itself", file=sys.stderr)
    return rewritten


def _compile(name: str, module: HloModule, platform: str | None, xla: XlaProcess) -> Executable:
    """The module, compiled, once a child process has made StableHLO of it: some HLO kills the process that tries."""
    from xla_fp8.backends.executable import Executable, ExecutionError
    from xla_fp8.hlo import to_text

    answer = xla.stablehlo(to_text(module))
    if not answer.ok:
        raise CliError(f"{name} has no StableHLO form, so it cannot be compiled: {answer.message}")
    try:
        return Executable(module, platform)
    except ExecutionError as error:
        raise CliError(f"{name}: {error}") from error


def _same_interface(a: Executable, b: Executable) -> None:
    for what, left, right in (
        ("parameters", a.parameters, b.parameters),
        ("results", [shape for _, shape in a.results], [shape for _, shape in b.results]),
    ):
        if len(left) != len(right):
            raise CliError(f"the modules have {len(left)} and {len(right)} {what}: nothing to compare")
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            if not one.compatible(other):
                raise CliError(f"{what[:-1]} {number} is {one} in one module and {other} in the other")


def _print_table(
    a: Executable, first: Sequence[Array], second: Sequence[Array], tolerance: Tolerance, arguments: argparse.Namespace
) -> int:
    """One line for each output; returns how many are too far apart."""
    from xla_fp8.backends.compare import compare

    paint = options.stdout_color(arguments)
    rows: list[tuple[str, ...]] = [("output", "shape", "max abs", "max rel", "ulps", "mismatches", "where", "")]
    mismatches = 0
    for (index, shape), one, other in zip(a.results, first, second, strict=True):
        difference = compare(one, other)
        accepted = tolerance.accepts(difference, one.dtype)
        mismatches += not accepted
        rows.append(
            (index, str(shape.with_layout(None)), *_cells(difference, one, other), "ok" if accepted else "FAIL")
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(paint(line, "error") if row[-1] == "FAIL" else line)
    if mismatches:
        print(f"{mismatches} of {len(first)} outputs differ by more than the tolerance")
    return mismatches


def _cells(difference: Difference, one: Array, other: Array) -> tuple[str, ...]:
    where = "-"
    if difference.worst is not None:
        where = f"{list(difference.worst)}: {one[difference.worst]} and {other[difference.worst]}"
    return (
        f"{difference.max_abs:.3g}",
        f"{difference.max_rel:.3g}",
        f"{difference.max_steps:.0f}",
        f"{difference.share:.3%}",
        where,
    )


def _print_times(a: Executable, b: Executable, arrays: Sequence[Array], iterations: int) -> None:
    """Median times of alternating runs, transfers included; a GPU's are dominated by those."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(iterations):
        for executable, own in zip((a, b), times, strict=True):
            start = time.perf_counter()
            executable(*arrays)
            own.append(time.perf_counter() - start)
    first, second = (sorted(own)[len(own) // 2] for own in times)
    print(f"median of {iterations} runs: {first * 1e3:.3f} ms and {second * 1e3:.3f} ms ({second / first:.2f}x)")
