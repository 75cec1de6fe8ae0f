"""The command: see the package."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import benchmarks.conv as package
from benchmarks.conv import state
from benchmarks.gpus import gpus_here


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conv",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("phase", choices=("tune", "measure", "report", "variants", "lower", "worker"))
    parser.add_argument("--out", type=Path, default=Path("build/conv"), help="folder of caches and results")
    parser.add_argument("--seconds", type=float, default=480, help="stop in time for this")
    parser.add_argument("--only", default="", help="rows whose name or network has one of these parts, by ;, in order")
    parser.add_argument("--workers", type=int, default=7, help="processes in which XLA tunes, on each GPU")
    parser.add_argument("--kernel-workers", type=int, default=10, help="processes that tune this project's kernels")
    parser.add_argument("--configs", type=int, default=5, help="of a kernel, tried on each shape")
    parser.add_argument("--alone", default="", help="more rows of variants, without XLA's FP8")
    parser.add_argument("--clocks", default="", help="rows of variants of which the GPU's clock is watched too")
    parser.add_argument("--in-turn", default="", help="rows of whose shapes variants times all epilogues in turn")
    parser.add_argument("--gpu", help="of CUDA_VISIBLE_DEVICES, the one that is measured on; else the first")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try it on any machine")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)

    if arguments.phase == "measure":  # before anything imports JAX
        os.environ.update(state.environment(out, arguments.gpu or next(iter(gpus_here()), None)))
    from benchmarks.conv.programs import Case, cases

    every = cases(arguments.tiny)

    def named(text: str) -> list[Case]:
        parts = [part for part in text.split(";") if part]
        found = (case for part in parts for case in every if any(part in name for name in (case.name, *case.networks)))
        return list({case.name: case for case in found}.values())

    chosen = arguments.only or arguments.alone or arguments.in_turn
    rows = named(arguments.only) if chosen else every
    settings = state.Settings(
        out, arguments.seconds, arguments.workers, arguments.kernel_workers, arguments.configs, arguments.tiny
    )
    if arguments.phase == "tune":
        from benchmarks.conv.tune import Tuning

        Tuning(settings, rows).run()
    elif arguments.phase == "variants":
        from benchmarks.conv import report
        from benchmarks.conv.variants import Variants

        alone = [case for case in named(arguments.alone) if case not in rows]
        Variants(settings, rows, alone, named(arguments.clocks), named(arguments.in_turn)).run()
        report.write(out)
    elif arguments.phase == "worker":
        from benchmarks.conv import worker

        worker.serve(out, arguments.gpu, arguments.configs, arguments.tiny)
    elif arguments.phase == "lower":
        from benchmarks.conv import lower

        lower.run(rows)
    else:
        if arguments.phase == "measure":
            from benchmarks.conv.measure import Measuring

            Measuring(out, arguments.seconds).run(rows)
        from benchmarks.conv import report

        report.write(out)


if __name__ == "__main__":
    main()
