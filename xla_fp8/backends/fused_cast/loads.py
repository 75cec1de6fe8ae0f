"""Tiles of matrices and of tables, as f32."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.fused_cast.arithmetic import Tiles
from xla_fp8.backends.fused_cast.problem import Joined, Matrix, Table
from xla_fp8.backends.triton.instructions import to_f32


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the tiles of a program are: beside each other in some rows, or below each other in some columns.

    Attributes:
        rows, columns: the first ones of each tile, of which one is that of all. They are of one image.
        height, width: of a tile.
        threads: of a program.
        own: how many of its columns are loaded; None for all.
    """

    rows: tuple[Any, ...]
    columns: tuple[Any, ...]
    height: int
    width: int
    threads: int
    interpret: bool
    own: int | None = None

    @property
    def tiles(self) -> list[tuple[Any, Any]]:
        return [(row, column) for row in self.rows for column in self.columns]

    def whole(self, tiles: Tiles) -> Tiles:
        """A tile of all elements for each place, of a value that may have fewer numbers."""
        each = tiles * len(self.tiles) if len(tiles) == 1 else tiles
        return [jnp.broadcast_to(tile, (self.height, self.width)) for tile in each]

    def load(self, at: Any, shape: tuple[int, ...]) -> jax.Array:
        """What is at a place in memory, of a shape whose last dimension is that of a tile's columns."""
        return triton.load(at) if self.own is None else triton.load(at, mask=self.mask(shape), other=0.0)

    def mask(self, shape: tuple[int, ...]) -> jax.Array | None:
        if self.own is None:
            return None
        return lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) < self.own


def loaded(operand: Matrix | Joined | Table, arrays: Sequence[Any], place: Place) -> Tiles:
    """An operand."""
    return table(operand, arrays, place) if isinstance(operand, Table) else wide(stored(operand, arrays, place), place)


def stored(operand: Matrix | Joined, arrays: Sequence[Any], place: Place) -> Tiles:
    """A tensor's tiles as they are in memory."""
    if isinstance(operand, Matrix):
        return [_tile(arrays[0], row, operand.first + column, place) for row, column in place.tiles]
    parts = [(ref, part.width) for ref, part in zip(arrays, operand.parts, strict=True)]
    return [_tile_of(parts, row, column, place) for row, column in place.tiles]


def wide(tiles: Tiles, place: Place) -> Tiles:
    """In f32 what `stored` has loaded."""
    return [to_f32(tile, interpret=place.interpret) for tile in tiles]


def _tile(ref: Any, row: Any, column: Any, place: Place) -> jax.Array:
    at = ref.at[pl.ds(row, place.height), pl.ds(column, place.width)]
    return place.load(at, (place.height, place.width))


def _tile_of(parts: Sequence[tuple[Any, int]], row: Any, column: Any, place: Place) -> jax.Array:
    """A tile of matrices beside each other; it lies within one of them."""
    (ref, width), *others = parts
    if not others:
        return _tile(ref, row, column, place)
    tile: jax.Array = lax.cond(
        column < width,
        lambda: _tile(ref, row, column, place),
        lambda: _tile_of(others, row, column - width, place),
    )
    return tile


def table(operand: Table, arrays: Sequence[Any], place: Place) -> Tiles:
    """Its numbers for the tiles' rows and columns."""
    [ref] = arrays
    if operand.period == 1:
        of_rows = [triton.load(ref.at[pl.ds(row, place.height)]).astype(jnp.float32)[:, None] for row in place.rows]
        return of_rows if len(of_rows) == 1 else of_rows * len(place.columns)
    start = lax.div(place.rows[0], operand.period) * operand.pitch if operand.period else jnp.int32(0)
    if not operand.columns:
        return [triton.load(ref.at[start]).astype(jnp.float32)]
    # As many numbers as a program has threads Triton would load once, and hand from thread to thread through shared
    # memory, behind a barrier: they are loaded as a tile of rows that are alike.
    shape = (place.height, place.width) if place.width >= place.threads else (place.width,)
    tiles = [place.load(ref.at[_places(operand, start, column, shape)], shape) for column in place.columns]
    return [tile.astype(jnp.float32).reshape(-1, place.width) for tile in tiles]


def _places(operand: Table, start: Any, column: Any, shape: tuple[int, ...]) -> Any:
    """Where in a table the numbers of the columns from `column` are; those of rows are alike."""
    if operand.is_by_column and len(shape) == 1:
        return pl.ds(start + column, *shape)
    at = column + lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
    if operand.is_by_column:
        return start + at
    places = jnp.full(shape, start, jnp.int32)
    for stride, extent, step in operand.columns:
        places += lax.rem(lax.div(at, jnp.int32(stride)), jnp.int32(extent)) * jnp.int32(step)
    return places
