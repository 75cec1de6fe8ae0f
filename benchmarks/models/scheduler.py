"""The parent of the rows' processes: lets them compile side by side, then measure one at a time. Imports no JAX."""

from __future__ import annotations

import collections
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
from benchmarks.models.rows import Row

ROOT = Path(__file__).resolve().parents[2]
_LAST = 12.0  # seconds that a row takes to measure, about: none is begun with less left


class Child:
    """One row's process. `facts` has what it said; `state` is where it stands."""

    def __init__(self, row: Row, out: Path, tiny: bool, environment: dict[str, str]) -> None:
        self.row = row
        self.facts: dict[str, Any] = {}
        self.state = "compiling"
        self.began = time.monotonic()
        self.log = out / "logs" / f"{row.name.replace(' ', '-').replace('/', '-')}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "benchmarks.models", "worker", "--row", row.name]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, *(["--tiny"] if tiny else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
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
    """
    Args:
        out: folder of results, logs and caches.
        seconds: after which all is over; `share` of them is for compiling.
        workers: how many rows compile at once.
    """

    def __init__(
        self,
        out: Path,
        rows: Sequence[Row],
        seconds: float,
        share: float,
        workers: int,
        tiny: bool,
        about: dict[str, Any],
    ) -> None:
        self.out, self.tiny, self.workers = out, tiny, workers
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.compile_end = self.began + share * seconds
        self.waiting = collections.deque(rows)
        self.children: list[Child] = []
        path = out / table.RESULTS
        earlier = json.loads(path.read_text()) if path.exists() else {}
        self.content: dict[str, Any] = {"about": {}, "rows": {}} | earlier
        self.content["about"] |= about | {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}

    def run(self, environment: dict[str, str]) -> None:
        self.compile(environment)
        ready = [child for child in self.children if child.state == "compiled"]
        self.say(f"{len(ready)} rows compiled")
        for child in ready:
            self.measure(child)
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
            self.record(child)
        self.say("done")

    def compile(self, environment: dict[str, str]) -> None:
        while time.monotonic() < self.compile_end:
            busy = [child for child in self.children if child.state == "compiling"]
            while self.waiting and len(busy) < self.workers:
                child = Child(self.waiting.popleft(), self.out, self.tiny, environment)
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
        table.write(self.out, self.content)
        if child.state in ("measured", "failed") and not getattr(child, "told", False):
            child.told = True  # type: ignore[attr-defined]
            self.say(f"{name}: {table.describe(child.facts)}")

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)


def environment(out: Path, tune: bool, autotune_level: int, tiny: bool) -> dict[str, str]:
    """The variables of the rows' processes."""
    flags = os.environ.get("XLA_FLAGS", "")
    if not tiny:
        (out / "autotune").mkdir(parents=True, exist_ok=True)
        flags += (
            f" --xla_gpu_autotune_level={autotune_level} --xla_gpu_per_fusion_autotune_cache_dir={out / 'autotune'}"
        )
    return {
        **os.environ,
        "XLA_FLAGS": flags.strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FP8_AUTOTUNE": "1" if tune else "0",
        "XLA_FP8_CACHE_DIR": str(out / "choices"),
        "JAX_COMPILATION_CACHE_DIR": str(out / "xla"),
        "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT)))),
    }
