"""How a problem is cut: the tile sizes that make sense for a shape, pruned by what the machine holds, best guess first.

A config costs shared memory (the pipeline's stages and the staging buffers of the epilogue) and registers (the
accumulator). What is left is ranked by a model of the time: rounds of tiles over the multiprocessors, each tile a
number of steps that take as long as the slower of tensor core and copy engine, then an epilogue, which only consumers
with tiles of their own hide. The model is only good for an order; the autotuner times the first few.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from xla_fp8.backends.mosaic.problem import MAX_COPY_EXTENT, Problem

MULTIPROCESSORS = 132
"""Of an H100 SXM or H200, where no device can be asked."""

SHARED_MEMORY = 227 * 1024 - 1
"""Bytes of shared memory that one block may ask for on Hopper: the assembler takes one more for itself."""

_BARRIER = 8
"""Bytes of a barrier."""

_REDUCTION_SCRATCH = 2048
"""Bytes that Pallas takes for maxima over warps."""

_ALIGNMENT = 1024
"""Of every buffer in shared memory."""

_ACCUMULATOR_REGISTERS = 168
"""Registers of a consumer thread that the accumulator may take; it has 232, and the epilogue needs some."""

_PROMOTED_REGISTERS = 192
"""The same for accumulator and f32 sums together: the epilogue works on the sums alone."""

_HEAVY_ACCUMULATOR_REGISTERS, _HEAVY_PROMOTED_SUMS, _SHARED_PROMOTED_REGISTERS = 144, 112, 112
"""What registers hold beside more than the accumulator: of it beside an epilogue that reads vectors or tensors or has
exponentials; of sums in f32 beside one; of both where a step has several taps."""

_THREADS = 128
"""Threads of a warpgroup."""

MAX_BARRIERS = 32
"""The most that one of Mosaic's arrays of barriers has."""

CONSUMERS = 2
"""Warpgroups that multiply; one more copies."""

MAX_SPLITS = 10
"""The most parts of a split reduction: 10 divides the 90 steps of a 3x3 convolution of 1280 channels."""

