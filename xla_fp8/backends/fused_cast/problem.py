"""What a fused cast computes: a program on the rows of a matrix, and which of its values are written.

    operands   matrices in memory, tables of fewer numbers (by column, by image, by row, or one), and sums of groups of
               columns of each image, which a kernel in front of the cast's makes in parts: its statistics
    nodes      elementwise operations, and sums or maxima over a row
    results    tensors [rows, columns], in FP8 saturated; numbers of each row; the amax of a value; and sums over all
               rows, one for each column

All is computed in f32, as graphs of convolutions are: what the program rounds to 16 bits on the way is not rounded.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import numpy as np

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
        "one_minus_square",
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
        period: how many rows, one after the other, read the same numbers; 0 where all do.
        pitch: from the numbers of one period to those of the next.
        columns: (stride, size, step) for each dimension of the table that lies within a row; in front of them one of
            step 0 where the numbers start again within a row.
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
class Constant:
    """A number of the program's."""

    value: float


@dataclasses.dataclass(frozen=True)
class Node:
    """An operation of a program.

    Attributes:
        op: one of `ELEMENTWISE` or `REDUCTIONS`.
        operands: positions among operands and nodes, which follow them; or constants.
        exponent: of an integer_pow.
    """

    op: str
    operands: tuple[int | Constant, ...]
    exponent: int = 1


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Sums over the rows of each image and the columns of each group.

    Attributes:
        period: rows of an image.
        width: columns of a group.
        nodes: elementwise.
        results: the positions of the values that are added up.
    """

    rows: int
    columns: int
    period: int
    width: int
    operands: tuple[Matrix | Joined | Table, ...]
    nodes: tuple[Node, ...]
    results: tuple[int, ...]

    @property
    def images(self) -> int:
        return self.rows // self.period

    @property
    def groups(self) -> int:
        return self.columns // self.width

    @property
    def array_count(self) -> int:
        """Of the arrays in memory that the operands are of."""
        return sum(map(array_count, self.operands))


@dataclasses.dataclass(frozen=True)
class Sums:
    """One of the sums of statistics, for each image and group."""

    statistics: Statistics
    number: int


Operand = Matrix | Joined | Table | Sums


def array_count(operand: Operand) -> int:
    """Of the arrays in memory that an operand is of; those of sums are the statistics'."""
    if isinstance(operand, Joined):
        return len(operand.parts)
    return 0 if isinstance(operand, Sums) else 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What is written of values; one of fewer numbers than a tensor is repeated where that needs more.

    Attributes:
        kind: "tensor": [rows, columns]. "row": [rows], of a value with a number for each row. "amax": [], the largest
            of the absolute values, NaN if there is one. "column_sum": [columns], the sum over all rows.
        values: positions among operands and nodes. Several are beside each other, and have as many times the columns.
            The cast to FP8 saturates: of what is clamped to the type's range the value before.
        dtype: of a tensor e4m3fn, e5m2, bf16, f16 or f32; else f32.
    """

    kind: Literal["tensor", "row", "amax", "column_sum"]
    values: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclasses.dataclass(frozen=True)
class FusedCast:
    """A program and its results."""

    rows: int
    columns: int
    operands: tuple[Operand, ...]
    nodes: tuple[Node, ...]
    results: tuple[Result, ...]

    @property
    def reduces(self) -> bool:
        """Whether a program needs whole rows."""
        return any(node.op in REDUCTIONS for node in self.nodes)

    @property
    def adds_up(self) -> bool:
        """Whether there are results of all rows."""
        return any(result.kind in ("amax", "column_sum") for result in self.results)

    @property
    def statistics(self) -> Statistics | None:
        """What a kernel makes first; one at most."""
        return next((operand.statistics for operand in self.operands if isinstance(operand, Sums)), None)
