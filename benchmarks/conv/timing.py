"""How long one call takes on the device, from whole programs: contestants in turn, behind a delay."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.conv import delay
from benchmarks.conv.programs import calls

ROUNDS = 5
_ROUND = 4e-3  # seconds of work behind one delay
_MOST_RUNS = 24  # the runtime lets 32 programs wait
_MOST_DELAYS = 7
_ATTEMPTS = 3
_SPREAD = 1 / 4  # of the time: rounds that differ by more were disturbed
_POOL = 1 << 22

NOISE = "shorter than what the delay varies by"


@dataclasses.dataclass(frozen=True)
class Timing:
    """
    Attributes:
        us: microseconds of one call, the median of the rounds.
        spread: largest minus least of the rounds, in microseconds.
        disturbed: whether they differ by much, even without the largest and the least fifth of them.
        host_bound: the host could not launch as fast as the device worked, so the time is not the device's.
        first_s: seconds of the first run, in which cuDNN builds its plans.
    """

    us: float
    spread: float
    host_bound: bool
    first_s: float
    disturbed: bool = False

    @property
    def facts(self) -> dict[str, Any]:
        """What results.json keeps of it."""
        return {"us": self.us, "spread": self.spread, "host_bound": self.host_bound}


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A compiled program with its arguments on the device."""

    executable: Any
    arguments: tuple[Any, ...]
    calls: int


def _seconds(contestant: Contestant | None, runs: int, delays: int = 1) -> tuple[float, float]:
    """Seconds of some delays and some runs: until all is launched, and until all is done."""
    start = time.perf_counter()
    results: Any = None
    for _ in range(delays):
        results = delay.compiled()()
    for _ in range(runs if contestant else 0):
        assert contestant is not None
        results = contestant.executable(*contestant.arguments)
    launched = time.perf_counter() - start
    jax.block_until_ready(results)
    return launched, time.perf_counter() - start


def time_in_turn(contestants: Mapping[str, Contestant], rounds: int = ROUNDS) -> dict[str, Timing | str]:
    """Times all, one after another in each round; or says why one has no time.

    Who was disturbed, or launched more slowly than the device worked, is timed again, longer, behind longer delays.
    """
    firsts: dict[str, float] = {}
    found: dict[str, Timing | str] = {}
    _seconds(None, 0)
    for name, contestant in contestants.items():
        try:
            start = time.perf_counter()
            jax.block_until_ready(contestant.executable(*contestant.arguments))
            firsts[name] = time.perf_counter() - start
        except Exception as error:
            found[name] = short(error)
    left = {name: contestants[name] for name in firsts}
    for attempt in range(_ATTEMPTS):
        timings = _rounds(left, rounds * (attempt + 1), attempt)
        found |= {
            name: NOISE if one is None else dataclasses.replace(one, first_s=firsts[name])
            for name, one in timings.items()
        }
        left = {
            name: contestants[name] for name, one in timings.items() if one is None or one.host_bound or one.disturbed
        }
        if not left:
            break
    return found


