"""How the forward kernel cuts a problem, and the ways to do it that are worth a measurement."""

from __future__ import annotations

import dataclasses
import math

from xla_fp8.backends.depthwise.axis import Axis
from xla_fp8.backends.depthwise.problem import Problem


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernel; results do not depend on them.

    Attributes:
        rows, columns: of the tile of y that a thread makes.
        per_thread: channels of a thread, of which it loads one pixel's at once; a power of two.
        channels: of a group, a divisor of the problem's and a multiple of 8; threads of a group lie side by side.
        warps: of a program, a power of two.
        unrolled: whether every column of x of a tile has its own code; else there is a loop over most of them.
    """

    rows: int
    columns: int
    per_thread: int
    channels: int
    warps: int
    unrolled: bool


# (rows, columns, per_thread, unrolled) where the image is large enough. A thread keeps rows * columns * per_thread sums
# in registers, of which it has 255 at most, and 128 where 16 warps are to run at once.
_LARGE_WINDOWS = [(14, 2, 2, False), (7, 4, 2, True), (14, 1, 4, False)]
_SMALL_WINDOWS = [(4, 4, 4, True), (8, 2, 4, True), (8, 4, 2, True), (4, 2, 4, True), (4, 2, 2, True), (8, 1, 4, False)]
_SMALL_WINDOW = 16
"""Taps: with so few, loads and stores take longer than products."""

_WHOLE_IMAGE = 49
"""Results of an image of which one thread makes all: nothing is loaded twice, and what lies outside is known."""

_SMALL_PROBLEM = [(4, 1, 2, True), (2, 1, 2, True)]
_ENOUGH_WARPS = 8 * 132
"""So many that each multiprocessor of an H200 has 8."""

_MOST_PRODUCTS = 3200
"""Of unrolled code, by a thread: more of it takes long to compile and does not stay in the instruction cache."""

_GROUP = 32
"""Channels: 64 bytes of bf16. A smaller group leaves more columns to a program, and so fewer that it shares."""


def configs(problem: Problem) -> list[Config]:
    """Two to eight, the best guess first: for windows of 7x7 as measured (docs/benchmarks.md)."""
    _, p, q, _ = problem.output_shape
    tiles = list(_SMALL_WINDOWS if math.prod(problem.window) <= _SMALL_WINDOW else _LARGE_WINDOWS)
    if p * q <= _WHOLE_IMAGE:
        tiles = [(p, q, 2, True), *tiles]
    if not _fills(problem, _config(problem, *tiles[0])):
        tiles += _SMALL_PROBLEM
    found = dict.fromkeys(_config(problem, *tile) for tile in tiles)
    short = [config for config in found if not config.unrolled or _products(problem, config) <= _MOST_PRODUCTS]
    # Those that fill the GPU, in this order; then those that come closest.
    first, *others = sorted(short, key=lambda config: max(0, _ENOUGH_WARPS - _warps(problem, config)))
    again = dataclasses.replace(first, warps=8 if _fills(problem, first) else 1)
    return [first, again, *others[:6]]


def _config(problem: Problem, rows: int, columns: int, per_thread: int, unrolled: bool) -> Config:
    _, p, q, _ = problem.output_shape
    return Config(_even(p, rows), _even(q, columns), per_thread, _group(problem), 4, unrolled)


def _even(size: int, most: int) -> int:
    """The side of the smallest tiles that are as few as those of `most`."""
    return -(-size // -(-size // most))


def _group(problem: Problem) -> int:
    """The divisor of the channels that is closest to `_GROUP`, and whole sectors of 32 bytes if one is."""
    step = math.gcd(problem.channels, 32 // problem.dtype.itemsize)
    divisors = [d for d in range(step, problem.channels + 1, step) if problem.channels % d == 0]
    return min(divisors, key=lambda d: (abs(d - _GROUP), -d))


def _warps(problem: Problem, config: Config) -> int:
    n, p, q, c = problem.output_shape
    return n * -(-p // config.rows) * -(-q // config.columns) * c // config.per_thread // 32


def _fills(problem: Problem, config: Config) -> bool:
    return _warps(problem, config) >= _ENOUGH_WARPS


def _products(problem: Problem, config: Config) -> int:
    """That a thread computes."""
    rows, columns = Axis.of(problem, 0, config.rows), Axis.of(problem, 1, config.columns)
    return rows.products * columns.products * config.per_thread
