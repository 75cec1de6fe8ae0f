"""The parent of the rows' processes: few compile at once, on every GPU; they measure one at a time. Imports no JAX."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.models import table
from benchmarks.models.rows import BASELINE, XLA, Row

ROOT = Path(__file__).resolve().parents[2]
_LAST = 10.0  # seconds that a row takes to measure, about: none is begun with less left
_BEGUN = 25.0  # seconds that a row takes to compile, at least


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Attributes:
        out: folder of results, logs and caches.
        seconds: after which all is over.
        batch_seconds: after which those of a batch that are compiled are measured; the others are ended, and
            begin again behind all that wait.
        workers: how many rows compile on a GPU at once.
        gpus: their names in CUDA_VISIBLE_DEVICES; none is a machine without one.
        tune: whether `xla_fp8` times the configs of its kernels.
        autotune, fp8_autotune: XLA's levels of autotuning, of other rows and of those that XLA compiles in FP8.
        chain_seconds: for which XLA's FP8 convolutions are tuned in processes of their own, on the last GPU, at first.
        xla_flags: of every row.
    """

    out: Path
    seconds: float
    batch_seconds: float
    workers: int
    gpus: tuple[str, ...]
    tune: bool
    autotune: int
    fp8_autotune: int
    chain_seconds: float
    xla_flags: str
    tiny: bool

    def about(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "XLA autotune level": self.autotune,
            "of XLA's FP8": self.fp8_autotune,
            "xla_fp8": "tuned" if self.tune else "first guess",
            "XLA_FLAGS": self.xla_flags or "none",
            "compiling on a GPU at once": self.workers,
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def level(self, row: Row) -> int:
        """XLA's level of autotuning for a row."""
        return self.fp8_autotune if is_xla_fp8(row) else self.autotune

    def environment(self, row: Row, gpu: str | None) -> dict[str, str]:
        """The variables of a row's process."""
        flags = f"{os.environ.get('XLA_FLAGS', '')} {self.xla_flags}"
        if not self.tiny:
            flags += f" --xla_gpu_autotune_level={self.level(row)}"
        if is_xla_fp8(row):
            folder = self.out / "autotune"
            folder.mkdir(parents=True, exist_ok=True)
            flags += f" --xla_gpu_per_fusion_autotune_cache_dir={folder}"
        return {
            **os.environ,
            **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
            "XLA_FLAGS": flags.strip(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_FP8_AUTOTUNE": "1" if self.tune else "0",
            "XLA_FP8_CACHE_DIR": str(self.out / "choices"),
            "JAX_COMPILATION_CACHE_DIR": str(self.out / "xla"),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT)))),
        }


def is_xla_fp8(row: Row) -> bool:
    """Whether XLA compiles the row in FP8."""
    return row.recipe != BASELINE and row.compiler == XLA


class Child:
    """One row's process. `facts` has what it said; `state` is where it stands."""

    def __init__(self, row: Row, settings: Settings, gpu: str | None) -> None:
        self.row = row
        self.facts: dict[str, Any] = {"xla_autotune": settings.level(row), "gpu": gpu}
        self.state = "compiling"
        self.is_told = False
        self.log = settings.out / "logs" / f"{row.name.replace(' ', '-').replace('/', '-')}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "benchmarks.models", "worker", "--row", row.name]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *(["--tiny"] if settings.tiny else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=settings.environment(row, gpu),
                cwd=ROOT,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.facts |= json.loads(line)
                self.state = "measured" if "ms" in self.facts else "compiled"
        self.process.wait()
        if self.state in ("compiling", "measuring", "compiled"):
            self.fail(f"ended while {self.state}: {self.last_line()}")

    def last_line(self) -> str:
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["nothing printed"])[-1][:300]

    def go(self) -> None:
        self.state = "measuring"
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def fail(self, problem: str) -> None:
        """Notes why there is no result, and ends the process."""
        self.facts["problem"] = problem
        self.state = "failed"
        self.process.kill()


@dataclasses.dataclass
class Lane:
    """A GPU: a batch of rows that compile on it side by side, and are then measured with nothing else on it.

    Attributes:
        children: those that compile, or are compiled.
        since: when the batch began.
    """

    gpu: str | None
    children: list[Child] = dataclasses.field(default_factory=list)
    since: float = 0.0

    def of(self, *states: str) -> list[Child]:
        return [child for child in self.children if child.state in states]


