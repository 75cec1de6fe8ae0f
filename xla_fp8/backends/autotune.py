"""Times the ways to run a graph call on the device at hand, and remembers the fastest that computes the right thing.

`XLA_FP8_AUTOTUNE` says what happens: `1` (the default) tunes what the cache does not know, `force` tunes again, `0`
takes the cache's choice or else the one that the backend's heuristic prefers. In a program of several processes the
first one tunes, and all use its choice.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import functools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8 import _jax_compat
from xla_fp8.backends import cache, call_text, reference
from xla_fp8.backends.compare import Tolerance, compare
from xla_fp8.backends.inputs import random_operands
from xla_fp8.backends.progress import Progress
from xla_fp8.backends.protocol import Backend, Config, platforms_of
from xla_fp8.backends.registry import platform_name
from xla_fp8.errors import XlaFp8Error
from xla_fp8.hlo import Shape
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall, Target

MODES = ("0", "1", "force")
CALLS = 8
"""Calls inside one jit, so that what is timed is the device and not the dispatch, which takes 20 to 50 us."""
_MOST_RESULTS = 1 << 32
"""Bytes of results that the calls of one jit may have: all are kept, and the device has to hold them twice."""
_RANDOM = (1 << 22) - 3
"""Elements of an operand that differ: more would take minutes to make, and 32 bytes each. It is a prime, so that no two
rows or channels are alike that a wrong kernel could mistake for each other."""
_ROUNDS = 3
_ROUND = 0.01  # seconds that a round should take, so that the first dispatch does not show
_MOST_RUNS = 20
_WAIT = 600.0  # seconds that a process waits for another one's choice

AGREEMENT = Tolerance(0.02, fp8_share=0.1, fp8_beyond_share=0.01)
"""How near to the reference a config must come. It finds what computes something else, not what rounds differently:
tensor cores sum FP8 products in fewer bits than f32."""

_T = TypeVar("_T")

_lock = threading.Lock()


class AutotuneError(XlaFp8Error):
    """A wrong XLA_FP8_AUTOTUNE, or no config of a call that runs and agrees with the reference."""


@dataclasses.dataclass(frozen=True)
class Timing:
    """One config, tried.

    Attributes:
        config: which.
        microseconds: of one call on the device; infinite where it cannot be used.
        problem: why it cannot be used, or "".
    """

    config: Config
    microseconds: float
    problem: str = ""


def mode() -> str:
    """The value of XLA_FP8_AUTOTUNE. Raises AutotuneError where it is none of `MODES`."""
    value = os.environ.get("XLA_FP8_AUTOTUNE", "1")
    if value not in MODES:
        raise AutotuneError(f"XLA_FP8_AUTOTUNE is {value!r}: expected one of {', '.join(MODES)}")
    return value


def config_for(backend: Backend, call: GraphCall, target: Target, may_time: bool = True) -> Config:
    """The config with which `backend` is to run `call`: from the cache, by timing, or by the backend's heuristic.

    Nothing is timed where `may_time` is not set, nor where the process has no device of the backend's `platforms` (a
    program lowered for a GPU on a machine without one).

    Raises:
        AutotuneError: XLA_FP8_AUTOTUNE is wrong, or no config can be used.
    """
    configs = functools.cache(lambda: backend.configs(call, target))
    named: Callable[..., Config | None] | None = getattr(backend, "config_named", None)
    platforms = platforms_of(backend)
    has_device = platforms is None or platform_name(jax.default_backend()) in platforms
    wanted = mode() if may_time and has_device else "0"
    if not backend.opaque or (named is None and len(configs()) <= 1):
        return configs()[0]
    key = key_of(backend, call)

    def find(name: str | None) -> Config | None:
        """The config with this text, or the heuristic's choice."""
        if named is not None:
            return named(call, target, name)
        return next((config for config in configs() if name is None or str(config) == name), None)

    def choose() -> str:
        known = None if wanted == "force" else cache.load(key)
        if known is not None and find(known.config) is not None:
            return known.config
        return str(find(None)) if wanted == "0" else _tune_and_store(backend, call, target, configs(), key)

    # One thread tunes at a time: timings of two would be of two programs on one device.
    with _lock:
        name = _shared(key, choose)
    found = find(name)
    return find(None) if found is None else found


