"""The cudnn backend against XLA's own FP8 convolution, plan by plan: what a plan takes, and what launching it costs.

    python3 -m benchmarks.cudnn_plans --out OUT [--seconds 95] [--only "64,7,7,512;bias"] [--every] [--build-seconds 30]

Each row (a shape and an epilogue) has a process of its own. All build cuDNN's plans and let XLA tune at the same time,
which is work for the CPU; then one after another measures while nothing else uses its GPU. `--every` builds every
kernel of cuDNN's FP8 engines, until `--build-seconds` are over, and not only what its heuristics propose.

A row says, in microseconds of one call:

    proposed    the fastest plan that cuDNN's heuristics propose, on the device alone (a CUDA graph between two events)
    best, plan  the fastest of all that were built: what the backend tries, or every kernel
    program     the best plan in a jit of eight calls
    no graphs   the same, compiled without CUDA graphs
    XLA         the chain through XLA's own matcher and tuning, in such a program; ~ where the host was the slower one
    ratio       of XLA's time to that of the faster program
    host        the host's time to launch a call of each program
    Python      its time to launch the plan alone, and what that consists of

OUT/results.json is written after every row, with the times of all plans; OUT/table.md at the end.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.conv import programs
from benchmarks.conv.programs import Program, calls, quantized
from benchmarks.conv.shapes import Shape
from benchmarks.conv.timing import Contestant, Inputs, Timing, agreement, short, time_in_turn
from benchmarks.gpus import gpus_here
from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import buffers, device_context, ffi, library, plans, stopwatch
from xla_fp8.target import GraphCall

NO_GRAPHS = {"xla_gpu_graph_min_graph_size": 1 << 20}
EVERY = (*(f"eng2_k24={kernel}" for kernel in range(17, 49)), *(f"eng4_k24={kernel}" for kernel in range(56)))
SLICED = tuple(f"eng{engine}_k17={slices}_k24={kernel}" for slices in (2, 4) for engine, kernel in ((4, 45), (4, 53)))


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The same as a graph string, and in JAX on the convolution's f32 value; `residual` as in the benchmark's."""

    graph: str
    chain: Callable[..., tuple[jax.Array, ...]]
    residual: str = ""


EPILOGUES: Mapping[str, Epilogue] = MappingProxyType(
    {
        "amax": Epilogue(programs.EPILOGUES["amax"].graph, programs.EPILOGUES["amax"].chain),
        "scale": Epilogue(programs.EPILOGUES["scale"].graph, programs.EPILOGUES["scale"].chain),
        "bias+silu": Epilogue(
            "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]silu(3);5:[f8e4m3fn]scale(4);",
            lambda y, s, b, t: (quantized(jax.nn.silu(y * s + b) * t),),
        ),
        "channel scale": Epilogue("1:[f32]conv();2:[f8e4m3fn]channel_scale(1);", lambda y, c: (quantized(y * c),)),
        "bias+relu+residual": Epilogue(
            "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]relu(3);5:[f32]add(4);6:[f8e4m3fn]scale(5);",
            lambda y, s, b, r, t: (quantized((jax.nn.relu(y * s + b) + r.astype(jnp.float32)) * t),),
            "bf16",
        ),
    }
)
"""The first two XLA fuses; of the others it leaves all behind the convolution outside."""

_SLOW = (Shape(64, 7, 7, 512, 3, 512), Shape(2, 64, 64, 320, 3, 320), Shape(64, 56, 56, 128, 3, 128, 2))
_COMMON = (Shape(32, 64, 64, 256, 3, 256), Shape(64, 14, 14, 512, 3, 512))
_NETWORKS = (
    Shape(64, 56, 56, 64, 3, 64),  # ResNet-50
    Shape(64, 28, 28, 128, 3, 128),
    Shape(64, 14, 14, 256, 3, 256),
    Shape(64, 56, 56, 256, 1, 64),
    Shape(64, 14, 14, 1024, 1, 256),
    Shape(64, 56, 56, 256, 1, 512, 2),
    Shape(64, 112, 112, 128, 3, 128),  # VGG-16
    Shape(64, 28, 28, 512, 3, 512),
    Shape(16, 64, 64, 320, 3, 320),  # Stable Diffusion
    Shape(2, 32, 32, 640, 3, 640),
    Shape(2, 16, 16, 1280, 3, 1280),
    Shape(16, 32, 32, 1920, 3, 640),
    Shape(64, 56, 56, 96, 1, 384),  # ConvNeXt
)
ROWS: Mapping[str, tuple[Shape, str]] = MappingProxyType(
    {
        f"{shape} {epilogue}": (shape, epilogue)
        for shapes, epilogues in (
            (_SLOW, ("amax",)),
            (_COMMON, ("bias+silu", "channel scale", "bias+relu+residual")),
            (_SLOW, ("scale",)),
            (_NETWORKS, ("scale",)),
        )
        for shape in shapes
        for epilogue in epilogues
    }
)