class Scheduler:
    """The rows of a run, and results.json, which is written after each of them.

    All variants of a case run on one GPU, so that a ratio is of times on the same one.
    """

    def __init__(self, settings: Settings, rows: Sequence[Row]) -> None:
        self.settings = settings
        self.began = time.monotonic()
        self.end = self.began + settings.seconds
        self.lanes = [Lane(gpu) for gpu in settings.gpus] or [Lane(None)]
        self.lane_of: dict[str, Lane] = {}
        path = settings.out / table.RESULTS
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"about": {}, "rows": {}}
        self.content["about"] |= settings.about()
        self.waiting = [row for row in rows if not self.is_measured(row)]
        self.tuner = self.start_tuner()

    def is_measured(self, row: Row) -> bool:
        """Whether an earlier run has it, compiled by an XLA that tuned as much."""
        facts = self.content["rows"].get(row.name, {})
        return "ms" in facts and facts.get("xla_autotune") == self.settings.level(row)

    def run(self) -> None:
        while self.is_busy():
            for lane in self.lanes:
                self.advance(lane)
            time.sleep(0.1)
        if self.tuner:
            os.killpg(self.tuner.pid, signal.SIGKILL)
        for lane in self.lanes:
            for child in lane.children:
                child.fail(f"{child.state} when the time was over")
                self.record(child)
        for row in self.waiting:
            self.content["rows"].setdefault(row.name, {"problem": "not begun in time"})
        table.write(self.settings.out, self.content)
        self.say("done")

    def is_busy(self) -> bool:
        now = time.monotonic()
        may_begin = self.waiting and self.end - now > _BEGUN + _LAST
        return now < self.end and bool(may_begin or any(lane.children for lane in self.lanes))

    def start_tuner(self) -> subprocess.Popen[bytes] | None:
        """Tunes the chains of the first row that XLA compiles in FP8."""
        row = next(filter(is_xla_fp8, self.waiting), None)
        if row is None or not self.settings.chain_seconds:
            return None
        settings = self.settings
        command = [sys.executable, "-P", "-m", "benchmarks.models", "tune", "--only", row.name, "--out", settings.out]
        command += ["--seconds", settings.chain_seconds, "--xla-fp8-autotune", settings.fp8_autotune]
        command += ["--workers", 2 * settings.workers, *(["--tiny"] if settings.tiny else [])]
        environment = settings.environment(row, self.lanes[-1].gpu)
        with (settings.out / "tune.log").open("w") as log:
            return subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
            )

    def is_tuning(self) -> bool:
        if self.tuner and self.tuner.poll() is not None:
            self.say((self.settings.out / "tune.log").read_text().strip().rpartition("\n")[2])
            self.tuner = None
        return self.tuner is not None

    def advance(self, lane: Lane) -> None:
        """Lets the rows of a GPU compile, measures those that are compiled, or begins the next batch."""
        if self.is_tuning() and lane is self.lanes[-1]:
            return  # its GPU is busy, be it the only one
        compiling = lane.of("compiling")
        is_late = time.monotonic() > min(lane.since + self.settings.batch_seconds, self.end - 3 * _LAST)
        if lane.of("compiled") and (not compiling or is_late):
            for child in compiling:
                self.put_back(lane, child)
            self.measure(lane)
        elif not compiling or is_late:
            self.begin(lane)
        for child in lane.of("failed"):
            self.record(child)
            lane.children.remove(child)

    def begin(self, lane: Lane) -> None:
        """The next batch; where nothing of the last one is compiled, what still compiles is part of it."""
        lane.since = time.monotonic()
        if self.end - lane.since < _BEGUN + _LAST:
            return
        for row in list(self.waiting):
            if len(lane.children) == self.settings.workers:
                break
            if self.lane_of.get(row.case, lane) is lane and not (is_xla_fp8(row) and self.tuner):
                self.lane_of[row.case] = lane
                self.waiting.remove(row)
                lane.children.append(Child(row, self.settings, lane.gpu))

    def put_back(self, lane: Lane, child: Child) -> None:
        """Ends a row that compiles, so that others can be measured; it begins again behind all that wait.

        To hold its process is not enough: what it has launched, XLA's candidates, stays on the GPU.
        """
        child.fail("compiling when the time of its batch was over")
        child.process.wait()
        self.record(child)
        lane.children.remove(child)
        self.waiting.append(child.row)

    def measure(self, lane: Lane) -> None:
        """The first that is compiled. Nothing else is on the GPU: none compiles, others that are compiled wait."""
        child = lane.of("compiled")[0]
        self.record(child)
        if self.end - time.monotonic() < _LAST:
            child.fail("no time left to measure it")
        else:
            child.go()
        while child.state == "measuring":
            if time.monotonic() > self.end:
                child.fail("out of time while it was measured")
            time.sleep(0.05)
        child.process.wait()
        self.record(child)
        lane.children.remove(child)

    def record(self, child: Child) -> None:
        """Writes what is known; a failure never in place of an earlier result."""
        name = child.row.name
        if child.state in ("compiling", "measuring"):
            return
        if "ms" in child.facts or "ms" not in self.content["rows"].get(name, {}):
            self.content["rows"][name] = dict(child.facts)
        table.write(self.settings.out, self.content)
        if child.state in ("measured", "failed") and not child.is_told:
            child.is_told = True
            self.say(f"{name}: {table.describe(child.facts)}")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)