def key_of(backend: Backend, call: GraphCall) -> dict[str, str]:
    """What a choice depends on."""
    device = jax.local_devices()[0]
    return {
        "call": call_text.encode(call),
        "backend": repr(backend),
        "backend_version": str(getattr(backend, "version", "")),
        "device": f"{device.device_kind} (compute capability {getattr(device, 'compute_capability', 'none')})",
        "jaxlib": _jax_compat.jaxlib_version(),
    }


def tune(backend: Backend, call: GraphCall, configs: Sequence[Config]) -> list[Timing]:
    """Times every config; the fastest first, those that cannot be used last. Shows progress on a terminal.

    All are compiled side by side, as compiling takes most of the time and XLA, which tunes its own convolutions
    meanwhile, takes the longest. Then they are timed one by one while nothing else runs.
    """
    arrays = _random_operands(call)
    operands = [jnp.asarray(array) for array in arrays]
    timings = []
    with (
        concurrent.futures.ThreadPoolExecutor(thread_name_prefix="xla_fp8-compile") as pool,
        Progress(len(configs)) as progress,
    ):
        # The last first: a peer's config, which takes the longest, stands behind the others.
        compiled = [pool.submit(_compiled, backend, call, config, operands) for config in reversed(configs)][::-1]
        reference_outputs = pool.submit(_expected, call, arrays)
        progress.show(0, f"compiling for {backend.name}")
        for done, _ in enumerate(concurrent.futures.as_completed(compiled), start=1):
            progress.show(done, f"compiling for {backend.name}")
        expected = [_sample(output) for output in reference_outputs.result()]
        for done, (config, program) in enumerate(zip(configs, compiled, strict=True), start=1):
            progress.show(done, f"timing {backend.name} {config}")
            timings.append(_timing(call, config, program, operands, expected))
    return sorted(timings, key=lambda timing: timing.microseconds)


def _random_operands(call: GraphCall) -> list[np.ndarray[Any, Any]]:
    """Operands of which at most `_RANDOM` elements differ; larger ones repeat them."""
    few = [
        shape if shape.element_count <= _RANDOM else Shape.array(shape.element_type, (_RANDOM,))
        for shape in call.operand_shapes
    ]
    arrays = random_operands(call, few)
    return [np.resize(array, shape.dimensions) for array, shape in zip(arrays, call.operand_shapes, strict=True)]


