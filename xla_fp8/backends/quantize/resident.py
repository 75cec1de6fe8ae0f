"""The algorithm "resident": one launch, in which the tensor, or its end, stays in shared memory between the passes.

Every warpgroup of every multiprocessor has a ring of slots in shared memory, and every `workers`-th chunk of the
tensor:

    look     each chunk: wait until it is in its slot; the largest |x| so far; ask for the chunk one ring ahead
    meet     all warpgroups of the device agree on the amax (`meeting`)
    write    each chunk, the last first: cast it in its slot; store the slot; ask for the chunk one ring back

What the last round of the ring has brought is still there when writing begins: with 224 KiB in each of 132
multiprocessors, 30 MB. The rest of a larger tensor is read again, the latest first, as far as it reaches from the L2
cache. TMA does all copies, so that whatever the warps do a ring of loads is on its way.

With a given scale there is no looking and no meeting: the ring streams, and XLA takes the largest of what the
warpgroups found on their way, where the amax is asked for.

The kernel is Mosaic GPU's, written with Pallas.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8 import _jax_compat
from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import kernels, meeting
from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize.chunks import Chunks, Flat, Tiles
from xla_fp8.backends.quantize.request import Outcome, Request, multiprocessors
from xla_fp8.backends.quantize.two_kernels import largest, layout_of
from xla_fp8.target import Verdict

_WARPS, _LANES = 4, 32  # of a warpgroup
_THREADS = _WARPS * _LANES
_LOADED = 16  # bytes that a thread loads at once
_STORED = 16  # elements of a transposed copy that a thread stores at once


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the kernel; numbers do not depend on them.

    Attributes:
        warpgroups: of each multiprocessor.
        slots: of each warpgroup.
        slot_bytes: of x in each slot.
        lag: stores that may still read their slots when the next chunk is asked for.
    """

    warpgroups: int = 4
    slots: int = 7
    slot_bytes: int = 8192
    lag: int = 2


FLAT = Settings()
"""Without a transposed copy."""

TILED = Settings(warpgroups=2, slot_bytes=16384)
"""With one: larger chunks, because each becomes many short rows in memory."""


