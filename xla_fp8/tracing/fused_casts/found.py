"""What the search finds: groups of equations for kernels, and of casts in none the reason."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Group:
    """What one kernel computes.

    Attributes:
        equations: their indices, in program order. Groups may share some, which each kernel computes again.
        results: what others read, that of which the rows are first. Only this kernel makes it.
    """

    equations: tuple[int, ...]
    results: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why there is no kernel.

    Attributes:
        text: in words, as the rest of a sentence: "left to XLA: ...".
        blame: the index of the equation that is in the way; None where none is, or the root itself.
    """

    text: str
    blame: int | None = None


@dataclasses.dataclass(frozen=True)
class Unfused:
    """A cast to FP8 that is in no group and no graph: XLA computes it.

    Attributes:
        equation: its index.
        reason, blame: as those of `Reason`.
    """

    equation: int
    reason: str
    blame: int | None


@dataclasses.dataclass(frozen=True)
class Found:
    """
    Attributes:
        groups: in the order in which they were found.
        unfused: casts in program order.
    """

    groups: tuple[Group, ...]
    unfused: tuple[Unfused, ...]