# One row, in a process of its own.


@dataclasses.dataclass
class Row:
    """A row while it is measured: first its plans, then its programs."""

    name: str
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shape, self.epilogue = ROWS[self.name]
        epilogue = EPILOGUES[self.epilogue]
        self.call: GraphCall = programs.call_of(self.shape, epilogue.graph, epilogue.residual)
        self.text = call_text.encode(self.call)
        self.device = plans.on_device(0)
        self.operands = programs.arrays_of(self.call)
        self.compiled: dict[str, Any] = {}
        self.built: dict[str, plans.BuiltPlan] = {}

    def chain(self, x: jax.Array, w: jax.Array, *sides: jax.Array) -> tuple[jax.Array, ...]:
        """What XLA is given."""
        return programs.chain(self.shape, EPILOGUES[self.epilogue].chain, x, w, *sides)

    def compile(self, name: str, lowered: Any, options: Mapping[str, Any]) -> None:
        start = time.perf_counter()
        try:
            self.compiled[name] = lowered.compile(compiler_options=dict(options))
        except Exception as error:
            self.facts[f"{name} problem"] = short(error)
        self.facts[f"{name} compile_s"] = round(time.perf_counter() - start, 1)

    def build(self, every: bool, seconds: float) -> None:
        """Builds the plans while XLA tunes, which needs no Python: cuDNN's front end holds Python's lock."""
        lowered = Program(self.chain, self.operands, {}).lower()
        xla = threading.Thread(target=self.compile, args=("xla", lowered, {}))
        xla.start()
        start = time.perf_counter()
        tried = self.device.names(self.text)
        self.facts["proposed"] = list(self.device._proposals(self.text))
        unbuilt = {}
        for name in dict.fromkeys((*tried, *(EVERY + SLICED if every else ()))):
            if time.perf_counter() - start > seconds:
                self.facts["out of time at"] = name
                break
            try:
                self.built[name] = self.device.plan(self.text, name)
            except Exception as error:
                unbuilt[name] = short(error)[:150]
        self.facts |= {"build_s": round(time.perf_counter() - start, 1), "unbuilt": unbuilt}
        xla.join()
        if "xla" in self.compiled:
            self.facts["xla fused"] = "__cudnn$convForwardGraph" in self.compiled["xla"].as_text()

    def time_plans(self) -> None:
        """Every plan on the device alone; then what launching the best one costs Python."""
        workspace = max(plan.workspace for plan in self.built.values())
        times: dict[str, float] = {}
        with device_context.current(0), buffers.of(self.call, workspace) as (*pointers, scratch):
            stream = device_context.new_stream()
            for name in self.built:

                def launch(name: str = name) -> None:
                    self.device.run(self.text, name, pointers, scratch, stream)

                try:
                    times[name] = round(stopwatch.microseconds(stream, launch), 2)
                except Exception as error:
                    self.facts.setdefault("unrun", {})[name] = short(error)[:150]
                self.facts["plan_us"] = dict(sorted(times.items(), key=lambda item: item[1]))
            self.best = min(times, key=times.__getitem__)
            self.facts["workspace"] = self.built[self.best].workspace
            self._time_python(pointers, scratch, stream)

    def _time_python(self, pointers: list[int], scratch: int, stream: int) -> None:
        graph, handle = self.built[self.best].graph, self.device._handle
        pack, uids = dict(enumerate(pointers, start=1)), list(range(1, len(pointers) + 1))
        array = (ctypes.c_int64 * len(pointers))(*pointers)
        cudnn = library.cudnn()
        ways: dict[str, Callable[[], Any]] = {
            "run": lambda: self.device.run(self.text, self.best, pointers, scratch, stream),
            "set_stream": lambda: cudnn.set_stream(handle=handle, stream=stream),
            "execute": lambda: graph._execute(pack, scratch, handle),
            "execute, raw": lambda: graph._execute_with_raw_ptrs(ctypes.addressof(array), len(uids), scratch, handle),
        }
        found: dict[str, Any] = {}
        for name, way in ways.items():
            try:
                samples = []
                for _ in range(5):
                    device_context.wait(stream)
                    start = time.perf_counter()
                    for _ in range(40):
                        way()
                    samples.append((time.perf_counter() - start) / 40 * 1e6)
                device_context.wait(stream)
                found[name] = round(min(samples), 2)
            except Exception as error:
                found[name] = short(error)[:150]
        self.facts["python_us"] = found

    def compile_best(self) -> None:
        function = ffi.implementation(self.call, self.best, self.built[self.best].workspace)
        lowered = Program(function, self.operands, {}).lower()
        self.inputs = Inputs(self.shape.product[2])
        self.inputs.prepare(self.operands)
        for name, options in (("graphs", {}), ("launches", NO_GRAPHS)):
            self.compile(name, lowered, options)

    def time_programs(self) -> None:
        arguments = self.inputs.of(self.operands)
        jax.block_until_ready(arguments)
        each = calls(self.operands)
        contestants = {name: Contestant(program, arguments, each) for name, program in self.compiled.items()}
        self.facts["calls"] = each
        self.facts["host_us"] = {name: self._host(contestant) for name, contestant in contestants.items()}
        self.facts["program_us"] = {
            name: dataclasses.asdict(timing) if isinstance(timing, Timing) else timing
            for name, timing in time_in_turn(contestants, rounds=3).items()
        }
        if "xla" in contestants and "graphs" in contestants:
            expected, got = (contestants[name].executable(*arguments)[0] for name in ("xla", "graphs"))
            self.facts["agreement"] = agreement(expected, got)

    def _host(self, contestant: Contestant, runs: int = 16) -> dict[str, float]:
        """Microseconds in which the host launches a call, and how often Python is called for it."""
        count, original = 0, self.device.run

        def counted(*arguments: Any) -> None:
            nonlocal count
            count += 1
            original(*arguments)

        for _ in range(3):
            jax.block_until_ready(contestant.executable(*contestant.arguments))
        self.device.run = counted  # type: ignore[method-assign]
        samples = []
        try:
            for _ in range(5):
                start = time.perf_counter()
                for _ in range(runs):
                    result = contestant.executable(*contestant.arguments)
                samples.append((time.perf_counter() - start) / runs / contestant.calls * 1e6)
                jax.block_until_ready(result)
        finally:
            self.device.run = original  # type: ignore[method-assign]
        python = count / (5 * runs * contestant.calls)
        return {"us": round(min(samples), 2), "median": round(sorted(samples)[2], 2), "python": round(python, 2)}


