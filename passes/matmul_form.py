"""A dot as cuBLASLt takes it: [batch, m, k] times [batch, n, k], all row-major, m, n and k multiples of 16.

FP8 kernels exist for one operand order alone, in which both operands have the contracting dimension last (cuBLASLt's
TN format; cublasLtMatmul in NVIDIA's documentation). The other orders are transposes of an FP8 tensor.
"""

from __future__ import annotations

import dataclasses
import math
import re

from xla_fp8.hlo import HloComputation, HloInstruction, Shape
from xla_fp8.hlo.literal import format_scalar
from xla_fp8.passes.values import transpose

MULTIPLE = 16
"""What cuBLASLt's FP8 kernels want the sizes of a matrix to be multiples of."""


@dataclasses.dataclass(frozen=True)
class DotDimensions:
    """Which dimension of a dot's operands is what, and their sizes.

    Attributes:
        lhs, rhs: of each operand the (batch, free, contracting) dimensions. The result's are batch, lhs's free, rhs's
            free.
        result: the dot's shape.
    """

    lhs: tuple[tuple[int, ...], ...]
    rhs: tuple[tuple[int, ...], ...]
    result: Shape

    @staticmethod
    def of(dot: HloInstruction) -> DotDimensions:
        def operand(index: int, side: str) -> tuple[tuple[int, ...], ...]:
            batch, contracting = (_dimensions(dot, f"{side}_{kind}_dims") for kind in ("batch", "contracting"))
            rank = dot.operand(index).shape.rank
            free = tuple(d for d in range(rank) if d not in batch and d not in contracting)
            return batch, free, contracting

        return DotDimensions(operand(0, "lhs"), operand(1, "rhs"), dot.shape)

    @property
    def column(self) -> int | None:
        """The result's dimension that is the matrix's column, along which a bias runs; None where several are."""
        return self.result.rank - 1 if len(self.rhs[1]) == 1 else None

    @property
    def matrix(self) -> tuple[int, ...]:
        """The result as [m, n], or [batch, m, n] where there are batches."""
        sizes = self.result.dimensions
        batch, rows = len(self.lhs[0]), len(self.lhs[1])
        matrix = math.prod(sizes[batch : batch + rows]), math.prod(sizes[batch + rows :])
        return (math.prod(sizes[:batch]), *matrix) if batch else matrix

    @property
    def padded(self) -> tuple[int, ...]:
        return _padded(self.matrix)


def as_operand(value: HloInstruction, dimensions: tuple[tuple[int, ...], ...]) -> HloInstruction:
    """An FP8 tensor as an operand of the call: contracting dimension last, one of each kind, padded with zeros."""
    computation = value.parent
    assert computation is not None
    groups = dimensions if dimensions[0] else dimensions[1:]
    sizes = [math.prod(value.shape.dimensions[d] for d in group) for group in groups]
    value = transpose(row_major(value), tuple(d for group in groups for d in group))
    return pad(reshape(value, tuple(sizes)), _padded(tuple(sizes)))


def as_matrix(value: HloInstruction, dot: DotDimensions) -> HloInstruction:
    """A tensor of the result's shape as the call has it."""
    return pad(reshape(row_major(value), dot.matrix), dot.padded)


def from_matrix(value: HloInstruction, dot: DotDimensions) -> HloInstruction:
    """The call's result with the dimensions of the dot's."""
    computation = value.parent
    assert computation is not None
    if dot.padded != dot.matrix:
        limits = ", ".join(f"[0:{size}]" for size in dot.matrix)
        value = computation.create(
            "slice", value.shape.with_dimensions(dot.matrix), [value], attributes={"slice": f"{{{limits}}}"}
        )
    return reshape(value, dot.result.dimensions)


def row_major(value: HloInstruction) -> HloInstruction:
    """`value`, copied where its layout is another."""
    shape = value.shape.with_default_layout()
    if shape.minor_to_major == value.shape.minor_to_major:
        return value
    return _computation(value).create("copy", shape, [value], metadata_from=value)


def reshape(value: HloInstruction, sizes: tuple[int, ...]) -> HloInstruction:
    if value.shape.dimensions == sizes:
        return value
    return _computation(value).create("reshape", value.shape.with_dimensions(sizes), [value], metadata_from=value)


def pad(value: HloInstruction, sizes: tuple[int, ...]) -> HloInstruction:
    """`value` with zeros behind it in each dimension, up to `sizes`."""
    if value.shape.dimensions == sizes:
        return value
    type_ = value.shape.element_type
    zero = _computation(value).create("constant", Shape(type_), payload=format_scalar(0.0, type_))
    padding = "x".join(f"0_{new - old}" for old, new in zip(value.shape.dimensions, sizes, strict=True))
    return _computation(value).create(
        "pad", value.shape.with_dimensions(sizes), [value, zero], attributes={"padding": padding}, metadata_from=value
    )


def _padded(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The last two sizes as multiples of 16; what is before them is the batch."""
    return (*sizes[:-2], *(-(-size // MULTIPLE) * MULTIPLE for size in sizes[-2:]))


def _dimensions(dot: HloInstruction, name: str) -> tuple[int, ...]:
    return tuple(int(d) for d in re.findall(r"\d+", dot.attr(name) or ""))


def _computation(value: HloInstruction) -> HloComputation:
    assert value.parent is not None
    return value.parent
