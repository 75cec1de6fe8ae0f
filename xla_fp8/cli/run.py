"""`xla-fp8 run`: a module before and after the pipeline, or two modules, on the same inputs, compared."""

from __future__ import annotations

import argparse
import dataclasses
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
  chains behind chains
                 FP8 rounding makes a small difference a large one, and that again in each layer. Outputs behind
                 other FP8 results are judged by the norm of the error, and FP8 ones by the share of elements too;
                 a line below the table says which, and what was allowed. To look closer, run one layer alone
  NaN            on one side only is a mismatch, but where XLA's CPU lost it: it drops a NaN in a maximum over elements.
                 Both are run again without that, and a line below the table says so

--inputs needs an array for every parameter, of its shape and type: FP8 parameters take FP8 arrays (ml_dtypes), which
np.savez stores as they are.
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
    from xla_fp8.backends.roundings import fp8_roundings
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
    verdicts = _compared(a, b, arrays, tolerance, fp8_roundings(first))
    if any(verdict.difference.max_abs == float("inf") for verdict in verdicts):
        verdicts = _with_nan_kept(verdicts, first, second, arrays, tolerance, arguments.platform)
    mismatches = _print_table(a, verdicts, tolerance, arguments)
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


@dataclasses.dataclass(frozen=True)
class _Verdict:
    """An output of both programs, compared.

    Attributes:
        roundings: to FP8, one behind the other, that the output is behind (`xla_fp8.backends.roundings`).
        accepted: by the tolerance.
        nan_was_lost: accepted only once maxima over elements keep NaN, on both sides.
    """

    one: Array
    other: Array
    difference: Difference
    roundings: float
    accepted: bool
    nan_was_lost: bool = False


def _compared(
    a: Executable, b: Executable, arrays: Sequence[Array], tolerance: Tolerance, roundings: Sequence[float]
) -> list[_Verdict]:
    from xla_fp8.backends.compare import compare

    verdicts = []
    for one, other, deep in zip(a(*arrays), b(*arrays), roundings, strict=True):
        difference = compare(one, other)
        verdicts.append(_Verdict(one, other, difference, deep, tolerance.accepts(difference, one.dtype, deep)))
    return verdicts


def _with_nan_kept(
    verdicts: Sequence[_Verdict],
    first: HloModule,
    second: HloModule,
    arrays: Sequence[Array],
    tolerance: Tolerance,
    platform: str | None,
) -> list[_Verdict]:
    """The verdicts, where XLA's own loss of a NaN is no mismatch."""
    from xla_fp8.backends.executable import Executable
    from xla_fp8.backends.keep_nan import keep_nan

    modules = [module.clone() for module in (first, second)]
    if not sum([keep_nan(module) for module in modules]):
        return list(verdicts)
    a, b = (Executable(module, platform) for module in modules)
    kept = _compared(a, b, arrays, tolerance, [verdict.roundings for verdict in verdicts])
    return [
        dataclasses.replace(verdict, accepted=True, nan_was_lost=True)
        if again.accepted and not verdict.accepted
        else verdict
        for verdict, again in zip(verdicts, kept, strict=True)
    ]


def _print_table(
    a: Executable, verdicts: Sequence[_Verdict], tolerance: Tolerance, arguments: argparse.Namespace
) -> int:
    """One line for each output, and what is to be said of some; returns how many are too far apart."""
    paint = options.stdout_color(arguments)
    rows: list[tuple[str, ...]] = [("output", "shape", "max abs", "max rel", "ulps", "norm", "mismatches", "where", "")]
    notes: dict[str, list[str]] = {}
    for (index, shape), verdict in zip(a.results, verdicts, strict=True):
        rows.append((index, str(shape.with_layout(None)), *_cells(verdict), "ok" if verdict.accepted else "FAIL"))
        if note := _note(verdict, tolerance):
            notes.setdefault(note, []).append(index)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(paint(line, "error") if row[-1] == "FAIL" else line)
    for note, indices in notes.items():
        print(f"{', '.join(indices)}: {note}")
    mismatches = sum(not verdict.accepted for verdict in verdicts)
    if mismatches:
        print(f"{mismatches} of {len(verdicts)} outputs differ by more than the tolerance")
    return mismatches


def _note(verdict: _Verdict, tolerance: Tolerance) -> str:
    """What a reader of the row must know; "" where the rule for one convolution says it all."""
    from xla_fp8.backends.compare import is_fp8

    if verdict.nan_was_lost:
        return (
            "XLA drops a NaN in a maximum over elements on this device; where it is kept, both are the same "
            '(docs/numbers.md, "NaN and infinity")'
        )
    dtype, difference = verdict.one.dtype, verdict.difference
    if not tolerance.fp8_share or tolerance.accepts(difference, dtype) or verdict.roundings <= is_fp8(dtype):
        return ""
    limits = tolerance.behind(verdict.roundings, dtype)
    deep = f"{verdict.roundings:.0f} FP8 roundings" if verdict.roundings < float("inf") else "FP8 roundings in a loop"
    share = f"{limits.share:.0%} of the elements may differ, and " if is_fp8(dtype) else ""
    return f'behind {deep}: {share}the norm may be {limits.norm:.2g} (docs/numbers.md, "What the tools accept")'


def _cells(verdict: _Verdict) -> tuple[str, ...]:
    difference, one, other = verdict.difference, verdict.one, verdict.other
    where = "-"
    if difference.worst is not None:
        where = f"{list(difference.worst)}: {one[difference.worst]} and {other[difference.worst]}"
    return (
        f"{difference.max_abs:.3g}",
        f"{difference.max_rel:.3g}",
        f"{difference.max_steps:.0f}",
        f"{difference.norm:.1e}" if difference.norm else "0",
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
