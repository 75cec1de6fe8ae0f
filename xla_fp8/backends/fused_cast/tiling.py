"""How fused casts and statistics are cut into programs of tiles, for a GPU of 132 multiprocessors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from xla_fp8.backends.fused_cast.problem import FusedCast, Joined, Matrix, Operand, Statistics, Table
from xla_fp8.backends.protocol import No

_LARGEST_SIZE_OF_IMAGES = 2**22
"""Elements of a tensor whose programs make sums of whole images: of larger ones a launch is little of the time."""
_LEAST_COLUMNS = 32
_MOST_TILES = 32
_MOST_TILES_IN_FLIGHT = 8
_PARTS = (8, 16, 32)
"""Of the rows of an image at most: the fewest with which every multiprocessor has some programs."""
_MULTIPROCESSORS = 132
_LEAST_SIZE_OF_LOADS = 4
"""Elements. With loads of less than 8 bytes an RMS norm of 4096 elements a row was slower than XLA's on an H200."""


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a fused cast is cut into programs.

    Attributes:
        rows, columns: of a tile.
        tiles: of a program, beside each other.
        warps: of a program.
        below: tiles of a program below each other, whose loads it starts together.
        down: programs below each other. Each takes every `down`-th block of rows; with statistics, blocks that follow
            each other, all of one image.
        own: of the columns of a program's only tile, those that are its own, where that is all rows of an image and
            whole groups, whose sums it makes itself; else None.
    """

    rows: int
    columns: int
    tiles: int
    warps: int
    down: int
    below: int = 1
    own: int | None = None

    @property
    def height(self) -> int:
        """Rows of a block."""
        return self.rows * self.below

    @property
    def width(self) -> int:
        """Columns of a program."""
        return (self.own or self.columns) * self.tiles


def tiling_of(problem: FusedCast) -> Tiling | No:
    """The tiling, or why there is none."""
    of_images = _tiling_of_images(problem)
    if of_images is not None:
        return of_images
    if problem.adds_up or (problem.reduces and _tensors(problem.operands) > 1):
        return _tiling_by_registers(problem)
    if problem.reduces:
        return _tiling_of_rows(problem)
    return _tiling_of_elements(problem) if problem.statistics is None else _tiling_of_parts_of_images(problem)


def _tiling_of_elements(problem: FusedCast) -> Tiling | No:
    """The tiling where each element is computed by itself."""
    # A table of a tile has fewer numbers than the program threads: Triton loads it as the tile needs it, where else it
    # would go through shared memory, behind a barrier.
    warps, columns = 4, math.gcd(problem.columns, 64, *_widths_of_parts(problem))
    if columns < _LEAST_COLUMNS:
        return No(f"rows of {problem.columns} elements are no tiles of a power of two")
    rows = _height(problem)
    threads = 32 * warps
    while rows * columns > 32 * threads:  # four loads of 16 bytes for each thread
        rows //= 2
    rows = _rows_of_few(problem, rows, columns, 4 * threads)
    if rows * columns < 2 * threads:
        return No(f"programs of {rows} rows of {columns} elements are too small")
    return Tiling(rows, columns, 1, warps, problem.rows // rows)


def _tiling_of_rows(problem: FusedCast) -> Tiling | No:
    """The tiling where programs have whole rows of one tensor, all of it in registers.

    Programs of two warps: those of eight were slower on an H200.
    """
    warps, threads = 2, 64
    widths = (problem.columns, *_widths_of_parts(problem))
    columns = math.gcd(64 if problem.columns <= 16 * 64 else 128, *widths)
    tiles = problem.columns // columns
    if columns < _LEAST_COLUMNS or tiles > _MOST_TILES:
        return No(f"rows of {problem.columns} elements are no few tiles of a power of two")
    rows = _height(problem)
    # A load is of 8 elements, or of 4 where a thread has more than 40.
    while rows * columns > 8 * threads or (rows * columns > 4 * threads and rows * columns * tiles > 40 * threads):
        rows //= 2
    rows = _rows_of_few(problem, rows, columns * tiles, 4 * threads * tiles)
    if not rows or rows * columns * tiles > 80 * threads or rows * columns < _LEAST_SIZE_OF_LOADS * threads:
        return No(f"programs of {rows} rows of {problem.columns} elements are too small")
    return Tiling(rows, columns, tiles, warps, problem.rows // rows)


def _span(problem: FusedCast) -> int:
    """By how many rows a tensor can be cut so that those of each part read the same numbers."""
    tables = (o.period for o in problem.operands if isinstance(o, Table) and o.period > 1)
    images = () if problem.statistics is None else (problem.statistics.period,)
    return math.gcd(problem.rows, *tables, *images)


def _height(problem: FusedCast) -> int:
    """The largest power of two by which it can be cut so."""
    return math.gcd(_span(problem), 1 << 30)


def _rows_of_few(problem: FusedCast, rows: int, width: int, least: int) -> int:
    """Of a small tensor fewer rows, down to so many elements, so that every multiprocessor has some programs."""
    while rows > 1 and rows * width > least and problem.rows * problem.columns < 528 * rows * width:
        rows //= 2
    return rows


def _tiling_by_registers(problem: FusedCast) -> Tiling | No:
    """The tiling where programs walk down the rows and add up tiles of what they have seen, or have several tensors."""
    height = _height(problem)
    widths = (problem.columns, *_widths_of_parts(problem))
    columns = math.gcd(128 if problem.reduces else 64, *widths)
    size = 8  # elements of a tile for each thread: 16 bytes, and as many registers for each number that is added up
    if problem.reduces:
        # Of each element of a row its tensors, its sums and what is made of it at a time are in registers: 200 of the
        # 255 that a thread has at most, as offsets and numbers of rows are too. Wider tiles have fewer rows; up to 256
        # columns a row is one warp's, which adds it up without the others.
        sums = sum(len(result.values) for result in problem.results if result.kind == "column_sum")
        registers = _tensors(problem.operands) + sums + 1
        while problem.columns // columns * size * registers > 200 and math.gcd(2 * columns, *widths) > columns:
            columns *= 2
        while problem.columns // columns * size * registers > 200:
            size //= 2
    tiles = problem.columns // columns if problem.reduces else 1
    if columns < _LEAST_COLUMNS or tiles > _MOST_TILES or size < _LEAST_SIZE_OF_LOADS:
        return No(f"rows of {problem.columns} elements are no few tiles of a power of two")
    warps = 2 if problem.reduces else 4
    rows = size * 32 * warps // columns
    across = problem.columns // (columns * tiles)
    # Of few rows smaller programs, so that every multiprocessor has some.
    while rows > height or (warps > 1 and rows > 1 and problem.rows // rows * across < 2 * _MULTIPROCESSORS):
        rows, warps = rows // 2, max(1, warps // 2)
    if rows * columns < _LEAST_SIZE_OF_LOADS * 32 * warps:
        return No(f"programs of {rows} rows of {columns * tiles} elements are too small")
    # Four loads in flight for each of two tensors: of a row that is added up there are as many beside each other.
    below = 1 if problem.reduces else min(4 if _tensors(problem.operands) <= 2 else 2, height // rows)
    while below > 1 and problem.rows // (rows * below) * across < 4 * _MULTIPROCESSORS:
        below //= 2
    blocks = problem.rows // (rows * below)
    if not problem.adds_up:
        return Tiling(rows, columns, tiles, warps, blocks, below)
    # Few for each multiprocessor: what programs add up is little to write, and as much work for each.
    most = max(1, _MULTIPROCESSORS * (4 if problem.reduces else 12) // across)
    steps = -(-blocks // most)
    if problem.statistics is not None:
        steps = _steps_of_images(problem, rows * below, steps)
    return Tiling(rows, columns, tiles, warps, -(-blocks // steps), below)


def _tiling_of_parts_of_images(problem: FusedCast) -> Tiling | No:
    """The tiling where a program takes some columns of many rows of an image, for which it has the same numbers."""
    span = _span(problem)
    columns = math.gcd(problem.columns, 64, *_widths_of_parts(problem))
    if columns < _LEAST_COLUMNS:
        return No(f"rows of {problem.columns} elements are no tiles of a power of two")
    warps, across = 4, problem.columns // columns
    rows = math.gcd(span, 8 * 32 * warps // columns)  # 16 bytes are a load of a thread
    while warps > 1 and rows * columns < 8 * 32 * warps:
        warps //= 2
    if rows * columns < _LEAST_SIZE_OF_LOADS * 32 * warps:
        return No(f"programs of {rows} rows of {columns} elements are too small")
    blocks = span // rows
    # Two loads in flight, and two on their way. Of a small tensor fewer steps: every multiprocessor has programs.
    below = math.gcd(2, blocks)
    steps = math.gcd(4, blocks // below)
    while steps > 1 and problem.rows // (rows * below * steps) * across < 2 * _MULTIPROCESSORS:
        steps //= 2
    return Tiling(rows, columns, 1, warps, problem.rows // (rows * below * steps), below)


def _steps_of_images(problem: FusedCast, height: int, least: int) -> int:
    """At least so many blocks of a height where an image has them: those of a program are rows of one image."""
    blocks = _span(problem) // height
    return next(steps for steps in range(1, blocks + 1) if blocks % steps == 0 and (steps >= least or steps == blocks))


def _tiling_of_images(problem: FusedCast) -> Tiling | None:
    """One of whole images and one or two groups, where these are small: another kernel would take longer to start."""
    statistics = problem.statistics
    is_by_row = any(result.kind == "row" for result in problem.results)
    if statistics is None or problem.reduces or problem.adds_up or is_by_row:
        return None
    if problem.rows * problem.columns > _LARGEST_SIZE_OF_IMAGES:
        return None
    if not _are_of_images(problem.operands, statistics.period):
        return None
    rows, own = statistics.period, math.lcm(statistics.width, 8)  # 16 bytes
    own *= -(-_LEAST_COLUMNS // own)
    columns = 1 << (own - 1).bit_length()
    joined = [*_widths_of_parts(problem), *_widths_of_parts(statistics)]
    is_cut = own > 2 * statistics.width or any(width % own for width in (problem.columns, *joined))
    if is_cut or rows & (rows - 1) or not 2**10 <= rows * columns <= 2**14:
        return None
    return Tiling(rows, columns, 1, min(8, rows * columns // 2**10), problem.rows // rows, own=own)


def _tensors(operands: Iterable[Operand]) -> int:
    """How many numbers of each element a program loads."""
    return sum(isinstance(operand, Matrix | Joined) for operand in operands)


def _widths_of_parts(problem: FusedCast | Statistics) -> list[int]:
    return [part.width for operand in problem.operands if isinstance(operand, Joined) for part in operand.parts]


def _are_of_images(operands: Iterable[Operand], period: int) -> bool:
    """Whether the tables by column and the numbers of a program are the same in all rows of an image."""
    periods = (operand.period for operand in operands if isinstance(operand, Table) and operand.period > 1)
    return all(rows % period == 0 for rows in periods)


@dataclasses.dataclass(frozen=True)
class Parts:
    """How statistics are cut into programs, each of some columns and a part of the rows of an image.

    Attributes:
        rows, columns: of a tile.
        tiles: below each other, whose loads a program starts together.
        steps: how often it does that.
        count: of the parts of an image's rows.
        warps: of a program, a thread of which loads 16 bytes of a tile.
    """

    rows: int
    columns: int
    tiles: int
    steps: int
    count: int
    warps: int


def parts_of(statistics: Statistics) -> Parts | No:
    """How statistics are cut, or why they are not."""
    if not _are_of_images(statistics.operands, statistics.period):
        return No("sums of what is multiplied by other numbers in other rows of an image")
    # 128 columns are two lines of memory. Two warps wait for each other less than four do.
    columns = math.gcd(statistics.columns, 128, *_widths_of_parts(statistics))
    rows = math.gcd(statistics.period, 512 // columns)
    warps = rows * columns // 256
    if columns < _LEAST_COLUMNS or not warps:
        return No(f"images of {statistics.period} rows of {statistics.columns} elements are no tiles")
    left, across = statistics.period // rows, statistics.images * statistics.columns // columns
    tiles = math.gcd(left, _MOST_TILES_IN_FLIGHT)
    while tiles > 1 and left // tiles * across < _MULTIPROCESSORS:
        tiles //= 2
    left //= tiles
    most = next(count for count in _PARTS if count * across >= 8 * _MULTIPROCESSORS or count == _PARTS[-1])
    steps = next(d for d in range(1, left + 1) if left % d == 0 and left // d <= most)
    return Parts(rows, columns, tiles, steps, left // steps, warps)


def most_spanned(size: int, by: int) -> int:
    """In how many intervals of `size` an interval of `by` can be; both begin at multiples of their sizes."""
    if by % size == 0:
        return by // size
    return 1 if size % by == 0 else (by + size - 2) // size + 1
