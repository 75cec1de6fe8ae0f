"""The kernel, in Triton through Pallas: tiles of 128x128 bytes.

A thread loads 16 bytes of each of 4 rows, and makes words of 4 bytes of a column of them; those are what goes through
shared memory, in `stmatrix` and loads of 16 bytes a thread. Byte by byte, as Triton transposes a tile that is loaded
whole, it would take 8 times the loads from shared memory. Both ends are 128 bytes of a row in memory, whole lines.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.transpose.exchange import Exchange
from xla_fp8.backends.triton.launch import launch

NAME = "transpose_fp8"

_TILE = 128
"""Rows and columns: 11 programs of 16 KiB are on a multiprocessor, more than enough loads in flight for its memory."""

_WARPS = 4


def run(exchange: Exchange, x: jax.Array, interpret: bool = False) -> jax.Array:
    """The transpose of x of one byte an element, in any shape of the exchange's size: [batch, columns, between, rows].

    Rows and columns must be multiples of 16.
    """
    down, across = pl.cdiv(exchange.rows, _TILE), pl.cdiv(exchange.columns, _TILE)
    # Interpreted, what moves numbers may make one NaN of another. In a program for a GPU, where nothing does, XLA would
    # have whatever makes x store the bytes beside it, as a tensor of their own.
    given = lax.bitcast_convert_type(x, jnp.int8) if interpret else x
    (result,) = launch(
        functools.partial(_kernel, exchange),
        [given.reshape(exchange.size)],
        [((exchange.size,), given.dtype)],
        name=NAME,
        programs=exchange.batch * down * exchange.between * across,
        warps=_WARPS,
        interpret=interpret,
    )
    shape = (exchange.batch, exchange.columns, exchange.between, exchange.rows)
    return lax.bitcast_convert_type(result, x.dtype).reshape(shape)


def _kernel(exchange: Exchange, source: Any, target: Any) -> None:
    """Programs that follow each other read beside each other: all of some rows, which lie together in memory."""
    rows, between, columns = exchange.rows, exchange.between, exchange.columns
    down, across = pl.cdiv(rows, _TILE), pl.cdiv(columns, _TILE)
    rest, i = _split(pl.program_id(0), across)
    rest, s = _split(rest, between)
    batch, j = _split(rest, down)
    first_row, first_column = j * _TILE, i * _TILE

    quarter = (_TILE // 4, _TILE)
    column = first_column + lax.broadcasted_iota(jnp.int32, quarter, 1)
    read = between - 1 - s if exchange.is_mirrored else s
    start = (batch * rows * between + read) * columns
    loaded = []
    for k in range(4):
        row = first_row + k + 4 * lax.broadcasted_iota(jnp.int32, quarter, 0)
        at = source.at[start + row * (between * columns) + column]
        elements = triton.load(at, mask=_mask((row, rows), (column, columns)))
        loaded.append(lax.bitcast_convert_type(elements, jnp.int8))
    pairs = _interleaved(loaded[0], loaded[2]), _interleaved(loaded[1], loaded[3])
    tile = _interleaved(*pairs).transpose(1, 0, 2, 3).reshape(_TILE, _TILE)

    square = (_TILE, _TILE)
    column = first_column + lax.broadcasted_iota(jnp.int32, square, 0)
    row = first_row + lax.broadcasted_iota(jnp.int32, square, 1)
    start = (batch * columns * between + s) * rows
    at = target.at[start + column * (between * rows) + row]
    triton.store(at, lax.bitcast_convert_type(tile, target.dtype), mask=_mask((row, rows), (column, columns)))


def _split(number: Any, size: int) -> tuple[Any, Any]:
    return lax.div(number, size), lax.rem(number, size)


def _interleaved(x: jax.Array, y: jax.Array) -> jax.Array:
    """Both in a new last dimension."""
    return jnp.concatenate([x[..., None], y[..., None]], axis=-1)


def _mask(*bounds: tuple[jax.Array, int]) -> jax.Array | None:
    """What is in bounds; None where tiles do not reach beyond."""
    masks = [index < size for index, size in bounds if size % _TILE]
    return functools.reduce(jnp.logical_and, masks) if masks else None
