"""Configs: what is generated fits the machine, covers the problem, and puts first what was fastest when measured."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from xla_fp8.backends.mosaic import configs
from xla_fp8.backends.mosaic.configs import (
    CONSUMERS,
    SHARED_MEMORY,
    SUMS,
    Config,
    Footprint,
    fits,
    generate,
    keeps_registers,
    shared_memory,
    shares_taps,
)
from xla_fp8.backends.mosaic.geometry import Geometry
from xla_fp8.backends.mosaic.problem import Problem


def same(batch: int, size: int, channels: int, features: int, taps: int = 3, stride: int = 1) -> Problem:
    out = -(-size // stride)
    total = max((out - 1) * stride + taps - size, 0)
    return Problem(
        *(batch, size, size, channels, features, out, out),
        taps=(taps, taps),
        stride=(stride, stride),
        padding=(total // 2, total // 2),
    ).flattened()


PROBLEMS = {
    "resnet": same(64, 28, 128, 128),
    "resnet small": same(64, 7, 512, 512),
    "resnet stride": same(64, 56, 128, 128, stride=2),
    "pointwise": same(64, 56, 256, 64, taps=1),
    "diffusion": same(2, 64, 320, 320),
    "diffusion tiny": same(1, 8, 1280, 1280),
    "odd": same(3, 13, 208, 144),
    "patches": same(2, 32, 48, 96, taps=4, stride=4),
    "least": same(1, 1, 16, 16, taps=1),
    "large": same(256, 56, 1024, 2048),
}
FOOTPRINTS = {
    "fp8": Footprint(),
    "f32": Footprint((4,)),
    "residual": Footprint((1,), (2,), 1),
    "copy": Footprint((1, 2), (1,), 2, True),
    "heavy": Footprint((4, 2), (4, 4), 3),
}


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("footprint", FOOTPRINTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_config_fits_and_can_be_cut(name: str, footprint: str, promote: bool) -> None:
    problem, needed = PROBLEMS[name], FOOTPRINTS[footprint]
    found = generate(problem, needed, promote)
    assert 1 <= len(found) <= 8
    assert len(set(found)) == len(set(map(str, found))) == len(found), "a config's name is its key in the cache"
    for config in found:
        assert fits(config, needed)
        assert shared_memory(config, needed) <= SHARED_MEMORY
        assert config.promote == promote
        assert config.stages >= 3
        geometry = Geometry(problem, config)
        n, h, w = geometry.warpgroup_box()
        consumers = 1 if config.pingpong else CONSUMERS
        assert consumers * n * h * w == config.tile_pixels, "a consumer's share is not a box"
        taps = math.prod(problem.taps)
        assert geometry.steps(geometry.origin(0)) * config.splits * config.taps == taps * geometry.channel_blocks, (
            "a split leaves steps out"
        )
        assert config.taps == 1 or shares_taps(problem, config)
        assert config.resident in (0, taps * geometry.channel_blocks)
        assert geometry.blocks(configs.MULTIPROCESSORS) > 0
        columns = (SUMS if config.splits > 1 else needed).columns(config)
        assert config.piece_features % columns == 0
        assert columns >= configs.MIN_COLUMNS


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_config_is_mostly_waste(name: str) -> None:
    problem = PROBLEMS[name]
    best = generate(problem, Footprint())[0]
    computed = configs.tile_count(problem, best) / best.splits * best.tile_pixels * best.tile_features
    needed = problem.pixels * problem.features
    if needed > 1 << 20:
        assert computed <= 1.35 * needed


def test_a_split_needs_a_machine_with_room() -> None:
    for config in generate(same(64, 28, 256, 256), Footprint()):
        assert config.splits == 1
    assert generate(same(1, 8, 1280, 1280), Footprint())[0].splits > 1


def plain(problem: Problem, footprint: Footprint) -> list[Config]:
    """Configs whose steps copy one tap each, with its filter."""
    found = generate(problem, footprint, limit=512)
    return [config for config in found if config.taps == 1 and not config.resident]


def test_small_blocks_only_where_they_make_room_for_stages() -> None:
    problem = same(32, 64, 256, 256)
    assert plain(problem, Footprint())[0].columns == 0
    shared = [config for config in plain(problem, Footprint((1,), (2,), 1)) if not config.pingpong]
    assert shared[0].columns == configs.MIN_COLUMNS
    assert shared[0].tile_pixels * shared[0].tile_features == 256 * 128, "the epilogue must not make the tile smaller"


def test_a_long_epilogue_is_hidden_by_the_other_consumer() -> None:
    problem = same(32, 64, 256, 256)
    assert not plain(problem, Footprint())[0].pingpong
    assert plain(problem, Footprint((1,), (2,), 1, special=2))[0].pingpong


def test_wide_promoted_tiles_are_for_short_reductions() -> None:
    wide = [c for c in generate(same(16, 32, 1024, 1024), Footprint(), True) if c.tile_features > c.tile_pixels]
    assert all(config.pieces == 1 for config in wide)


def test_a_config_that_does_not_fit() -> None:
    good = Config(1, 8, 16, 128, 128, 4)
    assert fits(good, Footprint())
    changes: tuple[dict[str, Any], ...] = (
        {"stages": 8},  # shared memory
        {"tile_height": 32, "tile_features": 256},  # registers
        {"tile_features": 272},  # one copy moves at most 256 rows
        {"tile_height": 4},  # a consumer's half is less than one instruction has
        {"delay": 4},
    )
    for bad in changes:
        assert not fits(dataclasses.replace(good, **bad), Footprint()), bad


@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("footprint", FOOTPRINTS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_no_config_runs_out_of_registers(name: str, footprint: str, promote: bool) -> None:
    assert all(
        keeps_registers(c, FOOTPRINTS[footprint]) for c in generate(PROBLEMS[name], FOOTPRINTS[footprint], promote)
    )


def test_where_the_assembler_ran_out_of_registers() -> None:
    """By ptxas 13.5: bytes of a thread that went to memory."""
    heavy = Footprint((1,), (2,), 1, True, special=2)
    assert not keeps_registers(Config(1, 16, 16, 160, 64, 3), heavy)  # 112 to 120
    assert not keeps_registers(Config(1, 8, 16, 256, 64, 3, promote=True, pieces=2), heavy)  # 32 to 56
    assert not keeps_registers(Config(1, 8, 16, 160, 64, 3, promote=True, taps=3), Footprint())  # 256
    assert keeps_registers(Config(1, 16, 16, 160, 64, 3), Footprint())
    assert keeps_registers(Config(1, 8, 16, 256, 64, 3, promote=True, pieces=2), Footprint())
    assert keeps_registers(Config(1, 16, 16, 160, 64, 3, splits=2), heavy), "the sums of a split have no epilogue"


SILU_RESIDUAL = Footprint((1,), (2,), 1, special=2)
RELU_RESIDUAL = Footprint((1,), (1,), 1)

MEASURED: dict[str, tuple[Problem, Footprint, dict[tuple[int, int, int | str], float]]] = {
    # Microseconds on an H200, 2026-11-30, jax 0.11.2: the configs of each shape that were timed, as tile pixels and
    # features, and splits or letters: "p" where each consumer has its own tiles, "t" where the taps of a column share a
    # copy, "r" where the filter stays. The last six, of another run, have all of these.
    "64x64-256": (
        *(same(32, 64, 256, 256), Footprint()),
        {
            (256, 128, 1): 105.7,
            (128, 256, 1): 107.0,
            (128, 128, 1): 140.0,
            (128, 128, "p"): 108.7,
            (64, 256, "p"): 111.7,
        },
    ),
    "64x64-256 relu": (
        *(same(32, 64, 256, 256), RELU_RESIDUAL),
        {(256, 128, 1): 120.1, (128, 256, 1): 120.7, (128, 128, "p"): 113.8, (64, 256, "p"): 119.2},
    ),
    "64x64-256 silu": (
        *(same(32, 64, 256, 256), SILU_RESIDUAL),
        {(256, 128, 1): 144.4, (128, 256, 1): 137.9, (128, 128, "p"): 119.6, (64, 256, "p"): 121.1},
    ),
    "56x56-128": (
        *(same(64, 56, 128, 128), Footprint()),
        {(256, 128, 1): 45.8, (256, 64, 1): 51.5, (128, 128, 1): 53.0},
    ),
    "56x56-64": (
        *(same(64, 56, 64, 64), Footprint()),
        {(256, 64, 1): 26.5, (256, 64, "p"): 26.3, (128, 64, "p"): 31.1, (128, 64, 1): 32.5},
    ),
    "14x14-512": (
        *(same(64, 14, 512, 512), Footprint()),
        {
            (256, 64, 1): 42.3,
            (128, 128, 1): 48.1,
            (256, 128, 1): 53.3,
            (128, 256, 1): 50.3,
            (128, 128, "p"): 41.1,
            (64, 256, "p"): 41.9,
            (128, 64, "p"): 51.3,
        },
    ),
    "7x7-512": (
        *(same(64, 7, 512, 512), Footprint()),
        {
            (128, 128, 1): 15.3,
            (256, 64, 1): 19.0,
            (256, 128, 2): 21.2,
            (256, 128, 1): 25.2,
            (128, 128, "p"): 15.3,
            (64, 256, "p"): 14.2,
            (128, 64, "p"): 19.9,
        },
    ),
    "sdxl": (
        *(same(1, 64, 1280, 1280), Footprint()),
        {(256, 160, 1): 79.1, (128, 160, 1): 84.5, (256, 160, 2): 117.3},
    ),
    "1x1": (
        *(same(64, 56, 256, 256, taps=1), Footprint()),
        {(128, 256, 1): 32.4, (256, 128, 1): 32.2, (128, 128, 1): 34.6, (128, 128, "p"): 33.0, (64, 256, "p"): 35.0},
    ),
    "stride 2": (
        *(same(64, 56, 128, 128, stride=2), Footprint()),
        {(256, 64, 1): 16.2, (128, 128, 1): 16.9, (256, 128, 1): 19.2},
    ),
    "sd2/64": (
        *(same(2, 64, 320, 320), Footprint()),
        {(128, 160, 1): 13.5, (128, 192, 1): 17.9, (256, 96, 1): 14.9},
    ),
    "sd1/32": (
        *(same(1, 32, 640, 640), Footprint()),
        {(128, 128, 3): 12.3, (256, 64, 3): 12.4, (128, 160, 3): 13.3},
    ),
    "sd1/8": (
        *(same(1, 8, 1280, 1280), Footprint()),
        {(128, 64, 5): 9.6, (128, 160, 10): 9.6, (128, 64, 6): 10.0},
    ),
    "56x56-64 copies": (
        *(same(64, 56, 64, 64), Footprint()),
        {
            (256, 64, 1): 26.0,
            (256, 64, "ptr"): 14.8,
            (256, 64, "pt"): 18.7,
            (256, 64, "tr"): 16.6,
            (256, 64, "t"): 18.2,
            (128, 64, "ptr"): 16.0,
            (128, 64, "pt"): 22.3,
            (128, 64, "tr"): 17.0,
            (128, 64, "t"): 22.5,
            (256, 64, "pr"): 21.7,
            (256, 64, "r"): 21.8,
            (256, 64, "p"): 26.5,
        },
    ),
    "28x28-128 copies": (
        *(same(64, 28, 128, 128), Footprint()),
        {
            (128, 128, 1): 15.7,
            (128, 128, "p"): 13.6,
            (256, 64, "p"): 16.0,
            (128, 128, "pr"): 16.6,
            (128, 64, "ptr"): 15.6,
            (64, 128, "ptr"): 16.9,
            (128, 128, "r"): 16.7,
            (128, 64, "pt"): 14.9,
            (64, 128, "pt"): 16.7,
            (128, 64, "tr"): 14.6,
            (256, 32, "tr"): 21.2,
            (128, 64, "t"): 15.5,
            (256, 32, "t"): 21.2,
        },
    ),
    "7x7-512 copies": (
        *(same(64, 7, 512, 512), Footprint()),
        {
            (128, 128, 1): 14.7,
            (256, 64, "t"): 14.8,
            (128, 128, "t"): 14.0,
            (256, 64, "pt"): 15.3,
            (128, 128, "pt"): 14.4,
            (128, 64, "pt"): 15.7,
            (128, 128, "p"): 14.7,
            (128, 32, "ptr"): 24.2,
            (64, 32, "ptr"): 25.4,
            (128, 32, "tr"): 22.6,
        },
    ),
    "28x28-512-128-1x1 copies": (
        *(same(64, 28, 512, 128, taps=1), Footprint()),
        {
            (128, 128, 1): 14.8,
            (64, 128, "pr"): 14.6,
            (128, 128, "pr"): 15.9,
            (128, 64, "pr"): 14.8,
            (128, 128, "p"): 15.1,
            (128, 128, "r"): 15.1,
        },
    ),
    "112x112-64-128 copies": (
        *(same(64, 112, 64, 128), Footprint()),
        {
            (256, 128, 1): 117.1,
            (128, 128, "ptr"): 76.6,
            (256, 64, "ptr"): 89.6,
            (256, 64, "pt"): 110.7,
            (128, 128, "pt"): 120.3,
            (256, 128, "tr"): 78.7,
            (128, 128, "tr"): 92.6,
            (256, 128, "t"): 84.6,
            (128, 128, "t"): 121.9,
            (256, 128, "r"): 90.0,
            (128, 128, "pr"): 93.4,
            (128, 128, "p"): 155.1,
        },
    ),
    "sd2/64 copies": (
        *(same(2, 64, 320, 320), Footprint()),
        {
            (128, 160, 1): 16.4,
            (128, 160, "t"): 14.5,
            (256, 96, "t"): 16.0,
            (128, 160, "pt"): 16.3,
            (64, 160, "pt"): 17.6,
            (128, 160, "p"): 16.7,
            (128, 64, "tr"): 16.7,
            (256, 32, "tr"): 20.0,
            (128, 64, "ptr"): 19.2,
            (64, 64, "ptr"): 20.0,
            (128, 32, "pr"): 31.0,
            (128, 32, "r"): 36.3,
        },
    ),
}


def kind(config: Config) -> tuple[int, int, int | str]:
    """What of a config the times are kept for."""
    letters = "p" * config.pingpong + "t" * (config.taps > 1) + "r" * (config.resident > 0)
    return config.tile_pixels, config.tile_features, letters or config.splits


@pytest.mark.parametrize("name", MEASURED)
def test_the_first_config_is_within_a_tenth_of_the_best_measured(name: str) -> None:
    """Of the configs that were timed; what is put before them, of another kind, was not."""
    problem, footprint, times = MEASURED[name]
    taken = next(times[kind(config)] for config in generate(problem, footprint, limit=512) if kind(config) in times)
    assert taken <= 1.1 * min(times.values())
