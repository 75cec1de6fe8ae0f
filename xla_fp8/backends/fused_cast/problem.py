"""What a fused cast computes: a program on the rows of a matrix, whose last value is written as FP8.

    operands   matrices in memory, and tables of fewer numbers: by column, by image, by row, or one
    nodes      elementwise operations, and sums or maxima over a row
    result     float8[rows, columns], saturated

All is computed in f32, as graphs of convolutions are: what the program rounds to 16 bits on the way is not rounded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from xla_fp8.backends.protocol import No, Yes
from xla_fp8.target import Verdict

UNARY = frozenset(
    [
        "abs",
        "copy",
        "erf",
        "erfc",
        "exp",
        "exp2",
        "integer_pow",
        "logistic",
        "neg",
        "rsqrt",
        "sqrt",
        "square",
        "stop_gradient",
        "tanh",
    ]
)
BINARY = frozenset(["add", "add_any", "div", "max", "min", "mul", "sub"])
COMPARISONS = frozenset(["eq", "ge", "gt", "le", "lt", "ne"])
ELEMENTWISE = UNARY | BINARY | COMPARISONS | {"clamp", "select_n"}
REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_sum"})
"""Operations of a node, as JAX names them."""

_LEAST_COLUMNS = 32
_MOST_TILES = 32


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Columns `first` to `first` + columns of a row-major [rows, width] in memory."""

    dtype: np.dtype[Any]
    width: int
    first: int = 0


@dataclasses.dataclass(frozen=True)
class Joined:
    """Matrices beside each other, whole ones: a concatenation that is not in memory."""

    parts: tuple[Matrix, ...]


@dataclasses.dataclass(frozen=True)
class Table:
    """Numbers of which many elements read the same one.

        index = row // period * pitch + sum(column // stride % size * step for stride, size, step in columns)

    Attributes:
        period: rows in a row that read the same; 0 where all do.
        columns: (stride, size, step) for each dimension of the table that lies within a row.
        size: how many numbers there are.
    """

    dtype: np.dtype[Any]
    size: int
    period: int = 0
    pitch: int = 1
    columns: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_by_column(self) -> bool:
        """Whether there is a number for each column, in their order."""
        return bool(self.columns) and self.pitch == math.prod(extent for _, extent, _ in self.columns) == (
            self.columns[0][0] * self.columns[0][1]
        )

    @property
    def is_by_group(self) -> bool:
        """Whether there is a number for each group of columns, of each image or of all."""
        return self.period != 1 and len(self.columns) == 1 and self.columns[0][0] > 1


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums of groups of columns: one for each image and group, of `width` numbers that are beside each other in memory.

    Attributes:
        period: rows of an image.
    """

    dtype: np.dtype[Any]
    period: int
    groups: int
    width: int


Operand = Matrix | Joined | Table | Sums


@dataclasses.dataclass(frozen=True)
class Constant:
    """A number of the program's."""

    value: float


@dataclasses.dataclass(frozen=True)
class Node:
    """
    Attributes:
        op: one of `ELEMENTWISE` or `REDUCTIONS`.
        operands: positions among operands and nodes, which follow them; or constants.
        exponent: of an integer_pow.
    """

    op: str
    operands: tuple[int | Constant, ...]
    exponent: int = 1


@dataclasses.dataclass(frozen=True)
class FusedCast:
    """
    Attributes:
        result: what is written: the position of a value, or, where that is clamped to what `dtype` holds, of the value
            before: the cast saturates.
    """

    rows: int
    columns: int
    dtype: np.dtype[Any]
    operands: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    result: int

    @property
    def reduces(self) -> bool:
        """Whether a program needs whole rows."""
        return any(node.op in REDUCTIONS for node in self.nodes)


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a fused cast is cut into programs of `rows` rows and `tiles` tiles of `columns` columns beside each other."""

    rows: int
    columns: int
    tiles: int
    warps: int


def tiling_of(problem: FusedCast) -> Tiling | No:
    """The tiling, or why there is none."""
    reduces = problem.reduces
    # Where a table of a tile has fewer numbers than the program threads, Triton loads it as the tile needs it; else it
    # goes through shared memory, behind a barrier.
    warps, most_columns = (8, 128) if reduces else (4, 64)
    parts = [part.width for operand in problem.operands if isinstance(operand, Joined) for part in operand.parts]
    columns = math.gcd(problem.columns, most_columns, *parts)
    tiles = problem.columns // columns if reduces else 1
    if columns < _LEAST_COLUMNS or tiles > _MOST_TILES:
        return No(f"rows of {problem.columns} elements are no few tiles of a power of two")
    periods = [o.period for o in problem.operands if isinstance(o, (Table, Sums)) and o.period > 1]
    rows = math.gcd(problem.rows, *periods, 1 << 30)  # a power of two
    # 16 bytes of 8 elements are a load of a thread. Of a reduction all of a row is in registers.
    threads = 32 * warps
    while rows * columns > 32 * threads // (4 if reduces else 1) or rows * columns * tiles > 80 * threads:
        rows //= 2
    # Of a small tensor fewer, so that every multiprocessor has some programs.
    while rows > 1 and rows * columns > 4 * threads and problem.rows * problem.columns < 528 * rows * columns * tiles:
        rows //= 2
    if rows * columns * tiles < 2 * threads:
        return No(f"programs of {rows} rows of {columns * tiles} elements are too small")
    return Tiling(rows, columns, tiles, warps)


def supports(problem: FusedCast) -> Verdict:
    """Whether there is a kernel."""
    found = tiling_of(problem)
    return found if isinstance(found, No) else Yes()
