"""The command: see the package."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import benchmarks.models as package
from benchmarks.gpus import gpus_here
from benchmarks.models import plot, rows, scheduler, table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.models",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("phase", choices=("run", "tune", "report", "docs", "lower", "worker", "chains"))
    parser.add_argument("--out", type=Path, default=Path("build/models"), help="folder of results, logs and caches")
    parser.add_argument("--seconds", type=float, default=540, help="all is over in this time")
    parser.add_argument("--batch-seconds", type=float, default=90, help="what compiles longer begins again, at the end")
    parser.add_argument("--workers", type=int, default=5, help="rows that compile on a GPU at once; processes of tune")
    parser.add_argument("--gpus", type=int, help="how many of the visible GPUs to use; else all")
    parser.add_argument("--only", default="", help='rows whose name has one of these parts, by ";"')
    parser.add_argument("--variants", default="bf16,xla,auto", help='variants that have one of these parts, by ","')
    parser.add_argument("--tune", action="store_true", help="xla_fp8 times its kernels' configs; else the first guess")
    parser.add_argument("--xla-autotune", type=int, default=4, help="XLA's level of autotuning, 0 to 4")
    parser.add_argument("--xla-fp8-autotune", type=int, default=4, help="of XLA's FP8: it takes 20 s a convolution")
    parser.add_argument("--chain-seconds", type=float, default=0, help="for which XLA's FP8 chains are tuned, at first")
    parser.add_argument("--xla-flags", default="", help="for every row")
    parser.add_argument("--tiny", action="store_true", help="small networks, to try it on any machine")
    parser.add_argument("--row", default="", help="of the worker")
    parser.add_argument("--part", type=int, default=0, help="of the process that compiles chains")
    arguments = parser.parse_args()
    out: Path = arguments.out.resolve()
    every = rows.rows(arguments.tiny)
    if arguments.phase == "worker":
        from benchmarks.models import worker

        worker.serve(next(row for row in every if row.name == arguments.row), arguments.tiny)
        return
    out.mkdir(parents=True, exist_ok=True)
    chosen = rows.selected(every, arguments.only, arguments.variants)
    if arguments.phase == "lower":
        from benchmarks.models import lower

        lower.run(chosen, arguments.tiny)
    elif arguments.phase == "chains":
        from benchmarks.models import tune

        tune.compile_chains(chosen, arguments.part, arguments.workers, arguments.tiny)
    elif arguments.phase in ("run", "tune"):
        settings = scheduler.Settings(
            out,
            arguments.seconds,
            arguments.batch_seconds,
            arguments.workers,
            gpus_here()[: arguments.gpus],
            arguments.tune,
            arguments.xla_autotune,
            arguments.xla_fp8_autotune,
            arguments.chain_seconds,
            arguments.xla_flags,
            arguments.tiny,
        )
        if arguments.phase == "tune":
            from benchmarks.models import tune

            tune.run(settings, chosen)
        else:
            scheduler.Scheduler(settings, chosen).run()
    if arguments.phase == "docs":
        content = json.loads((out / table.RESULTS).read_text())
        table.put_into(scheduler.ROOT / "docs/benchmarks.md", table.for_docs(content))
        plot.plot(table.known(content["rows"]), content["rows"], scheduler.ROOT / "docs/plots/models.svg")
    if arguments.phase in ("run", "report"):
        content = json.loads((out / table.RESULTS).read_text())
        table.write(out, content)
        print(table.render(content))
        if arguments.phase == "report" and not plot.plot(
            table.known(content["rows"]), content["rows"], out / "models.svg"
        ):
            print("no plot: no profiles, or matplotlib is not installed")


if __name__ == "__main__":
    main()