def _rounds(contestants: Mapping[str, Contestant], rounds: int, more: int) -> dict[str, Timing | None]:
    """One attempt, with `more` delays than the launches of each take; None where the delay alone took longer."""
    plans: dict[str, tuple[int, int]] = {}  # runs and delays
    single = min(_seconds(None, 0)[1] for _ in range(2))
    for name, contestant in contestants.items():
        once = min(_seconds(contestant, 1)[1] for _ in range(2)) - single
        runs = max(3, min(_MOST_RUNS, int(_ROUND / max(once, 1e-6))))
        launched, _ = _seconds(contestant, runs)
        plans[name] = runs, min(_MOST_DELAYS, 1 + int(launched / single) + more)
    waits: dict[int, list[float]] = {delays: [] for _, delays in plans.values()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in plans}
    for _ in range(rounds):
        for delays, seconds in waits.items():
            seconds.append(_seconds(None, 0, delays)[1])
        for name, (runs, delays) in plans.items():
            samples[name].append(_seconds(contestants[name], runs, delays))
    timings: dict[str, Timing | None] = {}
    for name, pairs in samples.items():
        runs, delays = plans[name]
        wait = statistics.median(waits[delays])
        values = [(total - wait) / runs / contestants[name].calls * 1e6 for _, total in pairs]
        behind = sum(launched > wait and launched > 0.8 * total for launched, total in pairs)
        median = statistics.median(values)
        bound = behind > rounds // 2
        inner = sorted(values)[rounds // 5 : rounds - rounds // 5]
        disturbed = inner[-1] - inner[0] > _SPREAD * median
        timings[name] = Timing(median, max(values) - min(values), bound, 0.0, disturbed) if median > 0 else None
    return timings


def copier() -> tuple[Contestant, int]:
    """A program that is all memory, and how many bytes it reads and writes."""
    size = 1 << (30 if jax.default_backend() != "cpu" else 20)
    array = jnp.zeros(size // 4, jnp.uint32)
    return Contestant(jax.jit(lambda x: x + jnp.uint32(1)).lower(array).compile(), (array,), 1), 2 * size


@functools.cache
def _pool(dtype: Any) -> jax.Array:
    """Normal random numbers on the device, of which all operands are made."""
    return jax.device_put(np.random.default_rng(0).normal(size=_POOL).astype(dtype))


class Inputs:
    """Random operands on the device, made once for each shape and type and shared by contestants.

    They are made on the device: what is copied there takes the bus from whoever copies too, and the host's memory.
    """

    def __init__(self, reduction: int) -> None:
        self._reduction = reduction
        self._made: dict[Any, jax.Array] = {}

    @staticmethod
    def prepare(operands: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Compiles what `of` will then only run."""
        for operand in operands:
            if len(operand.shape) > 1:
                _filler(operand.shape, np.dtype(operand.dtype))

    def of(self, operands: Sequence[jax.ShapeDtypeStruct]) -> tuple[Any, ...]:
        """The arguments of a program: inputs and filter normal, so scaled that outputs are of the order of tens."""
        x, *rest = operands
        inputs = [self._array(x, number) for number in range(calls(operands))]
        return (inputs, *(self._array(operand, 100 + number) for number, operand in enumerate(rest)))

    def _array(self, operand: jax.ShapeDtypeStruct, number: int) -> jax.Array:
        key = operand.shape, operand.dtype, number
        if key not in self._made:
            self._made[key] = self._values(operand, number)
        return self._made[key]

    def _values(self, operand: jax.ShapeDtypeStruct, number: int) -> jax.Array:
        dtype = np.dtype(operand.dtype)
        if not operand.shape:
            return jax.device_put(np.asarray(16 / self._reduction**0.5 if number == 101 else 1.0, dtype))
        if len(operand.shape) == 1:
            return jax.device_put((np.linspace(0.5, 1.5, operand.size) / self._reduction**0.5).astype(dtype))
        return _filler(operand.shape, dtype)(_pool(dtype), np.uint32(7919 * number % _POOL))


@functools.cache
def _filler(shape: tuple[int, ...], dtype: Any) -> Callable[[jax.Array, Any], jax.Array]:
    """A compiled program: the pool from some element on, over and over."""

    def fill(pool: jax.Array, start: jax.Array) -> jax.Array:
        index = jnp.arange(math.prod(shape), dtype=jnp.uint32) + start
        # The pool has a power of two of numbers. Bits, as not every gather knows FP8.
        bits = jax.lax.bitcast_convert_type(pool, jnp.dtype(f"uint{8 * pool.dtype.itemsize}"))
        return jax.lax.bitcast_convert_type(bits[index & (_POOL - 1)], pool.dtype).reshape(shape)

    compiled: Callable[[jax.Array, Any], jax.Array] = jax.jit(fill).lower(_pool(dtype), np.uint32(0)).compile()
    return compiled


def agreement(expected: Sequence[jax.Array], results: Sequence[jax.Array]) -> dict[str, float]:
    """How near results of the first call are to another contestant's: norm of the difference, share of equal FP8."""
    a, b = (np.asarray(outputs[0]).reshape(-1) for outputs in (expected, results))
    step = max(1, a.size >> 20)
    a, b = a[::step], b[::step]
    wide_a, wide_b = a.astype(np.float32), b.astype(np.float32)
    norm = float(np.linalg.norm(wide_a - wide_b) / max(float(np.linalg.norm(wide_a)), 1e-30))
    equal = float(np.mean(wide_a == wide_b)) if a.dtype == ml_dtypes.float8_e4m3fn else float("nan")
    return {"norm": norm, "equal": equal}


def beside(facts: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """A time in microseconds, ~ where it is the host's, and how many times as fast as the reference."""
    ratio = f"{reference['us'] / facts['us']:.2f}x" if "us" in reference else ""
    mark = "~" if facts["host_bound"] else ""
    return f"{mark}{facts['us']:9.2f} us (±{facts['spread']:.2f})  {ratio:>6}"


def short(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
