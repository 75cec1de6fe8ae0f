"""Quantizations that a program spells out become regions, for kernels to run, and keep every bit where none does."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from tests.backends.quantize.test_lowering import kernels_of, lowered
from xla_fp8.backends.quantize import choice
from xla_fp8.tracing.equations import bodies
from xla_fp8.tracing.implementation import of_quantization
from xla_fp8.tracing.region import is_region
from xla_fp8.tracing.rewriting import rewritten

Array = jax.Array
E4M3, F32, BF16 = jnp.float8_e4m3fn, jnp.float32, jnp.bfloat16


def quantized(x: Array, dtype: Any = E4M3) -> tuple[Array, Array]:
    """As hand-written code has it."""
    largest = float(jnp.finfo(dtype).max)
    amax = jnp.maximum(jnp.max(jnp.abs(x.astype(F32))), 1e-12)
    scale = amax / largest
    return jnp.clip(x.astype(F32) / scale, -largest, largest).astype(dtype), scale


def quantized_by_multiplying(x: Array) -> tuple[Array, Array]:
    """In the tensor's own type, by the reciprocal of the scale."""
    amax = jnp.max(jnp.abs(x)).astype(F32)
    scale = jnp.where(amax > 0, 448 / amax, 1.0)
    scaled = x * scale.astype(x.dtype)
    return lax.clamp(jnp.asarray(-448, x.dtype), scaled, jnp.asarray(448, x.dtype)).astype(E4M3), 1 / scale


def normal(shape: tuple[int, ...] = (64, 48), dtype: Any = BF16, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 3, dtype)


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU, for smaller tensors; the kernels are not there, so that the regions run as plain JAX."""
    monkeypatch.setattr(choice, "takes_dynamic", lambda size, platform: size >= 1000)


def found(function: Any, *arguments: Any) -> list[str]:
    """The graphs of the quantizations that are rewritten."""
    report = xla_fp8.explain(function)(*arguments)
    return [entry.graph for entry in report.rewritten if entry.op == "quantize"]


def regions(jaxpr: Any) -> list[Any]:
    inner = [region for equation in jaxpr.eqns for body in bodies(equation) for region in regions(body)]
    return [equation for equation in jaxpr.eqns if is_region(equation)] + inner


def same(function: Any, *arguments: Any) -> None:
    """Bit by bit what jax.jit makes, and without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = xla_fp8.jit(function)(*arguments)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(jax.jit(function)(*arguments)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("quantize", [quantized, quantized_by_multiplying])
def test_a_dynamic_quantization_is_one_call_with_the_same_bits(quantize: Any, dtype: Any) -> None:
    x = normal(dtype=dtype)
    [graph] = found(quantize, x)
    assert "amax(" in graph
    for value in (x, jnp.zeros_like(x), x.at[3, 5].set(jnp.inf)):
        same(quantize, value)


def test_weights_and_activations_in_front_of_a_dot() -> None:
    def layer(x: Array, w: Array) -> Array:
        (x8, x_scale), (w8, w_scale) = quantized(x), quantized(w)
        return jax.nn.relu((x8.astype(F32) * x_scale) @ (w8.astype(F32) * w_scale))

    x, w = normal((64, 64)), normal((64, 64))
    assert len(found(layer, x, w)) == 2
    np.testing.assert_allclose(xla_fp8.jit(layer)(x, w), jax.jit(layer)(x, w), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (lambda x: quantized(jax.nn.relu(x)), 0),  # relu is not in memory: XLA computes it twice
        (lambda x: (y := jax.nn.relu(x), quantized(y)), 1),  # here it is
        (lambda x: quantized(x.astype(F32) @ x.astype(F32).T), 1),  # so is what a dot makes
        (lambda x: (quantized(x), quantized(x, jnp.float8_e5m2)), 2),
        (lambda x: quantized(x[:8, :8]), 0),  # small
        (lambda x: (jnp.clip(x.astype(F32) / 0.1, -448, 448).astype(E4M3), jnp.max(jnp.abs(x))), 0),  # delayed
        (lambda x: (x / jnp.max(jnp.abs(x), axis=0)).astype(E4M3), 0),  # by channel
        (lambda x: x.astype(E4M3), 0),
    ],
)
def test_which_become_regions(program: Any, count: int) -> None:
    x = normal()
    assert len(found(program, x)) == count
    same(program, x)


