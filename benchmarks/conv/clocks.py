"""How the time of a program changes while the GPU gets warm: each runs alone, after a rest, for some seconds.

Times of the same program differ between runs by more than between programs (docs/benchmarks.md). What could explain it
is read meanwhile: clock, power, temperature, and why the driver lowers the clock.
"""

from __future__ import annotations

import contextlib
import datetime
import re
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import gpu_readings
from benchmarks.conv import executables, state
from benchmarks.conv.programs import TARGET, Case, backend_of, calls, operands_of, program
from benchmarks.conv.timing import Contestant, Inputs

_REST = 0.7
_BUSY = 1.0
"""Seconds: each contestant rests, then runs."""
_PART = 6e-3
"""Seconds of work that are timed at once."""
_WINDOWS = ((0.0, 0.03), (0.1, 0.2), (0.3, 0.5), (0.8, _BUSY))
"""Seconds since the rest that are summed up."""


def watch(case: Case, out: Path, gpu: str) -> dict[str, Any]:
    """For each contestant, and for mosaic and XLA's FP8 on zeros: the time of a call in each window, and the readings.

    Contestants are mosaic's first guess, and XLA's programs in `out`.
    """
    kernel = backend_of("mosaic")
    mine = program(case, "mosaic", kernel, kernel.configs(case.call, TARGET)[0]).compile()
    compiled = {"mosaic": mine}
    for name in ("xla_fp8", "xla_bf16", "gemm"):
        with contextlib.suppress(OSError):
            compiled[name] = executables.stored(out, case, name)
    found: dict[str, Any] = {}
    with state.alone(out, gpu):
        inputs = Inputs(case.shape.product[2])
        for name, executable in compiled.items():
            operands = operands_of(case, name)
            normal = Contestant(executable, inputs.of(operands), calls(operands))
            found[name] = _watched(normal, gpu)
            if name in ("mosaic", "xla_fp8"):
                zeros = jax.tree.map(jnp.zeros_like, normal.arguments)
                found[f"{name} on zeros"] = _watched(Contestant(executable, zeros, normal.calls), gpu)
    for name, executable in compiled.items():
        with contextlib.suppress(Exception):  # not every executable has its text
            found[name]["plan"] = re.findall(r'"tuning_knobs":\{[^}]*\}', executable.as_text())
    return found


def _watched(contestant: Contestant, gpu: str) -> dict[str, Any]:
    def seconds(runs: int) -> float:
        start = time.perf_counter()
        results: Any = None
        for _ in range(runs):
            results = contestant.executable(*contestant.arguments)
        jax.block_until_ready(results)
        return time.perf_counter() - start

    seconds(1)
    # One run more than it takes to fill a part: what a launch and a wait cost is in both.
    runs = max(2, min(20, round(_PART / max(seconds(3) / 3, 1e-6))))
    with gpu_readings.watched(gpu) as readings:
        time.sleep(_REST)
        began, began_at = time.perf_counter(), datetime.datetime.now()
        samples = []
        while (at := time.perf_counter() - began) < _BUSY:
            samples.append((at, seconds(runs) / runs / contestant.calls * 1e6))
    parsed = [((moment - began_at).total_seconds(), values) for moment, values in readings]
    windows = []
    for low, high in _WINDOWS:
        times = [us for at, us in samples if low <= at < high]
        inside = [values for at, values in parsed if low <= at < high + 0.02]
        windows.append(
            {
                "from_s": low,
                "us": statistics.median(times) if times else None,
                "us_least": min(times, default=None),
                "us_most": max(times, default=None),
                "readings": inside[:: max(1, len(inside) // 4)],
            }
        )
    return {"windows": windows, "runs": runs, "reading_count": len(parsed)}
