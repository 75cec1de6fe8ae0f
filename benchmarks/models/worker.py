"""The process of one row: compiles, waits until it is told that nothing else runs, then times and profiles."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from typing import Any

import jax

from benchmarks import gpu_readings
from benchmarks.models import profile, programs
from benchmarks.models.rows import Row
from benchmarks.models.timing import run, time_steps
from xla_fp8.hlo import HloModule

GO = "go"
_PROFILED = 3


def serve(row: Row, tiny: bool) -> None:
    """Prints a line of JSON when the row is compiled; after a line from its input another one with what it measured."""
    start = time.perf_counter()
    program = programs.program_of(row, tiny)
    compiled, module, facts = compile_program(program)
    _tell({"compile_s": round(time.perf_counter() - start, 1), "device": jax.devices()[0].device_kind} | facts)
    if sys.stdin.readline().strip() == GO:
        _tell(measure(program, compiled, profile.kinds_of(module) if module else {}))


def compile_program(program: programs.Program) -> tuple[Any, HloModule | None, dict[str, Any]]:
    """The executable, its HLO where it can be read, and what is known of it before it runs."""
    reports: list[Any] = []
    start = time.perf_counter()
    lowered = program.lower(reports.append)
    lower_s = time.perf_counter() - start
    compiled = lowered.compile()
    module = profile.parsed(compiled)
    memory = compiled.memory_analysis()
    facts: dict[str, Any] = {
        "lower_s": round(lower_s, 1),
        "jax": jax.__version__,
        "launches": profile.launches(module) if module else {},
        "rewritten": [str(report.summary) for report in reports],
    }
    if memory is not None:
        facts["memory"] = {
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes - memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
        }
    return compiled, module, facts


def measure(program: programs.Program, compiled: Any, kinds: dict[str, str]) -> dict[str, Any]:
    """Times, memory and profile of a compiled program, and what the GPU's clock and power were meanwhile."""
    state, batch = programs.arrays(program.state), programs.arrays(program.batch)
    step = program.step(compiled)
    state = run(step, state, batch, 2)  # loads kernels, for seconds in which the GPU has nothing to do
    # The scheduler gives each process one GPU.
    with gpu_readings.watched(os.environ.get("CUDA_VISIBLE_DEVICES", "0")) as readings:
        timing, state = time_steps(step, state, batch)
    facts: dict[str, Any] = dataclasses.asdict(timing) | {"gpu_state": gpu_readings.summary(readings)}
    statistics = jax.devices()[0].memory_stats()
    if statistics:
        facts["peak_bytes"] = statistics["peak_bytes_in_use"]

    def several() -> None:
        run(step, state, batch, _PROFILED)  # the state is given away, and nobody needs it any more

    try:  # the times count without it
        facts["profile"] = profile.profile(several, _PROFILED, kinds)
    except Exception as error:
        facts["problem"] = f"no profile: {' '.join(str(error).split())[:200]}"
        facts["profile"] = {"ms": {}, "kernels": 0.0, "span_ms": 0.0, "longest": [], "host": {}}
    return facts


def _tell(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)
