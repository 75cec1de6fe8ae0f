"""One session on Hopper GPUs: install, validate, random graphs, two devices, jit end to end; a report at the end.

    python3 benchmarks/hopper_session.py --out OUT [--seconds 560] [--seeds 0:500] [--only STEP,STEP] [--earlier DIR]
                                         [--tests EXPRESSION]

Installs what is in .wheels/ (no network is needed) and the project, then, while there is time:

    smoke     three small convolutions, else nothing more is run
    devices   tests/hopper/test_two_devices.py, where there are two GPUs
    test      tests of the cudnn backend in parallel processes, spread over the GPUs, with the random graphs of --seeds
    running   what measures threads, memory and CUDA graphs, alone
    mosaic    tests of the mosaic backend in parallel processes (only when --only names it)
    jit       benchmarks/hopper_jit.py

`--tests EXPRESSION` runs of each step the tests that pytest's -k chooses, e.g. "relu-nan or two_streams". A test that
takes more than 40 s, and a process that its time ends, leave their threads' stacks in the log.

OUT gets few files: results.jsonl (a line for each test as soon as it is over), validation.md, session.log,
logs.tar.gz, hopper_jit.json. `--earlier DIR` (the OUT of a session before) continues: what passed there is
not run again, and both are in the report. `--plugin NAME` is a pytest plugin, to try the session on another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from gpus import gpus_here

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("install", "smoke", "devices", "test", "running", "mosaic", "jit")
DEFAULT = "install,smoke,devices,test,running,jit"
CALLS = ["tests/hopper/test_cudnn_values.py", "tests/hopper/test_cudnn.py"]
MOSAIC = ["tests/hopper/test_mosaic.py"]
_SMOKE = "test_the_smallest or (test_every_op and (relu or bias))"


class Session:
    """The steps, and the time that is left for them."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.out: Path = arguments.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.logs = Path(tempfile.mkdtemp(prefix="hopper_session"))
        self.results = self.out / "results.jsonl"
        self.earlier = [arguments.earlier.resolve() / "results.jsonl"] if arguments.earlier else []
        self.processes: int = arguments.processes or max(2, min(16, (os.cpu_count() or 4) // 2))
        self.plugin: str | None = arguments.plugin
        self.tests: str = arguments.tests
        self.gpus = gpus_here()
        self.begin = time.monotonic()
        self.end = self.begin + arguments.seconds

    @property
    def left(self) -> float:
        return self.end - time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.out / "session.log").open("a") as log:
            log.write(text + "\n")

    # The steps.

    def install(self) -> bool:
        wheels = sorted(map(str, (ROOT / ".wheels").glob("*.whl")))
        missing = any(
            importlib.util.find_spec(name) is None for name in ("cudnn", "jax_tvm_ffi", "pytest", "hypothesis")
        )
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
        if wheels and missing:
            self.run("wheels", [*pip, *wheels], 120)
        return self.run("project", [*pip, "--no-build-isolation", str(ROOT)], 120) == 0

    def smoke(self) -> bool:
        """Whether three small convolutions run: else the rest would only fail slowly."""
        return self.run("smoke", self.pytest(["tests/hopper/test_cudnn.py"], "-k", _SMOKE, "-x"), 120) == 0

    def devices(self) -> None:
        if len(self.gpus) > 1 or self.plugin:
            # Each test is named before it runs: what has not ended is known.
            self.run("devices", self.pytest(["tests/hopper/test_two_devices.py"], "-vv"), 150, lines=12)
        else:
            self.say("--- devices: there is one GPU; the tests of two are not run")

    def shards(self, what: str, paths: list[str], seeds: str, seconds: float) -> None:
        """Tests in parallel processes, each with its share of them and one of the GPUs."""
        started = []
        for shard in range(self.processes):
            environment = {
                "XLA_FP8_SHARD": f"{shard}/{self.processes}",
                "XLA_FP8_SECONDS": f"{seconds:.0f}",
                "XLA_FP8_SEEDS": seeds,
            }
            if self.gpus:
                environment["CUDA_VISIBLE_DEVICES"] = self.gpus[shard % len(self.gpus)]
            started.append((f"{what}{shard}", self.start(f"{what}{shard}", self.pytest(paths), environment)))
        for name, process in started:
            self.wait(name, process, seconds + 30, lines=1)

    def running(self) -> None:
        seconds = min(self.left, 150)
        more = {"XLA_FP8_SECONDS": f"{seconds - 20:.0f}"}
        self.run("running", self.pytest(["tests/hopper/test_running.py"]), seconds, more)

    def jit(self) -> None:
        seconds = min(self.left - 5, 300)
        command = [sys.executable, "benchmarks/hopper_jit.py", "--out", str(self.out / "hopper_jit.json")]
        command += ["--dry-run"] if self.plugin else ["--budget-seconds", f"{seconds - 30:.0f}"]
        self.run("jit", command, seconds, lines=40)

    # Processes.

    def pytest(self, paths: list[str], *arguments: str) -> list[str]:
        plugin = ["-p", self.plugin] if self.plugin else []
        options = ["-q", "--tb=short", "-p", "no:cacheprovider", "-m", "hopper", *plugin]
        stacks = ["-o", "faulthandler_timeout=40"]
        chosen = ["-k", self.tests] if self.tests and "-k" not in arguments else []
        return [sys.executable, "-P", "-m", "pytest", *options, *stacks, *paths, *arguments, *chosen]

    def start(self, name: str, command: list[str], more: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PIP_BREAK_SYSTEM_PACKAGES": "1",
            "PYTHONFAULTHANDLER": "1",
            "PYTHONUNBUFFERED": "1",
            # Several processes share the device, and free memory is measured.
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "XLA_FP8_CACHE_DIR": str(self.logs / "cache"),
            "XLA_FP8_RESULTS": str(self.results),
            "XLA_FP8_EARLIER": ":".join(map(str, self.earlier)),
            **(more or {}),
        }
        with (self.logs / f"{name}.log").open("wb") as log:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, name: str, process: subprocess.Popen[bytes], seconds: float, lines: int = 3) -> int:
        """The exit status; a process that takes longer than `seconds`, or than the session has, is ended: 124."""
        try:
            status = process.wait(max(1.0, min(seconds, self.left)))
        except subprocess.TimeoutExpired:
            self.end_with_stacks(name, process)
            status = 124
        shown = (self.logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
        self.say(f"--- {name}: status {status}, {time.monotonic() - self.begin:.0f} s gone, {self.left:.0f} s left")
        self.say("\n".join(line[:240] for line in shown[-lines:]))
        self.keep_logs()
        return status

    def end_with_stacks(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Ends a process that hangs: where each thread waits in the kernel, and Python's stacks, go to its log."""
        lines = ["threads: name, system call, where the kernel has it"]
        for thread in sorted(Path(f"/proc/{process.pid}/task").glob("*")):
            facts = []
            for fact in ("comm", "syscall", "wchan"):
                with contextlib.suppress(OSError):
                    facts.append((thread / fact).read_text().strip())
            lines.append(f"{thread.name}: {', '.join(facts)}")
        with (self.logs / f"{name}.threads.log").open("w") as log:
            log.write("\n".join(lines) + "\n")
        process.send_signal(signal.SIGABRT)  # faulthandler prints the stacks of all threads
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def run(
        self, name: str, command: list[str], seconds: float, more: dict[str, str] | None = None, lines: int = 3
    ) -> int:
        return self.wait(name, self.start(name, command, more), seconds, lines)

    def keep_logs(self) -> None:
        """All logs in one file, under another name until it is whole: the session may be ended at any time."""
        temporary = self.logs / "logs.tar.gz"
        with tarfile.open(temporary, "w:gz") as tar:
            for path in sorted(self.logs.glob("*.log")):
                tar.add(path, path.name)
        shutil.copy(temporary, self.out / ".logs.tar.gz")
        os.replace(self.out / ".logs.tar.gz", self.out / "logs.tar.gz")

    def summary(self, command: str) -> None:
        found = [path for path in (*self.earlier, self.results) if path.exists()]
        if not found:
            return
        report = [sys.executable, "benchmarks/validation_report.py", *map(str, found), "--command", command]
        programs = [path for results in found if (path := results.with_name("hopper_jit.json")).exists()]
        report += ["--programs", *map(str, programs)] if programs else []
        done = subprocess.run(report, cwd=ROOT, capture_output=True, text=True, check=False)
        (self.out / "validation.md").write_text(done.stdout or done.stderr)
        results = {}
        for path in found:
            for line in path.read_text().splitlines():
                result = json.loads(line)
                if "test" in result:
                    results[result["test"]] = result
        failed = [result for result in results.values() if result["outcome"] == "failed"]
        skipped = sum(result["outcome"] == "skipped" for result in results.values())
        passed = len(results) - len(failed) - skipped
        self.say(f"=== {passed} passed, {len(failed)} failed, {skipped} skipped; {time.monotonic() - self.begin:.0f} s")
        for result in failed[:60]:
            self.say(f"FAILED {result['test']}: {result['reason'][:220]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--earlier", type=Path)
    parser.add_argument("--only", default=DEFAULT)
    parser.add_argument("--seeds", default="0:500", help="random graphs through cuDNN")
    parser.add_argument("--mosaic-seeds", default="0:100", help="random convolutions through the Mosaic kernel")
    parser.add_argument("--processes", type=int, default=0, help="that share the tests; half the processors by default")
    parser.add_argument("--tests", default="", metavar="EXPRESSION", help="only tests that match, as of pytest -k")
    parser.add_argument("--plugin")
    arguments = parser.parse_args()
    steps = arguments.only.split(",")
    if unknown := set(steps) - set(STEPS):
        parser.error(f"there is no step {', '.join(sorted(unknown))}; the steps are {', '.join(STEPS)}")
    session = Session(arguments)
    needed = {"running": 100.0, "mosaic": 60.0, "jit": 200.0}

    def seconds_for(step: str) -> float:
        """What is left for a step, when those behind it get what they need."""
        behind = STEPS[STEPS.index(step) + 1 :]
        return max(30.0, session.left - sum(needed.get(other, 0.0) for other in behind if other in steps))

    actions = {
        "install": session.install,
        "smoke": session.smoke,
        "devices": session.devices,
        "test": lambda: session.shards("test", CALLS, arguments.seeds, seconds_for("test")),
        "running": session.running,
        "mosaic": lambda: session.shards("mosaic", MOSAIC, arguments.mosaic_seeds, seconds_for("mosaic")),
        "jit": session.jit,
    }
    for step in (step for step in STEPS if step in steps):
        if session.left < 20:
            session.say(f"--- {step}: no time left")
        elif actions[step]() is False:
            session.say(f"=== {step} failed: nothing else is run")
            break
    command = " ".join(["python3 benchmarks/hopper_session.py", *(a for a in sys.argv[1:])])
    session.summary(command.replace(str(arguments.out), "OUT"))


if __name__ == "__main__":
    main()