def test_an_amax_that_leaves_and_comes_back_stays_with_jax() -> None:
    def through_a_barrier(x: Array) -> Any:
        scale = lax.optimization_barrier(jnp.max(jnp.abs(x.astype(F32)))) / 448
        return jnp.clip(x.astype(F32) / scale, -448, 448).astype(E4M3)

    def half_of_it(x: Array) -> Any:
        amax = jnp.max(jnp.abs(x.astype(F32)))
        scale = (amax + lax.optimization_barrier(amax)) / 896
        return jnp.clip(x.astype(F32) / scale, -448, 448).astype(E4M3)

    for program in (through_a_barrier, half_of_it):
        assert found(program, normal()) == []
        same(program, normal())


def test_transformations_and_bodies() -> None:
    x = normal((3, 64, 48))

    def scanned(xs: Array) -> Any:
        return lax.scan(lambda carry, x: (carry, quantized(x)), 0.0, xs)

    assert len(found(scanned, x)) == 1
    same(scanned, x)
    same(jax.vmap(quantized), x)
    assert found(jax.vmap(quantized), x) == []  # several amaxes of one tensor
    ours = jax.vmap(xla_fp8.jit(quantized))(x)
    np.testing.assert_array_equal(np.asarray(ours[0], np.float32), np.asarray(jax.vmap(quantized)(x)[0], np.float32))

    def loss(x: Array) -> Array:
        q, scale = quantized(x)
        return jnp.sum((q.astype(F32) * scale) ** 2)

    for gradient in (jax.grad(xla_fp8.jit(loss)), xla_fp8.jit(jax.grad(loss))):
        np.testing.assert_allclose(gradient(x[0].astype(F32)), jax.grad(loss)(x[0].astype(F32)), rtol=1e-4)


def test_passes_that_are_named_decide() -> None:
    x = normal()
    for names, count in (("simplify,dce", 0), ("call-inliner,simplify,dynamic-quantize-rewriter,dce", 1)):
        report = xla_fp8.jit(quantized, passes=names).report(x)
        assert len(report.rewritten) == count


def test_strict_is_about_convolutions_and_dots() -> None:
    """A call's string has no word for a sine: what has one in its scale stays as it is."""

    def odd(x: Array) -> Any:
        scale = jnp.sin(jnp.max(jnp.abs(x.astype(F32)))) / 448
        return jnp.clip(x.astype(F32) / scale, -448, 448).astype(E4M3)

    same(odd, normal())
    strict = xla_fp8.jit(odd, strict=True)
    strict(normal())
    assert strict.report(normal()).refused_fp8 == []


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_fp8.quantization.algorithms.current_platform", lambda: "cuda")
    monkeypatch.setattr("xla_fp8.backends.quantize.request._capability", lambda: (9, 0))
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.usefixtures("on_hopper")
def test_kernels_run_them_on_hopper() -> None:
    jaxpr = jax.make_jaxpr(xla_fp8.jit(quantized))(jax.ShapeDtypeStruct((2048, 1024), BF16))
    [region] = regions(jaxpr)
    rewrite = rewritten(region.params["jaxpr"], region.params["options"], "cuda")
    [call] = rewrite.quantizations
    assert "quantize_cast" in str(of_quantization(call, "cuda", is_partitioned=False))
    assert rewritten(region.params["jaxpr"], region.params["options"], "cpu").quantizations == ()


@pytest.mark.usefixtures("on_hopper")
def test_a_call_of_quantize_keeps_its_kernels_beside_a_convolution() -> None:
    numbers = ("NHWC", "HWIO", "NHWC")

    def layer(x: Array, w: Array) -> Array:
        xq, wq = xla_fp8.quantize(x), xla_fp8.quantize(w)
        x, w = xq.dequantize(), wq.dequantize()
        return jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers))

    x, w = jax.ShapeDtypeStruct((2, 32, 32, 64), BF16), jax.ShapeDtypeStruct((3, 3, 64, 64), BF16)
    jaxpr = str(jax.make_jaxpr(xla_fp8.jit(layer))(x, w))
    assert jaxpr.count("xla_fp8_region") == 1
    assert kernels_of(lowered(xla_fp8.jit(layer, backend="reference"), x, w)) == ["quantize_amax", "quantize_cast"] * 2


def test_only_on_one_hopper_gpu_and_only_large_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not choice.takes_dynamic(2**24, "cpu")
    monkeypatch.setattr("xla_fp8.backends.quantize.request._capability", lambda: (9, 0))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert choice.takes_dynamic(2**24, "cuda")
    assert not choice.takes_dynamic(2**19, "cuda")
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not choice.takes_dynamic(2**24, "cuda")
