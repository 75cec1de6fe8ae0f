"""The rows, or the columns, of a depthwise convolution cut into tiles: where one reads, and what lies inside of x."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from xla_fp8.backends.depthwise.masks import Mask
from xla_fp8.backends.depthwise.problem import Problem


@dataclasses.dataclass(frozen=True)
class Axis:
    """One axis; every tile makes the same number of results from the same number of inputs.

    Attributes:
        inputs, outputs: sizes of x and y.
        window, stride: of the convolution.
        padding: before x.
        results: of a tile; no more than there are outputs.
    """

    inputs: int
    outputs: int
    window: int
    stride: int
    padding: int
    results: int

    @staticmethod
    def of(problem: Problem, axis: int, results: int) -> Axis:
        """Rows (0) or columns (1) of a problem."""
        outputs = problem.output_shape[1 + axis]
        return Axis(
            problem.input_shape[1 + axis],
            outputs,
            problem.window[axis],
            problem.stride[axis],
            problem.padding[axis][0],
            min(results, outputs),
        )

    @property
    def tiles(self) -> int:
        return -(-self.outputs // self.results)

    @property
    def extent(self) -> int:
        """Inputs of a tile."""
        return (self.results - 1) * self.stride + self.window

    def start(self, tile: Any) -> Any:
        """The first input of a tile; negative in the padding."""
        return tile * (self.results * self.stride) - self.padding

    def last_result(self, tile: Any) -> Any:
        return tile * self.results + self.results - 1

    def knows_input(self, i: int) -> bool | None:
        """Whether input i of a tile lies inside of x, if the answer is the same for all tiles."""
        lowest, highest = self.start(0) + i, self.start(self.tiles - 1) + i
        if lowest >= 0 and highest < self.inputs:
            return True
        return False if highest < 0 or lowest >= self.inputs else None

    def has_input(self, tile: Any, i: Any) -> Mask:
        """Whether input i of a tile lies inside of x."""
        known = self.knows_input(i) if isinstance(i, int) else None
        # As unsigned numbers the negative ones are large.
        return (self.start(tile) + i).astype(jnp.uint32) < np.uint32(self.inputs) if known is None else known

    def has_result(self, tile: Any, i: int) -> Mask:
        """Whether result i of a tile lies inside of y."""
        if self.outputs % self.results == 0 or i < self.outputs % self.results:
            return True
        return tile * self.results + i < self.outputs

    def taps(self, i: int) -> list[tuple[int, int]]:
        """(result, position in its window) of all results of a tile that input i of the tile is added to."""
        pairs = ((result, i - result * self.stride) for result in range(self.results))
        return [(result, at) for result, at in pairs if 0 <= at < self.window]

    @property
    def products(self) -> int:
        """Pairs of a result of a tile and an input in its window, without inputs that no tile has."""
        return sum(len(self.taps(i)) for i in range(self.extent) if self.knows_input(i) is not False)
