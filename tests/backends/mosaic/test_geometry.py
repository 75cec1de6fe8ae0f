"""The kernel's index arithmetic, run step by step in numpy, computes a convolution; and no store leaves the output."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.sampling import sampled
from xla_fp8.backends.mosaic.configs import CONSUMERS, Config, shares_taps
from xla_fp8.backends.mosaic.geometry import Geometry, Origin
from xla_fp8.backends.mosaic.phases import phases_of
from xla_fp8.backends.mosaic.problem import Problem

Array = np.ndarray[Any, Any]


def as_mosaic_starts(tensor: Array, start: tuple[int, ...], extents: tuple[int, ...]) -> list[int]:
    """Mosaic leaves a dimension of one element out of a copy of one element along it: it starts at 0, come what may."""
    sizes = zip(tensor.shape, extents, start, strict=True)
    return [0 if size == extent == 1 else first for size, extent, first in sizes]


def copy_box(tensor: Array, start: tuple[int, ...], extents: tuple[int, ...]) -> Array:
    """What the copy engine fetches: zeros for what lies outside the tensor."""
    start = tuple(as_mosaic_starts(tensor, start, extents))
    box = np.zeros(extents, tensor.dtype)
    low = [max(0, s) for s in start]
    high = [min(size, s + e) for size, s, e in zip(tensor.shape, start, extents, strict=True)]
    if all(a < b for a, b in zip(low, high, strict=True)):
        target = tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start, strict=True))
        box[target] = tensor[tuple(slice(a, b) for a, b in zip(low, high, strict=True))]
    return box


def store_box(tensor: Array, start: tuple[int, ...], box: Array) -> None:
    """What the copy engine stores: nothing outside the tensor. Each element of the output is stored once."""
    start = tuple(as_mosaic_starts(tensor, start, box.shape))
    keep = tuple(slice(0, max(0, size - s)) for size, s in zip(tensor.shape, start, strict=True))
    kept = box[keep]
    target = tensor[tuple(slice(s, s + e) for s, e in zip(start, kept.shape, strict=True))]
    assert np.isnan(target).all(), "an element is stored twice"
    target[...] = kept


def implicit_gemm(geometry: Geometry, input: Array, filter: Array, blocks: int = 3) -> Array:
    """The kernel in numpy: every block fills its stages, and its consumers read them; the sum of the splits."""
    p, c = geometry.problem, geometry.config
    padded = np.zeros(geometry.padded_input_shape, input.dtype)
    padded[:, : p.height, : p.width, : p.channels] = input
    view = padded.reshape(geometry.view_shape)
    taps = filter.reshape(p.features, -1, p.channels)
    # As the kernel stores it, 32 channels at a time: with phases, a view of rows and columns that were rounded up.
    stored = np.full(geometry.store_shape(32), np.nan).reshape(c.splits, *geometry.padded_output_shape(32))
    view_by_phases = stored.reshape(geometry.store_shape(32))
    blocks = geometry.blocks(blocks)
    for block in range(blocks):
        tiles = geometry.block_tiles(block, blocks)
        origins = [geometry.origin(block + i * blocks) for i in range(tiles)]
        steps = [stage for origin in origins for stage in filled_stages(geometry, origin, view, taps)]
        if c.resident:  # what the first tile brought serves all
            count = geometry.steps(origins[0])
            steps = [(pixels, steps[number % count][1]) for number, (pixels, _) in enumerate(steps)]
        readers = [0] * len(steps)
        for consumer in range(CONSUMERS):
            first = consumer * geometry.passed_steps(origins[0])
            for n in range(geometry.consumer_tiles(tiles, consumer)):
                i = geometry.consumer_tile(n, consumer)
                half = c.warpgroup_pixels
                sums = np.zeros((half, c.tile_features))
                for step in range(first, first + geometry.steps(origins[i])):
                    pixels, weights = steps[step]
                    for tap in range(c.taps):
                        for row, start, size in geometry.tap_rows(tap, consumer):
                            assert start % 8 == 0, "not a whole group of the swizzled view"
                            sums[row : row + size] += pixels[start : start + size] @ weights[tap].T
                    readers[step] += 1
                part = sums.reshape(*geometry.warpgroup_box(), c.tile_features)
                store(geometry, stored, view_by_phases, geometry.warpgroup_origin(origins[i], consumer), part)
                first += geometry.steps(origins[i]) + geometry.passed_steps(origins[min(i + 1, tiles - 1)])
        assert set(readers) <= {1 if c.pingpong else CONSUMERS}, "a stage is not released, or too often"
    assert not np.isnan(stored).any(), "an element is not stored"
    return np.asarray(stored.sum(axis=0)[tuple(map(slice, p.output_shape))])


def filled_stages(geometry: Geometry, origin: Origin, view: Array, taps: Array) -> Iterator[tuple[Array, Array]]:
    """What the producer copies for the steps of a tile: [pixels, channels] and [taps, features, channels]."""
    c = geometry.config
    for number in range(geometry.steps(origin)):
        step = geometry.step(number, origin)
        box = geometry.box_start(origin, step)
        middle = ((box.parity,), (1,)) if geometry.strided else ((), ())
        pixels = copy_box(
            view,
            (box.n, box.h, *middle[0], box.w, box.c),
            (c.tile_images, c.copied_height, *middle[1], c.tile_width, c.tile_channels),
        )
        corners = [(origin.k, geometry.filter_tap(step, tap), step.c) for tap in range(c.taps)]
        weights = [copy_box(taps, corner, (c.tile_features, 1, c.tile_channels))[:, 0] for corner in corners]
        yield pixels.reshape(-1, c.tile_channels), np.stack(weights)


def store(geometry: Geometry, stored: Array, view_by_phases: Array, start: Origin, part: Array) -> None:
    """Stores what a consumer computed of a tile; `inside` says of each pixel whether that is somewhere."""
    inside = geometry.inside(start, np.arange(geometry.config.warpgroup_pixels))
    part[~inside.reshape(part.shape[:-1])] = np.inf
    first = start.n, start.h, start.w
    sizes = geometry.problem.batch, *geometry.sizes(start)
    kept = [min(max(0, size - at), n) for size, at, n in zip(sizes, first, part.shape[:-1], strict=True)]
    assert inside.sum() == math.prod(kept)
    if any(geometry.lone_starts(start)):
        return
    if not geometry.phased:
        store_box(stored[start.split], (start.n, start.h, start.w, start.k), part)
        return
    channels = geometry.padded_output_shape(32)[-1]
    row_phase, column_phase = start.phase
    for column in range(0, geometry.config.tile_features, 32):
        if start.k + column < geometry.problem.features:
            corner = (start.n, start.h, start.w, column_phase * channels + start.k + column)
            store_box(view_by_phases[:, :, row_phase], corner, part[..., column : column + 32])


def convolution(p: Problem, input: Array, filter: Array) -> Array:
    """HLO's convolution in numpy: compiling one for every test would take most of their time."""
    height, width = ((size - 1) * zeros + 1 for size, zeros in zip(input.shape[1:3], p.base_dilation, strict=True))
    dilated = np.zeros((p.batch, height + 1, width + 1, p.channels), input.dtype)  # the last are the zeros outside
    dilated[:, : -1 : p.base_dilation[0], : -1 : p.base_dilation[1]] = input
    output = np.zeros(p.output_shape, input.dtype)
    for r, s in np.ndindex(*p.taps):
        h = np.arange(p.out_height) * p.stride[0] + r * p.dilation[0] - p.padding[0]
        w = np.arange(p.out_width) * p.stride[1] + s * p.dilation[1] - p.padding[1]
        h[(h < 0) | (h >= height)], w[(w < 0) | (w >= width)] = -1, -1
        output += dilated[:, h[:, None], w] @ filter[:, r, s].T
    return output


