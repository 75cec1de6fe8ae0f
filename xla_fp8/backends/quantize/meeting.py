"""How all warpgroups of a kernel wait for each other, and learn the largest number that any of them found.

    warpgroup   its largest → a word of shared memory                        barrier of the program
    program     the largest of these → its word in global memory; when no program's word is missing any more, the
                largest of all → shared memory                               barrier of the program

The words in global memory are zero at first, and a number in one has its sign bit set. So one load shows whether a
program has arrived and what it found: nothing is counted, and no other write must be ordered before it.

It works where all programs are on the device at once: there is one for each multiprocessor, and nothing else may hold
one for good. Two such kernels side by side could, each some; nothing promises that the device places all programs of
one first. Then both stop waiting after `_PATIENCE` looks and have NaN, which is seen, where waiting would never end.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from xla_fp8 import _jax_compat

_LANES = 32
_WARPS = 4  # of a warpgroup
_PATIENCE = 1 << 22

_MEET = """
{{
    .reg .pred other, first, there, met;
    .reg .b32 lane, word, own, all, largest, looks;
    .reg .b64 address;
    mov.u32 lane, %tid.x;
    setp.ge.u32 other, lane, {lanes};
    @other bra END;
    setp.eq.u32 first, lane, 0;

    mov.b32 own, 0;
    setp.lt.u32 there, lane, {warpgroups};
    mad.lo.u32 word, lane, 4, $0;
    @there ld.shared.b32 own, [word];
    redux.sync.max.u32 own, own, 0xffffffff;
    or.b32 own, own, 0x80000000;
    mov.u32 word, %ctaid.x;
    mad.wide.u32 address, word, 4, $1;
    @first st.relaxed.gpu.global.b32 [address], own;

    mov.b32 looks, 0;
LOOK:
    mov.b32 all, 0x80000000;
    mov.b32 largest, 0;
{load}
    setp.ne.b32 met, all, 0;
    vote.sync.all.pred met, met, 0xffffffff;
    @met bra MET;
    add.u32 looks, looks, 1;
    setp.lt.u32 there, looks, {patience};
    @there bra LOOK;
    mov.b32 largest, 0x7fc00000;
MET:
    redux.sync.max.u32 largest, largest, 0xffffffff;
    and.b32 largest, largest, 0x7fffffff;
    @first st.shared.b32 [$0 + {result}], largest;
END:
}}
"""

_LOAD = """
    {{
        .reg .b32 found;
        add.u32 word, lane, {offset};
        setp.lt.u32 there, word, {programs};
        mad.wide.u32 address, word, 4, $1;
        mov.b32 found, 0x80000000;
        @there ld.relaxed.gpu.global.b32 found, [address];
        and.b32 all, all, found;
        max.u32 largest, largest, found;
    }}"""


def scratch(warpgroups: int) -> dict[str, Any]:
    """The shared memory and the barrier that a meeting takes."""
    return {
        "words": plgpu.SMEM((warpgroups + 1,), jnp.int32),
        "warps": plgpu.SMEM((warpgroups, _WARPS), jnp.int32),
        "barrier": plgpu.Barrier(num_arrivals=warpgroups),
    }


def meet(
    bits: jax.Array, warpgroup: jax.Array, shared: dict[str, Any], programs: int, warpgroups: int, interpret: bool
) -> jax.Array:
    """The largest of all numbers of all warpgroups.

    Args:
        bits: int32, not negative: an array of each warpgroup in `Layout.WG_STRIDED`.
        shared: what `scratch` describes.
        interpret: there is one program.
    """
    words, barrier = shared["words"], shared["barrier"]
    words[warpgroup] = largest_of_warpgroup(bits, warpgroup, shared, interpret)
    _await_all(barrier)
    if programs == 1:
        largest: jax.Array = words[0]
        for other in range(1, warpgroups):
            largest = jnp.maximum(largest, words[other])
        return largest
    pl.when(warpgroup == 0)(lambda: _meet_programs(words, programs, warpgroups))
    _await_all(barrier)
    found: jax.Array = words[warpgroups]
    return found


def _await_all(barrier: Any) -> None:
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


def largest_of_warpgroup(bits: jax.Array, warpgroup: jax.Array, shared: dict[str, Any], interpret: bool) -> jax.Array:
    """The largest number of one warpgroup; arguments as of `meet`."""
    if interpret:
        return jnp.max(bits)
    # `jnp.max` would take shared memory that other warpgroups take as well.
    scratch = shared["warps"].at[warpgroup]

    @plgpu.inline_mgpu(  # type: ignore[no-untyped-call,untyped-decorator]
        arg_types=(plgpu.Layout.WG_STRIDED(bits.shape, vec_size=bits.size // 128), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=plgpu.Layout.WG_SPLAT(())),
    )
    def largest(_: Any, array: Any, scratch: Any) -> Any:
        return array.reduce("max", range(len(array.shape)), scratch)

    found: jax.Array = largest(bits, scratch)
    return found


def _meet_programs(words: Any, programs: int, warpgroups: int) -> None:
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((programs,)))
    load = "".join(_LOAD.format(offset=offset, programs=programs) for offset in range(0, programs, _LANES))
    text = _MEET.format(lanes=_LANES, warpgroups=warpgroups, load=load, patience=_PATIENCE, result=4 * warpgroups)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))  # type: ignore[no-untyped-call,untyped-decorator]
    def run(_: Any, words: Any, arrived: Any) -> None:
        _jax_compat.inline_ptx(text, shared=[words], pointers=[arrived])

    run(words, arrived)
