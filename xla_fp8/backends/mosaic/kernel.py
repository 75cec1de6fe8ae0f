"""The kernel: an FP8 convolution with its epilogue, for one Hopper GPU, in Pallas Mosaic GPU.

`geometry` says what a tile and a step are. Each block of three warpgroups stays on its multiprocessor and takes every
`blocks`-th tile (a persistent grid):

    producer    for each step: wait until the stage is empty; copy the input box and the filter rows into it (TMA).
    consumers   (two, each with half of the tile's pixels) for each step: wait until the stage is full; multiply
                (wgmma); release the stage whose multiplication has ended. Then the epilogue, while the producer
                runs ahead.

                 +--------------------- shared memory ----------------------+
      input  --> | stage 0 | stage 1 | ...   each BM x BK and BN x BK bytes  | --> tensor core --> accumulator
      filter --> |                                                          |                           |
      sides  --> | blocks  (2 consumers x slots x BM/2 x columns)           | --> epilogue <------------+
      output <-- |                                                          | <--    |
                 +----------------------------------------------------------+

Two views of the same bytes. The tensor core wants a tile of pixels x BK in 8-row groups, swizzled, which Mosaic calls
TilingTransform((8, BK)) + SwizzleTransform(BK). Put on the target of a copy, the tiling would force the box to start at
a multiple of 8 pixels, because the copy's offset is split with // and % (a shifted box would silently read other
pixels). But rows of exactly BK bytes lie in the same order in both views, so shared memory is a RefUnion: flat and
swizzled, in the shape of the box, for the copies; tiled, two-dimensional, for the tensor core and the registers.

Fewer copies, where a config asks for it: the `taps` of a column of the window share the copied input, each of them a
slice of whole 8-row groups (`Geometry.tap_rows`); a `resident` filter is copied for the first tile of a block alone,
each part with a barrier that is awaited once.

The epilogue goes over the tile in blocks of columns (output channels), each staged in shared memory and stored by TMA,
which leaves out what lies outside the output. Side tensors come the same way, the first blocks asked for before the
reduction. A block of an output lies where that of a side tensor was: what is left of shared memory goes to the stages.

amax: each consumer keeps the largest value of every row in registers over all its tiles (pixels and channels outside
the output masked). At its end it joins the others in global memory (`amax`), so that no second kernel is launched.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from xla_fp8 import _jax_compat
from xla_fp8.backends.mosaic import amax
from xla_fp8.backends.mosaic.configs import CONSUMERS, Config
from xla_fp8.backends.mosaic.epilogue import SUMS, Epilogue
from xla_fp8.backends.mosaic.geometry import Geometry, Index, Origin
from xla_fp8.backends.mosaic.problem import Problem

_PRODUCER = CONSUMERS

_MAXIMA = 8
"""Columns in which a consumer keeps the largest values of each row: 8 is the least that the layout of sums has."""

_MOST_IN_FLIGHT = 7
"""The most groups that `wgmma` can leave in flight when it waits."""

_PRODUCER_REGISTERS = 40
_CONSUMER_REGISTERS = 232


def convolve(
    problem: Problem,
    config: Config,
    epilogue: Epilogue,
    blocks: int,
    input: jax.Array,
    filter: jax.Array,
    sides: Sequence[jax.Array],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Runs the kernel.

    Args:
        blocks: how many multiprocessors there are.
        input: FP8 [N, H, W, C].
        filter: FP8 [K, R, S, C].
        sides: the side operands of the epilogue: f32 [] or [K], or tensors [N, OH, OW, K].

    Returns:
        The tensors of the epilogue, [N, OH, OW, K] each, and its amaxes, f32 [] each.
    """
    geometry = Geometry(problem, config)
    if config.splits == 1:
        return _run(geometry, epilogue, blocks, input, filter, sides)
    (sums,), _ = _run(geometry, SUMS, blocks, input, filter, ())
    return epilogue.finish(jnp.sum(sums, axis=0), sides)