def _calls(call: GraphCall) -> int:
    """How many calls one jit has: fewer than `CALLS` of a call whose results are large, which takes long by itself."""
    sizes = (shape.element_count * numpy_dtype(shape.element_type).itemsize for shape in call.output_shapes)
    return max(1, min(CALLS, _MOST_RESULTS // max(1, sum(sizes))))


def _compiled(backend: Backend, call: GraphCall, config: Config, operands: Sequence[jax.Array]) -> Any:
    """A program of several calls, so that what is timed is the device and not the dispatch."""
    one = jax.jit(backend.lower(call, config))  # traced once; XLA inlines the calls

    def several(*operands: jax.Array) -> list[tuple[jax.Array, ...]]:
        # Every result is returned, so that no call is dropped; behind a barrier XLA cannot see that they are the same.
        outputs = [one(*operands)]
        for _ in range(_calls(call) - 1):
            operands, outputs[-1] = jax.lax.optimization_barrier(  # type: ignore[no-untyped-call]
                (operands, outputs[-1])
            )
            outputs.append(one(*operands))
        return outputs

    # In the program that is lowered, too, a Python number is of 32 bits; a thread has the x64 mode of the process.
    with jax.enable_x64(False):
        return jax.jit(several).lower(*operands).compile()


def _device_time(compiled: Any, calls: int, operands: Sequence[jax.Array]) -> float:
    """Microseconds of one of the calls of a program on the device: several runs of it before anything is awaited."""

    def seconds(runs: int) -> float:
        start = time.perf_counter()
        for _ in range(runs):
            result = compiled(*operands)
        jax.block_until_ready(result)  # type: ignore[no-untyped-call]
        return (time.perf_counter() - start) / runs

    seconds(1)
    runs = max(1, min(_MOST_RUNS, int(_ROUND / seconds(1))))
    return statistics.median(seconds(runs) for _ in range(_ROUNDS)) / calls * 1e6


def _tune_and_store(
    backend: Backend, call: GraphCall, target: Target, configs: Sequence[Config], key: Mapping[str, str]
) -> str:
    start = time.perf_counter()
    timings = _outside_any_trace(lambda: tune(backend, call, configs))
    slower = getattr(backend, "slower_configs", None)
    if timings[0].problem and slower and (others := slower(call, target)):
        configs = others
        timings = _outside_any_trace(lambda: tune(backend, call, others))
    best = timings[0]
    if best.problem:
        raise AutotuneError(
            f"none of {len(configs)} configs of the {backend.name} backend runs {call.graph} and agrees with the "
            f"reference; the first: {best.problem}"
        )
    if settled := getattr(backend, "settled", None):
        settled(call, best.config)
    first = next(timing for timing in timings if timing.config == configs[0])
    seconds = time.perf_counter() - start
    cache.store(
        cache.Choice(
            dict(key),
            str(best.config),
            best.microseconds,
            None if first.problem else first.microseconds,
            len(configs),
            seconds,
            datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
    )
    heuristic = "unusable" if first.problem else f"{first.microseconds:.1f} us"
    print(
        f"xla_fp8: timed {len(configs)} {backend.name} configs in {seconds:.1f} s: {best.config} takes "
        f"{best.microseconds:.1f} us (the heuristic's choice: {heuristic}) for {call.graph}",
        file=sys.stderr,
    )
    return str(best.config)


def _outside_any_trace(work: Callable[[], _T]) -> _T:
    """`work()` in a thread of its own, as the caller may be tracing or lowering a program.

    JAX keeps traces, axis names, meshes, settings and the MLIR context for each thread, so there are none of the
    caller's in a new one. `jax.ensure_compile_time_eval` does less, and too much: it evaluates a kernel's
    `lax.axis_index` at once, where its grid has no name yet ("unbound axis name").
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="xla_fp8-autotune") as executor:
        return executor.submit(work).result()


def _timing(
    call: GraphCall,
    config: Config,
    program: concurrent.futures.Future[Any],
    operands: Sequence[jax.Array],
    expected: Sequence[Any],
) -> Timing:
    try:
        compiled = program.result()
        outputs = [_sample(output) for output in compiled(*operands)[-1]]
        for index, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
            difference = compare(wanted, output)
            if not AGREEMENT.accepts(difference, wanted.dtype):
                problem = (
                    f"{config}: result {index} differs from the reference in {difference.share:.1%} of its elements"
                )
                return Timing(config, float("inf"), f"{problem}, by {difference.max_abs:g} at most")
        return Timing(config, _device_time(compiled, _calls(call), operands))
    except Exception as error:  # whatever a candidate dies of, the others may run
        return Timing(config, float("inf"), f"{config}: {' '.join(str(error).split())[:500]}")


def _sample(output: jax.Array) -> np.ndarray[Any, Any]:
    """A million elements of a result, evenly spread: enough to tell right from wrong, quick to compare."""
    return np.asarray(output.reshape(-1)[:: max(1, output.size >> 20)])


def _expected(call: GraphCall, operands: Sequence[np.ndarray[Any, Any]]) -> tuple[jax.Array, ...]:
    """The reference's results; from the CPU, where there is nothing to tune for an f32 convolution."""
    try:
        device = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        device = None
    with jax.default_device(device):
        outputs: tuple[jax.Array, ...] = jax.jit(reference.implementation_of(call))(*operands)
    return outputs


def _shared(key: Mapping[str, str], choose: Callable[[], str]) -> str:
    """`choose()` of the first process, in all processes of the program."""
    if jax.process_count() == 1:
        return choose()
    name = f"xla_fp8/autotune/{call_text.digest(key)}"
    if jax.process_index() == 0:
        choice = choose()
        _jax_compat.publish(name, choice)
        return choice
    return _jax_compat.await_published(name, _WAIT)
