"""The algorithm "resident": one launch, in which the tensor, or its end, stays in shared memory between the passes.

Every warpgroup of every multiprocessor has a ring of slots in shared memory, and every `workers`-th chunk of the
tensor:

    look     each chunk: wait until it is in its slot; the largest |x| so far; ask for the chunk one ring ahead
    meet     all warpgroups of the device agree on the amax (`meeting`)
    write    each chunk, the last first: cast it in its slot; store the slot; ask for the chunk one ring back

What the last round of the ring has brought is still there when writing begins: with 224 KiB in each of 132
multiprocessors, 30 MB. The rest of a larger tensor is read again, the latest first, as far as it reaches from the L2
cache. TMA does all copies, so that whatever the warps do a ring of loads is on its way. With a given scale there is no
looking, and the ring streams.

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

from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import kernels, meeting
from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize.chunks import Chunks
from xla_fp8.backends.quantize.kernels import Known
from xla_fp8.backends.quantize.request import Outcome, Request, Rule, multiprocessors
from xla_fp8.target import Verdict

_THREADS = 128  # of a warpgroup
_LOADED = 16  # bytes that a thread loads at once


@dataclasses.dataclass(frozen=True)
class Resident:
    """One kernel, of warpgroups with a ring each.

    Attributes:
        warpgroups: of each multiprocessor.
        slots: of each warpgroup.
        slot_bytes: of x in each slot.
        lag: stores that may still read their slots when the next chunk is asked for.
    """

    name: str = "resident"
    warpgroups: int = 4
    slots: int = 7
    slot_bytes: int = 8192
    lag: int = 2
    interpret: bool = False

    def supports(self, request: Request) -> Verdict:
        if not (verdict := requests.supports(request, self.interpret)).ok:
            return verdict
        if request.layout != "row":
            return No("it makes no transposed copies")
        if not self._chunks(request).fits:
            return No("it copies rows of 16 elements and more by TMA, and at least one slot of them")
        return verdict

    def run(self, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
        chunks = self._chunks(request)
        programs = 1 if self.interpret else min(chunks.count, multiprocessors())
        kernel = _Kernel(self, chunks, request.rule, request.given, request.wants_amax or not request.given, programs)
        varying = jax.typeof(x).manual_axis_type
        data, scale, amax = plgpu.kernel(
            kernel.entry,
            out_type=[
                jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # type: ignore[no-untyped-call]
                for shape, dtype in ((chunks.view, request.rule.dtype), ((1,), jnp.float32), ((1,), jnp.float32))
            ],
            grid=(programs,),
            grid_names=("program",),
            num_threads=self.warpgroups,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=_interpreter() if self.interpret else None,
            kernel_name="quantize_resident",
        )(x.reshape(chunks.view), *([] if given is None else [given.reshape(1)]))
        return data.reshape(x.shape), None, scale.reshape(()), amax.reshape(()) if request.wants_amax else None

    def _chunks(self, request: Request) -> Chunks:
        return Chunks(int(np.prod(request.shape)), self.slot_bytes // request.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """What is fixed for one kernel, and its parts in the order in which they run."""

    algorithm: Resident
    chunks: Chunks
    rule: Rule
    given: str
    finds_amax: bool
    programs: int

    def entry(self, x: Any, *refs: Any) -> None:
        """Allocates shared memory and barriers, and runs every warpgroup."""
        a, c = self.algorithm, self.chunks
        slots = a.warpgroups * a.slots
        # A chunk is cast in its slot: FP8 takes the first part of what x took.
        narrow_rows = c.rows * x.dtype.itemsize
        pl.run_scoped(
            functools.partial(self.run, x, *refs),
            slot=plgpu.RefUnion(
                plgpu.SMEM((slots, c.rows, c.width), x.dtype),
                plgpu.SMEM((slots, narrow_rows, c.width), self.rule.dtype),
            ),
            full=plgpu.Barrier(num_barriers=slots),
            shared=meeting.scratch(a.warpgroups) if self.finds_amax else None,
            collective_axes="warpgroup",
        )

    def run(self, x: Any, *refs: Any, slot: Any, full: Any, shared: Any) -> None:
        *given, data, scale_ref, amax_ref = refs
        warpgroup = lax.axis_index("warpgroup")
        worker = _Worker(self, x, data, slot, full, lax.axis_index("program"), warpgroup)
        if self.given:
            known: Known = "scale" if self.given == "scale" else "amax"
            multiplier, scale = kernels.multiplier_of(self.rule, given[0][0], known)
            worker.ask_for_last()
            largest = worker.write(multiplier, self.finds_amax, is_resident=False)
            amax = self.meet(largest, warpgroup, shared) if self.finds_amax else given[0][0]
        else:
            worker.ask_for_first()
            amax = self.meet(worker.look(), warpgroup, shared)
            multiplier, scale = kernels.multiplier_of(self.rule, amax, "amax")
            worker.write(multiplier, False, is_resident=True)

        @pl.when(worker.number == 0)
        def _() -> None:
            scale_ref[0] = scale
            amax_ref[0] = amax

    def meet(self, largest: jax.Array, warpgroup: jax.Array, shared: Any) -> jax.Array:
        """The amax of all warpgroups of all programs."""
        bits = lax.bitcast_convert_type(largest.astype(jnp.float32), jnp.int32) & np.int32(0x7FFFFFFF)
        a = self.algorithm
        return kernels.from_bits(meeting.meet(bits, warpgroup, shared, self.programs, a.warpgroups, a.interpret))


class _Worker:
    """One warpgroup, its ring, and its chunks: every `workers`-th of the tensor."""

    def __init__(
        self, kernel: _Kernel, x: Any, data: Any, slot: Any, full: Any, program: jax.Array, warpgroup: jax.Array
    ) -> None:
        self.kernel, self.x, self.data, self.full = kernel, x, data, full
        self.wide, self.narrow = slot
        self.slots, self.lag = kernel.algorithm.slots, kernel.algorithm.lag
        self.first_slot = warpgroup * self.slots
        # Chunks beside each other go to different multiprocessors, so that few chunks occupy many.
        self.number = warpgroup * kernel.programs + program
        self.workers = kernel.programs * kernel.algorithm.warpgroups
        self.count = lax.div(kernel.chunks.count - self.number + self.workers - 1, self.workers)

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
            parts = [self._load(j, part) for part in range(self._parts)]
            pl.when(j + self.slots < self.count)(lambda: self._ask(j + self.slots))
            return _larger(largest, parts)

        largest: jax.Array = lax.fori_loop(0, self.count, step, self._no_amax())
        return largest

    def write(self, multiplier: jax.Array, looks: bool, is_resident: bool) -> Any:
        """Casts all chunks, the last first.

        Args:
            looks: whether the largest |x| is found on the way, and returned as `look` does.
            is_resident: the chunks of the last round have been waited for.
        """

        def step(i: jax.Array, largest: Any) -> Any:
            j = self.count - 1 - i
            slot = self._slot(j)
            pl.when((i >= self.slots) | (not is_resident))(lambda: plgpu.barrier_wait(self.full.at[slot]))
            parts = [self._load(j, part) for part in range(self._parts)]
            cast = [self._cast(part, multiplier) for part in parts]
            plgpu.commit_smem()  # type: ignore[no-untyped-call]  # all have read the slot
            for number, part in enumerate(cast):
                self.narrow.at[slot, self._rows_of(number)][...] = part
            plgpu.commit_smem()  # type: ignore[no-untyped-call]
            chunk = pl.ds(self._first_row(j), self.kernel.chunks.rows)
            plgpu.copy_smem_to_gmem(self.narrow.at[slot, pl.ds(0, self.kernel.chunks.rows)], self.data.at[chunk])
            plgpu.wait_smem_to_gmem(self.lag, wait_read_only=True)
            back = j + self.lag - self.slots
            pl.when((i >= self.lag) & (back >= 0))(lambda: self._ask(back))
            return _larger(largest, parts) if looks else largest

        found = lax.fori_loop(0, self.count, step, self._no_amax() if looks else None)
        plgpu.wait_smem_to_gmem(0)
        return found

    # Chunks: `j` counts those of this worker

    def _slot(self, j: jax.Array) -> jax.Array:
        return self.first_slot + lax.rem(j, self.slots)

    def _first_row(self, j: jax.Array) -> jax.Array:
        return (self.number + j * self.workers) * self.kernel.chunks.rows

    def _ask(self, j: jax.Array) -> None:
        slot = self._slot(j)
        rows = pl.ds(self._first_row(j), self.kernel.chunks.rows)
        plgpu.copy_gmem_to_smem(self.x.at[rows], self.wide.at[slot], self.full.at[slot])

    # Parts of a chunk: what all threads load at once

    @property
    def _vector(self) -> int:
        return _LOADED // int(self.x.dtype.itemsize)

    @property
    def _parts(self) -> int:
        return self.kernel.chunks.elements // (_THREADS * self._vector)

    @property
    def _part_shape(self) -> tuple[int, int]:
        return self.kernel.chunks.rows // self._parts, self.kernel.chunks.width

    def _rows_of(self, part: int) -> Any:
        rows = self._part_shape[0]
        return pl.ds(part * rows, rows)

    def _load(self, j: jax.Array, part: int) -> jax.Array:
        ref = self.wide.at[self._slot(j), self._rows_of(part)]
        return _load(ref, plgpu.Layout.WG_STRIDED(self._part_shape, vec_size=self._vector))

    def _no_amax(self) -> jax.Array:
        layout = plgpu.Layout.WG_STRIDED(self._part_shape, vec_size=self._vector)
        nothing: jax.Array = plgpu.layout_cast(jnp.zeros(self._part_shape, self.x.dtype), layout)
        return nothing

    def _cast(self, part: jax.Array, multiplier: jax.Array) -> jax.Array:
        scaled = part.astype(jnp.float32) * multiplier
        if self.kernel.algorithm.interpret:  # on the device the conversion saturates by itself
            largest = np.float32(self.kernel.rule.largest)
            scaled = jnp.clip(scaled, -largest, largest)
        return scaled.astype(self.kernel.rule.dtype)


def _interpreter() -> Any:
    """What interprets the kernel on any machine. Its name is new in JAX 0.11."""
    return plgpu.InterpretGPUParams()  # type: ignore[attr-defined]


def _larger(largest: jax.Array, parts: list[jax.Array]) -> jax.Array:
    for part in parts:
        largest = jnp.maximum(largest, jnp.abs(part))
    return largest


def _load(ref: Any, layout: Any) -> jax.Array:
    """`plgpu.load` of a whole ref, whose second parameter JAX 0.10 wants and JAX 0.12 does not have."""
    try:
        return plgpu.load(ref, layout=layout)  # type: ignore[call-arg]
    except TypeError:
        return plgpu.load(ref, (), layout=layout)
