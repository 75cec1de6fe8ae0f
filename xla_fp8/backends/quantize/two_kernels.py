"""What the algorithms of two kernels share: an amax kernel, and a cast kernel that walks the other way.

    x ─ find_amax ─ amaxes ─┬───────────────── cast_all → row, transposed, scale      scale_step="block"
                            └─ XLA: scale ──── cast_all → row, transposed             scale_step="separate"

Where the amax or the scale is given, only the cast is left, and finds the amax of x on its way where that is wanted.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp

from xla_fp8.backends.quantize.kernels import Joined, Known, cast_all, find_amax
from xla_fp8.backends.quantize.request import Outcome, Request, multiprocessors
from xla_fp8.backends.quantize.work import Eviction, Flat, Tiled, Work

ScaleStep = Literal["block", "separate"]
"""Who makes the scale of the amax: each program of the cast for itself, or a step between the kernels."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the kernels; numbers do not depend on them.

    Attributes:
        scale_step: see `ScaleStep`.
        amax_block, amax_loads: elements of a load of the amax kernel, and loads of a piece.
        amax_programs: programs of the amax kernel for each multiprocessor.
        cast_block, cast_loads: of the cast without a transposed copy.
        cast_programs: programs of the cast for each multiprocessor; None: one for each piece.
        tile, tile_warps: of the cast with a transposed copy.
        warps: of every other kernel.
        eviction: what the L2 cache is told of what the cast reads; "evict_first": nobody reads it a third time.
    """

    scale_step: ScaleStep = "block"
    amax_block: int = 4096
    amax_loads: int = 4
    amax_programs: int = 4
    cast_block: int = 4096
    cast_loads: int = 1
    cast_programs: int | None = None
    tile: tuple[int, int] = (128, 128)
    tile_warps: int = 8
    warps: int = 8
    eviction: Eviction = None


DEFAULT = Settings()


def run(
    request: Request, x: jax.Array, given: jax.Array | None, joined: Joined, settings: Settings, interpret: bool
) -> Outcome:
    """Quantizes with the two kernels, whose programs join their amaxes as `joined` says."""
    own_amax: Joined | None = None
    known: Known
    if request.given:
        assert given is not None
        known = "scale" if request.given == "scale" else "amax"
        values = given.reshape(1)
        own_amax = joined if request.wants_amax else None
    else:
        known, values = "amax", _amaxes(x, joined, settings, interpret)
    scale, amax = None, None
    if known == "amax" and settings.scale_step == "separate":
        amax = largest(values)
        multiplier, scale = request.rule.of_amax(amax)
        known, values = "multiplier", multiplier.reshape(1)
    row, transposed, own_scale, value, own = _cast(request, x, values, known, own_amax, settings, interpret)
    found = largest(own) if own is not None else value if amax is None else amax
    return row, transposed, own_scale if scale is None else scale, found if request.wants_amax else None


def largest(amaxes: jax.Array) -> jax.Array:
    """The largest of amaxes of parts, by XLA; f32[]."""
    return amaxes[0] if amaxes.size == 1 else jnp.max(amaxes)


def layout_of(request: Request) -> tuple[bool, bool]:
    """Whether a row-major and whether a transposed copy is asked for."""
    return request.layout != "transposed", request.layout != "row"


def programs_for(work: Work, each: int | None) -> int:
    """So many programs for each multiprocessor, but no more than there are pieces."""
    return work.pieces if each is None else min(work.pieces, each * multiprocessors())


def _amaxes(x: jax.Array, joined: Joined, settings: Settings, interpret: bool) -> jax.Array:
    work = Flat.of(x.size, settings.amax_block, settings.amax_loads, settings.amax_programs)
    programs = programs_for(work, settings.amax_programs)
    if joined == "partial":
        # The cast loads them all at once, and Triton loads powers of two.
        programs = 1 << (programs.bit_length() - 1)
    return find_amax(work, x, joined, programs=programs, warps=settings.warps, interpret=interpret)


def _cast(
    request: Request,
    x: jax.Array,
    values: jax.Array,
    known: Known,
    own_amax: Joined | None,
    settings: Settings,
    interpret: bool,
) -> tuple[jax.Array | None, jax.Array | None, jax.Array, jax.Array, jax.Array | None]:
    work: Work
    if request.layout == "row":
        work, warps = Flat.of(x.size, settings.cast_block, settings.cast_loads), settings.warps
    else:
        work, warps = Tiled.of(x.shape, settings.tile), settings.tile_warps
    # Programs that look for the amax on the way do it over several pieces, so that there are few to join.
    each = settings.amax_programs if own_amax is not None else settings.cast_programs
    return cast_all(
        work,
        x,
        values,
        known,
        request.rule,
        layout_of(request),
        own_amax,
        programs=programs_for(work, each),
        warps=warps,
        interpret=interpret,
        eviction=settings.eviction,
    )
