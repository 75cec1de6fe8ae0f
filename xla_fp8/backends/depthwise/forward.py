"""The depthwise convolution as a Triton kernel on the CUDA cores: each number of x is loaded and made f32 once, and
then added, times a weight, to all results of its thread whose windows it lies in.

A thread makes a tile of y, `rows` x `columns` results for each of `per_thread` channels:

              columns + S - 1
            ┌─────────────────┐      the tile of x, for strides of 1: column by column, in each the rows
            │ · · · · · · · · │
    rows    │ · ┌───────┐ · · │          y[p, q] += x[i, j] * w[i - p, j - q]
     + R    │ · │ y y y │ · · │
     - 1    │ · │ y y y │ · · │      for all results (p, q) of the tile with 0 <= i - p < R and 0 <= j - q < S
            │ · └───────┘ · · │
            └─────────────────┘

Threads lie side by side along the channels of a group, then along the tiles of a row of tiles, then groups, then
images: nothing is left over where an image is small. All threads of a program have the same rows, so for most rows of
x, and for all of an image that is one tile high, it is known when the kernel is traced whether they lie inside of x:
those that do need no mask, and nothing is done for those that do not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.depthwise.axis import Axis
from xla_fp8.backends.depthwise.forward_configs import Config, configs
from xla_fp8.backends.depthwise.masks import Mask, both, load
from xla_fp8.backends.depthwise.problem import ALIGNED, Problem
from xla_fp8.backends.triton.instructions import fma, to_f32
from xla_fp8.backends.triton.launch import launch

Sums = dict[tuple[int, int], jax.Array]
"""The results of a tile, by row and column, each a block of one number for every channel of every thread; f32."""


def forward(
    problem: Problem, x: jax.Array, w: jax.Array, config: Config | None = None, interpret: bool = False
) -> jax.Array:
    """y of a problem that `problem.supports`.

    Args:
        x: [N,H,W,C], of the problem's type.
        w: [R,S,C], of the problem's type or f32. Where it is not finite, results at the borders may be NaN: what lies
            outside of x is zeros that are multiplied, or left out.
        config: the first of `configs` where there is none.
        interpret: runs it on any device, slowly.

    Returns:
        [N,P,Q,C], of x's type; the sums are f32.
    """
    kernel = Forward(problem, config or configs(problem)[0], interpret)
    (y,) = launch(
        kernel,
        [x.reshape(-1), w.reshape(-1)],
        [((math.prod(problem.output_shape),), problem.dtype)],
        name="depthwise_forward",
        programs=kernel.programs,
        warps=kernel.config.warps,
        interpret=interpret,
    )
    return y.reshape(problem.output_shape)


class Forward:
    """The kernel of a problem. Its arguments are x, w and y as flat references; blocks are flat too.

    Attributes:
        rows, columns: how the image is cut into tiles.
        block: numbers of a block, of all threads.
        lanes: that there are for one row of tiles; programs have `block` of them.
        programs: of the grid; those that differ in the row of tiles alone follow each other, and share what they read.
    """

    def __init__(self, problem: Problem, config: Config, interpret: bool = False) -> None:
        self.problem, self.config, self.interpret = problem, config, interpret
        self.rows, self.columns = Axis.of(problem, 0, config.rows), Axis.of(problem, 1, config.columns)
        self.block = config.per_thread * 32 * config.warps
        self.lanes = problem.batch * self.columns.tiles * problem.channels
        self.programs = self.rows.tiles * -(-self.lanes // self.block)

    def __call__(self, x: Any, w: Any, y: Any) -> None:
        tile = Tile(self)
        columns, window = self.columns, self.columns.window
        results = [(p, q) for p in range(self.rows.results) for q in range(columns.results)]
        sums = dict.fromkeys(results, jnp.zeros(self.block, jnp.float32))

        def of_known_columns(sums: Sums, first: int, end: int) -> Sums:
            weights = functools.cache(functools.partial(tile.weights, w))
            for j in range(first, end):
                taps = [(q, weights(s)) for q, s in columns.taps(j)]
                sums = tile.add(sums, x, j, taps)
            return sums

        # From `first` on all results of a tile have something of a column, to column `window`.
        first = (columns.results - 1) * columns.stride
        if self.config.unrolled or first >= window:
            sums = of_known_columns(sums, 0, columns.extent)
        else:
            sums = of_known_columns(sums, 0, first)

            def step(j: jax.Array, values: Sequence[jax.Array]) -> Sequence[jax.Array]:
                taps = [(q, tile.weights(w, j - q * columns.stride)) for q in range(columns.results)]
                sums = tile.add(dict(zip(results, values, strict=True)), x, j, taps)
                return [sums[result] for result in results]

            values = lax.fori_loop(first, window, step, [sums[result] for result in results])
            sums = of_known_columns(dict(zip(results, values, strict=True)), window, columns.extent)
        tile.store(y, sums)


class Tile:
    """The tiles of a program's threads."""

    def __init__(self, kernel: Forward) -> None:
        self.kernel, self.rows, self.columns = kernel, kernel.rows, kernel.columns
        channels, group = kernel.problem.channels, kernel.config.channels
        program, lane = pl.program_id(0), jnp.arange(kernel.block, dtype=jnp.int32)
        self.row, rest = _split(program, kernel.rows.tiles)
        lane = rest * kernel.block + lane
        self.exists: Mask = kernel.lanes % kernel.block == 0 or lane < kernel.lanes
        channel, rest = _split(lane, group)
        self.column, rest = _split(rest, kernel.columns.tiles)
        number, self.image = _split(rest, channels // group)
        self.channel = number * group + channel

    def weights(self, w: Any, s: Any) -> list[jax.Array]:
        """Column s of the window, by rows."""
        problem, last = self.kernel.problem, self.rows.window - 1
        row = self.columns.window * problem.channels
        at = _offset(last * row + s * problem.channels + self.channel, math.prod(problem.filter_shape))
        blocks = [triton.load(w.at[at - (last - r) * row]) for r in range(last + 1)]
        return [to_f32(block, interpret=self.kernel.interpret) for block in blocks]

    def add(self, sums: Sums, x: Any, j: Any, taps: Sequence[tuple[int, list[jax.Array]]]) -> Sums:
        """Adds column j of x to the results of the columns q for which `taps` has the weights."""
        (_, height, width, channels), last = self.kernel.problem.input_shape, self.rows.extent - 1
        row = width * channels
        pixel = (self.image * height + self.rows.start(self.row) + last) * width + self.columns.start(self.column) + j
        at = _offset(pixel * channels + self.channel, math.prod(self.kernel.problem.input_shape) + last * row)
        has_column = self.columns.has_input(self.column, j)
        sums = dict(sums)
        for i in range(self.rows.extent):
            mask = both(both(self.rows.has_input(self.row, i), has_column), self.exists)
            if mask is False:
                continue
            value = to_f32(load(x, at - (last - i) * row, mask), interpret=self.kernel.interpret)
            for p, r in self.rows.taps(i):
                for q, weights in taps:
                    sums[p, q] = fma(value, weights[r], sums[p, q], interpret=self.kernel.interpret)
        return sums

    def store(self, y: Any, sums: Sums) -> None:
        _, height, width, channels = shape = self.kernel.problem.output_shape
        (p_last, q_last) = self.rows.last_result(self.row), self.columns.last_result(self.column)
        pixel = (self.image * height + p_last) * width + q_last
        at = _offset(pixel * channels + self.channel, math.prod(shape) + self.rows.results * width * channels)
        for (p, q), total in sums.items():
            mask = both(self.rows.has_result(self.row, p), self.columns.has_result(self.column, q))
            mask = both(mask, self.exists)
            back = (self.rows.results - 1 - p) * width + self.columns.results - 1 - q
            triton.store(
                y.at[at - back * channels],
                total.astype(self.kernel.problem.dtype),
                mask=None if mask is True else jnp.broadcast_to(mask, total.shape),
            )


def _split(index: Any, size: int) -> tuple[Any, Any]:
    """index % size and index // size."""
    return (0, index) if size == 1 else (lax.rem(index, size), lax.div(index, size))


def _offset(offset: jax.Array, largest: int) -> jax.Array:
    """An offset from which others are counted backwards; negative, or more than `largest`, only where masks are false.

    A number of 31 bits less a constant does not overflow. So the compiler may add the offset to the address once, and
    put the constants into the instructions that load: it need not compute an address for each of them.
    """
    if largest < 2**31:
        offset = offset & np.int32(2**31 - 1)
    aligned: jax.Array = triton.max_contiguous(pl.multiple_of(offset, (ALIGNED,)), (ALIGNED,))  # type: ignore[no-untyped-call]
    return aligned
