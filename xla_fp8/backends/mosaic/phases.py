"""A convolution over a dilated input as convolutions over the input itself, one for each phase of its output.

The input gradient of a convolution of stride 2 is a convolution whose input (the cotangent) has a zero between any two
of its rows. Most products are then with zeros, and which are not depends on the output row alone, by its remainder: its
phase. Along one dimension, with three taps a, b, c, stride 2 and padding 1::

    input with zeros       x0  .  x1  .  x2  .  x3
    output 0           a   b   c                          = b x0             even outputs see tap b:
    output 1               a   b  c                       = a x0 + c x1          1 tap, no padding
    output 2                  a   b   c                   = b x1             odd outputs see taps a, c:
    output 3                      a   b  c                = a x1 + c x2          2 taps, step 2 in the filter

So each phase is a plain convolution of the input with every other tap, and its results are every other output. Where
both dimensions are dilated by 2, the nine taps of a 3x3 filter come to 1, 2, 2 and 4 in the four phases. A phase may
have no tap at all (a 1x1 filter): its sums are 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Along one dimension: the outputs `offset`, `offset` + count of phases, ... as a convolution of their own.

    Attributes:
        size: how many outputs.
        taps: how many taps it sees.
        first_tap: the first of them, in the whole filter.
        padding: before the first input; negative skips inputs.
    """

    offset: int
    size: int
    taps: int
    first_tap: int
    padding: int


@dataclasses.dataclass(frozen=True, slots=True)
class Phases:
    """All phases along one dimension, and what they have in common.

    Attributes:
        tap_step: from one tap of a phase to its next, in the whole filter.
        stride, dilation: of the window of a phase, over the input without zeros.
    """

    phases: tuple[Phase, ...]
    tap_step: int
    stride: int
    dilation: int

    @property
    def count(self) -> int:
        return len(self.phases)

    @property
    def size(self) -> int:
        """Outputs of the largest phase."""
        return self.phases[0].size

    @property
    def taps(self) -> int:
        """The most taps of a phase."""
        return max(phase.taps for phase in self.phases)


@functools.lru_cache(maxsize=1024)
def phases_of(outputs: int, taps: int, stride: int, dilation: int, padding: int, base_dilation: int) -> Phases:
    """The phases of one dimension of a convolution; one where the input is not dilated.

    Output o sees the dilated input at o * stride + tap * dilation - padding, and a number is there where that is a
    multiple of `base_dilation`.
    """
    count = base_dilation // math.gcd(base_dilation, stride)
    tap_step = base_dilation // math.gcd(base_dilation, dilation)
    phases = []
    for offset in range(count):
        start = offset * stride - padding
        seen = [tap for tap in range(taps) if (start + tap * dilation) % base_dilation == 0]
        first = seen[0] if seen else 0
        phases.append(
            Phase(
                offset=offset,
                size=-(-(outputs - offset) // count),
                taps=len(seen),
                first_tap=first,
                padding=-((start + first * dilation) // base_dilation) if seen else 0,
            )
        )
    return Phases(tuple(phases), tap_step, stride * count // base_dilation, dilation * tap_step // base_dilation)
