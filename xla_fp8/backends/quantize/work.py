"""How a tensor is cut into the pieces that one step of a kernel reads and writes.

The sides of a piece are powers of two, as Triton has them. The last piece along a dimension ends where the dimension
ends and so overlaps the one before: both write the same bytes there, and no load or store needs a mask, which would
keep Triton from moving 16 bytes at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.quantize.request import multiprocessors

Position = Any
"""Where a piece starts; what `visit` hands to its body."""

Eviction = Literal["evict_first", "evict_last"] | None
"""What the L2 cache is told of the lines that are read."""

_ALIGNED = 16  # elements: with fewer, Triton would not store 16 bytes of FP8 at once


class Work(Protocol):
    """A way to cut a tensor.

    Attributes:
        pieces: how many there are.
        views: the shapes in which kernels see the tensor, and its copy with the last two dimensions exchanged.
    """

    @property
    def pieces(self) -> int: ...

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...]]: ...

    def visit(self, piece: jax.Array, carry: Any, body: Callable[[Position, Any], Any]) -> Any:
        """body(position, carry) of a piece."""

    def load(self, ref: Any, position: Position, eviction: Eviction = None) -> Sequence[jax.Array]:
        """The piece, as one or several blocks whose loads do not wait for each other."""

    def store(self, row: Any, transposed: Any, position: Position, blocks: Sequence[jax.Array]) -> None:
        """Writes the piece to the copies that there are; the others are None."""


@dataclasses.dataclass(frozen=True)
class Flat:
    """A tensor as one row of numbers: for the amax, and for a cast without a transposed copy.

    Attributes:
        size: elements of the tensor.
        block: elements of one load.
        loads: loads of a piece.
    """

    size: int
    block: int
    loads: int

    @staticmethod
    def of(size: int, block: int, loads: int, each: int = 0) -> Flat:
        """Pieces of at most so many loads of at most so many elements; where there would be fewer than `each` pieces
        for a multiprocessor, of fewer loads."""
        block = min(block, _power_of_two_within(size))
        while loads > 1 and size < block * loads * max(1, each * multiprocessors()):
            loads //= 2
        return Flat(size, block, loads)

    @property
    def _piece(self) -> int:
        return self.block * self.loads

    @property
    def pieces(self) -> int:
        return -(-self.size // self._piece)

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.size,), (self.size,)

    def visit(self, piece: jax.Array, carry: Any, body: Callable[[Position, Any], Any]) -> Any:
        last = self.size - self._piece
        if self.pieces == 1:
            return body(0, carry)
        if self.size % self._piece == 0:
            return body(piece * self._piece, carry)
        if self.size % _ALIGNED == 0 and self._piece % _ALIGNED == 0:
            return body(pl.multiple_of(jnp.minimum(piece * self._piece, last), _ALIGNED), carry)
        # Only the last piece is not aligned, so only that one is moved element by element.
        return lax.cond(
            piece < self.pieces - 1,
            lambda: body(piece * self._piece, carry),
            lambda: body(jnp.int32(last), carry),
        )

    def load(self, ref: Any, position: Position, eviction: Eviction = None) -> Sequence[jax.Array]:
        views = [ref.at[pl.ds(position + i * self.block, self.block)] for i in range(self.loads)]
        return [triton.load(view, eviction_policy=eviction) for view in views]

    def store(self, row: Any, transposed: Any, position: Position, blocks: Sequence[jax.Array]) -> None:
        for i, block in enumerate(blocks):
            triton.store(row.at[pl.ds(position + i * self.block, self.block)], block)


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A tensor as matrices cut into tiles, which are transposed in registers and shared memory.

    Attributes:
        matrices: product of all dimensions but the last two.
        rows, columns: the last two dimensions.
        tile: rows and columns of a tile.
    """

    matrices: int
    rows: int
    columns: int
    tile: tuple[int, int]

    @staticmethod
    def of(shape: tuple[int, ...], tile: tuple[int, int]) -> Tiled:
        *leading, rows, columns = shape
        fitting = min(tile[0], _power_of_two_within(rows)), min(tile[1], _power_of_two_within(columns))
        return Tiled(math.prod(leading), rows, columns, fitting)

    @property
    def _grid(self) -> tuple[int, int]:
        return -(-self.rows // self.tile[0]), -(-self.columns // self.tile[1])

    @property
    def pieces(self) -> int:
        return self.matrices * math.prod(self._grid)

    @property
    def views(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (self.matrices, self.rows, self.columns), (self.matrices, self.columns, self.rows)

    def visit(self, piece: jax.Array, carry: Any, body: Callable[[Position, Any], Any]) -> Any:
        down, across = self._grid
        tile, matrix = lax.rem(piece, down * across), lax.div(piece, down * across)
        row = _start(lax.div(tile, across), self.tile[0], self.rows)
        column = _start(lax.rem(tile, across), self.tile[1], self.columns)
        return body((matrix, row, column), carry)

    def load(self, ref: Any, position: Position, eviction: Eviction = None) -> Sequence[jax.Array]:
        matrix, row, column = position
        tile = ref.at[matrix, pl.ds(row, self.tile[0]), pl.ds(column, self.tile[1])]
        return [triton.load(tile, eviction_policy=eviction)]

    def store(self, row: Any, transposed: Any, position: Position, blocks: Sequence[jax.Array]) -> None:
        matrix, first_row, first_column = position
        (block,) = blocks
        rows, columns = pl.ds(first_row, self.tile[0]), pl.ds(first_column, self.tile[1])
        if row is not None:
            triton.store(row.at[matrix, rows, columns], block)
        if transposed is not None:
            triton.store(transposed.at[matrix, columns, rows], block.T)


def _start(index: jax.Array, side: int, size: int) -> jax.Array:
    """Where tile `index` starts along a dimension."""
    if size % side == 0:
        return index * side
    return pl.multiple_of(jnp.minimum(index * side, size - side), math.gcd(side, size))


def _power_of_two_within(size: int) -> int:
    """The largest power of two that is not larger than size."""
    return 1 << (size.bit_length() - 1)