def jax_convolution(p: Problem, input: Array, filter: Array) -> Array:
    inputs, outputs = (p.height, p.width), (p.out_height, p.out_width)
    sizes = [(size - 1) * zeros + 1 for size, zeros in zip(inputs, p.base_dilation, strict=True)]
    high = [
        (out - 1) * stride + (taps - 1) * dilation + 1 - size - low
        for out, stride, taps, dilation, size, low in zip(
            outputs, p.stride, p.taps, p.dilation, sizes, p.padding, strict=True
        )
    ]
    return np.asarray(
        lax.conv_general_dilated(
            jnp.asarray(input),
            jnp.asarray(filter),
            p.stride,
            list(zip(p.padding, high, strict=True)),
            lhs_dilation=p.base_dilation,
            rhs_dilation=p.dilation,
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
            precision=lax.Precision.HIGHEST,
        )
    )


PROBLEMS = {
    "3x3": Problem(2, 8, 8, 32, 32, 8, 8, taps=(3, 3), padding=(1, 1)),
    "odd sizes": Problem(3, 7, 9, 48, 80, 7, 9, taps=(3, 5), padding=(1, 2)),
    "no padding": Problem(1, 9, 10, 32, 32, 7, 8, taps=(3, 3)),
    "much padding": Problem(1, 4, 4, 32, 32, 9, 9, taps=(2, 2), padding=(4, 2)),
    "negative padding": Problem(1, 12, 12, 32, 32, 6, 8, taps=(3, 3), padding=(-2, -1)),
    "stride 2": Problem(2, 8, 8, 32, 32, 4, 4, taps=(3, 3), stride=(2, 2)),
    "stride 2, odd sizes": Problem(2, 9, 7, 32, 32, 5, 4, taps=(3, 3), stride=(2, 2), padding=(1, 1)),
    "stride 2, channel tail": Problem(1, 8, 8, 48, 32, 4, 4, taps=(3, 3), stride=(2, 2), padding=(1, 1)),
    "stride 2, negative padding": Problem(1, 12, 12, 32, 32, 5, 5, taps=(3, 3), stride=(2, 2), padding=(-1, -1)),
    "stride 3 and 1": Problem(1, 10, 6, 32, 32, 4, 6, taps=(3, 3), stride=(3, 1), padding=(1, 1)),
    "patches": Problem(1, 16, 16, 16, 32, 4, 4, taps=(4, 4), stride=(4, 4)),
    "dilation": Problem(1, 10, 10, 32, 32, 8, 6, taps=(2, 3), dilation=(2, 2)),
    "stride and dilation": Problem(
        1, 12, 12, 32, 32, 5, 5, taps=(3, 3), stride=(2, 2), dilation=(2, 2), padding=(1, 1)
    ),
    "1x1": Problem(2, 7, 7, 32, 32, 7, 7).flattened(),
    "one row": Problem(1, 1, 52, 32, 32, 1, 52),
    "one column": Problem(2, 9, 1, 32, 32, 9, 1, taps=(3, 4), padding=(1, 1)),
    "one column, several out": Problem(2, 9, 1, 32, 32, 9, 3, taps=(3, 4), padding=(1, 3)),
    "one pixel": Problem(1, 1, 1, 32, 32, 1, 1, taps=(3, 3), padding=(1, 1)),
    "stride 2 over two rows": Problem(1, 2, 9, 32, 32, 1, 5, taps=(3, 3), stride=(2, 2), padding=(1, 1)),
    "gradient of one pixel": Problem(1, 1, 1, 32, 32, 2, 2, taps=(3, 3), padding=(1, 1), base_dilation=(2, 2)),
    "1-D": Problem(2, 1, 40, 32, 32, 1, 40, taps=(1, 3), padding=(0, 1)),
    "gradient of stride 2": Problem(2, 7, 8, 32, 32, 14, 16, taps=(3, 3), padding=(1, 2), base_dilation=(2, 2)),
    "gradient of stride 2, odd sizes": Problem(
        1, 7, 5, 48, 80, 13, 11, taps=(3, 5), padding=(1, 3), base_dilation=(2, 2)
    ),
    "gradient of 1x1 with stride 2": Problem(2, 4, 5, 32, 48, 8, 9, base_dilation=(2, 2)),
    "gradient of patches": Problem(1, 4, 4, 32, 32, 16, 16, taps=(4, 4), padding=(3, 3), base_dilation=(4, 4)),
    "gradient of strides 3 and 1": Problem(1, 4, 9, 32, 32, 12, 9, taps=(3, 3), padding=(2, 1), base_dilation=(3, 1)),
    "gradient of stride and dilation": Problem(
        1, 6, 6, 32, 32, 12, 12, taps=(3, 3), dilation=(2, 3), padding=(3, 4), base_dilation=(2, 2)
    ),
    "dilated input and stride": Problem(
        1, 5, 6, 32, 32, 6, 5, taps=(3, 3), stride=(2, 3), padding=(3, 2), base_dilation=(3, 2)
    ),
    "input dilated by its stride": Problem(
        2, 5, 6, 32, 32, 5, 6, taps=(5, 3), stride=(2, 1), padding=(2, 1), base_dilation=(2, 1)
    ),
    "stride, a multiple of the input's dilation": Problem(
        1, 9, 12, 32, 48, 5, 3, taps=(4, 7), stride=(4, 3), dilation=(1, 2), padding=(1, 6), base_dilation=(2, 3)
    ),
    "dilated input of which no tap sees a number": Problem(
        1, 4, 1, 32, 32, 4, 2, taps=(3, 2), stride=(2, 1), dilation=(2, 1), padding=(1, 1), base_dilation=(2, 1)
    ),
    "gradient with negative padding": Problem(
        1, 6, 6, 32, 32, 7, 6, taps=(3, 3), padding=(-1, -2), base_dilation=(2, 2)
    ),
}

