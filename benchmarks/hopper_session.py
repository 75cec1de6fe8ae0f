"""One session on a Hopper GPU with the cuDNN backend: install, validate, benchmark, and a summary at the end.

    python benchmarks/hopper_session.py --out OUT [--seconds 560] [--earlier DIR] [--seeds 0:60]

Installs what is in .wheels/ (no network is needed) and the project, runs one tiny convolution, then tests/hopper in
four processes, then benchmarks/conv.py. Every outcome is in OUT as soon as there is one; `--earlier DIR` (the OUT of a
session before) continues: what passed or was measured there is not run again. Stops in time for `--seconds`.
`--plugin NAME` is a pytest plugin, to try the session on another machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARDS = 4
_SMOKE = "test_the_smallest or (test_every_op and (relu or bias))"


class Session:
    """The steps, and the time that is left for them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.earlier = sorted(arguments.earlier.resolve().glob("*.jsonl")) if arguments.earlier else []
        self.earlier_bench = arguments.earlier.resolve() / "bench/results.json" if arguments.earlier else None
        self.seeds: str = arguments.seeds
        self.plugin: str | None = arguments.plugin
        self.end = time.monotonic() + arguments.seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def install(self) -> None:
        wheels = sorted(map(str, (ROOT / ".wheels").glob("*.whl")))
        missing = any(
            importlib.util.find_spec(name) is None for name in ("cudnn", "jax_tvm_ffi", "pytest", "hypothesis")
        )
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        if wheels and missing:
            self.run("wheels", [*pip, *wheels], 120)
        self.run("project", [*pip, "--no-build-isolation", str(ROOT)], 120)

    def smoke(self) -> bool:
        """Whether one tiny convolution runs: else the rest would only fail slowly."""
        return (
            self.run("smoke", self.pytest("-k", _SMOKE, "-x", "--tb=short"), 120, self.environment("smoke", 100)) == 0
        )

    def test(self, share: float) -> None:
        """tests/hopper: what runs calls in parallel processes, then what measures memory and threads alone."""
        seconds = self.left * share
        files = [
            (f"test{shard}", ["tests/hopper/test_cudnn.py"], {"XLA_FP8_SHARD": f"{shard}/{SHARDS}"})
            for shard in range(SHARDS)
        ]
        started = [
            (
                name,
                self.start(name, self.pytest(*paths, "--tb=line"), {**self.environment(name, seconds * 0.75), **more}),
            )
            for name, paths, more in files
        ]
        for name, process in started:
            self.wait(name, process, seconds * 0.75 + 30)
        rest = max(30.0, seconds * 0.25)
        self.run(
            "running",
            self.pytest("tests/hopper/test_running.py", "--tb=short"),
            rest + 30,
            self.environment("running", rest),
        )

    def bench(self) -> None:
        command = [
            sys.executable,
            "benchmarks/conv.py",
            "--out",
            str(self.out / "bench"),
            "--seconds",
            f"{self.left - 60:.0f}",
        ]
        if self.earlier_bench and self.earlier_bench.exists():
            command += ["--resume", str(self.earlier_bench)]
        if self.plugin:
            command.append("--tiny")
        self.run("bench", command, self.left)

    def pytest(self, *arguments: str) -> list[str]:
        paths = [] if any(a.startswith("tests/") for a in arguments) else ["tests/hopper"]
        plugin = ["-p", self.plugin] if self.plugin else []
        return [
            sys.executable,
            "-P",
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            "hopper",
            *plugin,
            *paths,
            *arguments,
        ]

    def environment(self, name: str, seconds: float) -> dict[str, str]:
        return {
            "XLA_FP8_RESULTS": str(self.out / f"{name}.jsonl"),
            "XLA_FP8_EARLIER": ":".join(map(str, self.earlier)),
            "XLA_FP8_SECONDS": f"{seconds:.0f}",
            "XLA_FP8_SEEDS": self.seeds,
        }

    def start(self, name: str, command: list[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
            # Several processes share the device, and free memory is measured.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_FP8_CACHE_DIR": str(self.out / "cache"),
            **(more or {}),
        }
        with (self.out / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, name: str, process: subprocess.Popen[bytes], seconds: float) -> int:
        try:
            status = process.wait(max(1.0, min(seconds, self.left)))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = 124
        lines = (self.out / f"{name}.log").read_text(errors="replace").strip().splitlines()
        print(f"--- {name}: status {status}, {self.left:.0f} s left", flush=True)
        print("\n".join(line[:300] for line in lines[-(25 if status else 3) :]), flush=True)
        return status

    def run(self, name: str, command: list[str], seconds: float, more: dict[str, str] | None = None) -> int:
        return self.wait(name, self.start(name, command, more), seconds)

    def summary(self) -> None:
        results = {}
        for path in (*self.earlier, *sorted(self.out.glob("*.jsonl"))):
            for line in path.read_text().splitlines():
                result = json.loads(line)
                results[result["test"]] = result
        failed = [result for result in results.values() if result["outcome"] == "failed"]
        print(f"=== {sum(r['outcome'] == 'passed' for r in results.values())} passed, {len(failed)} failed")
        for result in failed[:40]:
            reason = next((x for x in reversed(result["message"].splitlines()) if x.strip()), "")
            print(f"FAILED {result['test']}: {reason[:220]}")
        for path in (self.out / "bench").glob("results.json"):
            import conv

            print(conv.table(json.loads(path.read_text())["rows"], ["cudnn"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--only", default="install,smoke,test,bench")
    parser.add_argument("--seeds", default="0:60")
    parser.add_argument("--plugin")
    arguments = parser.parse_args()
    steps = arguments.only.split(",")
    session = Session(arguments)
    if "install" in steps:
        session.install()
    if "smoke" in steps and not session.smoke():
        print("=== the smoke test failed: nothing else was run")
        sys.exit(1)
    if "test" in steps:
        session.test(0.55 if "bench" in steps else 0.95)
    if "bench" in steps:
        session.bench()
    session.summary()


if __name__ == "__main__":
    main()
