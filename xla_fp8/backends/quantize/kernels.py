"""The two things that quantization kernels do, amax and cast.

    walk(work, ...)       a program's share of the pieces, forward or backward
    amax_bits(...)        the largest |x| of a piece as bits: an integer
    multiplier_of(...)    what x is multiplied by
    cast(...)             x * multiplier → FP8
    find_amax, cast_all   kernels of these

The amax is the largest of the bits of |x| as unsigned integers: for numbers that is their order, infinity comes above
all numbers and NaN above infinity. So NaN is kept, which Triton's floating-point maximum loses, and one instruction of
the memory system (atomic max) joins the blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.quantize.request import Rule
from xla_fp8.backends.quantize.work import Eviction, Work
from xla_fp8.backends.triton.launch import launch

Known = Literal["amax", "scale", "multiplier"]
"""What the numbers that a cast is given are: amaxes of parts of the tensor, one scale, or one multiplier."""

Joined = Literal["atomic", "partial"]
"""How programs join their amaxes: with an atomic max, or each writes its own."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)


# Inside of kernels


def walk(
    work: Work,
    programs: int,
    carry: Any,
    body: Callable[[Any, Any], Any],
    *,
    backward: bool = False,
) -> Any:
    """body(position, carry) of every `programs`-th piece, one after the other; `backward` starts with the last."""
    program = pl.program_id(0)
    if programs == work.pieces:
        return work.visit(work.pieces - 1 - program if backward else program, carry, body)
    count = lax.div(work.pieces - program + programs - 1, programs)

    def step(i: jax.Array, carry: Any) -> Any:
        return work.visit(program + programs * (count - 1 - i if backward else i), carry, body)

    return lax.fori_loop(0, count, step, carry)


def no_amax(work: Work, x: Any) -> Any:
    """What `amax_bits` starts with: zeros, of the shape of a block."""
    blocks = jax.eval_shape(lambda: work.load(x, work.visit(jnp.int32(0), None, lambda position, _: position)))
    return jnp.zeros(blocks[0].shape, jnp.uint32)


def amax_bits(blocks: Sequence[jax.Array], so_far: jax.Array) -> jax.Array:
    """The largest of the bits of |x| in f32, element by element of a block; to be reduced once, at the end."""
    for block in blocks:
        bits = lax.bitcast_convert_type(block.astype(jnp.float32), jnp.uint32)
        so_far = jnp.maximum(so_far, bits & _MAGNITUDE)
    return so_far


def from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)


def multiplier_of(rule: Rule, value: jax.Array, known: Known) -> tuple[jax.Array, jax.Array]:
    """(multiplier, scale) of an amax or scale. Of a multiplier there is no scale here: the second means nothing."""
    if known == "amax":
        multiplier, scale = rule.of_amax(value)
        if not rule.keeps_nan:
            return multiplier, scale
        is_nan = value != value  # which the rule's maximum drops in Triton
        return lax.select(is_nan, value, multiplier), lax.select(is_nan, value, scale)
    if known == "scale":
        return rule.of_scale(value), value
    return value, value


def cast(rule: Rule, block: jax.Array, multiplier: jax.Array) -> jax.Array:
    """The saturating cast of a block that is scaled."""
    scaled = rule.scaled(block.astype(jnp.float32), multiplier)
    largest = np.float32(rule.largest)
    clamped = jnp.minimum(jnp.maximum(scaled, -largest), largest)
    # Triton's minimum and maximum drop NaN.
    return lax.select(scaled != scaled, scaled, clamped).astype(rule.dtype)


# Kernels


def find_amax(work: Work, x: jax.Array, joined: Joined, *, programs: int, warps: int, interpret: bool) -> jax.Array:
    """The amax of x as f32[1], or of the parts that each program saw as f32[programs]."""

    def kernel(x_ref: Any, *refs: Any) -> None:
        bits = jnp.max(walk(work, programs, no_amax(work, x_ref), functools.partial(_amax_step, work, x_ref)))
        join(refs[-1], bits, joined)

    (bits,) = launch(
        kernel,
        [x.reshape(work.views[0]), *start_of(joined)],
        [((join_size(joined, programs),), jnp.uint32)],
        name="quantize_amax",
        programs=programs,
        warps=warps,
        interpret=interpret,
        aliases={1: 0} if joined == "atomic" else None,
    )
    return from_bits(bits)


