"""The quantization kernels on a Hopper GPU: bit by bit what plain JAX makes there; again and again."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import xla_fp8
from tests.backends.quantize.test_from_call import CALLS
from tests.quantize_requests import request_for
from xla_fp8.backends import reference_quantize
from xla_fp8.backends.quantize import from_call
from xla_fp8.backends.quantize.atomic import Atomic
from xla_fp8.backends.quantize.reduction import Reduction
from xla_fp8.backends.quantize.resident import Resident
from xla_fp8.backends.quantize.single_pass import SinglePass
from xla_fp8.backends.quantize.two_kernels import Settings
from xla_fp8.hlo import Shape
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.quantization.algorithms import Algorithm, Lax, Outcome, Request
from xla_fp8.quantization.numerics import ScaleRule
from xla_fp8.quantize_call import QuantizeCall

pytestmark = pytest.mark.hopper

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
WIDE = [np.float32, ml_dtypes.bfloat16, np.float16]
KERNELS: dict[str, Algorithm] = {
    "atomic": Atomic(),
    "reduction": Reduction(),
    "single_pass": SinglePass(),
    "resident": Resident(),
}
SEPARATE: dict[str, Algorithm] = {
    "atomic": Atomic(settings=Settings(scale_step="separate")),
    "reduction": Reduction(settings=Settings(scale_step="separate")),
}
# Without a dimension, less than a block, odd, aligned, many pieces for each program, and all of it by several.
FLAT = [(), (1,), (7,), (1000,), (100_001,), (1 << 20,), (33, 65), (3, 5, 7, 11), (6_000_016,)]
MATRICES = [(1, 1), (1, 40), (33, 65), (128, 256), (100, 320), (2, 56, 272), (513, 1023), (2048, 4096), (3, 208, 400)]
# Many matrices, each with a tile that is not whole; several chunks for each multiprocessor.
MATRICES += [(128, 64, 320), (64, 80, 320)]


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(algorithm: Algorithm, requests: tuple[Request, ...], xs: list[Any], given: Any) -> list[Outcome]:
    """The outcomes of several tensors: one program, because compiling takes the time here."""
    return [algorithm.run(request, x, given) for request, x in zip(requests, xs, strict=True)]


def same(found: list[Outcome], expected: list[Outcome]) -> None:
    """The same bits; NaNs are alike."""
    for a, b in zip(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(jax.device_get(expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        wide_a, wide_b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        both_nan = np.isnan(wide_a) & np.isnan(wide_b)
        differ = (wide_a.view(np.uint32) != wide_b.view(np.uint32)) & ~both_nan
        assert not differ.any(), (a.shape, a.dtype, np.sum(differ), wide_a[differ][:4], wide_b[differ][:4])


@jax.jit
def differences(found: Any, expected: Any) -> jax.Array:
    """How many numbers differ; counted on the device, because the host takes a second for some tens of millions."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    counts = [jnp.sum(a.astype(jnp.float32) != b.astype(jnp.float32)) for a, b in pairs]
    return sum(counts, jnp.int32(0))


def check(algorithm: Algorithm, xs: list[Any], number: Any = None, **options: Any) -> None:
    if algorithm.name == "resident":  # which takes whole rows of 16 and more
        xs = [x for x in xs if algorithm.supports(request_for(x, **options)).ok]
        assert xs
    requests = tuple(request_for(x, **options) for x in xs)
    assert all(algorithm.supports(request).ok for request in requests)
    found = run(algorithm, requests, xs, number)
    expected = run(Lax(), requests, xs, number)
    for request, a, b in zip(requests, found, expected, strict=True):
        assert [part is None for part in a] == [part is None for part in b], request
    same(found, expected)


