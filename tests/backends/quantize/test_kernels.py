"""The quantization kernels, interpreted on the CPU: bit by bit what plain JAX makes, for every way to cut a tensor.

What the hardware adds (Triton's casts, atomics, the barrier) is tests/hopper/test_quantize.py's.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.quantize_requests import request_for
from tests.sampling import pairwise, sampled
from xla_fp8.backends.quantize.atomic import Atomic
from xla_fp8.backends.quantize.reduction import Reduction
from xla_fp8.backends.quantize.single_pass import SinglePass
from xla_fp8.backends.quantize.two_kernels import Settings
from xla_fp8.quantization.algorithms import Algorithm, Lax, Outcome, Request
from xla_fp8.quantization.numerics import ScaleRule

pytestmark = pytest.mark.unoptimized

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
WIDE = [np.float32, ml_dtypes.bfloat16, np.float16]
# Small pieces, so that a small tensor has many of them.
SMALL = Settings(amax_block=64, amax_loads=2, amax_programs=1, cast_block=32, cast_loads=2, tile=(16, 32))
SEPARATE = Settings("separate", amax_block=64, amax_loads=1, cast_block=64, cast_programs=1, tile=(32, 16))
KERNELS: dict[str, Algorithm] = {
    "atomic": Atomic(settings=SMALL, interpret=True),
    "atomic, separate scale": Atomic(settings=SEPARATE, interpret=True),
    "reduction": Reduction(settings=SMALL, interpret=True),
    "reduction, separate scale": Reduction(settings=SEPARATE, interpret=True),
    "single_pass": SinglePass(block=32, loads=2, tile=(16, 16), interpret=True),
}


@functools.cache
def compiled(algorithm: Algorithm) -> Any:
    return jax.jit(algorithm.run, static_argnums=0)


def run(algorithm: Algorithm, request: Request, x: Any, given: Any = None) -> Outcome:
    outcome: Outcome = compiled(algorithm)(request, jnp.asarray(x), given)
    return outcome


def same(found: Outcome, expected: Outcome) -> None:
    """The same bits; NaNs are alike."""
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide_a, wide_b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        both_nan = np.isnan(wide_a) & np.isnan(wide_b)
        bits_a, bits_b = (np.where(both_nan, 0, wide.view(np.uint32)) for wide in (wide_a, wide_b))
        np.testing.assert_array_equal(bits_a, bits_b)


def normal(shape: tuple[int, ...], wide: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.asarray(np.random.default_rng(len(shape)).normal(size=shape) * 3).astype(wide)


DIFFERENT = ["atomic", "reduction, separate scale", "single_pass"]
"""Kernels of which each has the parts of another."""


@pytest.mark.parametrize(("kernel", "dtype", "wide"), pairwise(DIFFERENT, [E4M3, E5M2], WIDE))
def test_every_type_has_the_bits_of_lax(kernel: str, dtype: Any, wide: Any) -> None:
    x = normal((40, 52), wide)
    for layout in ("row", "both"):
        request = request_for(x, dtype, layout=layout)
        same(run(KERNELS[kernel], request, x), run(Lax(), request, x))


# No dimension, one element, less than a block, whole pieces, an aligned tail, an odd one.
@pytest.mark.parametrize("shape", [(), (1,), (7,), (31,), (256,), (1008,), (1001,), (3, 5, 7, 11)], ids=str)
@pytest.mark.parametrize("kernel", sampled([*DIFFERENT, "reduction", "atomic, separate scale"], 3))
def test_any_size(kernel: str, shape: tuple[int, ...]) -> None:
    x = normal(shape, ml_dtypes.bfloat16)
    # The largest stands in the tail: who misses it sees another amax.
    if shape:
        x[(-1,) * len(shape)] = -100
    request = request_for(x)
    same(run(KERNELS[kernel], request, x), run(Lax(), request, x))


@pytest.mark.parametrize(
    ("shape", "layout", "kernel"),
    pairwise([(1, 1), (1, 40), (16, 32), (33, 65), (2, 3, 20, 36)], ["transposed", "both"], DIFFERENT),
)
def test_transposed_copies(kernel: str, layout: str, shape: tuple[int, ...]) -> None:
    x = normal(shape)
    request = request_for(x, layout=layout)
    same(run(KERNELS[kernel], request, x), run(Lax(), request, x))


@pytest.mark.parametrize(
    ("kernel", "layout", "wants_amax", "given"),
    pairwise(["atomic", "reduction", "reduction, separate scale"], ["row", "both"], [False, True], ["amax", "scale"]),
)
def test_given_scales_and_amaxes(kernel: str, layout: str, wants_amax: bool, given: str) -> None:
    x = normal((33, 65))
    for value in (1e-6, 0.7, 2.0**20):  # most saturate, some, all are subnormal
        request = request_for(x, layout=layout, given=given, wants_amax=wants_amax)
        number = jnp.float32(value)
        same(run(KERNELS[kernel], request, x, number), run(Lax(), request, x, number))


@pytest.mark.parametrize("given", ["", "scale"])
@pytest.mark.parametrize("kernel", DIFFERENT)
def test_special_values(kernel: str, given: str) -> None:
    number = jnp.float32(0.5) if given else None
    # No subnormal numbers: XLA on CPUs flushes them, integers do not.
    for special in (np.nan, -np.nan, np.inf, -np.inf, -0.0, 2e-38, 3e38):
        some = normal((1001,))
        some[700] = special
        for x in (some, np.full(1001, special, np.float32)):
            for dtype in (E4M3, E5M2):
                request = request_for(x, dtype, given=given)
                same(run(KERNELS[kernel], request, x, number), run(Lax(), request, x, number))


@pytest.mark.parametrize("kernel", KERNELS)
def test_scale_rules(kernel: str) -> None:
    for x in (np.zeros(100, np.float32), normal((100,)), np.full(100, np.nan, np.float32)):
        for rule in (ScaleRule(np.dtype(E4M3), power_of_two=True), ScaleRule(np.dtype(E4M3), eps=10.0)):
            request = request_for(x, rule=rule)
            same(run(KERNELS[kernel], request, x), run(Lax(), request, x))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_kernels_leave_to_lax(kernel: str) -> None:
    algorithm, x = KERNELS[kernel], np.zeros((4, 4), np.float32)
    assert algorithm.supports(request_for(x)).ok
    for request, reason in (
        (request_for(x, kept=(0,)), "axis="),
        (request_for(x[:0]), "empty"),
        (request_for(np.broadcast_to(np.float32(0), (2**16, 2**15))), "32 bits"),
    ):
        verdict = algorithm.supports(request)
        assert not verdict.ok
        assert reason in verdict.reason


def test_without_the_interpreter_they_need_a_device() -> None:
    verdict = Atomic().supports(request_for(np.zeros(4, np.float32), platform="cpu"))
    assert not verdict.ok
    assert "cpu" in verdict.reason