BOXES = [
    (1, 8, 16),
    (1, 16, 16),
    (2, 8, 8),
    (16, 1, 8),
    (1, 1, 128),
    (128, 1, 1),
    (1, 128, 1),
    (1, 2, 64),
    (1, 64, 2),
    (2, 1, 64),
]


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_convolution_that_the_others_compare_with(name: str) -> None:
    problem = PROBLEMS[name]
    rng = np.random.default_rng(0)
    input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
    filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
    np.testing.assert_array_equal(convolution(problem, input, filter), jax_convolution(problem, input, filter))


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("box", BOXES, ids=str)
def test_the_steps_of_all_tiles_are_a_convolution(name: str, box: tuple[int, int, int]) -> None:
    problem = PROBLEMS[name]
    rng = np.random.default_rng(0)
    input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
    filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
    geometry = Geometry(problem, Config(*box, tile_features=64, tile_channels=32, stages=4))
    np.testing.assert_array_equal(implicit_gemm(geometry, input, filter), convolution(problem, input, filter))


@pytest.mark.parametrize("channels", [32, 64, 128])
def test_a_channel_tail_adds_nothing(channels: int) -> None:
    problem = Problem(1, 4, 8, 80, 16, 4, 8, taps=(3, 3), padding=(1, 1))
    rng = np.random.default_rng(1)
    input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
    filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
    geometry = Geometry(problem, Config(4, 4, 8, tile_features=32, tile_channels=channels, stages=4))
    np.testing.assert_array_equal(implicit_gemm(geometry, input, filter), convolution(problem, input, filter))


