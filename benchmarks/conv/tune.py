"""The first phase: every program tuned, in many processes on every GPU; what they find is on disk.

This project's kernels are tuned on the first GPU, where one process times at a time; XLA tunes on the others, and on
the first one afterwards. XLA spends its time building cuDNN plans, on one core, and times each for a moment; the more
processes share a GPU the likelier two such moments meet and a plan looks slower than it is: `--workers` says how many.
"""

from __future__ import annotations

import concurrent.futures
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Literal

from benchmarks.conv import state
from benchmarks.conv.programs import KERNELS, Case
from benchmarks.conv.state import Settings
from benchmarks.gpus import gpus_here

Kind = Literal["kernels", "xla", "rows"]
"""Of a job: one of this project's kernels is tuned, a program of XLA, or (`variants` alone) a row is measured."""

Job = tuple[str, str]
"""The name of a case, and a contestant, or what else a worker is to do with the case."""

_LIMIT: dict[Kind, float] = {"kernels": 90.0, "xla": 240.0, "rows": 150.0}
"""Seconds after which a job counts as one that hangs."""
USUAL: dict[Kind, float] = {"kernels": 15.0, "xla": 40.0, "rows": 12.0}
"""No job is begun with less time left."""


class Tuning:
    """The jobs that are left, and the processes that do them.

    Attributes:
        queues: the jobs of each kind, the first ones first.
        ends: when the processes of each kind are stopped.
    """

    def __init__(self, settings: Settings, rows: Sequence[Case]) -> None:
        self.settings = settings
        self.began = time.monotonic()
        self.end = self.began + settings.seconds
        self.ends: dict[Kind, float] = {"kernels": self.end, "xla": self.end, "rows": self.end}
        self.tuned = state.load_tuned(settings.out)
        names = [(case.name, contestant) for case in rows for contestant in case.contestants]
        left = [job for job in names if " / ".join(job) not in self.tuned]
        self.queues: dict[Kind, list[Job]] = {
            "kernels": [job for job in left if job[1] in KERNELS],
            "xla": [job for job in left if job[1] not in KERNELS],
            "rows": [],
        }
        self.lock = threading.Lock()

    def run(self) -> None:
        settings = self.settings
        first, *more = gpus_here() or (None,)
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            kernels = [pool.submit(self.serve, "kernels", first) for _ in range(settings.kernel_workers)]
            others = [pool.submit(self.serve, "xla", gpu) for gpu in more for _ in range(settings.workers)]
            concurrent.futures.wait(kernels)
            others += [pool.submit(self.serve, "xla", first) for _ in range(settings.workers)]
            for future in (*kernels, *others):
                future.result()
        self.print_end()

    def print_end(self) -> None:
        """What is left, and what went wrong."""
        left = {kind: len(queue) for kind, queue in self.queues.items()}
        problems = [f"{name}: {answer['problem']}" for name, answer in self.tuned.items() if answer["problem"]]
        print("\n".join(problems))
        print(f"{len(self.tuned)} tuned, {len(problems)} of them with a problem; left: {left}", flush=True)

    def serve(self, kind: Kind, gpu: str | None) -> None:
        """Starts a process, and again where one dies, and gives it jobs until there are none or no time is left."""
        while (job := self.next(kind)) is not None:
            with self.start(kind, gpu) as process:
                while job is not None and self.ask(process, kind, job):
                    job = self.next(kind)
                process.kill()

    def next(self, kind: Kind) -> Job | None:
        with self.lock:
            queue = self.queues[kind]
            return queue.pop(0) if queue and self.ends[kind] - time.monotonic() > USUAL[kind] else None

    def start(self, kind: Kind, gpu: str | None) -> subprocess.Popen[str]:
        out, settings = self.settings.out, self.settings
        command = [sys.executable, "-m", "benchmarks.conv", "worker", "--out", str(out), "--gpu", str(gpu)]
        command += ["--configs", str(settings.configs), *(["--tiny"] if settings.tiny else [])]
        with (out / "workers.log").open("a") as log:
            pipe = subprocess.PIPE
            # This project's programs are compiled again when measured: that is quick, and they would fill the cache.
            variables = state.environment(out, gpu, cached=kind == "xla")
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=variables)

    def ask(self, process: subprocess.Popen[str], kind: Kind, job: Job) -> bool:
        """Has one job done; returns whether the process is still of use."""
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = min(_LIMIT[kind], self.ends[kind] - time.monotonic())
        timer = threading.Timer(max(seconds, 1.0), process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"case": job[0], "contestant": job[1]}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timer.cancel()
        if not line and self.ends[kind] - time.monotonic() < 2:
            with self.lock:
                self.queues[kind].append(job)  # out of time: it is left, and no failure
            return False
        self.record(
            job, json.loads(line) if line else {"problem": f"the process died, or no answer in {seconds:.0f} s"}
        )
        return bool(line)

    def record(self, job: Job, answer: dict[str, Any]) -> None:
        with self.lock:
            self.tuned[" / ".join(job)] = answer
            state.write(self.settings.out / state.TUNED, self.tuned)
            self.print_job(job, answer.get("seconds", 0), answer["problem"][:120])

    def print_job(self, job: Job, seconds: float, text: str) -> None:
        left = sum(map(len, self.queues.values()))
        at = time.monotonic() - self.began
        print(f"{at:5.0f} s  {' / '.join(job):60} {seconds:6.1f} s  {text}  ({left} wait)", flush=True)
