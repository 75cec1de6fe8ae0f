"""Rows with many configs of this project's kernel, tuned and measured in one go: the parent of the processes.

XLA's programs are tuned by some processes, as in `tune`; others compile the kernels of one row each, and time all of
the row as soon as XLA's programs for it are there. With two GPUs or more XLA tunes on the last, and nothing but times
is taken on the first. With one, XLA has it for the first half of the time, and nothing is timed meanwhile. Where XLA
has nothing to tune, because an earlier run left its programs in the folder or `--workers` is 0, rows are measured on
every GPU.
"""

from __future__ import annotations

import concurrent.futures
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.conv import state
from benchmarks.conv.measure import best, describe
from benchmarks.conv.programs import Case
from benchmarks.conv.state import Settings
from benchmarks.conv.tune import USUAL, Job, Kind, Tuning
from benchmarks.conv.worker import CEILINGS, CLOCKS, EPILOGUES, ROW
from benchmarks.gpus import gpus_here

_SHARE = 0.55
"""Of the time: it is XLA's, where there is one GPU."""

_ROWS = 20
"""After so many the ceilings are measured again, of which the best counts: at first all processes start."""


class Variants(Tuning):
    """The rows that are left, and XLA's programs for them.

    Args:
        rows: measured beside XLA's contestants.
        alone: measured without XLA's FP8, which alone takes long to tune.
        clocks: those of the rows of which the clock of the GPU is watched too.
        in_turn: those of whose shapes all epilogues are timed in turn, before the rows.
    """

    def __init__(
        self,
        settings: Settings,
        rows: Sequence[Case],
        alone: Sequence[Case],
        clocks: Sequence[Case],
        in_turn: Sequence[Case],
    ) -> None:
        super().__init__(settings, [])
        self.path = settings.out / state.RESULTS
        self.content: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.content = {"about": {}, "ceilings": {}, "rows": {}, "clocks": {}, "epilogues": {}} | self.content
        # Those that need little first: they are measured while XLA tunes for the others.
        wanted: list[tuple[Case, tuple[str, ...]]] = [(case, ("xla_bf16",)) for case in alone]
        wanted += [(case, ("xla_bf16", "xla_fp8", "gemm")) for case in rows]
        self.needs = {
            case.name: [(case.name, name) for name in names if name in case.contestants]
            for case, names in wanted
            if case.name not in self.content["rows"]
        }
        jobs = [job for needs in self.needs.values() for job in needs]
        left = [job for job in jobs if " / ".join(job) not in self.tuned]
        self.queues["xla"] = left if settings.workers else []
        watched = {case.name for case in clocks}
        self.queues["rows"] = [("", CEILINGS)]
        shapes = {str(case.shape): case.name for case in in_turn if str(case.shape) not in self.content["epilogues"]}
        self.queues["rows"] += [(name, EPILOGUES) for name in shapes.values()]
        for number, name in enumerate(self.needs, 1):
            self.queues["rows"] += [(name, ROW), *([(name, CLOCKS)] if name in watched else [])]
            if number % _ROWS == 0:
                self.queues["rows"].append(("", CEILINGS))

    def run(self) -> None:
        settings = self.settings
        gpus = gpus_here() or (None,)
        first, last = gpus[0], gpus[-1]
        timing = gpus[:1] if self.queues["xla"] else gpus
        if len(gpus) < 2:
            self.ends["xla"] = self.began + _SHARE * settings.seconds
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            tuners = [pool.submit(self.serve, "xla", last) for _ in range(settings.workers)]
            pool.submit(self.await_tuners, tuners, first if len(gpus) < 2 else "of nobody")
            rows = [pool.submit(self.serve, "rows", gpu) for gpu in timing for _ in range(settings.kernel_workers)]
            for future in (*tuners, *rows):
                future.result()
        self.print_end()

    def await_tuners(self, tuners: Sequence[concurrent.futures.Future[None]], gpu: object) -> None:
        """Lets nobody time on the GPU on which XLA tunes; then rows are measured without what is not tuned."""
        with state.alone(self.settings.out, gpu):
            concurrent.futures.wait(tuners)
        self.ends["xla"] = min(self.ends["xla"], time.monotonic())

    def next(self, kind: Kind) -> Job | None:
        """A row only when XLA's programs for it are there, or will not be."""
        if kind != "rows":
            return super().next(kind)
        while time.monotonic() < self.ends[kind] - USUAL[kind]:
            with self.lock:
                queue = self.queues[kind]
                if not queue:
                    return None
                if (job := next(filter(self.ready, queue), None)) is not None:
                    queue.remove(job)
                    return job
            time.sleep(0.1)
        return None

    def ready(self, job: Job) -> bool:
        if time.monotonic() > self.ends["xla"]:
            return True
        return all(" / ".join(needed) in self.tuned for needed in self.needs.get(job[0], ()))

    def record(self, job: Job, answer: dict[str, Any]) -> None:
        name, kind = job
        if kind not in (ROW, EPILOGUES, CEILINGS, CLOCKS):
            super().record(job, answer)
            return
        with self.lock:
            text = answer["problem"]
            if not text and kind == ROW:
                self.content["rows"][name] = answer["row"]
                text = describe(answer["row"])
            elif not text and kind == CEILINGS:
                # Those of an earlier run too, so that a plot of all rows has all under them.
                self.content |= {
                    "about": answer["about"],
                    "ceilings": best(self.content["ceilings"], answer["ceilings"]),
                }
                text = str(answer["ceilings"])
            elif not text and kind == EPILOGUES:
                self.content["epilogues"][name.split()[0]] = answer["epilogues"]
                text = "  ".join(
                    f"{epilogue} {facts.get('us', 0):.1f}" for epilogue, facts in answer["epilogues"].items()
                )
            elif not text:
                self.content["clocks"][name] = answer["clocks"]
            state.write(self.path, self.content)
            self.print_job(job, answer.get("seconds", 0), text)