@pytest.mark.parametrize("splits", [1, 2, 3, 9])
def test_splits_share_the_steps(splits: int) -> None:
    problem = Problem(2, 7, 9, 64, 48, 7, 9, taps=(3, 3), padding=(1, 1))
    rng = np.random.default_rng(2)
    input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
    filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
    geometry = Geometry(problem, Config(1, 8, 16, tile_features=32, tile_channels=32, stages=4, splits=splits))
    assert geometry.steps(geometry.origin(0)) * splits == 18
    np.testing.assert_array_equal(implicit_gemm(geometry, input, filter), convolution(problem, input, filter))


@pytest.mark.parametrize("box", [(1, 8, 16), (2, 8, 8), (1, 8, 8), (64, 1, 1)], ids=str)
@pytest.mark.parametrize("name", ["3x3", "odd sizes", "stride 2, odd sizes", "1x1", "gradient of stride 2, odd sizes"])
def test_consumers_with_tiles_of_their_own(name: str, box: tuple[int, int, int]) -> None:
    """Several tiles for each: the second consumer's lie where its tiles do, and its steps are every second tile's."""
    problem = PROBLEMS[name]
    rng = np.random.default_rng(3)
    input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
    filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
    geometry = Geometry(problem, Config(*box, tile_features=32, tile_channels=32, stages=4, pingpong=True))
    for blocks in (1, 2):
        np.testing.assert_array_equal(
            implicit_gemm(geometry, input, filter, blocks), convolution(problem, input, filter)
        )


