"""The first phase: every program tuned, in many processes on every GPU; what they find is on disk.

This project's kernels are tuned on the first GPU, where one process times at a time; XLA tunes on the others, and on
the first one afterwards. XLA spends its time building cuDNN plans, on one core, and times each for a moment; the more
processes share a GPU the likelier two such moments meet and a plan looks slower than it is: `--workers` says how many.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.conv import state
from benchmarks.conv.programs import KERNELS, Case

_LIMIT = {True: 90.0, False: 240.0}
"""Seconds after which a job counts as one that hangs: this project's kernels, XLA."""
_USUAL = {True: 15.0, False: 40.0}
"""No job is begun with less time left."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Attributes:
        out: folder of everything that is left.
        seconds: after which all processes are stopped.
        workers: XLA's processes on each GPU.
        kernel_workers: processes that tune this project's kernels.
        configs: of a kernel that are tried on each shape.
    """

    out: Path
    seconds: float
    workers: int
    kernel_workers: int
    configs: int
    tiny: bool


class Tuning:
    """The jobs that are left, and the processes that do them."""

    def __init__(self, settings: Settings, rows: Sequence[Case]) -> None:
        self.settings = settings
        self.end = time.monotonic() + settings.seconds
        self.tuned = state.load_tuned(settings.out)
        names = [(case.name, contestant) for case in rows for contestant in case.contestants]
        left = [job for job in names if " / ".join(job) not in self.tuned]
        self.queues = {kernel: [job for job in left if (job[1] in KERNELS) == kernel] for kernel in (True, False)}
        self.lock = threading.Lock()
        self.began = time.monotonic()

    def run(self) -> None:
        count, settings = state.gpus(), self.settings
        first = 0 if count else None
        with concurrent.futures.ThreadPoolExecutor(64) as pool:
            kernels = [pool.submit(self.serve, True, first) for _ in range(settings.kernel_workers)]
            others = [pool.submit(self.serve, False, g) for g in range(1, count) for _ in range(settings.workers)]
            concurrent.futures.wait(kernels)
            others += [pool.submit(self.serve, False, first) for _ in range(settings.workers)]
            for future in (*kernels, *others):
                future.result()
        left = {("kernels" if kernel else "XLA"): len(queue) for kernel, queue in self.queues.items()}
        problems = [f"{name}: {answer['problem']}" for name, answer in self.tuned.items() if answer["problem"]]
        print("\n".join(problems))
        print(f"{len(self.tuned)} tuned, {len(problems)} of them with a problem; left: {left}", flush=True)

    def serve(self, kernel: bool, gpu: int | None) -> None:
        """Starts a process, and again where one dies, and gives it jobs until there are none or no time is left."""
        while (job := self.next(kernel)) is not None:
            with self.start(kernel, gpu) as process:
                while job is not None and self.ask(process, kernel, job):
                    job = self.next(kernel)
                process.kill()

    def next(self, kernel: bool) -> tuple[str, str] | None:
        with self.lock:
            queue = self.queues[kernel]
            return queue.pop(0) if queue and self.end - time.monotonic() > _USUAL[kernel] else None

    def start(self, kernel: bool, gpu: int | None) -> subprocess.Popen[str]:
        out, settings = self.settings.out, self.settings
        command = [sys.executable, "-m", "benchmarks.conv", "worker", "--out", str(out), "--gpu", str(gpu)]
        command += ["--configs", str(settings.configs), *(["--tiny"] if settings.tiny else [])]
        with (out / "workers.log").open("a") as log:
            pipe = subprocess.PIPE
            # This project's programs are compiled again when measured: that is quick, and they would fill the cache.
            variables = state.environment(out, gpu, cached=not kernel)
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=variables)

    def ask(self, process: subprocess.Popen[str], kernel: bool, job: tuple[str, str]) -> bool:
        """Has one job done; returns whether the process is still of use."""
        assert process.stdin is not None
        assert process.stdout is not None
        seconds = min(_LIMIT[kernel], self.end - time.monotonic())
        timer = threading.Timer(max(seconds, 1.0), process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({"case": job[0], "contestant": job[1]}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timer.cancel()
        if not line and self.end - time.monotonic() < 2:
            with self.lock:
                self.queues[kernel].append(job)  # out of time: it is left, and no failure
            return False
        self.record(
            job, json.loads(line) if line else {"problem": f"the process died, or no answer in {seconds:.0f} s"}
        )
        return bool(line)

    def record(self, job: tuple[str, str], answer: dict[str, Any]) -> None:
        with self.lock:
            self.tuned[" / ".join(job)] = answer
            state.write(self.settings.out / state.TUNED, self.tuned)
            left = sum(map(len, self.queues.values()))
            print(
                f"{time.monotonic() - self.began:5.0f} s  {' / '.join(job):60} {answer.get('seconds', 0):6.1f} s  "
                f"{answer['problem'][:120]}  ({left} wait)",
                flush=True,
            )
