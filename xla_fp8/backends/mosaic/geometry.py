"""Which pixels, taps and channels each step of the kernel works on: plain index arithmetic, on ints or traced values.

The convolution is a matrix product that is never laid out in memory (implicit GEMM)::

    output [pixels, K] = patches [pixels, R * S * C] @ filter [K, R * S * C]^T

A tile is a box of TN images x TH rows x TW columns of output pixels, and BN output channels. One step of its reduction
takes one tap (r, s) and BK channels: the input pixels that this tap sees from all pixels of the tile are again a box of
TN x TH x TW pixels, moved by (r, s)::

          input, tap (0, 0)      tap (0, 1)             tap (2, 2)
         +-----------+          +-----------+
         | o o o o . |          | . o o o o |           . . . . . .        o: the box that is copied for the tile
         | o o o o . |    ->    | . o o o o |    ->     . . . . . .
         | . . . . . |          | . . . . . |           . . o o o o        no halo is kept: each tap has its own copy,
         +-----------+          +-----------+           . . o o o o        and L2 serves what neighbouring taps share

so one TMA copy fetches it, and the copy engine writes zeros for what lies outside the tensor: padding, the cut tiles at
the borders, the tail of the channels.

With strides (SH, SW), neighbouring outputs see inputs SH rows apart. The input is then viewed as
[N, H / SH, SH, W / SW, SW * C]: row h is (h // SH, h % SH), and column w the w // SW-th, at channel (w % SW) * C. For
one tap all rows of the tile have the same h % SH, so the box is dense again.

A grid too small to fill the machine is split along the reduction: `splits` tiles share one place in the output, each
with its part of the steps, and store f32 sums one behind the other, [splits, N, OH, OW, K].

Tests run this file with numpy against a convolution.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeAlias

from jax import lax

from xla_fp8.backends.mosaic.configs import Config
from xla_fp8.backends.mosaic.problem import Problem

Index: TypeAlias = Any
"""A Python int or a traced i32 scalar."""


def _div(a: Index, b: int) -> Index:
    """a // b for a >= 0. A traced `//` would round down with more instructions."""
    return a // b if isinstance(a, int) else lax.div(a, b)


def _rem(a: Index, b: int) -> Index:
    return a % b if isinstance(a, int) else lax.rem(a, b)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a tile starts: image, row and column of its first output pixel, first output channel; and its split."""

    n: Index
    h: Index
    w: Index
    k: Index
    split: Index = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of the reduction: the tap (r, s), its number r * S + s, and the first channel."""

    r: Index
    s: Index
    tap: Index
    c: Index


@dataclasses.dataclass(frozen=True, slots=True)
class BoxStart:
    """Where the input box of a step starts, in the (strided) view of the input.

    Attributes:
        n: image.
        h: row of the view; may lie outside the tensor.
        parity: which of the SH rows that one row of the view stands for.
        w: column of the view; may lie outside the tensor.
        c: channel of the view.
    """

    n: Index
    h: Index
    parity: Index
    w: Index
    c: Index


