"""How a tensor is cut for `resident`: chunks that one TMA copy moves, dealt to warpgroups in turn.

TMA leaves out what a chunk has beyond the end of a dimension: it loads zeros there and stores nothing. But Mosaic GPU
stores a chunk that is contiguous in memory without a descriptor, as so many bytes, and stops only at the end of the
array (`LaunchContext.async_copy`, jax 0.11.2; seen on an H200): such a chunk may reach over the end of the first
dimension alone.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl

_WIDEST = 256  # elements along a side of what TMA copies
_ALIGNED = 16  # elements: rows of FP8 start at multiples of 16 bytes

Box = tuple[Any, ...]
"""Where a chunk lies: an index or a slice for each dimension of a view."""


class Chunks(Protocol):
    """A way to cut a tensor.

    Attributes:
        rows, columns: of a chunk.
        count: how many there are.
        views: the shapes in which the kernel sees the tensor, and its copy with the last two dimensions exchanged.
    """

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def count(self) -> int: ...

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...]]: ...

    @property
    def fits(self) -> bool:
        """Whether TMA can copy the chunks."""

    def boxes(self, number: jax.Array) -> tuple[Box, Box]:
        """Where chunk `number` lies in each view."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A tensor as rows of a width that divides it, in chunks of some rows.

    Attributes:
        size: elements of the tensor.
        elements: of a chunk; a power of two.
    """

    size: int
    elements: int

    @property
    def columns(self) -> int:
        """The largest power of two within TMA's limit that divides the size."""
        return min(_WIDEST, self.size & -self.size)

    @property
    def rows(self) -> int:
        return self.elements // self.columns

    @property
    def count(self) -> int:
        return -(-self.size // self.elements)

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        view = self.size // self.columns, self.columns
        return view, view[::-1]

    @property
    def fits(self) -> bool:
        return self.size % _ALIGNED == 0 and self.size >= self.elements and self.rows <= _WIDEST

    def boxes(self, number: jax.Array) -> tuple[Box, Box]:
        rows, columns = pl.ds(number * self.rows, self.rows), pl.ds(0, self.columns)
        return (rows, columns), (columns, rows)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """A tensor as matrices cut into tiles, each of which also has a place in the transposed copy.

    Attributes:
        matrices: product of all dimensions but the last two.
        size: the last two dimensions.
        tile: rows and columns of a tile.
    """

    matrices: int
    size: tuple[int, int]
    tile: tuple[int, int]

    @staticmethod
    def of(shape: tuple[int, ...], tile: tuple[int, int]) -> Tiles:
        *leading, rows, columns = shape
        return Tiles(math.prod(leading), (rows, columns), tile)

    @property
    def rows(self) -> int:
        return self.tile[0]

    @property
    def columns(self) -> int:
        return self.tile[1]

    @property
    def _grid(self) -> tuple[int, int]:
        return -(-self.size[0] // self.rows), -(-self.size[1] // self.columns)

    @property
    def count(self) -> int:
        return self.matrices * math.prod(self._grid)

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.matrices, *self.size), (self.matrices, *self.size[::-1])

    @property
    def fits(self) -> bool:
        pairs = list(zip(self.size, self.tile, strict=True))
        return all(side % _ALIGNED == 0 and part <= min(side, _WIDEST) for side, part in pairs) and not self._spills

    @property
    def _spills(self) -> bool:
        """Whether what a tile has beyond its matrix would be stored, as zeros, at the beginning of the next matrix."""
        (rows, columns), (tile_rows, tile_columns) = self.size, self.tile
        row = columns == tile_columns and rows % tile_rows > 0
        transposed = rows == tile_rows and columns % tile_columns > 0
        return self.matrices > 1 and (row or transposed)

    def boxes(self, number: jax.Array) -> tuple[Box, Box]:
        down, across = self._grid
        tile, matrix = lax.rem(number, down * across), lax.div(number, down * across)
        rows = pl.ds(lax.div(tile, across) * self.rows, self.rows)
        columns = pl.ds(lax.rem(tile, across) * self.columns, self.columns)
        return (matrix, rows, columns), (matrix, columns, rows)
