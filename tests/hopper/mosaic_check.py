"""Runs one case of the Mosaic kernel on the GPU and judges what came out.

A case is right if

- every element of every result is within the bound that `error_bound` derives for the tensor core (for `exact`
  operands: for f32);
- that holds for a run into memory that was filled with NaNs before, so every element was written;
- what lies before and behind each result in memory is unchanged, so nothing else was written;
- repeated runs give the same bits.

XLA allocates results itself. Memory for them is poisoned by filling arrays of their sizes and freeing those just before
the run: the allocator hands the freshly freed, fitting blocks out again. Between them lie the guards. Whether it did so
is checked by address, and is part of the outcome.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tests.hopper.mosaic_cases import Array, MosaicCase
from xla_fp8.backends.error_bound import F32, TENSOR_CORE, Accumulator, Interval, intervals
from xla_fp8.backends.mosaic.configs import Config
from xla_fp8.hlo.literal import numpy_dtype

GUARD = np.full(1 << 16, 0x5A, np.uint8)
ALIGNMENT = 256
"""Of blocks of XLA's allocator."""

AT_ONCE = 10
"""Repeats whose results are in memory at a time."""


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A case, compiled for the GPU, with what has to come out of it."""

    case: MosaicCase
    config: Config
    compiled: Any
    operands: list[Array]
    wanted: list[Interval]
    seconds: dict[str, float]


def prepare(case: MosaicCase, platform: str | None = None) -> Prepared:
    """Compiles a case and computes its reference on the CPU. May run in any thread.

    Args:
        platform: lower for this one, and compile nothing: to try it where there is no GPU.
    """
    times = [time.perf_counter()]
    config = case.chosen_config
    shapes = [
        jax.ShapeDtypeStruct(shape.dimensions, numpy_dtype(shape.element_type))  # type: ignore[no-untyped-call]
        for shape in case.call.operand_shapes
    ]
    traced = jax.jit(case.backend.lower(case.call, config)).trace(*shapes)
    lowered = traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()
    times.append(time.perf_counter())
    compiled = None if platform else lowered.compile()
    times.append(time.perf_counter())
    operands = case.arrays()
    wanted = reference(case, config, operands)
    times.append(time.perf_counter())
    names = ("lower", "compile", "reference")
    seconds = {name: round(b - a, 3) for name, a, b in zip(names, times, times[1:], strict=False)}
    return Prepared(case, config, compiled, operands, wanted, seconds)


def accumulator(case: MosaicCase, config: Config) -> Accumulator:
    """How the kernel adds up: `exact` operands leave the tensor core nothing to lose."""
    if case.operands == "exact":
        return F32
    if config.promote:
        return dataclasses.replace(TENSOR_CORE, promoted=config.tile_channels)
    return TENSOR_CORE


def reference(case: MosaicCase, config: Config, operands: Sequence[Array]) -> list[Interval]:
    with jax.default_device(jax.devices("cpu")[0]):
        return intervals(case.call, operands, accumulator(case, config))


def verify(prepared: Prepared, repeats: int) -> dict[str, Any]:
    """Runs a case `repeats` times, the first time into poisoned memory; returns what was found, "outcome" included."""
    start = time.perf_counter()
    arrays = [jax.device_put(operand) for operand in prepared.operands]
    jax.block_until_ready(arrays)  # type: ignore[no-untyped-call]
    outputs, found = run_surrounded(prepared, arrays)
    first = [np.asarray(output) for output in outputs]
    differing = 0
    for many in range(1, repeats, AT_ONCE):
        again = [prepared.compiled(*arrays) for _ in range(min(AT_ONCE, repeats - many))]
        differing += sum(
            any(np.asarray(a).tobytes() != b.tobytes() for a, b in zip(r, first, strict=True)) for r in again
        )
    outside = [int(np.count_nonzero(i.outside(output))) for i, output in zip(prepared.wanted, first, strict=True)]
    wrong = {
        "beyond the bound": sum(outside),
        "guards overwritten": found["guards_overwritten"],
        "repeats that differ": differing,
    }
    messages = [f"{count} {what}" for what, count in wrong.items() if count]
    messages += [
        describe(i, output) for i, output in zip(prepared.wanted, first, strict=True) if i.outside(output).any()
    ]
    return {
        "outcome": "failed" if messages else "passed",
        "message": "; ".join(messages),
        "outside": outside,
        "share_equal": [share_equal(i.stored, output) for i, output in zip(prepared.wanted, first, strict=True)],
        "of_bound": [of_bound(i, output) for i, output in zip(prepared.wanted, first, strict=True)],
        "repeats": repeats,
        **found,
        "seconds": {**prepared.seconds, "run": round(time.perf_counter() - start, 3)},
    }


def run_surrounded(prepared: Prepared, arrays: Sequence[jax.Array]) -> tuple[Sequence[jax.Array], dict[str, Any]]:
    """One run into poisoned memory between guards."""
    sizes = [
        shape.element_count * numpy_dtype(shape.element_type).itemsize for shape in prepared.case.call.output_shapes
    ]
    memory = prepared.compiled.memory_analysis()
    temporary = int(getattr(memory, "temp_size_in_bytes", 0))
    guards, poisoned = [jax.device_put(GUARD)], []
    for size in (*sizes, *([temporary] if temporary else [])):
        poisoned.append(jax.device_put(np.full(size, 0xFF, np.uint8)))  # NaN in every float type
        guards.append(jax.device_put(GUARD))
    jax.block_until_ready([guards, poisoned])  # type: ignore[no-untyped-call]
    blocks = {address(array): size for array, size in zip(poisoned, sizes, strict=False)}
    guarded_ends = {address(guard) for guard in guards}
    for array in poisoned:
        array.delete()
    outputs = prepared.compiled(*arrays)
    jax.block_until_ready(outputs)  # type: ignore[no-untyped-call]
    overwritten = sum(int(np.count_nonzero(np.asarray(guard) != 0x5A)) for guard in guards)
    tensors = [(address(output), size) for output, size in zip(outputs, sizes, strict=True)]
    return outputs, {
        "guards_overwritten": overwritten,
        "poisoned": sum(start in blocks for start, _ in tensors),
        "guarded": sum(
            start - GUARD.nbytes in guarded_ends and start + -(-size // ALIGNMENT) * ALIGNMENT in guarded_ends
            for start, size in tensors
        ),
        "results": len(tensors),
    }


def address(array: jax.Array) -> int:
    return int(array.unsafe_buffer_pointer())


def share_equal(wanted: Array, output: Array) -> float:
    a, b = wanted.astype(np.float64), output.astype(np.float64)
    return float(np.mean((a == b) | (np.isnan(a) & np.isnan(b))))


def of_bound(interval: Interval, output: Array) -> float | None:
    """The largest error as a part of the bound, of a result in f32, which storing does not round."""
    usable = np.isfinite(interval.value) & (interval.error > 0)
    if interval.type != "f32" or not usable.any():
        return None
    return float(np.max(np.abs(output - interval.value)[usable] / interval.error[usable]))


def describe(interval: Interval, output: Array) -> str:
    """One element that is beyond the bound."""
    wrong = interval.outside(output)
    where = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    return (
        f"{interval.type} result: {output[where]} at {where} of {wrong.shape} for {interval.value[where]} +- "
        f"{interval.error[where]}"
    )
