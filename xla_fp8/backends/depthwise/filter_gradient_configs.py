"""How the kernel of the filter gradient cuts a problem, and the ways to do it that are worth a measurement."""

from __future__ import annotations

import dataclasses
import math

from xla_fp8.backends.depthwise.problem import Problem


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the kernel.

    Attributes:
        columns: of dy that a thread has; a divisor of the columns of dy, as what is to the right of them would be
            multiplied.
        per_thread: channels of a thread, a power of two, of which it loads one pixel's at once.
        channels: of a program, a power of two of at least 8, and no more than the problem has.
        warps: of a program, a power of two.
        steps: in the body of the loop over rows. Where it is a multiple of the rows of dy that wait, none of them moves
            from one register to another; but more code takes longer to compile.
        blocks: how often a program takes as many columns as its threads have, before it adds up their sums.
    """

    columns: int
    per_thread: int
    channels: int
    warps: int
    steps: int
    blocks: int

    @property
    def groups(self) -> int:
        """Groups of `columns` that lie side by side in a program."""
        return self.per_thread * 32 * self.warps // self.channels


# (columns, per_thread, warps, steps); of columns as many as divide those of dy. A thread has R * S * per_thread sums in
# registers, of which it has 255 at most, and 128 where 16 warps are to run at once.
_LARGE_WINDOWS = [(4, 1, 4, 2), (7, 1, 4, 2), (4, 1, 4, 7), (2, 2, 2, 2)]
_SMALL_WINDOWS = [(4, 2, 4, 3), (4, 4, 4, 3), (2, 4, 4, 3), (8, 2, 4, 1), (4, 2, 8, 1), (8, 1, 4, 3)]
_SMALL_WINDOW = 16
"""Taps: with so few, loads take longer than products."""

_WHOLE_ROW = 8
"""Columns of dy of which one thread has all where the image has no more: which of x are in the padding is known."""

_MOST_REGISTERS = 230
"""For sums and rows; a few more are for offsets."""

_MOST_OPERATIONS = 1000
"""Of adding products to a sum, in the code of a program: 1,000 of them take seconds to compile, 5,000 minutes."""

_MULTIPROCESSORS = 132
_RESIDENT = 4
"""Programs that a multiprocessor needs at once to have something to do while others wait for loads."""

_ROWS_TO_FINISH = 4
"""As many rows take as long as adding up the sums of a program's threads, and storing them."""

_MOST_BLOCKS = 32
"""That are tried."""

_MOST_PARTIAL_BYTES = 8 * 2**20
"""Of the programs' sums, which are written and read again."""


def configs(problem: Problem) -> list[Config]:
    """Ways to cut a problem that `problem.supports`, the one first that is most likely the fastest; never empty.

    The first for a window of 7x7 was the fastest of eight, or within noise of it (docs/benchmarks.md).
    """
    columns = problem.output_shape[2]
    small = math.prod(problem.window) <= _SMALL_WINDOW
    wanted = _SMALL_WINDOWS if small else _LARGE_WINDOWS
    if not small and columns % 4 and columns % 7 == 0:  # 4 would be 2 or 1, which load more for each product
        wanted = [wanted[1], wanted[0], *wanted[2:]]
    if columns <= _WHOLE_ROW:
        wanted = [(columns, 1, 4, 7), (columns, 2, 4, 2), (columns, 1, 2, 7), *wanted]
    fitting = (_fitted(problem, *sizes) for sizes in [*wanted, (1, 1, 4, 1)])
    return list(dict.fromkeys(config for config in fitting if config is not None))


def _fitted(problem: Problem, columns: int, per_thread: int, warps: int, steps: int) -> Config | None:
    """None where a thread has too few registers."""
    columns = max(d for d in range(1, columns + 1) if problem.output_shape[2] % d == 0)
    depth = -(-problem.window[0] // problem.stride[0])
    row = (columns - 1) * problem.stride[1] + problem.window[1]
    registers = math.prod(problem.window) + depth * columns + (row * problem.stride[0] + columns)
    if registers * per_thread > _MOST_REGISTERS and (columns, per_thread) != (1, 1):
        return None
    # The first and last rows have half of the operations each; then the loop, and half of its body for what is left.
    most_steps = (_MOST_OPERATIONS // math.prod(problem.window) - (depth - 1)) * 2 // 3
    steps = max(1, min(steps, most_steps))
    channels = _channels(problem.channels, 32 * per_thread)
    config = Config(columns, per_thread, channels, warps, steps, 1)
    return dataclasses.replace(config, blocks=_blocks(problem, config))


def _channels(channels: int, most: int) -> int:
    """Of a program: few are left over, and what lies side by side in memory is long."""
    sizes = [size for size in (64, 32, 16, 8) if size <= min(channels, most)]
    return min(sizes, key=lambda size: -(-channels // size) * (size + 4))


def _blocks(problem: Problem, config: Config) -> int:
    """As many that the multiprocessor with the most programs has little to do, and the programs' sums are small."""
    all_blocks = -(-problem.batch * (problem.output_shape[2] // config.columns) // config.groups)
    channel_blocks = -(-problem.channels // config.channels)
    bytes_of_part = 4 * problem.channels * (1 << (math.prod(problem.window) - 1).bit_length())
    fewest = -(-all_blocks // max(1, _MOST_PARTIAL_BYTES // bytes_of_part))

    def time(blocks: int) -> int:
        programs = -(-all_blocks // blocks) * channel_blocks
        of_one = blocks * problem.output_shape[1] + _ROWS_TO_FINISH
        return max(_RESIDENT, -(-programs // _MULTIPROCESSORS)) * of_one

    return min(range(fewest, fewest + _MOST_BLOCKS), key=time)
