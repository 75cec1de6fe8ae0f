"""How a tensor is cut for `resident`: chunks that one TMA copy moves, dealt to warpgroups in turn."""

from __future__ import annotations

import dataclasses

_WIDEST = 256  # elements along a side of what TMA copies
_ALIGNED = 16  # elements: rows of FP8 start at multiples of 16 bytes


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A tensor as rows of `width` elements, in chunks of `rows` rows. TMA leaves out what the last one lacks.

    Attributes:
        size: elements of the tensor.
        elements: of a chunk; a power of two.
    """

    size: int
    elements: int

    @property
    def fits(self) -> bool:
        """Whether the rows are aligned, and there is a whole chunk at all."""
        return self.size % _ALIGNED == 0 and self.size >= self.elements and self.rows <= _WIDEST

    @property
    def width(self) -> int:
        """The largest power of two within TMA's limit that divides the size."""
        return min(_WIDEST, self.size & -self.size)

    @property
    def rows(self) -> int:
        return self.elements // self.width

    @property
    def count(self) -> int:
        return -(-self.size // self.elements)

    @property
    def view(self) -> tuple[int, int]:
        """The shape in which the kernel sees the tensor."""
        return self.size // self.width, self.width