SHARED_TAPS = {
    "3x3": PROBLEMS["3x3"],
    "odd sizes": PROBLEMS["odd sizes"],
    "no padding": PROBLEMS["no padding"],
    "much padding": PROBLEMS["much padding"],
    "negative padding": PROBLEMS["negative padding"],
    "5x2": Problem(3, 17, 19, 48, 80, 15, 19, taps=(5, 2), padding=(1, 0), dilation=(1, 2)),
}


@pytest.mark.parametrize("pingpong", [False, True], ids=["shared", "pingpong"])
@pytest.mark.parametrize("box", [(1, 16, 8), (2, 8, 8), (1, 8, 32), (4, 4, 16)], ids=str)
@pytest.mark.parametrize("name", SHARED_TAPS)
def test_taps_of_a_column_share_one_copy(name: str, box: tuple[int, int, int], pingpong: bool) -> None:
    problem = SHARED_TAPS[name]
    rng = np.random.default_rng(5)
    input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
    filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
    expected = convolution(problem, input, filter)
    config = Config(*box, 32, 32, 4, pingpong=pingpong, taps=problem.taps[0])
    assert shares_taps(problem, config)
    blocks = -(-problem.channels // 32)
    resident = dataclasses.replace(config, resident=math.prod(problem.taps) * blocks)
    for tried in (config, resident):
        np.testing.assert_array_equal(implicit_gemm(Geometry(problem, tried), input, filter), expected)


def swizzled(address: Array, swizzle: int) -> Array:
    """Where the copy engine puts a byte: 16-byte units of a row of `swizzle` bytes change places by bits 7 and up."""
    return np.asarray(address ^ ((address >> 7 & (swizzle // 16 - 1)) << 4))


@pytest.mark.parametrize("channels", [32, 64, 128])
def test_a_tap_s_slice_of_the_tiled_view_holds_its_pixels(channels: int) -> None:
    """The tensor core reads groups of 8 rows, each swizzled from its own start; a copy swizzles all by address."""
    config = Config(2, 8, 8, 32, channels, 4, taps=3)
    rows = config.tile_images * config.copied_height * config.tile_width
    row, column = np.meshgrid(np.arange(rows), np.arange(channels), indexing="ij")
    memory = np.empty(rows * channels, np.int64)
    memory[swizzled(row * channels + column, channels)] = row * channels + column
    geometry = Geometry(PROBLEMS["3x3"], config)
    for tap, consumer in ((tap, consumer) for tap in range(3) for consumer in range(CONSUMERS)):
        for _, first, count in geometry.tap_rows(tap, consumer):
            group, line = np.divmod(np.arange(count), 8)
            start = (first // 8 + group) * 8 * channels  # `Ref.at[ds(first, count)]` of a tiling by 8 rows
            inner = swizzled(line[:, None] * channels + np.arange(channels), channels)
            expected = row[first : first + count] * channels + np.arange(channels)
            np.testing.assert_array_equal(memory[start[:, None] + inner], expected)


@pytest.mark.parametrize("pingpong", [False, True], ids=["shared", "pingpong"])
@pytest.mark.parametrize("name", ["3x3", "odd sizes", "stride 2, channel tail", "1x1", "1-D"])
def test_a_filter_stays_for_all_tiles_of_a_block(name: str, pingpong: bool) -> None:
    problem = PROBLEMS[name]
    rng = np.random.default_rng(6)
    input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
    filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
    tiles = math.prod(problem.taps) * -(-problem.channels // 32)
    geometry = Geometry(problem, Config(1, 8, 16, 32, 32, 4, pingpong=pingpong, resident=tiles))
    for blocks in (3, 7):
        found = implicit_gemm(geometry, input, filter, blocks)
        np.testing.assert_array_equal(found, convolution(problem, input, filter))


def test_what_cannot_share_a_copy() -> None:
    config = Config(2, 8, 8, 32, 32, 4, taps=3)
    assert shares_taps(PROBLEMS["3x3"], config)
    changes: tuple[dict[str, Any], ...] = (
        {"tile_width": 4},
        {"tile_images": 3},
        {"tile_images": 1},
        {"tile_images": 4, "tile_height": 4},
    )
    for bad in changes:
        assert not shares_taps(PROBLEMS["3x3"], dataclasses.replace(config, **bad)), bad
    for name in ("1x1", "1-D", "stride 2", "dilation", "gradient of stride 2"):
        assert not shares_taps(PROBLEMS[name], config), name


def test_flattening_keeps_a_1x1_convolution_and_nothing_else() -> None:
    pointwise = Problem(2, 7, 5, 32, 48, 7, 5)
    flat = pointwise.flattened()
    assert (flat.batch, flat.height, flat.width, flat.pixels) == (1, 1, 70, pointwise.pixels)
    for other in (
        dataclasses.replace(pointwise, stride=(2, 2), out_height=4, out_width=3),
        dataclasses.replace(pointwise, padding=(1, 1), out_height=9, out_width=7),
        dataclasses.replace(pointwise, padding=(0, 0), out_height=8),  # padded behind the last row
        dataclasses.replace(pointwise, taps=(3, 3), padding=(1, 1)),
        Problem(2**13, 512, 512, 16, 16, 512, 512),  # 2**31 pixels, whose numbers are no i32
    ):
        assert other.flattened() is other


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_rows_of_the_product_are_the_pixels_of_the_box(box: tuple[int, int, int]) -> None:
    geometry = Geometry(PROBLEMS["3x3"], Config(*box, tile_features=64, tile_channels=32, stages=4))
    pixels = [geometry.pixel(row) for row in range(geometry.config.tile_pixels)]
    assert pixels == [(n, h, w) for n in range(box[0]) for h in range(box[1]) for w in range(box[2])]


@pytest.mark.parametrize("name", ["stride and dilation", "gradient of stride 2, odd sizes", "gradient of patches"])
def test_traced_arithmetic_is_that_of_ints(name: str) -> None:
    geometry = Geometry(PROBLEMS[name], Config(1, 8, 16, tile_features=32, tile_channels=32, stages=4))

    def start(tile: Any, number: Any) -> tuple[Any, ...]:
        origin = geometry.origin(tile)
        step = geometry.step(number, origin)
        box = geometry.box_start(origin, step)
        return box.n, box.h, box.parity, box.w, box.c, step.tap, geometry.steps(origin), *geometry.sizes(origin)

    traced = jax.jit(start)
    for tile in range(geometry.tiles):
        for number in range(geometry.steps(geometry.origin(tile))):
            assert tuple(map(int, traced(tile, number))) == start(tile, number)


def random_problem(rng: np.random.Generator) -> Problem:
    """Small, with sizes of 1 in every dimension more often than not."""

    def one(*choices: int) -> int:
        return int(rng.choice(choices))

    def along() -> tuple[int, ...]:
        size, taps, stride = one(1, 1, 2, 3, 5, 8, 13), one(1, 1, 2, 3, 3, 4, 7), one(1, 1, 2, 2, 3, 4)
        dilation, zeros = one(1, 1, 2, 3), one(1, 1, 2, 3, 4)
        reach = (taps - 1) * dilation
        low, high = one(0, reach // 2, reach, reach + 3, -1, -2), one(0, reach - reach // 2, reach + 4, -1)
        return size, taps, stride, dilation, zeros, low, (size - 1) * zeros + low + high - reach

    rows, columns = along(), along()
    (height, width), taps, stride, dilation, zeros, padding, last = zip(rows, columns, strict=True)
    if min(last) < 0:
        return random_problem(rng)
    out_height, out_width = (at // apart + 1 for at, apart in zip(last, stride, strict=True))
    shape = one(1, 1, 2, 3, 5), height, width, one(16, 48, 80), one(16, 48, 80), out_height, out_width
    problem = Problem(*shape, taps, stride, dilation, padding, base_dilation=zeros).flattened()
    return problem if problem.flops < 5e6 else random_problem(rng)


def random_config(rng: np.random.Generator, problem: Problem) -> Config:
    """A box of any shape, and any of the schedules that the problem has; sensible or not."""

    def often() -> bool:
        return bool(rng.random() < 0.5)

    pingpong = often()
    bits = 6 + int(rng.integers(2)) + (not pingpong)
    first, second = sorted(int(n) for n in rng.integers(bits + 1, size=2))
    box = (1 << first, 1 << second - first, 1 << bits - second)
    config = Config(*box, int(rng.choice([32, 64])), int(rng.choice([32, 64, 128])), 4, pingpong=pingpong)
    if problem.base_dilation != (1, 1):
        return config
    if shares_taps(problem, config) and often():
        config = dataclasses.replace(config, taps=problem.taps[0])
    tiles = math.prod(problem.taps) * -(-problem.channels // config.tile_channels)
    if often():
        return dataclasses.replace(config, resident=tiles)
    splits = 1 if pingpong else int(rng.choice([n for n in range(1, 11) if tiles // config.taps % n == 0]))
    return dataclasses.replace(config, splits=splits)


@pytest.mark.parametrize("first", sampled(range(0, 200, 25), 2))
def test_random_problems(first: int) -> None:
    for seed in range(first, first + 25):
        rng = np.random.default_rng(seed)
        problem = random_problem(rng)
        config = random_config(rng, problem)
        input = rng.integers(-4, 5, problem.input_shape).astype(np.float32)
        filter = rng.integers(-4, 5, problem.filter_shape).astype(np.float32)
        found = implicit_gemm(Geometry(problem, config), input, filter)
        np.testing.assert_array_equal(found, convolution(problem, input, filter), f"{seed}: {problem} {config}")


@pytest.mark.parametrize(
    ("taps", "stride", "counts"), [(3, 2, [1, 2]), (1, 2, [1, 0]), (4, 4, [1] * 4), (7, 2, [4, 3])]
)
def test_each_tap_belongs_to_one_phase(taps: int, stride: int, counts: list[int]) -> None:
    phases = phases_of(outputs=8, taps=taps, stride=1, dilation=1, padding=taps // 2, base_dilation=stride)
    assert sorted(phase.taps for phase in phases.phases) == sorted(counts)
    assert phases.tap_step == stride
    seen = [phase.first_tap + i * phases.tap_step for phase in phases.phases for i in range(phase.taps)]
    assert sorted(seen) == list(range(taps))