def work(name: str, every: bool, build_seconds: float) -> None:
    """Prints a line of JSON after each phase, and waits for a line before one that needs the GPU alone."""
    row = Row(name)
    phases: list[Callable[[], None]] = [
        lambda: row.build(every, build_seconds),
        row.time_plans,
        row.compile_best,
        row.time_programs,
    ]
    for number, phase in enumerate(phases):
        if number in (1, 3):
            sys.stdin.readline()
        try:
            phase()
        except Exception as error:
            row.facts["problem"] = f"phase {number}: {short(error)}"
        print(json.dumps(row.facts), flush=True)
        if "problem" in row.facts:
            return


# All rows.


class Worker:
    """The process of one row. Its answers come as they are ready."""

    def __init__(self, name: str, gpu: str | None, arguments: argparse.Namespace, events: queue.Queue[Worker]) -> None:
        self.name, self.gpu, self.phase = name, gpu, 0
        self.facts: dict[str, Any] = {}
        self.over = False
        command = [sys.executable, "-m", "benchmarks.cudnn_plans", "--worker", name, "--out", str(arguments.out)]
        command += ["--build-seconds", str(arguments.build_seconds), *(["--every"] if arguments.every else [])]
        environment = {
            **os.environ,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
        }
        self.log = (arguments.out / f"{len(list(arguments.out.glob('*.log')))}.log").open("w")
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def _listen(self, events: queue.Queue[Worker]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                self.facts = json.loads(line)
                self.phase += 1
                self.over = self.phase == 4 or "problem" in self.facts
                events.put(self)
        if not self.over:
            self.facts["problem"] = f"the process ended in phase {self.phase}; {self.log.name}"
            self.over = True
            events.put(self)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()


def run(arguments: argparse.Namespace) -> None:
    end = time.monotonic() + arguments.seconds
    events: queue.Queue[Worker] = queue.Queue()
    wanted = [part for part in arguments.only.split(";") if part]
    names = [name for name in ROWS if not wanted or any(part in name for part in wanted)]
    gpus = gpus_here()[: arguments.gpus] or (None,)
    workers = [Worker(name, gpu, arguments, events) for name, gpu in zip(names, itertools.cycle(gpus), strict=False)]
    # Who waits for a GPU, and whom each one is busy with. A GPU is first given out when all have built, as building and
    # XLA's tuning would disturb; or when a third of the time is left.
    measuring: dict[str | None, Worker] = {}
    patience = time.monotonic() + arguments.seconds * 0.6
    while not all(worker.over for worker in workers) and time.monotonic() < end:
        try:
            worker = events.get(timeout=0.5)
            gone = arguments.seconds - (end - time.monotonic())
            print(f"{gone:5.0f} s  {worker.name}: phase {worker.phase}", flush=True)
            if measuring.get(worker.gpu) is worker:
                del measuring[worker.gpu]
            save(arguments.out, workers)
        except queue.Empty:
            pass
        if any(worker.phase == 0 and not worker.over for worker in workers) and time.monotonic() < patience:
            continue
        for gpu in gpus:
            mine = [worker for worker in workers if worker.gpu == gpu and not worker.over]
            waiting = [worker for phase in (1, 3) for worker in mine if worker.phase == phase]
            # What has its plans timed is compiled meanwhile, on the CPU.
            if gpu not in measuring and waiting:
                measuring[gpu] = waiting[0]
                waiting[0].go()
    for worker in workers:
        if not worker.over:
            worker.facts["problem"] = f"out of time in phase {worker.phase}"
        worker.process.kill()
    save(arguments.out, workers)
    table = markdown({worker.name: worker.facts for worker in workers})
    (arguments.out / "table.md").write_text(table)
    print(table)


def save(out: Path, workers: list[Worker]) -> None:
    temporary = out / ".results.json"
    temporary.write_text(json.dumps({worker.name: worker.facts for worker in workers}, indent=1))
    os.replace(temporary, out / "results.json")


_COLUMNS = ("row", "proposed", "best", "plan", "program", "no graphs", "XLA", "ratio", "host", "Python")


def markdown(rows: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---|--:|--:|---|--:|--:|--:|--:|---|---|"]
    lines += [f"| {' | '.join(_cells(name, facts))} |" for name, facts in rows.items()]
    lines += ["", *(f"- `{name}`: {facts['problem']}" for name, facts in rows.items() if "problem" in facts)]
    lines += _kernels(rows)
    return "\n".join(lines) + "\n"


def _cells(name: str, facts: Mapping[str, Any]) -> list[str]:
    times = facts.get("plan_us", {})
    proposed = [us for plan, us in times.items() if plan in facts["proposed"]]
    timings = facts.get("program_us", {})
    best = min(times, key=times.__getitem__, default="")

    def program(which: str) -> str:
        found = timings.get(which)
        return f"{found['us']:.1f}{'~' if found['host_bound'] else ''}" if isinstance(found, dict) else "-"

    ours = [timings[which]["us"] for which in ("graphs", "launches") if isinstance(timings.get(which), dict)]
    xla = timings.get("xla")
    ratio = f"{xla['us'] / min(ours):.2f}x" if ours and isinstance(xla, dict) else "-"
    host = facts.get("host_us", {})
    return [
        f"`{name}`",
        f"{min(proposed):.1f}" if proposed else "-",
        f"{times[best]:.1f}" if times else "-",
        best,
        program("graphs"),
        program("launches"),
        program("xla"),
        ratio,
        ", ".join(f"{host[which]['us']:.1f}" if which in host else "-" for which in ("graphs", "launches", "xla")),
        ", ".join(f"{way} {us}" for way, us in facts.get("python_us", {}).items()),
    ]


def _kernels(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Which plans are within 5% of the best of a row, and the rows of each: what to try for every call."""
    near: dict[str, list[str]] = {}
    for name, facts in rows.items():
        times = facts.get("plan_us", {})
        for plan, us in times.items():
            if us <= 1.05 * min(times.values()):
                near.setdefault(plan, []).append(name)
    order = sorted(near, key=lambda plan: -len(near[plan]))
    return ["", "Within 5% of the best:", "", *(f"- {plan}: {'; '.join(near[plan])}" for plan in order)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=95)
    parser.add_argument("--build-seconds", type=float, default=30)
    parser.add_argument("--only", default="", help="rows whose name has one of these texts, separated by semicolons")
    parser.add_argument("--every", action="store_true", help="every kernel of cuDNN's FP8 engines")
    parser.add_argument("--gpus", type=int, default=1, help="how many of the visible GPUs to use")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.every, arguments.build_seconds)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    run(arguments)


if __name__ == "__main__":
    main()
