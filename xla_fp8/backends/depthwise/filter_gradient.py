"""The filter gradient of a depthwise convolution as a Triton kernel on the CUDA cores: each number of x is loaded and
made f32 once, and meets the rows of dy that wait for it in registers.

A thread has a few columns of dy in one image and goes down the rows. With a window of 3x3 and two columns:

              a step                   the next step

    x         a b c d   row i          · · · ·   row i + 1
    dy        e f       row p          · ·       row p + 1     sums[k, s] += x[j + s] * dy[k][j]
              g h       row p - 1      e f       row p
              i j       row p - 2      g h       row p - 1     for row k of those of dy, and column j

With strides of 1 row p - k of dy meets row i = p - top of x in row k of the window, whatever p is: a thread keeps R * S
sums and R rows of dy. In each step a row of x and one of dy are new (and those of the next step are loaded), and the
oldest of dy goes. With a stride of 2 down, two rows of x come with each row of dy, and half as many of dy wait.

In the first and the last steps some of these rows do not exist: they are traced one by one, and nothing is done for
what is not there. Between them is a loop. Columns of x in the padding are loaded as zeros.

At its end a program adds up the sums of its threads, and XLA adds up those of the programs: the same bits every time.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.depthwise.axis import Axis
from xla_fp8.backends.depthwise.filter_gradient_configs import Config, configs
from xla_fp8.backends.depthwise.masks import Mask, both, load
from xla_fp8.backends.depthwise.problem import ALIGNED, Problem
from xla_fp8.backends.depthwise.products import add_products
from xla_fp8.backends.triton.instructions import to_f32
from xla_fp8.backends.triton.launch import launch

Row = list[jax.Array | None]
"""Column by column a block [groups, channels]; None is one that is in the padding for every thread."""


def filter_gradient(
    problem: Problem, x: jax.Array, dy: jax.Array, config: Config | None = None, interpret: bool = False
) -> jax.Array:
    """dw[r,s,c], the sum over n,p,q of x[n, p*stride+r-top, q*stride+s-left, c] * dy[n,p,q,c].

    Args:
        problem: one that `problem.supports`.
        x: [N,H,W,C], of the problem's type.
        dy: [N,P,Q,C], of the problem's type.
        config: the first of `configs` where there is none.
        interpret: runs it on any device, slowly.

    Returns:
        f32 [R,S,C], of sums in f32. Whether a product of the padding's zeros and an infinity, which is NaN, is added is
        left open; every other product is added, and no other.
    """
    kernel = FilterGradient(problem, config or configs(problem)[0], interpret)
    (sums,) = launch(
        kernel,
        [x.reshape(-1), dy.reshape(-1)],
        [((kernel.parts * problem.channels * kernel.taps,), jnp.float32)],
        name="depthwise_filter_gradient",
        programs=kernel.parts * kernel.channel_blocks,
        warps=kernel.config.warps,
        interpret=interpret,
    )
    by_channel = sums.reshape(kernel.parts, problem.channels, kernel.taps).sum(0)
    return by_channel.T[: math.prod(problem.window)].reshape(problem.filter_shape)


class FilterGradient:
    """The kernel of a problem. Its arguments are x, dy and the sums [parts, channels, taps], as flat references.

    Attributes:
        columns: those of dy, cut into groups.
        shape: of a block: groups of columns, channels.
        waiting: rows of dy that one row of x meets.
        taps: of the window, and so many more that they are a power of two.
        channel_blocks: programs that have the same columns; the last may share channels with the one before.
        groups, blocks: that there are of columns, and of so many groups as a program has side by side.
        parts: programs that have the same channels. Each takes every `parts`-th block, so that at any time all programs
            are near each other and what two of them read is still in the L2 cache.
    """

    def __init__(self, problem: Problem, config: Config, interpret: bool = False) -> None:
        self.problem, self.config, self.interpret = problem, config, interpret
        self.columns = Axis.of(problem, 1, config.columns)
        self.shape = config.groups, config.channels
        self.waiting = -(-problem.window[0] // problem.stride[0])
        self.taps = 1 << (math.prod(problem.window) - 1).bit_length()
        self.channel_blocks = -(-problem.channels // config.channels)
        self.groups = problem.batch * self.columns.tiles
        self.blocks = -(-self.groups // config.groups)
        self.parts = -(-self.blocks // config.blocks)

    def __call__(self, x: Any, dy: Any, out: Any) -> None:
        channels, config = self.problem.channels, self.config
        program = pl.program_id(0)
        part, channel_block = lax.div(program, self.channel_blocks), lax.rem(program, self.channel_blocks)
        first = jnp.minimum(channel_block * config.channels, channels - config.channels)

        def add_block(i: Any, sums: list[jax.Array]) -> list[jax.Array]:
            return Walk(self, x, dy, (part + i * self.parts) * config.groups, first).add(sums)

        sums = [jnp.zeros(self.shape, jnp.float32)] * math.prod(self.problem.window)
        if self.parts == self.blocks:
            sums = add_block(0, sums)
        else:
            sums = lax.fori_loop(0, lax.div(self.blocks - part + self.parts - 1, self.parts), add_block, sums)
        total = jnp.sum(_side_by_side(sums, self.taps), axis=0)
        channel, tap = (lax.broadcasted_iota(jnp.int32, total.shape, axis) for axis in (0, 1))
        triton.store(out.at[(part * channels + first + channel) * self.taps + tap], total)


class Loaded(NamedTuple):
    """What is new in a step; None is a row that does not exist."""

    dy: Row | None
    x: list[Row | None]


class Walk:
    """A program's way down the rows of some groups of columns.

    In step t row t of dy is new, and with it as many rows of x as the stride is, from t * stride - top.

    Attributes:
        group: its number in its row of groups; [groups, 1].
        exists: whether there is such a group.
        masks: whether each of its columns of x is one, and no padding.
        x_at, dy_at: offsets of the last column in row 0; [groups, channels].
    """

    def __init__(self, kernel: FilterGradient, x: Any, dy: Any, first: Any, channel: Any) -> None:
        self.kernel, self.problem, self.x, self.dy = kernel, kernel.problem, x, dy
        (_, h, w, c), (_, p, q, _) = self.problem.input_shape, self.problem.output_shape
        groups, channels = kernel.shape
        number = first + lax.broadcasted_iota(jnp.int32, (groups, 1), 0)
        channel = channel + lax.broadcasted_iota(jnp.int32, (1, channels), 1)
        columns = kernel.columns
        self.exists: Mask = kernel.groups % groups == 0 or number < kernel.groups
        image, self.group = lax.div(number, columns.tiles), lax.rem(number, columns.tiles)
        self.masks = [both(columns.has_input(self.group, i), self.exists) for i in range(columns.extent)]
        self.x_at = (image * (h * w) + columns.start(self.group) + columns.extent - 1) * c + channel
        self.dy_at = (image * (p * q) + columns.last_result(self.group)) * c + channel

    def add(self, sums: list[jax.Array]) -> list[jax.Array]:
        """The sums with all products of these columns."""
        (top, _), down, p = self.problem.padding[0], self.problem.stride[0], self.problem.output_shape[1]
        waiting, unrolled = self.kernel.waiting, self.kernel.config.steps
        # From step `first` on all rows exist; before step `last` also those that the next step loads.
        first, last = max(waiting - 1, -(-top // down)), min(p, (self.problem.height + top) // down) - 1
        loops = (last - first) // unrolled
        known = first if loops > 1 else p + waiting - 1

        def step(t: Any, carry: Any) -> Any:
            loaded, dys, sums = carry
            return self.load(t + 1), *self.multiply(loaded, dys, sums)

        def body(i: Any, carry: Any) -> Any:
            for k in range(unrolled):
                carry = step(first + i * unrolled + k, carry)
            return carry

        carry = self.load(0), [None] * (waiting - 1), sums
        for t in range(known):
            carry = step(t, carry)
        if loops > 1:
            carry = lax.fori_loop(0, loops, body, carry)
            for t in range(first + loops * unrolled, p + waiting - 1):
                carry = step(t, carry)
        _, _, sums = carry
        return sums

    def load(self, t: Any) -> Loaded:
        """What is new in step t; where t is known, so is which rows exist."""
        (_, h, w, c), (_, p, q, _) = self.problem.input_shape, self.problem.output_shape
        down = self.problem.stride[0]
        rows = [t * down - self.problem.padding[0][0] + e for e in range(min(down, self.problem.window[0]))]
        return Loaded(
            self.load_row(self.dy, self.dy_at, t, p, q * c, [self.exists] * self.kernel.config.columns)
            if _may_be(t, p)
            else None,
            [self.load_row(self.x, self.x_at, i, h, w * c, self.masks) if _may_be(i, h) else None for i in rows],
        )

    def load_row(self, ref: Any, last: Any, i: Any, rows: int, size: int, masks: list[Mask]) -> Row:
        """The columns before and at offset `last`, in row i instead of 0."""
        c = self.problem.channels
        at = last + i * size
        if self.problem.batch * rows * size + len(masks) * c < 2**31:
            # A number of 31 bits less a constant does not overflow: the compiler can put constants into the
            # instructions that load, and need not compute an address for each of them.
            at = at & np.int32(2**31 - 1)
        at = triton.max_contiguous(pl.multiple_of(at, (1, ALIGNED)), (1, ALIGNED))  # type: ignore[no-untyped-call]
        back = range(len(masks) - 1, -1, -1)
        return [self.load_block(ref, at - b * c, mask) for b, mask in zip(back, masks, strict=True)]

    def load_block(self, ref: Any, at: jax.Array, mask: Mask) -> jax.Array | None:
        return None if mask is False else load(ref, at, mask)

    def multiply(
        self, loaded: Loaded, dys: list[Row | None], sums: list[jax.Array]
    ) -> tuple[list[Row | None], list[jax.Array]]:
        """The rows of dy that wait for the next step, the newest first, and the sums with the products of this one."""
        (rows, columns), down = self.problem.window, self.problem.stride[0]
        dys = [self.widened(loaded.dy), *dys]
        products: dict[int, list[Any]] = {}
        for e, row in enumerate(map(self.widened, loaded.x)):
            for i, x in enumerate(row or []):
                for (j, s), (k, dy) in itertools.product(self.kernel.columns.taps(i), enumerate(dys)):
                    r = k * down + e
                    if x is not None and dy is not None and r < rows:
                        products.setdefault(r * columns + s, []).append((x, dy[j]))
        sums = list(sums)
        for tap, pairs in products.items():
            sums[tap] = add_products(sums[tap], pairs, interpret=self.kernel.interpret)
        return dys[:-1], sums

    def widened(self, row: Row | None) -> Row | None:
        return None if row is None else [None if block is None else self.f32(block) for block in row]

    def f32(self, block: jax.Array) -> jax.Array:
        if self.kernel.config.per_thread == 1:  # `to_f32` takes two from a register, in which there is one
            return block.astype(jnp.float32)
        return to_f32(block, interpret=self.kernel.interpret)


def _may_be(row: Any, rows: int) -> bool:
    """Whether the row of an image exists; that of a loop does."""
    return not isinstance(row, int) or 0 <= row < rows


def _side_by_side(blocks: list[jax.Array], count: int) -> jax.Array:
    """[groups, channels, count] of blocks, and zeros; Triton joins two blocks at a time, along a new last dimension."""
    joined = [*blocks, *[jnp.zeros_like(blocks[0])] * (count - len(blocks))]
    while len(joined) > 1:
        half = len(joined) // 2
        pairs = zip(joined[:half], joined[half:], strict=True)
        joined = [jnp.concatenate([a[..., None], b[..., None]], axis=-1) for a, b in pairs]
    return joined[0].reshape(*blocks[0].shape, count)
