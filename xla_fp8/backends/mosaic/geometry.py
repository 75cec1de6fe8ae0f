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
         | . . . . . |          | . . . . . |           . . o o o o        each tap has its own copy,
         +-----------+          +-----------+           . . o o o o        and L2 serves what neighbouring taps share

so one TMA copy fetches it, and the copy engine writes zeros for what lies outside the tensor: padding, the cut tiles at
the borders, the tail of the channels.

With `taps` = R a step takes a column of the window instead: the box has R - 1 rows more, and tap r sees its rows from r
on (`tap_rows`).

With strides (SH, SW), neighbouring outputs see inputs SH rows apart. The input is then viewed as
[N, H / SH, SH, W / SW, SW * C]: row h is (h // SH, h % SH), and column w the w // SW-th, at channel (w % SW) * C. For
one tap all rows of the tile have the same h % SH, so the box is dense again.

A dilated input comes without its zeros: each phase of the output (`phases`) is a convolution of its own, with its share
of the taps. A tile belongs to one phase, so its pixels are DH rows and DW columns apart in the output, which is viewed
as the input is with strides: [N, OH / DH, DH, OW / DW, DW * K].

A grid too small to fill the machine is split along the reduction: `splits` tiles share one place in the output, each
with its part of the steps, and store f32 sums one behind the other, [splits, N, OH, OW, K].

Tests run this file with numpy against a convolution.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jax import lax

from xla_fp8.backends.mosaic.configs import CONSUMERS, Config
from xla_fp8.backends.mosaic.phases import Phases
from xla_fp8.backends.mosaic.problem import Problem

Index: TypeAlias = Any
"""A Python int, a traced i32 scalar, or an array of either."""


def _div(a: Index, b: Index) -> Index:
    """a // b for a >= 0. A traced `//` would round down with more instructions."""
    return a // b if isinstance(a, int | np.ndarray) else lax.div(a, b)


def _rem(a: Index, b: Index) -> Index:
    return a % b if isinstance(a, int | np.ndarray) else lax.rem(a, b)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _one_of(values: Sequence[int], index: Index) -> Index:
    """values[index]; for a traced index a chain of selects, or the value that all are."""
    if isinstance(index, int):
        return values[index]
    if len(set(values)) == 1:
        return values[0]
    chosen: Index = np.int32(values[0])
    for i, value in enumerate(values[1:], start=1):
        chosen = lax.select(index == i, np.int32(value), chosen)
    return chosen


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a tile starts: image, row and column of its first output pixel, first output channel; its split, its phase.

    Row and column count the pixels of the phase: output row h * DH + phase[0], column w * DW + phase[1].
    """

    n: Index
    h: Index
    w: Index
    k: Index
    split: Index = 0
    phase: tuple[Index, Index] = (0, 0)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One step of the reduction: the tap (r, s) of the phase, its number in the whole filter, and the first channel."""

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
    def row_phases(self) -> Phases:
        return self.problem.phases[0]

    @property
    def column_phases(self) -> Phases:
        return self.problem.phases[1]

    @property
    def stride(self) -> tuple[int, int]:
        """Of the window of a phase, over the input as it is in memory."""
        return self.row_phases.stride, self.column_phases.stride

    @property
    def strided(self) -> bool:
        return self.stride != (1, 1)

    @property
    def phased(self) -> bool:
        """Whether the output has more than one phase."""
        return self.row_phases.count * self.column_phases.count > 1

    @property
    def tile_counts(self) -> tuple[int, int, int, int]:
        """Tiles of one phase along images, rows, columns and output channels."""
        p, c = self.problem, self.config
        return (
            ceil_div(p.batch, c.tile_images),
            ceil_div(self.row_phases.size, c.tile_height),
            ceil_div(self.column_phases.size, c.tile_width),
            ceil_div(p.features, c.tile_features),
        )

    @property
    def tiles(self) -> int:
        """Of all phases and splits."""
        phases = self.row_phases.count * self.column_phases.count
        return math.prod(self.tile_counts) * self.config.splits * phases

    @property
    def channel_blocks(self) -> int:
        return ceil_div(self.problem.channels, self.config.tile_channels)

    def steps(self, origin: Origin) -> Index:
        """Steps of the reduction of the tile at `origin`: of one split of it, where there are several."""
        r, s = self._taps(origin)
        parts = self.config.splits * self.config.taps
        if parts == 1:
            return r * s * self.channel_blocks
        assert not self.phased, "a split reduction has one phase, and so has a filter whose taps share copies"
        assert r * s * self.channel_blocks % parts == 0, self.config
        return r * s * self.channel_blocks // parts

    def _taps(self, origin: Origin) -> tuple[Index, Index]:
        r, s = (
            _one_of([phase.taps for phase in along.phases], index)
            for along, index in zip(self.problem.phases, origin.phase, strict=True)
        )
        return r, s

    def sizes(self, origin: Origin) -> tuple[Index, Index]:
        """Rows and columns of the phase of the tile at `origin`."""
        h, w = (
            _one_of([phase.size for phase in along.phases], index)
            for along, index in zip(self.problem.phases, origin.phase, strict=True)
        )
        return h, w

    @property
    def covers_exactly(self) -> bool:
        """Whether no tile reaches beyond the output."""
        p, c = self.problem, self.config
        return not (
            p.batch % c.tile_images
            or any(phase.size % c.tile_height for phase in self.row_phases.phases)
            or any(phase.size % c.tile_width for phase in self.column_phases.phases)
            or p.features % c.tile_features
        )

    @property
    def view_channels(self) -> int:
        """Channels of a pixel of the input as the kernel sees it.

        In the view of a strided convolution the next column follows the last channel, so zeros have to fill the last
        block of BK channels in memory; otherwise the copy engine makes them.
        """
        return self.channel_blocks * self.config.tile_channels if self.strided else self.problem.channels

    @property
    def view_shape(self) -> tuple[int, ...]:
        """Shape of the input as the kernel sees it: [N, H, W, C], or [N, H / SH, SH, W / SW, SW * C], rounded up."""
        batch, height, width, channels = self.padded_input_shape
        if not self.strided:
            return batch, height, width, channels
        sh, sw = self.stride
        return batch, height // sh, sh, width // sw, sw * channels

    @property
    def padded_input_shape(self) -> tuple[int, int, int, int]:
        """[N, H, W, C] with the zeros that have to be in memory, for `view_shape` to be a reshape of it."""
        p, c = self.problem, self.config
        rows = self._view_size(p.height, self.row_phases, c.tile_height)
        columns = self._view_size(p.width, self.column_phases, c.tile_width)
        return p.batch, rows * self.stride[0], columns * self.stride[1], self.view_channels

    def _view_size(self, size: int, along: Phases, extent: int) -> int:
        """Rows or columns of the view.

        One more than one where a box of one may start elsewhere: see `lone_starts`.
        """
        rows = ceil_div(size, along.stride)
        if rows > 1 or extent > 1:
            return rows
        offsets = [_input_offset(along, i, tap)[0] for i in range(along.count) for tap in range(along.phases[i].taps)]
        return 2 if along.size > 1 or any(offsets) else 1

    def padded_output_shape(self, columns: int) -> tuple[int, int, int, int]:
        """[N, OH, OW, K] of what the kernel stores, before it is cut to the size of the output.

        Where the output has phases, all get the same size. In the view the next column follows the last channel, so K
        is a multiple of `columns`, what is stored at a time: a store must not reach into the next column.
        """
        p = self.problem
        if not self.phased:
            return p.output_shape
        features = ceil_div(p.features, columns) * columns
        return (
            p.batch,
            self.row_phases.size * self.row_phases.count,
            self.column_phases.size * self.column_phases.count,
            features,
        )

    def store_shape(self, columns: int) -> tuple[int, ...]:
        """Shape of what the kernel stores, as it sees it: the output or its view by phases, or the sums of all splits.

        Args:
            columns: output channels that are stored at a time.
        """
        splits = (self.config.splits,) if self.config.splits > 1 else ()
        shape = self.padded_output_shape(columns)
        if not self.phased:
            return *splits, *shape
        dh, dw = self.row_phases.count, self.column_phases.count
        return shape[0], shape[1] // dh, dh, shape[2] // dw, dw * shape[3]

    @property
    def _phase_order(self) -> list[tuple[int, int]]:
        """Phases of rows and columns, those with the most taps first: short tiles last even out the machine's load."""
        rows, columns = self.row_phases.phases, self.column_phases.phases
        pairs = [(r, s) for r in range(len(rows)) for s in range(len(columns))]
        return sorted(pairs, key=lambda pair: -rows[pair[0]].taps * columns[pair[1]].taps)

    def origin(self, tile: Index) -> Origin:
        """Where tile number `tile` starts. Output channels vary fastest: concurrent blocks share their input in L2."""
        _, th, tw, features = self.tile_counts
        c = self.config
        split: Index = 0
        phase: tuple[Index, Index] = (0, 0)
        if c.splits > 1:
            split, tile = _div(tile, self.tiles // c.splits), _rem(tile, self.tiles // c.splits)
        if self.phased:
            each = math.prod(self.tile_counts)
            number, tile = _div(tile, each), _rem(tile, each)
            rows, columns = zip(*self._phase_order, strict=True)
            phase = _one_of(rows, number), _one_of(columns, number)
        m, k = _div(tile, features), _rem(tile, features)
        n, rest = _div(m, th * tw), _rem(m, th * tw)
        h, w = _div(rest, tw), _rem(rest, tw)
        return Origin(n * c.tile_images, h * c.tile_height, w * c.tile_width, k * c.tile_features, split, phase)

    def inside(self, origin: Origin, row: Index) -> Index:
        """Whether row `row` of a consumer's share is a pixel of the output; its box starts at `origin`."""
        _, height, width = self.warpgroup_box()
        n, rest = _div(row, height * width), _rem(row, height * width)
        h, w = _div(rest, width), _rem(rest, width)
        height, width = self.sizes(origin)
        return (n < self.problem.batch - origin.n) & (h < height - origin.h) & (w < width - origin.w)

    def lone_starts(self, origin: Origin) -> list[Index]:
        """Where a consumer's box starts, in dimensions in which a start other than 0 would be taken for 0.

        Mosaic leaves a dimension out of a copy where tensor and box have one element along it, and its start too: the
        copy engine would not see that the box lies outside, and store it over the one inside.

        Args:
            origin: of the consumer's box.
        """
        c = self.config
        dimensions = zip(
            (self.problem.batch, self.row_phases.size, self.column_phases.size),
            self.warpgroup_box(),
            (c.tile_images, c.tile_height, c.tile_width),
            (origin.n, origin.h, origin.w),
            strict=True,
        )
        return [start for size, box, tile, start in dimensions if size == box == 1 and tile > 1]

    def blocks(self, multiprocessors: int) -> int:
        """How many blocks run: all tiles of one have the same output channels where its filter is resident."""
        assert not (self.phased and self.config.resident), "the phases have different taps"
        features = self.tile_counts[3] if self.config.resident else 1
        return min(multiprocessors // features * features, self.tiles)

    # Who takes which tile. Block b of `blocks` takes every `blocks`-th, and fills its stages for them in this order.

    def block_tiles(self, block: Index, blocks: int) -> Index:
        """How many tiles a block has."""
        return _div(self.tiles - block + blocks - 1, blocks)

    def consumer_tiles(self, block_tiles: Index, consumer: Index) -> Index:
        """How many of the tiles of its block a consumer works on: on all, or on every second."""
        return _div(block_tiles + CONSUMERS - 1 - consumer, CONSUMERS) if self.config.pingpong else block_tiles

    def consumer_tile(self, i: Index, consumer: Index) -> Index:
        """Which tile of the block is the `i`-th of a consumer."""
        return CONSUMERS * i + consumer if self.config.pingpong else i

    def passed_steps(self, others: Origin) -> Index:
        """Steps of the block that a consumer passes over between two tiles: all of the other consumer's tile."""
        return self.steps(others) if self.config.pingpong else 0

    def step(self, number: Index, origin: Origin) -> Step:
        """Step `number` of the reduction of the tile at `origin`: its first tap. Channels vary fastest."""
        if self.config.splits > 1:
            number = origin.split * self.steps(origin) + number
        tap, block = _div(number, self.channel_blocks), _rem(number, self.channel_blocks)
        if self.config.taps > 1:
            return Step(0, tap, tap, block * self.config.tile_channels)
        _, s = self._taps(origin)
        row, column = _div(tap, s), _rem(tap, s)
        if self.problem.base_dilation != (1, 1):  # one phase, too, sees a part of the taps: stride 2 over zeros of 2
            first = [
                _one_of([phase.first_tap for phase in along.phases], index)
                for along, index in zip(self.problem.phases, origin.phase, strict=True)
            ]
            in_filter = (first[0] + row * self.row_phases.tap_step, first[1] + column * self.column_phases.tap_step)
            tap = in_filter[0] * self.problem.taps[1] + in_filter[1]
        return Step(row, column, tap, block * self.config.tile_channels)

    def box_start(self, origin: Origin, step: Step) -> BoxStart:
        """Where the input box starts that tap (r, s) sees from the tile at `origin`."""
        h, parity = _input_offset(self.row_phases, origin.phase[0], step.r)
        w, column = _input_offset(self.column_phases, origin.phase[1], step.s)
        return BoxStart(origin.n, origin.h + h, parity, origin.w + w, step.c + column * self.view_channels)

    def filter_tap(self, step: Step, tap: int) -> Index:
        """The number in the whole filter of tap `tap` of a step."""
        return step.tap + tap * self.problem.taps[1]

    def tap_rows(self, tap: int, warpgroup: Index) -> list[tuple[int, Index, int]]:
        """Which rows in shared memory tap `tap` of a step sees from a consumer's pixels.

        Returns:
            Runs of rows, which follow one another in the accumulator: the first row there, the first row of the
            copied box, and how many. One run, unless several images have a halo between them.
        """
        c = self.config
        images, height, width = self.warpgroup_box()
        if c.taps == 1:
            return [(0, 0 if c.pingpong else warpgroup * c.warpgroup_pixels, c.warpgroup_pixels)]
        copied = c.copied_height * width
        first: Index = tap * width
        if not c.pingpong:
            first = warpgroup * (height * width if c.tile_images == 1 else images * copied) + first
        return [(n * height * width, first + n * copied, height * width) for n in range(images)]

    def pixel(self, row: Index) -> tuple[Index, Index, Index]:
        """Image, row and column, within a tile, of row `row` of the matrix product."""
        c = self.config
        n, rest = _div(row, c.tile_height * c.tile_width), _rem(row, c.tile_height * c.tile_width)
        return n, _div(rest, c.tile_width), _rem(rest, c.tile_width)

    def warpgroup_box(self) -> tuple[int, int, int]:
        """Images, rows and columns of one consumer's half of the tile: its rows of the product are again a box.

        The whole tile where the consumers do not share it.
        """
        c = self.config
        if c.pingpong:
            return c.tile_images, c.tile_height, c.tile_width
        if c.tile_images % 2 == 0:
            return c.tile_images // 2, c.tile_height, c.tile_width
        if c.tile_images == 1 and c.tile_height % 2 == 0:
            return 1, c.tile_height // 2, c.tile_width
        assert c.tile_images == c.tile_height == 1, c
        return 1, 1, c.tile_width // 2

    def warpgroup_origin(self, origin: Origin, warpgroup: Index) -> Origin:
        """Where the half of consumer `warpgroup` (0 or 1) starts; a tile of its own starts where it does."""
        n, h, w = self.warpgroup_box()
        c = self.config
        if c.pingpong:
            return origin
        if n != c.tile_images:
            return dataclasses.replace(origin, n=origin.n + warpgroup * n)
        if h != c.tile_height:
            return dataclasses.replace(origin, h=origin.h + warpgroup * h)
        return dataclasses.replace(origin, w=origin.w + warpgroup * w)


def _input_offset(along: Phases, phase: Index, tap: Index) -> tuple[Index, Index]:
    """How far from an output the input lies that a tap sees, in strides rounded down; and the rest."""
    paddings = [p.padding for p in along.phases]
    offset = tap * along.dilation - _one_of(paddings, phase)
    if along.stride == 1:
        return offset, 0
    shift = ceil_div(max(0, *paddings), along.stride)
    shifted = offset + shift * along.stride
    return _div(shifted, along.stride) - shift, _rem(shifted, along.stride)