@dataclasses.dataclass(frozen=True)
class Resident:
    """One kernel, of warpgroups with a ring each.

    Attributes:
        flat: the settings without a transposed copy.
        tiled: the settings with one; a slot is a tile of twice as many columns as rows, or as many.
    """

    name: str = "resident"
    flat: Settings = FLAT
    tiled: Settings = TILED
    interpret: bool = False

    def supports(self, request: Request) -> Verdict:
        if not (verdict := requests.supports(request, self.interpret)).ok:
            return verdict
        if not self._chunks(request).fits:
            return No(
                "it copies by TMA, which wants as many elements as a slot has, of rows (of columns too, where they are "
                "transposed) multiples of 16, and of matrices of one tile's width or height whole tiles"
            )
        return verdict

    def run(self, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
        chunks = self._chunks(request)
        programs = 1 if self.interpret else min(chunks.count, multiprocessors())
        copies = layout_of(request)
        kernel = _Kernel(request, self._settings(request), chunks, copies, programs, self.interpret)
        outputs: list[tuple[tuple[int, ...], Any]] = [
            *((view, request.rule.dtype) for view, is_made in zip(chunks.views, copies, strict=True) if is_made),
            ((1,), jnp.float32),
            ((programs * kernel.settings.warpgroups if kernel.looks_late else 1,), jnp.float32),
        ]
        varying = jax.typeof(x).manual_axis_type
        results = list(
            plgpu.kernel(
                kernel.entry,
                out_type=[
                    jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # type: ignore[no-untyped-call]
                    for shape, dtype in outputs
                ],
                grid=(programs,),
                grid_names=("program",),
                num_threads=kernel.settings.warpgroups,
                thread_name="warpgroup",
                compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
                interpret=_interpreter() if self.interpret else None,
                kernel_name="quantize_resident",
            )(x.reshape(chunks.views[0]), *([] if given is None else [given.reshape(1)]))
        )
        row, transposed = kernels.shaped(results, x.shape, copies)
        scale, amaxes = results
        return row, transposed, scale[0], largest(amaxes) if request.wants_amax else None

    def _settings(self, request: Request) -> Settings:
        return self.flat if request.layout == "row" else self.tiled

    def _chunks(self, request: Request) -> Chunks:
        elements = self._settings(request).slot_bytes // request.dtype.itemsize
        if request.layout == "row":
            return Flat(int(np.prod(request.shape)), elements)
        rows = 1 << (elements.bit_length() - 1) // 2
        return Tiles.of(request.shape, (rows, elements // rows))


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is fixed for one kernel, and its parts in the order in which they run."""

    request: Request
    settings: Settings
    chunks: Chunks
    copies: tuple[bool, bool]
    programs: int
    interpret: bool

    @property
    def looks_late(self) -> bool:
        """Whether the amax is a result alone: nothing waits for it."""
        return self.request.wants_amax and bool(self.request.given)

    def entry(self, x: Any, *refs: Any) -> None:
        """Allocates shared memory and barriers, and runs every warpgroup."""
        slots = self.settings.warpgroups * self.settings.slots
        rows, columns = self.chunks.rows, self.chunks.columns
        # A chunk is cast in its slot: FP8 takes the first part of what x took, a transposed copy the second.
        parts = x.dtype.itemsize
        pl.run_scoped(
            functools.partial(self.run, x, *refs),
            slot=plgpu.RefUnion(
                plgpu.SMEM((slots, rows, columns), x.dtype),
                plgpu.SMEM((slots, parts, rows, columns), self.request.rule.dtype),
                plgpu.SMEM((slots, parts, columns, rows), self.request.rule.dtype),
            ),
            full=plgpu.Barrier(num_barriers=slots),
            shared=None if self.request.given and not self.looks_late else meeting.scratch(self.settings.warpgroups),
            collective_axes="warpgroup",
        )

    def run(self, x: Any, *refs: Any, slot: Any, full: Any, shared: Any) -> None:
        rule, given = self.request.rule, self.request.given
        *rest, scale_ref, amax_ref = refs
        number = rest.pop(0)[0] if given else None
        row, transposed = (rest.pop(0) if is_made else None for is_made in self.copies)
        warpgroup = lax.axis_index("warpgroup")
        worker = _Worker(self, x, row, transposed, slot, full, lax.axis_index("program"), warpgroup)
        if number is None:
            worker.ask_for_first()
            amax = self.meet(worker.look(), warpgroup, shared)
            multiplier, scale = kernels.multiplier_of(rule, amax, "amax")
            worker.write(multiplier, looks=False, is_resident=True)
        else:
            amax = number
            multiplier, scale = kernels.multiplier_of(rule, number, "scale" if given == "scale" else "amax")
            worker.ask_for_last()
            found = worker.write(multiplier, looks=self.looks_late, is_resident=False)
            if self.looks_late:
                amax_ref[worker.number] = kernels.from_bits(
                    meeting.largest_of_warpgroup(_bits(found), warpgroup, shared, self.interpret)
                )

        @pl.when(worker.number == 0)
        def _() -> None:
            scale_ref[0] = scale
            if not self.looks_late:
                amax_ref[0] = amax

    def meet(self, largest: jax.Array, warpgroup: jax.Array, shared: Any) -> jax.Array:
        """The amax of all warpgroups of all programs."""
        found = meeting.meet(_bits(largest), warpgroup, shared, self.programs, self.settings.warpgroups, self.interpret)
        return kernels.from_bits(found)


class _Worker:
    """One warpgroup, its ring, and its chunks: every `workers`-th of the tensor."""

    def __init__(
        self,
        kernel: _Kernel,
        x: Any,
        row: Any,
        transposed: Any,
        slot: Any,
        full: Any,
        program: jax.Array,
        warpgroup: jax.Array,
    ) -> None:
        self.kernel, self.chunks = kernel, kernel.chunks
        self.x, self.row, self.transposed, self.full = x, row, transposed, full
        self.wide, self.narrow, self.narrow_transposed = slot
        self.slots, self.lag = kernel.settings.slots, kernel.settings.lag
        self.first_slot = warpgroup * self.slots
        # Chunks beside each other go to different multiprocessors, so that few chunks occupy many.
        self.number = warpgroup * kernel.programs + program
        self.workers = kernel.programs * kernel.settings.warpgroups
        self.count = lax.div(self.chunks.count - self.number + self.workers - 1, self.workers)

    def ask_for_first(self) -> None:
        """Asks for the chunks of the first round."""
        for j in range(self.slots):
            pl.when(j < self.count)(functools.partial(self._ask, jnp.int32(j)))

    def ask_for_last(self) -> None:
        """Asks for the chunks of the last round, the last first."""
        for i in range(self.slots):
            pl.when(i < self.count)(functools.partial(self._ask, self.count - 1 - i))

    def look(self) -> jax.Array:
        """The largest |x| of the chunks, for each element of a part of a chunk. The last round stays in the slots."""

        def step(j: jax.Array, largest: jax.Array) -> jax.Array:
            plgpu.barrier_wait(self.full.at[self._slot(j)])
            parts = self._load(j)
            pl.when(j + self.slots < self.count)(lambda: self._ask(j + self.slots))
            return _larger(largest, parts)

        largest: jax.Array = lax.fori_loop(0, self.count, step, self._no_amax())
        return largest

    def write(self, multiplier: jax.Array, *, looks: bool, is_resident: bool) -> Any:
        """Casts all chunks, the last first.

        Args:
            looks: whether the largest |x| is found on the way, and returned as `look` does.
            is_resident: the chunks of the last round have been waited for.
        """

        def step(i: jax.Array, largest: Any) -> Any:
            j = self.count - 1 - i
            pl.when((i >= self.slots) | (not is_resident))(lambda: plgpu.barrier_wait(self.full.at[self._slot(j)]))
            parts = self._load(j) if looks or self.row is not None else []
            self._cast(j, parts, multiplier)
            plgpu.wait_smem_to_gmem(self.lag * sum(self.kernel.copies), wait_read_only=True)
            back = j + self.lag - self.slots
            pl.when((i >= self.lag) & (back >= 0))(lambda: self._ask(back))
            return _larger(largest, parts) if looks else largest

        found = lax.fori_loop(0, self.count, step, self._no_amax() if looks else None)
        plgpu.wait_smem_to_gmem(0)
        return found

    def _cast(self, j: jax.Array, parts: list[jax.Array], multiplier: jax.Array) -> None:
        """Casts a chunk in its slot, and begins to store it."""
        slot = self._slot(j)
        rows = [self._narrowed(part, multiplier) for part in parts] if self.row is not None else []
        transposed = None if self.transposed is None else self._narrowed(self._load_transposed(j), multiplier)
        plgpu.commit_smem()  # type: ignore[no-untyped-call]  # all have read the slot
        for number, part in enumerate(rows):
            self.narrow.at[slot, 0, self._rows_of(number)][...] = part
        if transposed is not None:
            _store(self.narrow_transposed.at[slot, 1], transposed)
        plgpu.commit_smem()  # type: ignore[no-untyped-call]
        box, transposed_box = self.chunks.boxes(self._chunk(j))
        if self.row is not None:
            plgpu.copy_smem_to_gmem(self.narrow.at[slot, 0], self.row.at[box])
        if self.transposed is not None:
            plgpu.copy_smem_to_gmem(self.narrow_transposed.at[slot, 1], self.transposed.at[transposed_box])

    # Chunks: `j` counts those of this worker

    def _slot(self, j: jax.Array) -> jax.Array:
        return self.first_slot + lax.rem(j, self.slots)

    def _chunk(self, j: jax.Array) -> jax.Array:
        return self.number + j * self.workers

    def _ask(self, j: jax.Array) -> None:
        slot = self._slot(j)
        box, _ = self.chunks.boxes(self._chunk(j))
        plgpu.copy_gmem_to_smem(self.x.at[box], self.wide.at[slot], self.full.at[slot])

    # Parts of a chunk: what all threads load at once

    @property
    def _vector(self) -> int:
        return _LOADED // int(self.x.dtype.itemsize)

    @property
    def _part_shape(self) -> tuple[int, int]:
        return _THREADS * self._vector // self.chunks.columns, self.chunks.columns

    def _rows_of(self, part: int) -> Any:
        rows = self._part_shape[0]
        return pl.ds(part * rows, rows)

    def _load(self, j: jax.Array) -> list[jax.Array]:
        layout = plgpu.Layout.WG_STRIDED(self._part_shape, vec_size=self._vector)
        parts = range(self.chunks.rows // self._part_shape[0])
        return [_jax_compat.load_ref(self.wide.at[self._slot(j), self._rows_of(part)], layout) for part in parts]

    def _load_transposed(self, j: jax.Array) -> jax.Array:
        """The transposed chunk: each thread has the `length` elements of one of its rows that it stores at once."""
        shape = self.chunks.columns, self.chunks.rows
        chunk = self.wide.at[self._slot(j)]
        transposed: jax.Array
        if self.kernel.interpret:
            transposed = chunk[...]
            return transposed.T
        length = min(_STORED, self.chunks.rows // _WARPS)
        tiling = plgpu.Tiling(((_LANES, _WARPS * length), (_LANES, length)))
        layout = plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

        @plgpu.inline_mgpu(  # type: ignore[no-untyped-call,untyped-decorator]
            arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(shape, self.x.dtype, layout=layout)
        )
        def load(_: Any, chunk: Any) -> Any:
            return _jax_compat.load_transposed(chunk, layout, shape)

        transposed = load(chunk)
        return transposed

    def _no_amax(self) -> jax.Array:
        layout = plgpu.Layout.WG_STRIDED(self._part_shape, vec_size=self._vector)
        nothing: jax.Array = plgpu.layout_cast(jnp.zeros(self._part_shape, self.x.dtype), layout)
        return nothing

    def _narrowed(self, part: jax.Array, multiplier: jax.Array) -> jax.Array:
        scaled = self.kernel.request.rule.scaled(part.astype(jnp.float32), multiplier)
        if self.kernel.interpret:  # on the device the conversion saturates by itself
            largest = np.float32(self.kernel.request.rule.largest)
            scaled = jnp.clip(scaled, -largest, largest)
        return scaled.astype(self.kernel.request.rule.dtype)


def _interpreter() -> Any:
    """What interprets the kernel on any machine. Its name is new in JAX 0.11."""
    return plgpu.InterpretGPUParams()  # type: ignore[attr-defined]


def _bits(x: jax.Array) -> jax.Array:
    """The bits of |x| in f32."""
    bits: jax.Array = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) & np.int32(0x7FFFFFFF)
    return bits


def _larger(largest: jax.Array, parts: list[jax.Array]) -> jax.Array:
    for part in parts:
        largest = jnp.maximum(largest, jnp.abs(part))
    return largest


def _store(ref: Any, value: jax.Array) -> None:
    """Stores where banks of shared memory may conflict, which JAX 0.12 wants to be told, and others do not mind."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