def _run(
    geometry: Geometry, epilogue: Epilogue, blocks: int, input: jax.Array, filter: jax.Array, sides: Sequence[jax.Array]
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    problem = geometry.problem
    blocks = geometry.blocks(blocks)
    kernel = _Kernel(geometry, epilogue, blocks)
    shape = geometry.store_shape(kernel.columns)
    tensors = [
        jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]
        for dtype in epilogue.output_dtypes
    ]
    maximum = jax.ShapeDtypeStruct((1,), jnp.float32)  # type: ignore[no-untyped-call]
    run = plgpu.kernel(
        functools.partial(kernel.entry, input.dtype, filter.dtype),
        out_type=[*tensors, *[maximum] * epilogue.amax_count],
        grid=(blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    if epilogue.amax_count:
        # Under vmap Pallas makes one kernel of a batch, whose parts would all join in the same words.
        run = jax.custom_batching.sequential_vmap(run)  # type: ignore[no-untyped-call]
    results = run(
        _view_input(geometry, input),
        filter.reshape(problem.features, -1, problem.channels),
        *(_view_side(geometry, kernel.columns, side) for side in sides),
    )
    stored, maxima = results[: len(tensors)], results[len(tensors) :]
    if geometry.phased:
        stored = [_from_phases(geometry, kernel.columns, tensor) for tensor in stored]
    return tuple(stored), tuple(largest.reshape(()) for largest in maxima)


def _view_input(geometry: Geometry, input: jax.Array) -> jax.Array:
    """The input as `Geometry.view_shape` has it: a reshape, and zeros behind it where that is larger."""
    return _pad_to(geometry.padded_input_shape, input).reshape(geometry.view_shape)


def _view_side(geometry: Geometry, columns: int, side: jax.Array) -> jax.Array:
    """A side operand as the kernel sees it: a tensor as the output is stored."""
    if side.ndim == 0:
        return side.reshape(1)
    if side.ndim == 1 or not geometry.phased:
        return side
    return _pad_to(geometry.padded_output_shape(columns), side).reshape(geometry.store_shape(columns))


def _from_phases(geometry: Geometry, columns: int, stored: jax.Array) -> jax.Array:
    """The output in what the kernel stored: a reshape, and a slice where phases or channels were rounded up."""
    padded = stored.reshape(geometry.padded_output_shape(columns))
    return padded[tuple(slice(size) for size in geometry.problem.output_shape)]


def _pad_to(shape: Sequence[int], array: jax.Array) -> jax.Array:
    """Zeros behind the array in every dimension that is larger in `shape`."""
    if array.shape == tuple(shape):
        return array
    return jnp.pad(array, [(0, new - old) for old, new in zip(array.shape, shape, strict=True)])


class _Kernel:
    """What is fixed for one kernel, and its parts in the order in which they run."""

    def __init__(self, geometry: Geometry, epilogue: Epilogue, blocks: int) -> None:
        self.geometry = geometry
        self.config = geometry.config
        self.epilogue = epilogue
        self.blocks = blocks
        footprint = epilogue.footprint
        self.columns = footprint.columns(self.config)
        self.column_blocks = self.config.tile_features // self.columns
        self.slots = footprint.slots(self.config)

    # Shared memory

    def entry(self, input_type: Any, filter_type: Any, *gmem: Any) -> None:
        """Allocates shared memory and barriers, and runs the three warpgroups."""
        c = self.config
        box = (c.tile_images, c.copied_height, c.tile_width)
        filters = c.resident // c.taps
        tensors, vectors = len(self.epilogue.tensors), len(self.epilogue.vectors)
        pl.run_scoped(
            functools.partial(self.run, gmem),
            input_smem=plgpu.RefUnion(*_two_views((c.stages,), box, c.tile_channels, input_type)),
            filter_smem=plgpu.RefUnion(
                *_two_views((filters or c.stages, c.taps), (c.tile_features,), c.tile_channels, filter_type)
            ),
            block_smem=[self.block_smem(pair) for pair in self.pairs],
            vector_smem=[plgpu.SMEM((CONSUMERS, c.tile_features), jnp.float32) for _ in self.epilogue.vectors],
            full=plgpu.Barrier(
                num_arrivals=1 if filters else 1 + c.taps, num_barriers=c.stages * (CONSUMERS if c.pingpong else 1)
            ),
            empty=plgpu.Barrier(num_arrivals=1 if c.pingpong else CONSUMERS, num_barriers=c.stages),
            filter_full=plgpu.Barrier(num_arrivals=c.taps, num_barriers=filters) if filters else None,
            side_full=plgpu.Barrier(num_arrivals=tensors, num_barriers=CONSUMERS * self.slots) if tensors else None,
            vector_full=plgpu.Barrier(num_arrivals=vectors, num_barriers=CONSUMERS) if vectors else None,
            turn=plgpu.Barrier() if self.epilogue.amax_count else None,
            collective_axes="warpgroup",
        )

    @property
    def pairs(self) -> list[tuple[Any, ...]]:
        """Types of the tensors whose blocks have a place in common: an output and a side tensor, or one of them."""
        types = itertools.zip_longest(self.epilogue.output_dtypes, self.epilogue.tensor_dtypes)
        return [tuple(dtype for dtype in pair if dtype is not None) for pair in types]

    def block_smem(self, types: Sequence[Any]) -> Any:
        """Blocks of `columns` output channels for each consumer and slot, in the views of each type."""
        box = self.geometry.warpgroup_box()
        views = [_two_views((CONSUMERS, self.slots * of), box, self.columns, dtype) for dtype, of in _places(types)]
        return plgpu.RefUnion(*itertools.chain.from_iterable(views))

    def blocks_of(self, block_smem: Sequence[Any], warpgroup: jax.Array) -> tuple[list[_Blocks], list[_Blocks]]:
        """One consumer's blocks of the outputs, and of the side tensors."""
        outputs: list[_Blocks] = []
        sides: list[_Blocks] = []
        for types, views in zip(self.pairs, block_smem, strict=True):
            places = [of for _, of in _places(types)]
            pairs = zip(views[::2], views[1::2], places, strict=True)
            blocks = [_Blocks(tiled, flat, warpgroup, of) for tiled, flat, of in pairs]
            if len(outputs) < len(self.epilogue.outputs):
                outputs.append(blocks.pop(0))
            sides += blocks
        return outputs, sides

    # The three warpgroups

    def run(
        self,
        gmem: Sequence[Any],
        input_smem: Any,
        filter_smem: Any,
        block_smem: Any,
        vector_smem: Any,
        full: Any,
        empty: Any,
        filter_full: Any,
        side_full: Any,
        vector_full: Any,
        turn: Any,
    ) -> None:
        count = len(self.epilogue.sides)
        input_gmem, filter_gmem, *rest = gmem
        side_gmem, result_gmem = rest[:count], rest[count:]
        (input_tiled, input_flat), (filter_tiled, filter_flat) = input_smem, filter_smem
        block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
        block_tiles = self.geometry.block_tiles(block, self.blocks)

        @pl.when(warpgroup == _PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(_PRODUCER_REGISTERS, action="decrease")
            self.produce(block_tiles, input_gmem, filter_gmem, input_flat, filter_flat, full, empty, filter_full)

        @pl.when(warpgroup < _PRODUCER)
        def _() -> None:
            plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
            multiply = functools.partial(self.multiply, warpgroup, input_tiled, filter_tiled, full, empty, filter_full)
            output_blocks, side_blocks = self.blocks_of(block_smem, warpgroup)
            sides = _Sides(self, warpgroup, side_gmem, side_blocks, side_full, vector_smem, vector_full)
            self.consume(warpgroup, block_tiles, multiply, sides, result_gmem, output_blocks, turn)

    def origin(self, i: jax.Array) -> Origin:
        """Where tile `i` of this block starts."""
        return self.geometry.origin(lax.axis_index("block") + i * self.blocks)

    def full_index(self, stage: jax.Array, consumer: jax.Array) -> jax.Array:
        """Which barrier says that a stage is full.

        A consumer with tiles of its own has its own barriers: it has to wait on a barrier every time or never.
        """
        return consumer * self.config.stages + stage if self.config.pingpong else stage

    def produce(
        self,
        block_tiles: Index,
        input_gmem: Any,
        filter_gmem: Any,
        input_flat: Any,
        filter_flat: Any,
        full: Any,
        empty: Any,
        filter_full: Any,
    ) -> None:
        """Copies the operands of every step of every tile into the stages, in order, as they become free."""
        c, geometry = self.config, self.geometry

        def tile(i: jax.Array, first: jax.Array) -> jax.Array:
            origin = self.origin(i)
            steps = geometry.steps(origin)
            consumer = lax.rem(i, CONSUMERS)

            @pl.loop(0, steps)
            def _(j: jax.Array) -> None:
                ordinal = first + j
                stage = lax.rem(ordinal, c.stages)
                step = geometry.step(j, origin)
                box = geometry.box_start(origin, step)

                @pl.when(ordinal >= c.stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[stage])

                rows = (pl.ds(box.n, c.tile_images), pl.ds(box.h, c.copied_height))
                parity = (box.parity,) if geometry.strided else ()
                pixels = (*rows, *parity, pl.ds(box.w, c.tile_width), pl.ds(box.c, c.tile_channels))
                ready = full.at[self.full_index(stage, consumer)]
                plgpu.copy_gmem_to_smem(input_gmem.at[pixels], input_flat.at[stage], ready)

                def copy_filter(slot: jax.Array, ready: Any) -> None:
                    for tap in range(c.taps):
                        rows = (pl.ds(origin.k, c.tile_features), geometry.filter_tap(step, tap))
                        source = filter_gmem.at[(*rows, pl.ds(step.c, c.tile_channels))]
                        plgpu.copy_gmem_to_smem(source, filter_flat.at[slot, tap], ready)

                if c.resident:
                    pl.when(i == 0)(lambda: copy_filter(j, filter_full.at[j]))
                else:
                    copy_filter(stage, ready)

            after: jax.Array = first + steps
            return after

        lax.fori_loop(0, block_tiles, tile, jnp.int32(0))

    def consume(
        self,
        warpgroup: jax.Array,
        block_tiles: Index,
        multiply: Callable[[jax.Array, jax.Array, Index], tuple[jax.Array, ...]],
        sides: _Sides,
        result_gmem: Sequence[Any],
        output_blocks: Sequence[_Blocks],
        turn: Any,
    ) -> None:
        """Computes this consumer's half of every tile, or every second tile."""
        geometry, epilogue = self.geometry, self.epilogue
        output_gmem, amax_gmem = result_gmem[: len(epilogue.outputs)], result_gmem[len(epilogue.outputs) :]

        def tile(i: jax.Array, carry: tuple[jax.Array, Any, Any]) -> tuple[Any, ...]:
            first_step, maxima, factors = carry
            first_tile = i == 0
            i = geometry.consumer_tile(i, warpgroup)
            whole = self.origin(i)
            origin = geometry.warpgroup_origin(whole, warpgroup)
            steps = geometry.steps(whole)
            sides.fetch_vectors(origin)
            sides.fetch_first(origin)
            pieces = multiply(first_tile, first_step, steps)
            inside = self.rows_inside(origin) if epilogue.amax_count and not geometry.covers_exactly else None

            sides.await_vectors()
            for q in range(self.column_blocks):
                first = q * self.columns
                piece, column = divmod(first, self.config.piece_features)
                if self.slots == 1:
                    sides.fetch_next(origin, q)
                tensors, magnitudes, factors = epilogue.evaluate(
                    pieces[piece][:, column : column + self.columns], sides.reader(q), reciprocal=_reciprocal
                )
                maxima = tuple(
                    jnp.maximum(old, self.largest(new, origin, first, inside))
                    for old, new in zip(maxima, magnitudes, strict=True)
                )
                if self.slots > 1:
                    sides.fetch_next(origin, q)
                self.store(q, tensors, origin, output_blocks, output_gmem)
            after = first_step + steps + geometry.passed_steps(self.origin(i + 1))
            return after, maxima, tuple(map(jnp.float32, factors))

        # Of consumers with tiles of their own, the second begins behind the first tile of the first.
        first_step = warpgroup * geometry.passed_steps(self.origin(jnp.int32(0)))
        nothing = plgpu.layout_cast(jnp.zeros((self.config.warpgroup_pixels, _MAXIMA), jnp.float32), plgpu.Layout.WGMMA)
        initial = (first_step, (nothing,) * epilogue.amax_count, (jnp.float32(1),) * epilogue.amax_count)
        _, maxima, factors = lax.fori_loop(0, geometry.consumer_tiles(block_tiles, warpgroup), tile, initial)
        if maxima:
            self.join_maxima(warpgroup, maxima, factors, amax_gmem, turn)
        plgpu.wait_smem_to_gmem(0)

    # The reduction

    def multiply(
        self,
        warpgroup: jax.Array,
        input_tiled: Any,
        filter_tiled: Any,
        full: Any,
        empty: Any,
        filter_full: Any,
        first_tile: jax.Array,
        first_step: jax.Array,
        steps: Index,
    ) -> tuple[jax.Array, ...]:
        """The sum over all steps of a tile: f32 [BM / 2, BN], in `pieces` along BN.

        Args:
            first_tile: whether it is the consumer's first.
            first_step: the ordinal of the tile's first step among all steps of the block.
            steps: of the tile; traced where it depends on the phase.
        """
        c = self.config
        shape = (c.warpgroup_pixels, c.piece_features)
        runs = [self.geometry.tap_rows(tap, warpgroup) for tap in range(c.taps)]
        # wgmma counts what it has in flight in groups: one for each run.
        groups = sum(map(len, runs))

        def await_stage(j: jax.Array) -> tuple[jax.Array, jax.Array]:
            """Waits for the operands of step `j`; returns its ordinal among all steps of the block, and its stage."""
            ordinal = first_step + j
            stage = lax.rem(ordinal, c.stages)
            plgpu.barrier_wait(full.at[self.full_index(stage, warpgroup)])
            if c.resident:
                pl.when(first_tile)(lambda: plgpu.barrier_wait(filter_full.at[j]))
            return ordinal, stage

        def start(accumulator: Any, j: jax.Array, stage: jax.Array, tap: int, piece: int = 0) -> None:
            """Starts the multiplication of one tap and piece of step `j`."""
            slot = j if c.resident else stage
            features = pl.ds(piece * c.piece_features, c.piece_features)
            filter = filter_tiled.at[slot, tap, features] if c.pieces > 1 else filter_tiled.at[slot, tap]
            for row, first, count in runs[tap]:
                target = accumulator.at[pl.ds(row, count)] if len(runs[tap]) > 1 else accumulator
                plgpu.wgmma(target, input_tiled.at[stage, pl.ds(first, count)], filter.transpose((1, 0)))

        def release(ordinal: jax.Array) -> None:
            plgpu.barrier_arrive(empty.at[lax.rem(ordinal, c.stages)])

        def in_tensor_core(accumulator: Any) -> Any:
            @pl.loop(0, steps)
            def _(j: jax.Array) -> None:
                ordinal, stage = await_stage(j)
                for tap in range(c.taps):
                    start(accumulator, j, stage, tap)
                plgpu.wgmma_wait(min(c.delay * groups, _MOST_IN_FLIGHT))

                @pl.when(j >= c.delay)
                def _() -> None:
                    release(ordinal - c.delay)

            plgpu.wgmma_wait(0)
            for late in reversed(range(c.delay)):

                @pl.when(steps > late)
                def _(late: int = late) -> None:
                    release(first_step + steps - 1 - late)

            return accumulator[...]

        def products(j: jax.Array, stage: jax.Array, tap: int, piece: int, accumulator: Any) -> Any:
            start(accumulator, j, stage, tap, piece)
            plgpu.wgmma_wait(0)
            return accumulator[...]

        def add_step(j: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            ordinal, stage = await_stage(j)
            new = list(sums)
            for tap, piece in itertools.product(range(c.taps), range(c.pieces)):
                step = pl.run_scoped(functools.partial(products, j, stage, tap, piece), scope)
                if (tap, piece) == (c.taps - 1, c.pieces - 1):
                    release(ordinal)
                new[piece] += step
            return tuple(new)

        scope = plgpu.WGMMAAccumulatorRef(shape, jnp.float32)
        if not c.promote:
            return (pl.run_scoped(in_tensor_core, scope),)
        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        sums: tuple[jax.Array, ...] = lax.fori_loop(0, steps, add_step, (zeros,) * c.pieces)
        return sums

    # The epilogue

    def store(
        self,
        column_block: int,
        tensors: Sequence[jax.Array],
        origin: Origin,
        output_blocks: Sequence[_Blocks],
        output_gmem: Sequence[Any],
    ) -> None:
        """Stores one block of columns of every output: registers, shared memory, global memory."""
        inside = [start == 0 for start in self.geometry.lone_starts(origin)]
        if self.geometry.phased:
            # In the view by phases, channels beyond K are those of the next column.
            inside.append(origin.k + column_block * self.columns < self.geometry.problem.features)
        if not inside:
            self.store_box(column_block, tensors, origin, output_blocks, output_gmem)
            return
        everywhere = functools.reduce(operator.and_, inside)
        pl.when(everywhere)(lambda: self.store_box(column_block, tensors, origin, output_blocks, output_gmem))
        # A store also keeps the copies that follow from overtaking warps that still read side blocks.
        pl.when(~everywhere)(plgpu.commit_smem)

    def store_box(
        self,
        column_block: int,
        tensors: Sequence[jax.Array],
        origin: Origin,
        output_blocks: Sequence[_Blocks],
        output_gmem: Sequence[Any],
    ) -> None:
        slot = column_block % self.slots
        # The last copy out of this slot must have read it: at the start of a tile all have to, later all but those of
        # the other slots. And all warps must have read the side block that lies there.
        pending = 0 if column_block == 0 else (self.slots - 1) * len(tensors)
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        for tensor, blocks in zip(tensors, output_blocks, strict=True):
            blocks.tiled_at(slot)[...] = tensor
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        for blocks, gmem in zip(output_blocks, output_gmem, strict=True):
            plgpu.copy_smem_to_gmem(blocks.flat_at(slot), gmem.at[self.output_box(origin, column_block)])

    def output_box(self, origin: Origin, column_block: int) -> tuple[Any, ...]:
        """Where a block of columns of a consumer's half tile lies in a tensor of the output's shape."""
        n, h, w = self.geometry.warpgroup_box()
        first = origin.k + column_block * self.columns
        split = (origin.split,) if self.config.splits > 1 else ()
        row_phase: tuple[Index, ...] = ()
        if self.geometry.phased:
            row_phase = (origin.phase[0],)
            first += origin.phase[1] * self.geometry.padded_output_shape(self.columns)[-1]
        rows = (pl.ds(origin.n, n), pl.ds(origin.h, h), *row_phase)
        return (*split, *rows, pl.ds(origin.w, w), pl.ds(first, self.columns))

    # amax

    def join_maxima(
        self,
        warpgroup: jax.Array,
        maxima: Sequence[jax.Array],
        factors: Sequence[jax.Array | float],
        amax_gmem: Sequence[Any],
        turn: Any,
    ) -> None:
        """Takes the largest value of all rows of each amax, one consumer after the other; then joins it with the rest.

        Pallas gives all warpgroups the same shared memory for a maximum over warps, and orders only the warps of one:
        two consumers at once read each other's numbers.
        """

        words = amax.words(len(maxima))

        def largest() -> list[jax.Array]:
            return [values.max(axis=1).max() * factor for values, factor in zip(maxima, factors, strict=True)]

        def join(found: list[jax.Array]) -> None:
            amax.join(words, found, amax_gmem, self.blocks * CONSUMERS)

        @pl.when(warpgroup == 0)
        def _() -> None:
            found = largest()
            plgpu.barrier_arrive(turn)
            join(found)

        @pl.when(warpgroup == 1)
        def _() -> None:
            plgpu.barrier_wait(turn)
            join(largest())

    def rows_inside(self, origin: Origin) -> jax.Array:
        """Which rows of this consumer's half tile are pixels of the output."""
        row = plgpu.broadcasted_iota(jnp.int32, (self.config.warpgroup_pixels,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        inside: jax.Array = self.geometry.inside(origin, row)
        return inside

    def largest(self, block: jax.Array, origin: Origin, first: int, inside: jax.Array | None) -> jax.Array:
        """The largest values of each row of a block, without what lies outside the output.

        `_MAXIMA` of them, a few for each thread: between threads, maxima are taken once at the very end.
        """
        features = self.geometry.problem.features
        if features % self.config.tile_features:
            column = plgpu.broadcasted_iota(jnp.int32, block.shape, 1, layout=plgpu.Layout.WGMMA)
            block = jnp.where(column < features - origin.k - first, block, 0.0)
        while block.shape[1] > _MAXIMA:
            half = block.shape[1] // 2
            block = jnp.maximum(block[:, :half], block[:, half:])
        if inside is None:
            return block
        return jnp.where(lax.broadcast_in_dim(inside, block.shape, (0,)), block, 0.0)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """One consumer's column blocks of one tensor, of which one in `places` belongs to a slot."""

    tiled: Any
    flat: Any
    warpgroup: jax.Array
    places: int

    def tiled_at(self, slot: int) -> Any:
        return self.tiled.at[self.warpgroup, slot * self.places]

    def flat_at(self, slot: int) -> Any:
        return self.flat.at[self.warpgroup, slot * self.places]


class _Sides:
    """The side operands of one consumer: vectors and tensors come through shared memory, asked for before the sums."""

    def __init__(
        self,
        kernel: _Kernel,
        warpgroup: jax.Array,
        gmem: Sequence[Any],
        blocks: Sequence[_Blocks],
        full: Any,
        vector_smem: Sequence[Any],
        vector_full: Any,
    ) -> None:
        self.kernel, self.epilogue, self.slots = kernel, kernel.epilogue, kernel.slots
        self.warpgroup, self.gmem = warpgroup, gmem
        self.blocks, self.full = dict(zip(self.epilogue.tensors, blocks, strict=True)), full
        self.vector_smem = dict(zip(self.epilogue.vectors, vector_smem, strict=True))
        self.vector_full = vector_full
        self.scalars = {i: gmem[i][0] for i in self.epilogue.scalars}

    def fetch_vectors(self, origin: Origin) -> None:
        """Asks for the part of every vector that belongs to a tile."""
        for i, smem in self.vector_smem.items():
            source = self.gmem[i].at[pl.ds(origin.k, self.kernel.config.tile_features)]
            plgpu.copy_gmem_to_smem(source, smem.at[self.warpgroup], self.vector_full.at[self.warpgroup])

    def await_vectors(self) -> None:
        if self.vector_smem:
            plgpu.barrier_wait(self.vector_full.at[self.warpgroup])

    def fetch_first(self, origin: Origin) -> None:
        """Asks for the first blocks of every side tensor, where the outputs of the last tile were."""
        if not self.blocks:
            return
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for column_block in range(self.slots):
            self.fetch(origin, column_block)
        for column_block in range(self.slots, self.kernel.column_blocks):
            # Into the L2 cache: when there is room for them, they are waited for.
            for i in self.blocks:
                plgpu.async_prefetch(self.gmem[i].at[self.kernel.output_box(origin, column_block)])

    def fetch_next(self, origin: Origin, column_block: int) -> None:
        """Asks for a block where that before `column_block` was, once this is stored."""
        following = column_block - 1 + self.slots
        if self.blocks and column_block > 0 and following < self.kernel.column_blocks:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self.fetch(origin, following)

    def fetch(self, origin: Origin, column_block: int) -> None:
        """Asks for one block of columns of every side tensor."""
        slot = column_block % self.slots
        for i, blocks in self.blocks.items():
            source = self.gmem[i].at[self.kernel.output_box(origin, column_block)]
            plgpu.copy_gmem_to_smem(source, blocks.flat_at(slot), self.full.at[self.warpgroup * self.slots + slot])

    def reader(self, column_block: int) -> Callable[[int], jax.Array]:
        """What `Epilogue.evaluate` asks for the side operands of one block of columns."""
        columns = self.kernel.columns
        shape = (self.kernel.config.warpgroup_pixels, columns)
        slot = column_block % self.slots
        tensors: dict[int, jax.Array] = {}
        if self.blocks:
            plgpu.barrier_wait(self.full.at[self.warpgroup * self.slots + slot])
            tensors = {i: blocks.tiled_at(slot)[...].astype(jnp.float32) for i, blocks in self.blocks.items()}

        def read(i: int) -> jax.Array:
            if i in self.scalars:
                scalar: jax.Array = self.scalars[i]
                return scalar
            if i in tensors:
                return tensors[i]
            part = self.vector_smem[i].at[self.warpgroup, pl.ds(column_block * columns, columns)]
            vector = _jax_compat.load_ref(part, plgpu.Layout.WGMMA.reduce(0), optimized=False)
            return lax.broadcast_in_dim(vector, shape, (1,))

        return read


def _reciprocal(block: jax.Array) -> jax.Array:
    """1 / block in one instruction; a division takes twenty."""

    @plgpu.inline_mgpu(  # type: ignore[no-untyped-call,untyped-decorator]
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(block.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def reciprocal(_: Any, a: Any) -> Any:
        return a._pointwise(a._lift_fast_instr("rcp.approx.ftz.f32"))

    result: jax.Array = reciprocal(block)
    return result


def _two_views(leading: tuple[int, ...], box: tuple[int, ...], columns: int, dtype: Any) -> tuple[Any, Any]:
    """What lies in the same bytes: [rows, columns] for tensor core and registers, [*box, columns] for copies."""
    swizzle = columns * jnp.dtype(dtype).itemsize
    rows = 1
    for extent in box:
        rows *= extent
    tiled = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle))
    return (
        plgpu.SMEM((*leading, rows, columns), dtype, transforms=tiled),
        plgpu.SMEM((*leading, *box, columns), dtype, transforms=(plgpu.SwizzleTransform(swizzle),)),
    )


def _places(types: Sequence[Any]) -> list[tuple[Any, int]]:
    """Each type, with how many blocks of it are as large as one of the largest type."""
    largest = max(jnp.dtype(dtype).itemsize for dtype in types)
    return [(dtype, largest // jnp.dtype(dtype).itemsize) for dtype in types]