MIN_COLUMNS = 32
"""The epilogue works on column blocks of at least this many output channels: 32 FP8 bytes, the smallest swizzle."""


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """One way to cut a convolution.

    Attributes:
        tile_images, tile_height, tile_width: TN, TH, TW: output pixels of a tile; their product is BM, 128 or 256.
        tile_features: BN, output channels of a tile.
        tile_channels: BK, input channels of a step: 32, 64 or 128 bytes, which is also the swizzle.
        stages: steps that the copies run ahead.
        delay: matrix multiplies in flight while the next step is awaited.
        promote: add the accumulator to f32 registers after each step. The tensor core keeps fewer bits than f32 in a
            sum of FP8 products; with this, outputs equal the f32 reference, at about 80% of the speed.
        pieces: column blocks that share one accumulator, one after the other, where `promote` is set: the f32 sums of a
            wide tile leave no registers for an accumulator of the same size.
        columns: output channels that the epilogue works on at a time; 0 is as many as a 128-byte row holds.
        side_slots: column blocks of one side tensor in shared memory at most, for each consumer.
        pingpong: each consumer has whole tiles of its own, every second one, and runs its epilogue while the other
            multiplies. Otherwise both share each tile, and the tensor core rests during their epilogues. For kernels
            without `promote`, where one consumer alone does not keep the tensor core busy.
        taps: taps of a step: one, or all R of a column of the window, which then share one copy of the input. For
            convolutions and tiles of which `shares_taps` holds.
        resident: filter tiles (one tap and BK channels each) that stay in shared memory, as all tiles of a block have
            the same output channels: all R * S * C / BK of them, or 0 where each step brings its own.
        splits: parts into which the reduction of each tile is cut, so that a small output keeps the whole machine busy.
            The kernel then stores f32 sums, and XLA adds them and runs the epilogue. Divides the number of steps.
    """

    tile_images: int
    tile_height: int
    tile_width: int
    tile_features: int
    tile_channels: int
    stages: int
    delay: int = 1
    promote: bool = False
    pieces: int = 1
    splits: int = 1
    columns: int = 0
    side_slots: int = 4
    pingpong: bool = False
    taps: int = 1
    resident: int = 0

    @property
    def tile_pixels(self) -> int:
        """BM, the rows of the matrix product in a tile."""
        return self.tile_images * self.tile_height * self.tile_width

    @property
    def warpgroup_pixels(self) -> int:
        """Rows of one consumer."""
        return self.tile_pixels if self.pingpong else self.tile_pixels // CONSUMERS

    @property
    def accumulator_registers(self) -> int:
        """Per consumer thread."""
        sums = self.warpgroup_pixels * self.tile_features // _THREADS
        return sums + sums // self.pieces if self.promote else sums

    @property
    def piece_features(self) -> int:
        """Output channels of one accumulator."""
        return self.tile_features // self.pieces

    @property
    def copied_height(self) -> int:
        """Rows of the input that a step copies for each image: with the halo of the taps that share them."""
        return self.tile_height + self.taps - 1

    @property
    def copied_rows(self) -> int:
        """Rows of BK bytes that a step copies: input pixels, and output channels for each tap."""
        pixels = self.tile_images * self.copied_height * self.tile_width
        return pixels if self.resident else pixels + self.taps * self.tile_features

    @property
    def stage_bytes(self) -> int:
        return self.copied_rows * self.tile_channels

    @property
    def resident_bytes(self) -> int:
        return self.resident * self.tile_features * self.tile_channels

    @property
    def stage_barriers(self) -> int:
        """Of a stage: one says that it is empty; one that it is full, or one to each consumer that takes it alone."""
        return 1 + (CONSUMERS if self.pingpong else 1)

    def __str__(self) -> str:
        tile = f"{self.tile_images}x{self.tile_height}x{self.tile_width}"
        promote = f" promote {self.pieces}" if self.promote else ""
        splits = f" splits {self.splits}" if self.splits > 1 else ""
        columns = f" columns {self.columns}" if self.columns else ""
        slots = f" slots {self.side_slots}" if self.side_slots != 4 else ""
        schedule = " pingpong" if self.pingpong else ""
        taps = f" taps {self.taps}" if self.taps > 1 else ""
        resident = f" resident {self.resident}" if self.resident else ""
        return (
            f"pixels {tile} features {self.tile_features} channels {self.tile_channels} "
            f"stages {self.stages} delay {self.delay}{promote}{splits}{columns}{slots}{schedule}{taps}{resident}"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Footprint:
    """What the epilogue of a graph needs of shared memory.

    Attributes:
        output_sizes: bytes of an element of each tensor that is stored.
        side_sizes: bytes of an element of each tensor that is read.
        vectors: how many vectors along the output channels are read, in f32.
        amax: whether there is one.
        special: exponentials, reciprocals and the like for each element: instructions that the machine issues at an
            eighth of the rate of others. They cost time, no memory.
    """

    output_sizes: tuple[int, ...] = (1,)
    side_sizes: tuple[int, ...] = ()
    vectors: int = 0
    amax: bool = False
    special: int = 0

    def columns(self, config: Config) -> int:
        """Output channels that the epilogue works on at a time: as many as a 128-byte row of the widest type holds."""
        if config.columns:
            return config.columns
        columns = 128 // max((*self.output_sizes, *self.side_sizes))
        while config.piece_features % columns:
            columns //= 2
        return columns

    @property
    def slot_sizes(self) -> tuple[int, ...]:
        """Bytes of an element of each place for blocks: an output and a side tensor have one in common."""
        pairs = itertools.zip_longest(self.output_sizes, self.side_sizes, fillvalue=0)
        return tuple(max(pair) for pair in pairs)

    def slots(self, config: Config) -> int:
        """Column blocks in shared memory at a time, for each consumer."""
        return min(config.side_slots if self.side_sizes else 2, config.tile_features // self.columns(config))

    def staging_bytes(self, config: Config) -> int:
        """Bytes for both consumers."""
        block = config.warpgroup_pixels * self.columns(config)
        blocks = CONSUMERS * self.slots(config) * block * sum(self.slot_sizes)
        vector = _aligned(4 * CONSUMERS * config.tile_features)
        barriers = CONSUMERS * (self.slots(config) * bool(self.side_sizes) + bool(self.vectors)) + self.amax
        scratch = self.amax * _REDUCTION_SCRATCH + barriers * _BARRIER
        return blocks + self.vectors * vector + scratch


SUMS = Footprint(output_sizes=(4,))
"""What a split reduction stores, whatever the graph."""


def shared_memory(config: Config, footprint: Footprint) -> int:
    """Bytes of shared memory that a config takes, to the byte: `tests/backends/mosaic/test_lowering.py` compares."""
    staging = (SUMS if config.splits > 1 else footprint).staging_bytes(config)
    barriers = config.stages * config.stage_barriers + config.resident // config.taps
    # The filter's share of a stage is aligned; with the rows that taps share, the input's may not be.
    stages = _aligned(config.stages * config.stage_bytes)
    return stages + config.resident_bytes + staging + barriers * _BARRIER


def _aligned(size: int) -> int:
    """Bytes of a buffer of `size` bytes and what is left free behind it."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def shares_taps(problem: Problem, config: Config) -> bool:
    """Whether the taps of a column of the window can share one copy of the input.

    The rows of the product that tap r sees start r * TW rows further on in shared memory: that has to be a whole number
    of groups of 8 rows, and a consumer's pixels of one image a whole number of the 64 rows of an instruction.
    """
    images = 1 if config.pingpong or config.tile_images == 1 else CONSUMERS
    height = config.tile_height if config.pingpong or config.tile_images > 1 else config.tile_height // CONSUMERS
    return (
        problem.taps[0] > 1
        and (problem.stride, problem.dilation[0], problem.base_dilation) == ((1, 1), 1, (1, 1))
        and config.tile_width % 8 == 0
        and height * config.tile_width % 64 == 0
        and config.tile_images % images == 0
        and height > 0
    )


def keeps_registers(config: Config, footprint: Footprint) -> bool:
    """Whether the assembler keeps a thread's numbers in registers, all but 40 bytes wherever it was tried (ptxas 13.5).

    A config that fits runs without, but slower. What an epilogue reads and computes needs some beside the sums, and so
    do the taps of a promoted step, multiplied one after the other: with 160 the assembler makes each wait for the last.
    """
    needed = SUMS if config.splits > 1 else footprint
    heavy = bool(needed.side_sizes or needed.vectors or needed.special)
    sums = config.warpgroup_pixels * config.tile_features // _THREADS
    if not config.promote:
        return not heavy or sums <= _HEAVY_ACCUMULATOR_REGISTERS
    if config.taps > 1:
        return config.accumulator_registers <= _SHARED_PROMOTED_REGISTERS
    return not heavy or sums <= _HEAVY_PROMOTED_SUMS


def fits(config: Config, footprint: Footprint) -> bool:
    """Whether the machine holds it."""
    return (
        shared_memory(config, footprint) <= SHARED_MEMORY
        and config.accumulator_registers <= (_PROMOTED_REGISTERS if config.promote else _ACCUMULATOR_REGISTERS)
        and config.warpgroup_pixels % 64 == 0
        and config.tile_features % (MIN_COLUMNS * config.pieces) == 0
        and max(config.tile_features, config.tile_height, config.tile_width, config.tile_images) <= MAX_COPY_EXTENT
        and config.delay < config.stages
        and not (config.pingpong and config.promote)
        and config.resident // config.taps <= MAX_BARRIERS
    )


@functools.lru_cache(maxsize=256)
def generate(
    problem: Problem,
    footprint: Footprint,
    promote: bool = False,
    multiprocessors: int = MULTIPROCESSORS,
    limit: int = 8,
) -> tuple[Config, ...]:
    """Configs for a problem, the one expected to be fastest first.

    Args:
        limit: how many to return at most. They differ in tile sizes and schedules; the number of stages is as many as
            fit, up to 8. The first is there twice where more matrix multiplies in flight may help.
    """
    ranks = dict(_candidates(problem, footprint, promote, multiprocessors))

    def key(config: Config) -> tuple[float, str]:
        # Other tile sizes before other shapes of a tile: those are worth more than their predicted difference.
        cycles = predicted_cycles(problem, config, footprint, multiprocessors)
        return cycles * (1 + 0.02 * ranks[config]), str(config)

    best = sorted(ranks, key=key)[:limit]
    deeper = [dataclasses.replace(config, delay=2) for config in best[:1] if config.pingpong and config.stages >= 6]
    return (*best[:1], *deeper, *best[1 : limit - len(deeper)])


def _candidates(
    problem: Problem, footprint: Footprint, promote: bool, multiprocessors: int
) -> Iterator[tuple[Config, int]]:
    """Configs that fit, each with the rank of its box among those of the same size."""
    for pixels in (64, 128, 256):
        boxes = [*enumerate(_boxes(problem, pixels)), *((0, box) for box in _tap_boxes(problem, pixels))]
        sizes = itertools.product(boxes, _feature_tiles(problem.features), _channel_tiles(problem))
        for (rank, box), features, channels in sizes:
            bare = Config(*box, features, channels, stages=0, promote=promote)
            for shape in _schedules(problem, bare, multiprocessors):
                for copies in _copies(problem, shape, multiprocessors):
                    config = _with_stages(copies, footprint)
                    if config is not None:
                        yield config, rank


def _schedules(problem: Problem, bare: Config, multiprocessors: int) -> Iterator[Config]:
    """Who works on a tile: both consumers, one, or several blocks."""
    if not bare.promote and bare.accumulator_registers * CONSUMERS <= _ACCUMULATOR_REGISTERS:
        yield dataclasses.replace(bare, pingpong=True)
    if bare.warpgroup_pixels % 64:
        return
    pieces = (1, 2) if bare.promote else (1,)
    for splits in _splits(problem, bare.tile_channels):
        whole = dataclasses.replace(bare, splits=splits)
        if splits > 1 and tile_count(problem, whole) > 2 * splits * multiprocessors:
            continue  # the machine is full without
        for config in (dataclasses.replace(whole, pieces=count) for count in pieces):
            if config.accumulator_registers <= _PROMOTED_REGISTERS and not _spills(problem, config):
                yield config
                break


def _copies(problem: Problem, bare: Config, multiprocessors: int) -> Iterator[Config]:
    """Which copies a step makes: one box and one filter tile, fewer of the input, none of the filter."""
    taps = problem.taps[0]
    tiles = math.prod(problem.taps) * -(-problem.channels // bare.tile_channels)
    # In pieces, the sums of several taps spill.
    sharing = bare.pieces == 1 and shares_taps(problem, bare) and tiles // taps % bare.splits == 0
    for count in (1, taps) if sharing else (1,):
        config = dataclasses.replace(bare, taps=count)
        if count == 1 or tiles // taps // bare.splits >= 3:
            yield config
        column_blocks = -(-problem.features // bare.tile_features)
        rounds = tile_count(problem, bare) / multiprocessors
        if bare.splits == 1 and rounds > 1 and column_blocks <= multiprocessors and tiles // count <= MAX_BARRIERS:
            yield dataclasses.replace(config, resident=tiles)


def _with_stages(bare: Config, footprint: Footprint) -> Config | None:
    """As many stages as fit beside the epilogue, which takes less room where that leaves fewer than 4; None below 3."""
    most: Config | None = None
    for columns, side_slots in ((0, 4), (MIN_COLUMNS, 4), (MIN_COLUMNS, 2)):
        config = staged(dataclasses.replace(bare, columns=columns, side_slots=side_slots), footprint)
        if config is not None and (most is None or config.stages > most.stages):
            most = config
        if (most is not None and most.stages >= 4) or bare.splits > 1:
            break
    return most


def staged(bare: Config, footprint: Footprint) -> Config | None:
    """A config with as many stages as fit beside its epilogue, up to 8; None below 3."""
    empty = dataclasses.replace(bare, stages=0)
    each = bare.stage_bytes + bare.stage_barriers * _BARRIER
    stages = min(8, 768 // bare.tile_channels, (SHARED_MEMORY - shared_memory(empty, footprint)) // each)
    if shared_memory(dataclasses.replace(bare, stages=stages), footprint) > SHARED_MEMORY:
        stages -= 1  # what stands behind them is aligned
    config = dataclasses.replace(bare, stages=stages)
    return config if stages >= 3 and fits(config, footprint) and keeps_registers(config, footprint) else None


def _spills(problem: Problem, config: Config) -> bool:
    """Whether a kernel with f32 sums of a wide tile ran out of registers where it was measured.

    128 pixels x 256 channels in two pieces: 119.6 us, the best, with 18 steps; 637 us, the worst by far, with 72.
    """
    steps = math.prod(problem.taps) * -(-problem.channels // config.tile_channels)
    return config.promote and config.tile_features > config.tile_pixels and config.pieces > 1 and steps > 24


def _splits(problem: Problem, channels: int) -> list[int]:
    """Into how many parts a reduction may be cut: what divides its steps, and leaves each part some."""
    steps = math.prod(problem.taps) * -(-problem.channels // channels)
    return [
        splits for splits in range(1, MAX_SPLITS + 1) if steps % splits == 0 and (splits == 1 or steps >= 4 * splits)
    ]


def _boxes(problem: Problem, pixels: int) -> list[tuple[int, int, int]]:
    """Boxes of `pixels` output pixels that waste the fewest at the borders of the output: a square one, a wide one.

    All extents are powers of two, so that the two consumers' halves are boxes too.
    """
    log = pixels.bit_length() - 1
    extents = [2**i for i in range(log + 1)]
    boxes = [(pixels // (h * w), h, w) for h in extents for w in extents if h * w <= pixels]

    def computed(box: tuple[int, int, int]) -> int:
        n, h, w = box
        sizes = ((problem.batch, n), (problem.out_height, h), (problem.out_width, w))
        return math.prod(-(-size // extent) * extent for size, extent in sizes)

    best = min(map(computed, boxes))
    good = [box for box in boxes if computed(box) <= 1.02 * best]
    # The taps of one image overlap in L2, and the more the squarer the box; wide boxes are long runs of memory.
    square = min(good, key=lambda box: (box[0], abs(math.log2(box[1] / box[2])), box))
    wide = max(good, key=lambda box: (box[2], box[1]))
    return [square] if square == wide else [square, wide]


def _tap_boxes(problem: Problem, pixels: int) -> list[tuple[int, int, int]]:
    """Boxes whose taps may share a copy: the one that computes and copies least."""
    extents = [2**i for i in range(pixels.bit_length())]
    boxes = [(pixels // (h * w), h, w) for h in extents for w in extents if h * w <= pixels]

    def cost(box: tuple[int, int, int]) -> float:
        n, h, w = box
        sizes = ((problem.batch, n), (problem.out_height, h), (problem.out_width, w))
        return math.prod(-(-size // extent) * extent for size, extent in sizes) * (1 + 0.2 * (problem.taps[0] - 1) / h)

    able = [box for box in boxes if any(shares_taps(problem, Config(*box, 0, 0, 0, pingpong=p)) for p in (True, False))]
    return sorted(able, key=lambda box: (cost(box), box))[:1]


def _feature_tiles(features: int) -> list[int]:
    """Multiples of 32 up to 256 that waste the fewest output channels."""
    sizes = list(range(MIN_COLUMNS, 257, MIN_COLUMNS))

    def computed(size: int) -> int:
        return -(-features // size) * size

    best = min(map(computed, sizes))
    return sorted((s for s in sizes if computed(s) <= 1.2 * best), key=lambda size: (computed(size), -size))[:6]


def _channel_tiles(problem: Problem) -> list[int]:
    """128, 64 or 32 channels a step: the widest, and the widest that wastes none."""
    widest = 128 if problem.channels > 64 else 64 if problem.channels > 32 else 32
    exact = max((size for size in (128, 64, 32) if problem.channels % size == 0), default=32)
    if problem.strided:
        return [exact]  # a tail would have to be zeros in memory
    return sorted({widest, exact, min(exact, 64)}, reverse=True) if widest != exact else [exact]


# What follows was fitted to 190 times of an H200 with jax 0.11.2 (docs/mosaic-conv.md), as cycles of 1755 MHz: the root
# mean square of what is left is 8%. `_ALONE` and `_AMAX_BLOCK` are of a later run, for the order alone.

_TENSOR_CORE = 4096 * 1.05
"""FP8 multiply-adds a cycle of one multiprocessor: 4096 at the clock of a cool machine, which is higher."""

_PROMOTE_SLOWDOWN, _WIDE_PROMOTE_SLOWDOWN = 1.24, 1.10
"""What adding the accumulator to f32 sums costs where one consumer adds while the other multiplies."""

_COPY_BYTES, _COPY_ROWS = 97, 0.84
"""Bytes and rows a cycle that a multiprocessor copies into shared memory, whichever is slower."""

_LATENCY = 200
"""Cycles that a copy takes beside the time for its bytes."""

_STEP_OVERHEAD, _PINGPONG_STEP_OVERHEAD = 230, 166
"""Cycles of a step of 128 channels in which nothing multiplies; and where only one consumer takes each step."""

_TAP_OVERHEAD = 40
"""Cycles of each further tap of a step."""

_ELEMENT, _SIDE_BYTE, _SPECIAL = 0.051, 0.070, 0.024
"""Cycles of the epilogue for an output element, for a byte of a side tensor, for an exponential or reciprocal."""

_AMAX_BLOCK = 45
"""Cycles of the epilogue for the largest value of each column block."""

_SUMS_ELEMENT = 2 * _ELEMENT
"""The same for an f32 sum of a split."""

_ALONE = 2.0
"""How much longer the epilogue of a tile takes where one consumer runs it alone."""

_TILE_OVERHEAD = 100
"""Cycles between the last multiply of a tile and the first of the next."""

_LAUNCH_CYCLES = 2000
"""Of a kernel: its start and end."""

_FILL_BYTES = 18
"""Bytes a cycle with which the first stage comes from memory."""

_MEMORY_BYTES, _MEMORY_OVERLAP = 4000, 1.5
"""Bytes a cycle for what the kernel reads and writes at least; how well that hides: the exponent of a norm."""

_SECOND_PASS_CYCLES, _SECOND_PASS_BYTES = 1260, 1900
"""Of the kernel of XLA that adds the sums of all splits: its start and end; the bytes a cycle that it reads."""


def tile_count(problem: Problem, config: Config) -> int:
    """Tiles of all splits."""
    return config.splits * (
        -(-problem.batch // config.tile_images)
        * -(-problem.out_height // config.tile_height)
        * -(-problem.out_width // config.tile_width)
        * -(-problem.features // config.tile_features)
    )


def predicted_cycles(
    problem: Problem, config: Config, footprint: Footprint = Footprint(), multiprocessors: int = MULTIPROCESSORS
) -> float:
    """A model of the time of one config, in cycles; only its order counts."""
    steps = math.prod(problem.taps) * -(-problem.channels // config.tile_channels) // (config.splits * config.taps)
    if config.resident:
        multiprocessors -= multiprocessors % -(-problem.features // config.tile_features)
    sums, epilogue = steps * _step_cycles(config), _epilogue_cycles(config, footprint)
    rounds = -(-tile_count(problem, config) // multiprocessors)
    if config.pingpong:
        # The epilogue of one consumer is hidden by the sums of the other, unless it is longer; the last one is not.
        busy = rounds * max(sums, (sums + _ALONE * epilogue) / CONSUMERS) + _ALONE * epilogue
    else:
        busy = rounds * (sums + epilogue)
    memory = _memory_bytes(problem, config, footprint) / _MEMORY_BYTES
    kernel: float = _norm(_MEMORY_OVERLAP, busy, memory) + _LAUNCH_CYCLES + config.stage_bytes / _FILL_BYTES
    kernel += config.resident_bytes / _COPY_BYTES
    if config.splits == 1:
        return kernel
    return kernel + _SECOND_PASS_CYCLES + 4 * config.splits * problem.pixels * problem.features / _SECOND_PASS_BYTES


def _norm(exponent: float, *values: float) -> float:
    """Between the largest of the values (an infinite exponent) and their sum (1)."""
    total: float = sum(value**exponent for value in values) ** (1 / exponent)
    return total


def _step_cycles(config: Config) -> float:
    """Of one step: the slowest of tensor core, copy engine, and a copy's way divided by the copies in flight."""
    multiply = config.taps * config.tile_pixels * config.tile_features * config.tile_channels / _TENSOR_CORE
    # Every 64 pixels x BN read both operands from shared memory, which takes longer than multiplying narrow tiles.
    multiply *= max(1, 32 / config.piece_features + 0.5)
    if config.promote:
        wide = config.tile_features > config.tile_pixels
        multiply *= _WIDE_PROMOTE_SLOWDOWN if wide else _PROMOTE_SLOWDOWN
    copy = max(config.stage_bytes / _COPY_BYTES, config.copied_rows / _COPY_ROWS)
    in_flight = max(1, config.stages - 1 - (0 if config.promote else config.delay))
    overhead = _PINGPONG_STEP_OVERHEAD if config.pingpong else _STEP_OVERHEAD * config.tile_channels / 128
    return max(multiply, copy, (_LATENCY + copy) / in_flight) + overhead + _TAP_OVERHEAD * (config.taps - 1)


def _epilogue_cycles(config: Config, footprint: Footprint) -> float:
    """Of a tile, with both consumers at work."""
    elements = config.tile_pixels * config.tile_features
    if config.splits > 1:
        return elements * _SUMS_ELEMENT + _TILE_OVERHEAD
    each = _ELEMENT + _SIDE_BYTE * sum(footprint.side_sizes) + _SPECIAL * footprint.special
    blocks = config.tile_features / footprint.columns(config)
    return elements * each + _TILE_OVERHEAD + footprint.amax * _AMAX_BLOCK * blocks


def _memory_bytes(problem: Problem, config: Config, footprint: Footprint) -> int:
    """What the kernel reads and writes at least."""
    stored = 4 * config.splits if config.splits > 1 else sum(footprint.output_sizes) + sum(footprint.side_sizes)
    inputs = math.prod(problem.input_shape) + math.prod(problem.filter_shape)
    return inputs + problem.pixels * problem.features * stored
