"""The algorithm "resident", interpreted on the CPU: bit by bit what plain JAX makes. And it lowers for an H200.

The meeting of several programs and the conversions of the hardware are tests/hopper/test_quantize.py's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.backends.quantize.test_kernels import E4M3, E5M2, WIDE, normal, same
from tests.backends.quantize.test_lowering import lowered
from tests.quantize_requests import request_for
from tests.sampling import pairwise
from xla_fp8.backends.quantize.chunks import Flat, Tiles
from xla_fp8.backends.quantize.resident import Resident, Settings
from xla_fp8.quantization.algorithms import Lax
from xla_fp8.quantization.numerics import ScaleRule

pytestmark = pytest.mark.unoptimized

# Small slots and short rings, so that a small tensor goes round several times.
FLAT = Settings(warpgroups=2, slots=3, slot_bytes=2048, lag=1)
SMALL = Resident(flat=FLAT, tiled=Settings(warpgroups=2, slots=2, slot_bytes=4096, lag=1), interpret=True)

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX has no public interpreter for Mosaic GPU"
)


@functools.cache
def compiled(algorithm: Any) -> Any:
    return jax.jit(algorithm.run, static_argnums=0)


def check(x: Any, algorithm: Resident = SMALL, number: Any = None, **options: Any) -> None:
    request = request_for(x, **options)
    assert algorithm.supports(request).ok
    same(
        compiled(algorithm)(request, jnp.asarray(x), number),
        compiled(Lax())(request, jnp.asarray(x), number),
    )


@interpreted
@pytest.mark.parametrize(("wide", "dtype"), [(WIDE[0], E4M3), (WIDE[1], E5M2), (WIDE[2], E4M3)])
def test_every_type(wide: Any, dtype: Any) -> None:
    check(normal((64, 160), wide), dtype=dtype)


# One chunk for one of two warpgroups; less than a ring; several rings; a last chunk that is not whole; narrow rows.
@interpreted
@pytest.mark.parametrize("shape", [(1024,), (48, 256), (1001, 16), (5, 7, 11, 16)], ids=str)
@pytest.mark.parametrize("given", ["", "scale"])
def test_any_size_of_whole_rows(shape: tuple[int, ...], given: str) -> None:
    x = normal(shape, ml_dtypes.bfloat16)
    x[(-1,) * len(shape)] = -100  # who misses the tail sees another amax
    check(x, number=jnp.float32(0.05) if given else None, given=given)


@interpreted
@pytest.mark.parametrize(("slots", "lag"), [(3, 0), (5, 2)])
def test_rings(slots: int, lag: int) -> None:
    check(
        normal((30, 1024), ml_dtypes.bfloat16),
        Resident(flat=dataclasses.replace(FLAT, lag=lag, slots=slots), interpret=True),
    )


# Tiles of 32 x 64: one; some that are not whole, in either dimension; several matrices.
@interpreted
@pytest.mark.parametrize("shape", [(32, 64), (80, 144), (2, 3, 48, 80)], ids=str)
@pytest.mark.parametrize(("layout", "given"), [("transposed", ""), ("both", ""), ("transposed", "scale")])
def test_transposed_copies(shape: tuple[int, ...], layout: str, given: str) -> None:
    x = normal(shape, ml_dtypes.bfloat16)
    x[(-1,) * len(shape)] = -100
    check(x, number=jnp.float32(0.05) if given else None, layout=layout, given=given)


@interpreted
@pytest.mark.parametrize("given", ["amax", "scale"])
@pytest.mark.parametrize("wants_amax", [False, True])
def test_given_scales_and_amaxes(given: str, wants_amax: bool) -> None:
    for value in (1e-6, 0.7, 2.0**20):  # most saturate, some, all are subnormal
        check(normal((16, 512)), number=jnp.float32(value), given=given, wants_amax=wants_amax)


@interpreted
@pytest.mark.parametrize("given", ["", "scale"])
def test_special_values(given: str) -> None:
    number = jnp.float32(0.5) if given else None
    for special in (np.nan, -np.inf, -0.0):
        some = normal((1024,))  # XLA on CPUs loses the NaN of larger ones
        some[700] = special
        check(some, number=number, given=given)
        check(np.full(1024, special, np.float32), number=number, given=given, dtype=E5M2)


@interpreted
def test_scale_rules() -> None:
    for rule in (ScaleRule(np.dtype(E4M3), power_of_two=True), ScaleRule(np.dtype(E4M3), eps=10.0)):
        for x in (np.zeros(1024, np.float32), normal((1024,))):
            check(x, rule=rule)


@pytest.mark.parametrize(
    ("shape", "changes", "reason"),
    [
        ((1000, 1001), {}, "multiples of 16"),
        ((256,), {}, "as many elements as a slot"),
        ((64, 1024 + 8), {"layout": "both"}, "multiples of 16"),
        ((16, 1024), {"layout": "both"}, "as many elements as a slot"),
        # Tiles of 32 x 32: what a contiguous one has beyond its matrix would be stored in the next.
        ((2, 32, 48), {"layout": "both"}, "whole tiles"),
        ((2, 48, 32), {"layout": "both"}, "whole tiles"),
        ((64, 1024), {"kept": (0,)}, "axis="),
    ],
)
def test_what_it_leaves_to_others(shape: tuple[int, ...], changes: dict[str, Any], reason: str) -> None:
    verdict = SMALL.supports(request_for(np.zeros(shape, np.float32), **changes))
    assert not verdict.ok
    assert reason in verdict.reason


def test_flat_chunks_cover_the_tensor() -> None:
    for size in (4096, 4096 * 5 + 16, 10**6, 16 * 4097, 2**26):
        chunks = Flat(size, 4096)
        assert chunks.fits
        (rows, columns), _ = chunks.views
        assert rows * columns == size
        assert columns == chunks.columns
        assert chunks.rows * columns == 4096
        assert (chunks.count - 1) * chunks.rows < rows <= chunks.count * chunks.rows


def test_tiles_cover_the_tensor_once() -> None:
    chunks = Tiles.of((2, 80, 144), (32, 64))
    seen = np.zeros((2, 96, 192), np.int32)
    for number in range(chunks.count):
        (matrix, rows, columns), exchanged = chunks.boxes(jnp.int32(number))
        assert exchanged == (matrix, columns, rows)
        top, left = int(rows.start), int(columns.start)
        seen[int(matrix), top : top + rows.size, left : left + columns.size] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(("wide", "layout", "given"), pairwise(WIDE, ["row", "both"], ["", "amax", "scale"]))
def test_it_lowers_to_one_kernel(wide: Any, layout: str, given: str) -> None:
    for shape in ((4096, 4096), *(((1_000_000,), (4096,)) if layout == "row" else ())):
        request = request_for(np.broadcast_to(np.zeros((), wide), shape), layout=layout, given=given)
        number = [jax.ShapeDtypeStruct((), jnp.float32)] if given else []
        text = lowered(
            lambda x, *number, request=request: Resident().run(request, x, *(number or [None])),
            jax.ShapeDtypeStruct(shape, wide),
            *number,
        )
        assert text.count("stablehlo.custom_call") == 1
        assert "mosaic_gpu" in text


def test_a_tile_that_is_not_whole_is_stored_by_a_descriptor() -> None:
    """As bytes it would go on in the next matrix."""
    for shape in ((3, 208, 400), (128, 128, 320), (2, 80, 256)):
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        request = request_for(x, layout="both")
        assert Resident().supports(request).ok
        assert "cp.async.bulk.global" not in lowered(lambda x, r=request: Resident().run(r, x, None), x)
    assert not Resident().supports(request_for(jax.ShapeDtypeStruct((128, 64, 320), jnp.bfloat16), layout="both")).ok
