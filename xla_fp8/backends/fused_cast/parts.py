"""Results of all rows: the amax of a value and its sums by column, which each program makes a part of.

A program carries tiles of what it has seen so far down its blocks of rows, joins their elements at the end, and writes
f32[program down, column] or, of the amax, uint32[program]. XLA joins those. Nothing depends on the order in which
programs run.

The amax is the largest of the bits of |x| wherever elements are joined: as unsigned integers they have the order of the
numbers, infinity above these and NaN above infinity. Triton's own maximum drops NaN.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.fused_cast.arithmetic import Tiles
from xla_fp8.backends.fused_cast.loads import Place
from xla_fp8.backends.fused_cast.problem import Result
from xla_fp8.backends.fused_cast.tiling import Tiling
from xla_fp8.backends.triton.instructions import inline_ptx

KINDS = ("amax", "column_sum")
"""Of results."""


def start(result: Result, tiling: Tiling) -> list[jax.Array]:
    """What a program carries before its first block: nothing of a result that it stores block by block."""
    count = {"amax": 1, "column_sum": tiling.tiles * len(result.values)}.get(result.kind, 0)
    return [jnp.zeros((tiling.rows, tiling.columns), jnp.float32)] * count


def joined(result: Result, carried: list[jax.Array], values: Sequence[Tiles], place: Place) -> list[jax.Array]:
    """What it carries behind a block whose tiles these are, by row and column."""
    wholes = [place.whole(tiles) for tiles in values]
    if result.kind == "amax":
        larger = functools.partial(_larger, interpret=place.interpret)
        return [functools.reduce(larger, itertools.chain(*wholes), carried[0])]
    across = len(place.columns)
    columns = [whole[i::across] for whole in wholes for i in range(across)]
    return [functools.reduce(jnp.add, tiles, total) for tiles, total in zip(columns, carried, strict=True)]


def store(result: Result, carried: list[jax.Array], ref: Any, columns: Sequence[Any], down: Any) -> None:
    """Writes a program's part. `columns` are the first ones of the tiles, of all values."""
    if result.kind == "amax":
        ref[pl.program_id(0)] = jnp.max(lax.bitcast_convert_type(carried[0], jnp.uint32))
        return
    for column, total in zip(columns, carried, strict=True):
        triton.store(ref.at[down, pl.ds(column, total.shape[1])], jnp.sum(total, axis=0))


def whole(result: Result, parts: jax.Array) -> jax.Array:
    """The result, of the parts of all programs."""
    if result.kind == "amax":
        return lax.bitcast_convert_type(jnp.max(parts), jnp.float32)
    return jnp.sum(parts, axis=0)


def _larger(so_far: jax.Array, x: jax.Array, *, interpret: bool) -> jax.Array:
    """The larger one of what is not negative and of |x|; NaN where one is."""
    if interpret:
        return jnp.maximum(so_far, jnp.abs(x))
    text = "{ .reg .f32 size; abs.f32 size, $2; max.NaN.f32 $0, $1, size; }"  # one instruction
    return inline_ptx(text, so_far, x, constraints="=f,f,f")
