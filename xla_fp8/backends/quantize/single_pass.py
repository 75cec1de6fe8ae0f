"""The algorithm "single_pass": one launch. Programs find the amax, wait for each other, and cast, the last piece first.

    program p   load pieces p, p+P, p+2P ...  → amax ─ barrier ─ cast ... p+2P, p+P, p
                                                (atomic max, count of arrivals)

After the barrier every program reads its own pieces again, from the L2 cache as far as that reaches. Where there is a
program for each piece, the piece stays in registers. One program alone needs no barrier, and nothing that starts as
zero.

The barrier holds where all programs are on the device at once: there is one for each multiprocessor, and a kernel that
can be launched at all fits into each of them once, whatever registers the compiler takes. But two such kernels side by
side could each hold some, and nothing promises that the device hands out all programs of one first. Then both stop
waiting after `_PATIENCE` looks and write NaN, which is seen, where waiting would never end.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.quantize import kernels, two_kernels
from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize.request import Outcome, Request
from xla_fp8.backends.quantize.two_kernels import DEFAULT, layout_of, programs_for
from xla_fp8.backends.quantize.work import Eviction, Flat, Tiled, Work
from xla_fp8.backends.triton.launch import launch
from xla_fp8.target import Verdict

_PATIENCE = 1 << 22
_NAN_BITS = np.uint32(0x7FC00000)


@dataclasses.dataclass(frozen=True)
class SinglePass:
    """One kernel with a barrier across the grid. With a given amax or scale there is nothing to wait for: a cast.

    Attributes:
        block, loads: elements of a load, loads of a piece, without a transposed copy.
        tile: of a piece with a transposed copy.
        warps: of a program.
        each: programs for each multiprocessor. Above 1 it is the caller who knows that they fit: for x of one shape and
            type, from what the compiler says of registers.
        lone: a tensor of so few pieces is cast by one program, without a barrier.
        eviction: what the L2 cache is told of what is read for the second time.
    """

    name: str = "single_pass"
    block: int = 8192
    loads: int = 4
    tile: tuple[int, int] = (128, 128)
    warps: int = 16
    each: int = 1
    lone: int = 4
    eviction: Eviction = None
    interpret: bool = False

    def supports(self, request: Request) -> Verdict:
        return requests.supports(request, self.interpret)

    def run(self, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
        if request.given:
            return two_kernels.run(request, x, given, "atomic", DEFAULT, self.interpret)
        work: Work
        work = (
            Flat.of(x.size, self.block, self.loads, self.each)
            if request.layout == "row"
            else Tiled.of(x.shape, self.tile)
        )
        # The interpreter runs programs one after the other: only one can be there.
        alone = self.interpret or work.pieces <= self.lone
        programs = 1 if alone else programs_for(work, self.each)
        copies = layout_of(request)
        results = list(
            launch(
                functools.partial(_kernel, request, work, programs, copies, self.eviction),
                [x.reshape(work.views[0]), *([] if programs == 1 else [jnp.zeros(2, jnp.uint32)])],
                [
                    *((view, request.rule.dtype) for view, is_made in zip(work.views, copies, strict=True) if is_made),
                    ((1,), jnp.float32),
                    ((1,), jnp.float32),
                    *([] if programs == 1 else [((2,), jnp.uint32)]),
                ],
                name="quantize_single_pass",
                programs=programs,
                warps=self.warps,
                interpret=self.interpret,
                aliases=None if programs == 1 else {1: sum(copies) + 2},
            )
        )
        row, transposed = kernels.shaped(results, x.shape, copies)
        scale, amax = (result.reshape(()) for result in results[:2])
        return row, transposed, scale, amax if request.wants_amax else None


def _kernel(
    request: Request, work: Work, programs: int, copies: tuple[bool, bool], eviction: Eviction, x: Any, *refs: Any
) -> None:
    outputs = list(refs if programs == 1 else refs[1:])
    row = outputs.pop(0) if copies[0] else None
    transposed = outputs.pop(0) if copies[1] else None

    def look(position: Any, so_far: jax.Array) -> jax.Array:
        return kernels.amax_bits(work.load(x, position), so_far)

    def write(position: Any, blocks: Any) -> None:
        cast = [kernels.cast(request.rule, block, multiplier) for block in blocks]
        work.store(row, transposed, position, cast)

    one_each = programs == work.pieces
    if one_each:
        kept = kernels.walk(work, programs, None, lambda position, _: work.load(x, position))
        bits = jnp.max(kernels.amax_bits(kept, kernels.no_amax(work, x)))
    else:
        bits = jnp.max(kernels.walk(work, programs, kernels.no_amax(work, x), look))
    if programs > 1:
        bits = _amax_of_all(outputs[2], bits, programs)
    amax = kernels.from_bits(bits)
    multiplier, scale = kernels.multiplier_of(request.rule, amax, "amax")

    @pl.when(pl.program_id(0) == 0)
    def _() -> None:
        outputs[0][0] = scale
        outputs[1][0] = amax

    def write_again(position: Any, _: None) -> None:
        write(position, kept if one_each else work.load(x, position, eviction))

    kernels.walk(work, programs, None, write_again, backward=not one_each)


def _amax_of_all(state: Any, bits: jax.Array, programs: int) -> jax.Array:
    """Joins a program's amax, waits until all have, and returns the largest.

    Args:
        state: uint32[2], zero at first: the largest so far, and how many programs have arrived. Atomic operations of a
            Triton program acquire and release, so who sees an arrival sees the amax that came before it.
    """
    triton.atomic_max(state, jnp.int32(0), bits)
    arrived = triton.atomic_add(state, jnp.int32(1), jnp.uint32(1)) + jnp.uint32(1)

    def is_waiting(carry: tuple[jax.Array, jax.Array]) -> Any:
        arrived, looks = carry
        return (arrived < jnp.uint32(programs)) & (looks < _PATIENCE)

    def look(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return triton.atomic_add(state, jnp.int32(1), jnp.uint32(0)), carry[1] + 1

    arrived, _ = lax.while_loop(is_waiting, look, (arrived, jnp.int32(0)))
    joined = triton.atomic_max(state, jnp.int32(0), jnp.uint32(0))
    found: jax.Array = lax.select(arrived < jnp.uint32(programs), _NAN_BITS, joined)
    return found
