"""How long one step takes: steps in a row, the device always busy, the median of some rounds."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

_ROUND = 0.25  # seconds of one round, about
_STEPS = (4, 200)  # of one round, at least and at most
_LAUNCHES = 3  # so few that the host has not to wait for the device


@dataclasses.dataclass(frozen=True)
class Timing:
    """
    Attributes:
        ms: milliseconds of one step, the median of the rounds. The device is busy from the first step on: what the
            host needs to launch the first one is not in it.
        spread: largest minus least of the rounds, in milliseconds.
        rounds: milliseconds of a step in each round, in order.
        host_ms: milliseconds in which the host launches one step, while the device has nothing else to do.
        host_bound: whether that is most of the time, so that the device waits.
    """

    ms: float
    spread: float
    rounds: tuple[float, ...]
    host_ms: float
    host_bound: bool


def time_steps(step: Callable[[Any, Any], Any], state: Any, batch: Any, rounds: int = 5) -> tuple[Timing, Any]:
    """Times `(state, batch) → (state, result)`, which has run before; also returns the last state."""
    start = time.perf_counter()
    state = run(step, state, batch, 1)
    once = time.perf_counter() - start
    steps = max(_STEPS[0], min(_STEPS[1], int(_ROUND / max(once, 1e-6))))
    samples, launches = [], []
    for _ in range(rounds):
        state, seconds = _round(step, state, batch, steps)
        samples.append(seconds / steps * 1e3)
        start = time.perf_counter()
        for _ in range(_LAUNCHES):
            state, result = step(state, batch)
            del result
        launches.append((time.perf_counter() - start) / _LAUNCHES * 1e3)
        jax.block_until_ready(state)
    ms, host = statistics.median(samples), statistics.median(launches)
    return Timing(ms, max(samples) - min(samples), tuple(samples), host, host > 0.9 * ms), state


def _round(step: Callable[[Any, Any], Any], state: Any, batch: Any, steps: int) -> tuple[Any, float]:
    """Some steps behind one more, from whose end on they are timed: the next is launched by then."""
    state, first = step(state, batch)
    state, result = step(state, batch)
    jax.block_until_ready(first)
    start = time.perf_counter()
    del first, result
    state = run(step, state, batch, steps - 1)
    return state, time.perf_counter() - start


def run(step: Callable[[Any, Any], Any], state: Any, batch: Any, steps: int) -> Any:
    """Some steps, to their end; returns the state.

    A result is let go before the next step, whose result then has the same address: where addresses change, XLA updates
    its CUDA graphs, kernel by kernel, which takes longer than to run a short one.
    """
    for _ in range(steps - 1):
        state, result = step(state, batch)
        del result
    state, result = step(state, batch)
    jax.block_until_ready((state, result))
    return state