def normal(shape: tuple[int, ...], wide: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    x = np.asarray(np.random.default_rng(seed).normal(size=shape) * 3).astype(wide)
    if x.ndim:
        x[(-1,) * x.ndim] = -50 - seed % 7  # the largest stands in the tail
    return x


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("wide", WIDE, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("layout", ["row", "transposed", "both"])
def test_every_type_layout_and_size(kernel: str, dtype: Any, wide: Any, layout: str) -> None:
    shapes = FLAT if layout == "row" else MATRICES
    check(KERNELS[kernel], [normal(shape, wide) for shape in shapes], dtype=dtype, layout=layout)


@pytest.mark.parametrize("kernel", SEPARATE)
@pytest.mark.parametrize("layout", ["row", "both"])
def test_a_scale_that_a_separate_step_makes(kernel: str, layout: str) -> None:
    check(SEPARATE[kernel], [normal(shape, ml_dtypes.bfloat16) for shape in MATRICES], layout=layout)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", ["row", "both"])
@pytest.mark.parametrize("given", ["scale", "amax"])
@pytest.mark.parametrize("wants_amax", [False, True])
def test_given_scales_and_amaxes(kernel: str, layout: str, given: str, wants_amax: bool) -> None:
    xs = [normal(shape, wide) for shape in ((33, 65), (2048, 1024)) for wide in WIDE]
    for dtype in (E4M3, E5M2):
        for value in (1e-6, 0.013, 2.0**20):  # most saturate, some, all are subnormal
            number = np.float32(value)
            check(KERNELS[kernel], xs, number, dtype=dtype, layout=layout, given=given, wants_amax=wants_amax)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("given", ["", "scale"])
def test_special_values(kernel: str, given: str) -> None:
    number = np.float32(0.5) if given else None
    for wide in WIDE:
        for special in (np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-38, 1e-40, 6e4, 3e38):
            with np.errstate(over="ignore"):
                value = np.asarray(special, wide)
            some = normal((100_000 if kernel == "resident" else 100_001,), wide)
            some[700] = value
            full = np.full(5008, value, wide)
            check(KERNELS[kernel], [some, full], number, dtype=E4M3, given=given)
            check(KERNELS[kernel], [some, full], number, dtype=E5M2, given=given)


@pytest.mark.parametrize("kernel", KERNELS)
def test_amaxes_of_every_size_have_the_same_scale(kernel: str) -> None:
    # The division and the product are other instructions for XLA and for Triton: thousands of amaxes tell them apart.
    rng = np.random.default_rng(5)
    amaxes = (rng.uniform(1, 2, 512) * 2.0 ** rng.integers(-126, 127, 512)).astype(np.float32)
    for rule in (ScaleRule(np.dtype(E4M3)), ScaleRule(np.dtype(E5M2)), ScaleRule(np.dtype(E4M3), power_of_two=True)):
        tensors = np.stack([amaxes, amaxes * np.float32(0.37)], axis=1)
        if kernel == "resident":  # which wants a slot full
            tensors = np.pad(tensors, ((0, 0), (0, 2046)))
        request = (request_for(tensors[0], rule=rule),)
        for x in tensors:
            same(run(KERNELS[kernel], request, [x], None), run(Lax(), request, [x], None))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("shape", [(5008,), (4096, 1024), (4096, 4096)], ids=str)
def test_a_hundred_repeats_are_equal(kernel: str, shape: tuple[int, ...]) -> None:
    # Two tensors in turn: what a run before left in memory is another's.
    xs = [jnp.asarray(normal(shape, ml_dtypes.bfloat16, seed)) for seed in (1, 2)]
    request = (request_for(xs[0], layout="row" if len(shape) == 1 else "both"),)
    expected = [run(Lax(), request, [x], None) for x in xs]
    counts = [differences(run(KERNELS[kernel], request, [xs[i % 2]], None), expected[i % 2]) for i in range(100)]
    assert sum(int(count) for count in counts) == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_tensors_that_do_not_depend_on_each_other(kernel: str) -> None:
    # XLA may run them beside each other: barriers of one must not wait for another's.
    xs = [jnp.asarray(normal((1024, 4096 + 16 * (seed % 2)), ml_dtypes.bfloat16, seed)) for seed in range(8)]
    for layout in ("row", "both"):
        requests = tuple(request_for(x, layout=layout) for x in xs)
        expected = run(Lax(), requests, xs, None)
        counts = [differences(run(KERNELS[kernel], requests, xs, None), expected) for _ in range(20)]
        assert [int(count) for count in counts] == [0] * 20


def test_auto_and_names_through_quantize() -> None:
    x = jnp.asarray(normal((304, 528), ml_dtypes.bfloat16))
    expected = xla_fp8.quantize(x, layout="both", algorithm="lax")
    for name in ("auto", *KERNELS):
        assert "quantize_" in jax.jit(lambda x, n=name: xla_fp8.quantize(x, algorithm=n)).lower(x).as_text()
        found = xla_fp8.quantize(x, layout="both", algorithm=name)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("name", CALLS)
def test_quantize_calls_of_programs(name: str) -> None:
    call = QuantizeCall.parse(CALLS[name])
    wide = numpy_dtype(call.nodes[0].type)
    operands = [np.float32(0.37) for _ in call.scalars]
    by_kernels = jax.jit(lambda *values: from_call.run(call, values, "cuda"))
    assert from_call.runs(call, Shape.array(call.nodes[0].type, (2048, 4096)), "cuda") != bool(call.scalars)
    by_xla = jax.jit(lambda *values: reference_quantize.run(call, values))
    for x in (
        normal((2048, 4096), wide),
        normal((33, 65), wide),
        np.zeros((64, 64), wide),
        np.full((5, 7), np.nan, wide),
    ):
        for a, b in zip(by_kernels(x, *operands), by_xla(x, *operands), strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_batches_are_left_to_lax() -> None:
    x = jnp.asarray(normal((5, 64, 48), ml_dtypes.bfloat16))
    found = jax.jit(jax.vmap(lambda x: xla_fp8.quantize(x, algorithm="single_pass")))(x)
    expected = jax.jit(jax.vmap(lambda x: xla_fp8.quantize(x, algorithm="lax")))(x)
    np.testing.assert_array_equal(np.asarray(found.data, np.float32), np.asarray(expected.data, np.float32))
    np.testing.assert_array_equal(found.scale, expected.scale)


def test_an_input_that_lies_in_memory_in_another_order() -> None:
    from jax.experimental.layout import Format, Layout

    x = jnp.asarray(normal((96, 176), np.float32))
    other = jax.device_put(x, Format(Layout((1, 0)), x.sharding))
    for name in KERNELS:
        for layout in ("row", "both"):
            q = xla_fp8.quantize(x, layout=layout, algorithm=name)
            of_other = xla_fp8.quantize(other, layout=layout, algorithm=name)
            for a, b in zip(jax.tree.leaves(q), jax.tree.leaves(of_other), strict=True):
                np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_training_takes_the_kernels_and_has_the_gradients_of_lax(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (jnp.asarray(normal(shape, np.float32, seed)) for seed, shape in ((1, (64, 32)), (2, (32, 48))))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.relu(xla_fp8.fp8_dot(x, w)) ** 2)

    # Else XLA leaves out the roundings to FP8 that it can see, which are those of lax (docs/numbers.md).
    as_written = {"xla_allow_excess_precision": False}
    lowered = jax.jit(jax.grad(loss)).lower(w, x)
    assert "quantize_" in lowered.as_text()
    with_kernels = lowered.compile(as_written)(w, x)
    monkeypatch.setattr("xla_fp8.quantization.algorithms.fastest", lambda request: None)
    jax.clear_caches()
    lowered = jax.jit(jax.grad(loss)).lower(w, x)
    assert "quantize_" not in lowered.as_text()
    np.testing.assert_array_equal(with_kernels, lowered.compile(as_written)(w, x))