def _amax_step(work: Work, x: Any, position: Any, so_far: jax.Array) -> jax.Array:
    return amax_bits(work.load(x, position), so_far)


def start_of(joined: Joined) -> list[jax.Array]:
    """The array that an atomic max starts with."""
    return [jnp.zeros(1, jnp.uint32)] if joined == "atomic" else []


def join_size(joined: Joined, programs: int) -> int:
    return 1 if joined == "atomic" else programs


def join(ref: Any, bits: jax.Array, joined: Joined) -> None:
    """A program's own amax joins the others'."""
    if joined == "atomic":
        triton.atomic_max(ref, jnp.int32(0), bits)
    else:
        ref[pl.program_id(0)] = bits


def cast_all(
    work: Work,
    x: jax.Array,
    values: jax.Array,
    known: Known,
    rule: Rule,
    copies: tuple[bool, bool],
    amax: Joined | None,
    *,
    programs: int,
    warps: int,
    interpret: bool,
    eviction: Eviction = None,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array, jax.Array, jax.Array | None]:
    """Casts x, walking from its end to its start: what an amax pass read last is then still in the L2 cache.

    Args:
        values: f32, one number; of amaxes a power of two of them, whose largest each program finds by itself.
        copies: whether there is a row-major and a transposed one.
        amax: how the amax of x is found on the way; None where it is not.

    Returns:
        row, transposed, multiplier's scale f32[], the largest of `values` f32[], and the amax of x: f32[1] or, by
        program, f32[programs].
    """

    def kernel(x_ref: Any, values_ref: Any, *refs: Any) -> None:
        outputs = list(refs[len(start) :])
        row = outputs.pop(0) if copies[0] else None
        transposed = outputs.pop(0) if copies[1] else None
        value = largest_of(values_ref, values.size)
        multiplier, scale = multiplier_of(rule, value, known)

        @pl.when(pl.program_id(0) == 0)
        def _() -> None:
            outputs[0][0] = scale
            outputs[1][0] = value

        def step(position: Any, so_far: Any) -> Any:
            blocks = work.load(x_ref, position, eviction)
            work.store(row, transposed, position, [cast(rule, block, multiplier) for block in blocks])
            return so_far if so_far is None else amax_bits(blocks, so_far)

        found = walk(work, programs, None if amax is None else no_amax(work, x_ref), step, backward=True)
        if amax is not None:
            join(outputs[2], jnp.max(found), amax)

    start = start_of(amax) if amax is not None else []
    outputs: list[tuple[tuple[int, ...], Any]] = [
        *((view, rule.dtype) for view, wanted in zip(work.views, copies, strict=True) if wanted),
        ((1,), jnp.float32),
        ((1,), jnp.float32),
        *([((join_size(amax, programs),), jnp.uint32)] if amax is not None else []),
    ]
    results = list(
        launch(
            kernel,
            [x.reshape(work.views[0]), values, *start],
            outputs,
            name="quantize_cast",
            programs=programs,
            warps=warps,
            interpret=interpret,
            aliases={2: len(outputs) - 1} if start else None,
        )
    )
    row, transposed = shaped(results, x.shape, copies)
    scale, value = (result.reshape(()) for result in results[:2])
    return row, transposed, scale, value, from_bits(results[2]) if amax is not None else None


def shaped(
    results: list[jax.Array], shape: tuple[int, ...], copies: tuple[bool, bool]
) -> tuple[jax.Array | None, jax.Array | None]:
    """Takes the copies off the front of `results`, in the shapes that they have outside of kernels."""
    row = results.pop(0).reshape(shape) if copies[0] else None
    exchanged = (*shape[:-2], *shape[:-3:-1])
    transposed = results.pop(0).reshape(exchanged) if copies[1] else None
    return row, transposed


def largest_of(values: Any, count: int) -> jax.Array:
    """The largest of the amaxes in a reference, NaN if there is one; the only number if there is one."""
    if count == 1:
        only: jax.Array = values[0]
        return only
    bits = lax.bitcast_convert_type(triton.load(values.at[pl.ds(0, count)]), jnp.uint32)
    return from_bits(jnp.max(bits))
