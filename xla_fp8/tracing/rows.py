"""A tensor as rows of its last dimension, and how values of other shapes are spread over it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from xla_fp8.backends.fused_cast.problem import REDUCTIONS, Table
from xla_fp8.tracing.equations import Equation, is_literal, variables

Spread = Literal["all", "row", "column", "group", "one"]
"""A number for each element, one for each row, for each column or group of columns of each image, or one for all."""

VIEWS = frozenset({"concatenate", "slice", "split"})
"""Of tensors in memory."""


@dataclasses.dataclass(frozen=True)
class Groups:
    """Groups of `width` neighbouring columns in images of `period` rows."""

    period: int
    width: int


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows in memory, one after the other. A value of another shape with as many elements is the same rows.

    Attributes:
        count: of the rows.
        columns: elements of each.
    """

    count: int
    columns: int

    @staticmethod
    def of(shape: Sequence[int]) -> Rows | None:
        """Those of a shape; None where there are none."""
        if len(shape) < 2 or not all(shape):
            return None
        return Rows(math.prod(shape[:-1]), shape[-1])

    @staticmethod
    def summed_by(equation: Equation) -> Rows | None:
        """The rows whose sum an equation makes, to a number for each column; None where it does something else.

        Of its operand as many leading dimensions are the rows as it adds up, and all others the columns.
        """
        if equation.primitive.name != "reduce_sum":
            return None
        shape, leading = equation.invars[0].aval.shape, len(equation.params["axes"])
        rows = Rows(math.prod(shape[:leading]), math.prod(shape[leading:]))
        return rows if rows.columns > 1 and rows.are_summed_by(equation) else None

    @staticmethod
    def grouped_by(equation: Equation) -> Rows | None:
        """Those of which an equation adds up groups of columns, over the rows of each image; None where it does not."""
        if equation.primitive.name != "reduce_sum":
            return None
        shape = equation.invars[0].aval.shape
        cuts = (Rows(math.prod(shape[:i]), math.prod(shape[i:])) for i in range(1, len(shape)))
        return next((rows for rows in cuts if rows.groups_of_sum(equation) is not None), None)

    @property
    def size(self) -> int:
        return self.count * self.columns

    def hold(self, atom: Any) -> bool:
        """Whether a value is of all elements."""
        return element_count(atom) == self.size

    def are_reduced_by(self, equation: Equation) -> bool:
        """Whether an equation reduces each row to a number."""
        [operand] = equation.invars
        shape = operand.aval.shape
        leading = self._leading(shape) if self.hold(operand) else None
        if leading is None:
            return False
        reduced = {i for i in equation.params["axes"] if shape[i] > 1}
        return reduced == {i for i in range(leading, len(shape)) if shape[i] > 1}

    def are_summed_by(self, equation: Equation) -> bool:
        """Whether an equation adds up all rows, to a number for each column."""
        if equation.primitive.name != "reduce_sum" or not self.hold(equation.invars[0]):
            return False
        shape = equation.invars[0].aval.shape
        leading = self._leading(shape)
        summed = {i for i in equation.params["axes"] if shape[i] > 1}
        return leading is not None and summed == {i for i in range(leading) if shape[i] > 1}

    def groups_of_sum(self, equation: Equation) -> Groups | None:
        """The groups whose columns an equation adds up, over the rows of each image; None where it adds up others."""
        if equation.primitive.name != "reduce_sum":
            return None
        [operand] = equation.invars
        shape = operand.aval.shape
        leading = self._leading(shape) if self.hold(operand) else None
        if leading is None:
            return None
        summed = [i for i in equation.params["axes"] if shape[i] > 1]
        within = min((i for i in summed if i >= leading), default=len(shape))
        images = min((i for i in summed if i < leading), default=leading)
        if any(shape[i] > 1 and i not in summed for i in (*range(images, leading), *range(within, len(shape)))):
            return None
        period, width = math.prod(shape[images:leading]), math.prod(shape[within:])
        return Groups(period, width) if period > 1 and 1 < width < self.columns else None

    def spread(self, atom: Any, equation: Equation, of: Spread) -> Spread | Table | None:
        """How an operand of an equation is spread over its result, which is spread as `of` says; None where it cannot
        be said."""
        count, shape = element_count(atom), equation.outvars[0].aval.shape
        if count == 1:
            return "one"
        if of == "column":
            return self._spread_by_column(atom, equation)
        if of != "all":
            return of if count == math.prod(shape) else None
        if count == self.size:
            return "all"
        table = self.table_of(atom, equation)
        if table is None or (table.period == 1 and table.columns):
            return None
        if table.period == 1:
            return "row"
        return "group" if table.is_by_group else "column" if table.is_by_column else table

    def spreads(self, equation: Equation, of: Spread) -> list[tuple[Any, Spread | Table | None]]:
        """The operands that an equation is computed of, with how they are spread."""
        name = equation.primitive.name
        if name in VIEWS:
            return []  # of what is in memory
        if name in REDUCTIONS and not is_reshape(equation):
            return [(equation.invars[0], "all")]
        return [(atom, self.spread(atom, equation, of)) for atom in variables(equation.invars)]

    def _spread_by_column(self, atom: Any, equation: Equation) -> Spread | None:
        [result] = equation.outvars
        if element_count(atom) == element_count(result):
            return "column"
        table = self.table_of(atom, equation)
        if table is None or (table.period > 1 and not table.columns):
            return None
        return "column" if table.is_by_column else "group" if table.is_by_group else None

    def table_of(self, atom: Any, equation: Equation) -> Table | None:
        """An operand of an equation as a table; None where it is none.

        The result is of all elements, or of a number for each column, of each image or of all.
        """
        [result] = equation.outvars
        images = self if self.hold(result) else Rows(element_count(result) // self.columns, self.columns)
        table = images.table(_aligned_shape(atom, equation), result.aval.shape)
        if table is None or images is self:
            return table
        return dataclasses.replace(table, period=table.period * (self.count // images.count))

    def table_by_column(self, count: int) -> Table:
        """As many numbers as there are columns, or columns of images."""
        images = count // self.columns
        period = self.count // images if images > 1 else 0
        return Table(np.dtype(np.float32), count, period, self.columns, ((1, self.columns, 1),))

    def table(self, aligned: Sequence[int], shape: Sequence[int]) -> Table | None:
        """How an operand of the shape `aligned` is spread over `shape`, that of all elements; None where no table
        says it."""
        leading = self._leading(shape)
        if leading is None:
            return None
        across = [i for i in range(leading) if aligned[i] > 1]
        within = [i for i in range(leading, len(shape)) if aligned[i] > 1]
        images = max(across, default=-1) + 1
        if any(shape[i] > 1 and i not in across for i in range(images)):
            return None
        pitch = math.prod(shape[i] for i in within)
        columns, step = [], pitch
        for i in within:
            step //= shape[i]
            columns.append((math.prod(shape[i + 1 :]), shape[i], step))
        if within and (times := math.prod(shape[leading : within[0]])) > 1:  # the numbers start again within a row
            columns.insert(0, (self.columns // times, times, 0))
        period = self.count // math.prod(shape[:images]) if across else 0
        return Table(np.dtype(np.float32), math.prod(aligned), period, pitch, tuple(columns))

    def _leading(self, shape: Sequence[int]) -> int | None:
        """How many dimensions of a shape of all elements are the rows; None where one is a part of both."""
        count = 1
        for i, extent in enumerate(shape):
            if count == self.count and math.prod(shape[i:]) == self.columns:
                return i
            count *= extent
        return None


def element_count(atom: Any) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def sums_groups(equation: Equation, of: Spread) -> bool:
    """Whether an equation, whose result is spread as `of` says, adds up groups of columns."""
    return of == "group" and equation.primitive.name in REDUCTIONS and not is_reshape(equation)


def joins_values(equation: Equation, rows: Rows) -> bool:
    """Whether an equation puts values of as many columns beside each other: tensors that are computed part by part."""
    if equation.primitive.name != "concatenate" or not rows.hold(equation.outvars[0]):
        return False
    *_, last = shape = equation.outvars[0].aval.shape
    widths = {atom.aval.shape[-1] for atom in equation.invars}
    return equation.params["dimension"] == len(shape) - 1 and last == rows.columns and len(widths) == 1


def is_reshape(equation: Equation) -> bool:
    """Whether a result has the elements of its operand, in their order, in another shape.

    A sum of ones is: JAX makes some where a broadcast is transposed.
    """
    name = equation.primitive.name
    if name in ("expand_dims", "squeeze"):
        return True
    if name == "reshape":
        return equation.params["dimensions"] is None  # else it transposes first
    return name in REDUCTIONS and all(equation.invars[0].aval.shape[axis] == 1 for axis in equation.params["axes"])


def _aligned_shape(atom: Any, equation: Equation) -> tuple[int, ...]:
    """The shape of an operand with a one for each dimension of the result along which it is spread."""
    shape = () if is_literal(atom) else tuple(atom.aval.shape)
    if equation.primitive.name != "broadcast_in_dim":
        return shape
    aligned = [1] * len(equation.outvars[0].aval.shape)
    for extent, dimension in zip(shape, equation.params["broadcast_dimensions"], strict=True):
        aligned[dimension] = extent
    return tuple(aligned)


def columns_of(equation: Equation, rows: Rows) -> list[int]:
    """Where in the rows of its operand the results of a split or slice start; nothing where they are no columns."""
    [operand] = equation.invars
    shape = operand.aval.shape
    if math.prod(shape[:-1]) != rows.count or any(
        variable.aval.shape != (*shape[:-1], rows.columns) for variable in equation.outvars
    ):
        return []
    if equation.primitive.name == "split":
        return [i * rows.columns for i in range(len(equation.outvars))]
    if any(stride != 1 for stride in equation.params["strides"] or ()):
        return []
    return [equation.params["start_indices"][-1]]