@dataclasses.dataclass(frozen=True, slots=True)
class Geometry:
    """How a problem is cut into tiles and steps."""

    problem: Problem
    config: Config

    @property
    def tile_counts(self) -> tuple[int, int, int, int]:
        """Tiles along images, rows, columns and output channels."""
        p, c = self.problem, self.config
        return (
            ceil_div(p.batch, c.tile_images),
            ceil_div(p.out_height, c.tile_height),
            ceil_div(p.out_width, c.tile_width),
            ceil_div(p.features, c.tile_features),
        )

    @property
    def tiles(self) -> int:
        """Of all splits."""
        return math.prod(self.tile_counts) * self.config.splits

    @property
    def channel_blocks(self) -> int:
        return ceil_div(self.problem.channels, self.config.tile_channels)

    @property
    def steps(self) -> int:
        """Steps of the reduction of one tile: of one split of it, where there are several."""
        r, s = self.problem.taps
        assert r * s * self.channel_blocks % self.config.splits == 0, self.config
        return r * s * self.channel_blocks // self.config.splits

    @property
    def covers_exactly(self) -> bool:
        """Whether no tile reaches beyond the output."""
        p, c = self.problem, self.config
        return not (
            p.batch % c.tile_images
            or p.out_height % c.tile_height
            or p.out_width % c.tile_width
            or p.features % c.tile_features
        )

    @property
    def view_channels(self) -> int:
        """Channels of a pixel of the input as the kernel sees it.

        In the view of a strided convolution the next column follows the last channel, so zeros have to fill the last
        block of BK channels in memory; otherwise the copy engine makes them.
        """
        return self.channel_blocks * self.config.tile_channels if self.problem.strided else self.problem.channels

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of the input as the kernel sees it: [N, H, W, C], or [N, H / SH, SH, W / SW, SW * C], rounded up."""
        p = self.problem
        if not p.strided:
            return p.input_shape
        sh, sw = p.stride
        return p.batch, ceil_div(p.height, sh), sh, ceil_div(p.width, sw), sw * self.view_channels

    @property
    def store_shape(self) -> tuple[int, ...]:
        """Shape of what the kernel stores: the output, or the sums of all splits of it."""
        splits = (self.config.splits,) if self.config.splits > 1 else ()
        return (*splits, *self.problem.output_shape)

    def origin(self, tile: Index) -> Origin:
        """Where tile number `tile` starts. Output channels vary fastest: concurrent blocks share their input in L2."""
        _, th, tw, tk = self.tile_counts
        c = self.config
        split: Index = 0
        if c.splits > 1:
            split, tile = _div(tile, self.tiles // c.splits), _rem(tile, self.tiles // c.splits)
        m, k = _div(tile, tk), _rem(tile, tk)
        n, rest = _div(m, th * tw), _rem(m, th * tw)
        h, w = _div(rest, tw), _rem(rest, tw)
        return Origin(n * c.tile_images, h * c.tile_height, w * c.tile_width, k * c.tile_features, split)

    def step(self, number: Index, split: Index = 0) -> Step:
        """Step `number` of a split of a tile's reduction. Channels vary fastest."""
        number = split * self.steps + number
        tap, block = _div(number, self.channel_blocks), _rem(number, self.channel_blocks)
        _, s = self.problem.taps
        return Step(_div(tap, s), _rem(tap, s), tap, block * self.config.tile_channels)

    def box_start(self, origin: Origin, step: Step) -> BoxStart:
        """Where the input box starts that tap (r, s) sees from the tile at `origin`."""
        p = self.problem
        (sh, sw), (dh, dw), (ph, pw) = p.stride, p.dilation, p.padding
        h, parity = _split(step.r * dh - ph, sh, lowest=min(0, -ph))
        w, phase = _split(step.s * dw - pw, sw, lowest=min(0, -pw))
        return BoxStart(origin.n, origin.h + h, parity, origin.w + w, step.c + phase * self.view_channels)

    def pixel(self, row: Index) -> tuple[Index, Index, Index]:
        """Image, row and column, within a tile, of row `row` of the matrix product."""
        c = self.config
        n, rest = _div(row, c.tile_height * c.tile_width), _rem(row, c.tile_height * c.tile_width)
        return n, _div(rest, c.tile_width), _rem(rest, c.tile_width)

    def warpgroup_box(self) -> tuple[int, int, int]:
        """Images, rows and columns of one consumer's half of the tile: its rows of the product are again a box."""
        c = self.config
        if c.tile_images % 2 == 0:
            return c.tile_images // 2, c.tile_height, c.tile_width
        if c.tile_images == 1 and c.tile_height % 2 == 0:
            return 1, c.tile_height // 2, c.tile_width
        assert c.tile_images == c.tile_height == 1, c
        return 1, 1, c.tile_width // 2

    def warpgroup_origin(self, origin: Origin, warpgroup: Index) -> Origin:
        """Where the half of consumer `warpgroup` (0 or 1) starts."""
        n, h, w = self.warpgroup_box()
        c = self.config
        if n != c.tile_images:
            return dataclasses.replace(origin, n=origin.n + warpgroup * n)
        if h != c.tile_height:
            return dataclasses.replace(origin, h=origin.h + warpgroup * h)
        return dataclasses.replace(origin, w=origin.w + warpgroup * w)


def _split(offset: Index, stride: int, lowest: int) -> tuple[Index, Index]:
    """offset // stride, rounded down, and the rest, for an offset >= lowest."""
    if stride == 1:
        return offset, 0
    shift = ceil_div(-lowest, stride)
    shifted = offset + shift * stride
    return _div(shifted, stride) - shift, _rem(shifted, stride)
