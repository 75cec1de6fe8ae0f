"""A process that tunes one program at a time, as `tune` asks: a line of JSON in, a line of JSON out."""

from __future__ import annotations

import concurrent.futures
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks.conv import clocks, executables, rows, state
from benchmarks.conv.measure import about, ceilings
from benchmarks.conv.programs import KERNELS, TARGET, Case, backend_of, calls, cases, program
from benchmarks.conv.timing import Contestant, Inputs, Timing, short, time_in_turn
from xla_fp8.backends import autotune, cache
from xla_fp8.errors import XlaFp8Error

ROW, EPILOGUES, CEILINGS, CLOCKS = "row", "epilogues", "ceilings", "clocks"
"""What a job may ask for beside a contestant: see `variants`."""


class TuningError(XlaFp8Error):
    """A backend that refuses a convolution, or none of whose configs runs."""


def serve(out: Path, gpu: str, configs: int, tiny: bool) -> None:
    """Answers until its input ends. What XLA prints goes to stderr, and stays off the answers."""
    known = {case.name: case for case in cases(tiny)}
    process = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    for line in sys.stdin:
        job = json.loads(line)
        start = time.perf_counter()
        try:
            name, wanted = job["case"], job["contestant"]
            if wanted == CEILINGS:
                with state.alone(out, gpu):
                    answer = {"problem": "", "about": about(process), "ceilings": ceilings()}
            elif wanted == ROW:
                answer = {"problem": "", "row": rows.measure(known[name], out, gpu, configs, process)}
            elif wanted == EPILOGUES:
                answer = {"problem": "", "epilogues": rows.measure_epilogues(known[name].shape, out, gpu, configs)}
            elif wanted == CLOCKS:
                answer = {"problem": "", "clocks": clocks.watch(known[name], out, gpu)}
            else:
                found = _tune if wanted in KERNELS else _compile
                answer, executable = found(known[name], wanted, out, gpu, configs)
                answer["stored"] = executables.store(out, known[name], wanted, executable)
        except Exception as error:
            answer = {"problem": short(error)}
        print(json.dumps(answer | {"seconds": round(time.perf_counter() - start, 2)}), flush=True)


def _compile(case: Case, contestant: str, *_: object) -> tuple[dict[str, Any], Any]:
    """XLA tunes while it compiles; its choice is in the executable."""
    executable = program(case, contestant).compile()
    # What the contestant is there for; it is no error where XLA does something else, but it is told.
    wanted = {"xla_fp8": "__cudnn$convForwardGraph", "gemm": "__cublas$lt$matmul$f8"}.get(contestant, "")
    return {"problem": "", "fused": wanted in executable.as_text()}, executable


def _tune(case: Case, contestant: str, out: Path, gpu: str, limit: int) -> tuple[dict[str, Any], Any]:
    """Compiles some configs side by side, times them alone on the GPU, and keeps the fastest: a choice in the cache."""
    start = time.perf_counter()
    backend = backend_of(contestant)
    verdict = backend.supports(case.call, TARGET)
    if not verdict.ok:
        raise TuningError(f"refused: {verdict.reason}")
    # cuDNN's order says little of the speed: of its plans more are tried.
    configs = list(backend.configs(case.call, TARGET))[: 3 * limit if contestant == "cudnn" else limit]
    programs = [program(case, contestant, backend, config) for config in configs]
    problems: dict[str, str] = {}
    compiled: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {str(c): pool.submit(p.compile) for c, p in zip(configs, programs, strict=True)}
        for name, future in futures.items():
            try:
                compiled[name] = future.result()
            except Exception as error:
                problems[name] = short(error)
    operands = programs[0].operands
    Inputs.prepare(operands)
    with state.alone(out, gpu):
        arguments = jax.block_until_ready(Inputs(case.shape.product[2]).of(operands))
        contestants = {name: Contestant(program, arguments, calls(operands)) for name, program in compiled.items()}
        timings = time_in_turn(contestants, rounds=3)
    times = {name: t.us for name, t in timings.items() if isinstance(t, Timing)}
    problems |= {name: t for name, t in timings.items() if isinstance(t, str)}
    if not times:
        raise TuningError(next(iter(problems.values())))
    best = min(times, key=times.__getitem__)
    if settled := getattr(backend, "settled", None):
        settled(case.call, next(config for config in configs if str(config) == best))
    cache.store(
        cache.Choice(
            autotune.key_of(backend, case.call),
            best,
            times[best],
            times.get(str(configs[0])),
            len(configs),
            time.perf_counter() - start,
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
    )
    facts = {"problem": "", "config": best, "first": times.get(str(configs[0])), "us": times, "problems": problems}
    return facts, compiled[best]
