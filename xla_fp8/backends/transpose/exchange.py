"""Which transposes are an exchange of the innermost dimension with another one, batch by batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

SMALLEST_SIZE = 2**20
"""Elements from which a kernel of its own is worth its launch: XLA makes the transpose in one with what is in front."""

LARGEST_SIZE = 2**31 - 2**20
"""Elements; offsets in the kernel are 32-bit."""

_MULTIPLE = 16
"""Of what rows and columns must be: a thread loads and stores 16 bytes."""


@dataclasses.dataclass(frozen=True)
class Exchange:
    """[batch, rows, between, columns] → [batch, columns, between, rows].

    `is_mirrored`: what is between is reversed, as input gradients have the window of their filter.
    """

    batch: int
    rows: int
    between: int
    columns: int
    is_mirrored: bool = False

    @property
    def size(self) -> int:
        return self.batch * self.rows * self.between * self.columns


def exchange_of(shape: Sequence[int], permutation: Sequence[int], mirrored: Sequence[int] = ()) -> Exchange | None:
    """The transpose of a tensor reversed along some of its dimensions; None where it is no exchange."""
    wide = [dimension for dimension in permutation if shape[dimension] != 1]
    # What stays beside each other is one dimension.
    groups: list[list[int]] = []
    for dimension in wide:
        skipped = range(groups[-1][-1] + 1, dimension) if groups else ()
        if groups and dimension > groups[-1][-1] and all(shape[d] == 1 for d in skipped):
            groups[-1].append(dimension)
        else:
            groups.append([dimension])
    order = [sorted(groups).index(group) for group in groups]
    sizes = [math.prod(shape[d] for d in group) for group in sorted(groups)]
    reversed_group = sorted(d for d in mirrored if shape[d] != 1)
    if reversed_group and reversed_group not in sorted(groups)[-2:-1]:
        return None
    if order in ([1, 0], [2, 1, 0]):
        order, sizes = [0, *(i + 1 for i in order)], [1, *sizes]
    if order == [0, 2, 1] and not reversed_group:
        order, sizes = [0, 3, 2, 1], [*sizes[:2], 1, sizes[2]]
    if order != [0, 3, 2, 1]:
        return None
    batch, rows, between, columns = sizes
    return Exchange(batch, rows, between, columns, bool(reversed_group))


def kernel_exchange(
    shape: Sequence[int], permutation: Sequence[int], dtype: np.dtype[np.generic], mirrored: Sequence[int] = ()
) -> Exchange | None:
    """As `exchange_of`, where the kernel makes it; None where XLA should."""
    exchange = exchange_of(shape, permutation, mirrored) if dtype.itemsize == 1 else None
    if exchange is None or not SMALLEST_SIZE <= exchange.size <= LARGEST_SIZE:
        return None
    are_multiples = exchange.rows % _MULTIPLE == exchange.columns % _MULTIPLE == 0
    return exchange if are_multiples else None
