"""The parent of the rows' processes: lets them compile side by side, then measure one at a time. Imports no JAX."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import json
import os
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
_LAST = 12.0  # seconds that a row takes to measure, about: none is begun with less left


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Attributes:
        out: folder of results, logs and caches.
        seconds: after which all is over; `share` of them is for compiling.
        workers: how many rows compile at once.
        tune: whether `xla_fp8` times the configs of its kernels.
        autotune, fp8_autotune: XLA's levels of autotuning, of other rows and of those that XLA compiles in FP8.
        keep_autotune: whether XLA keeps what it found for each convolution in a folder, for the next run.
    """

    out: Path
    seconds: float
    share: float
    workers: int
    tune: bool
    autotune: int
    fp8_autotune: int
    keep_autotune: bool
    tiny: bool

    def about(self) -> dict[str, Any]:
        """For results.json."""
        return {
            "XLA autotune level": self.autotune,
            "of XLA's FP8": self.fp8_autotune,
            "xla_fp8": "tuned" if self.tune else "first guess",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }

    def level(self, row: Row) -> int:
        """XLA's level of autotuning for a row."""
        return self.fp8_autotune if row.recipe != BASELINE and row.compiler == XLA else self.autotune

    def environment(self, row: Row) -> dict[str, str]:
        """The variables of a row's process."""
        flags = os.environ.get("XLA_FLAGS", "")
        if not self.tiny:
            flags += f" --xla_gpu_autotune_level={self.level(row)}"
        if self.keep_autotune:
            folder = self.out / "autotune"
            folder.mkdir(parents=True, exist_ok=True)
            flags += f" --xla_gpu_per_fusion_autotune_cache_dir={folder}"
        return {
            **os.environ,
            "XLA_FLAGS": flags.strip(),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_FP8_AUTOTUNE": "1" if self.tune else "0",
            "XLA_FP8_CACHE_DIR": str(self.out / "choices"),
            "JAX_COMPILATION_CACHE_DIR": str(self.out / "xla"),
            "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT)))),
        }


class Child:
    """One row's process. `facts` has what it said; `state` is where it stands."""

    def __init__(self, row: Row, settings: Settings) -> None:
        self.row = row
        self.facts: dict[str, Any] = {"xla_autotune": settings.level(row)}
        self.state = "compiling"
        self.began = time.monotonic()
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
                env=settings.environment(row),
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


class Scheduler:
    """The rows of a run, and results.json, which is written after each of them."""

    def __init__(self, settings: Settings, rows: Sequence[Row]) -> None:
        self.settings = settings
        self.began = time.monotonic()
        self.end = self.began + settings.seconds
        self.compile_end = self.began + settings.share * settings.seconds
        self.children: list[Child] = []
        path = settings.out / table.RESULTS
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"about": {}, "rows": {}}
        self.content["about"] |= settings.about()
        self.waiting = collections.deque(row for row in rows if not self.is_measured(row))

    def is_measured(self, row: Row) -> bool:
        """Whether an earlier run has it, compiled by an XLA that tuned as much."""
        facts = self.content["rows"].get(row.name, {})
        return "ms" in facts and facts.get("xla_autotune") == self.settings.level(row)

    def run(self) -> None:
        self.compile()
        ready = [child for child in self.children if child.state == "compiled"]
        self.say(f"{len(ready)} rows compiled")
        for child in ready:
            self.measure(child)
        for child in self.children:
            child.process.kill()
            self.record(child)
        table.write(self.settings.out, self.content)
        self.say("done")

    def compile(self) -> None:
        while time.monotonic() < self.compile_end:
            busy = [child for child in self.children if child.state == "compiling"]
            while self.waiting and len(busy) < self.settings.workers:
                child = Child(self.waiting.popleft(), self.settings)
                busy.append(child)
                self.children.append(child)
            if not busy:
                break
            time.sleep(0.1)
        for child in self.children:
            if child.state == "compiling":
                child.fail("not compiled in time")
            self.record(child)
        for row in self.waiting:
            self.content["rows"].setdefault(row.name, {"problem": "not begun in time"})

    def measure(self, child: Child) -> None:
        if self.end - time.monotonic() < _LAST:
            child.fail("no time left to measure it")
            return
        child.go()
        while child.state == "measuring":
            if time.monotonic() > self.end:
                child.fail("out of time while it was measured")
            time.sleep(0.05)
        child.process.wait()
        self.record(child)

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
