"""Quantize calls through the kernels, interpreted: bit by bit what the reference makes of the call's string."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import xla_fp8
from xla_fp8.backends import reference_quantize
from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import choice, from_call
from xla_fp8.backends.quantize.reduction import Reduction
from xla_fp8.backends.quantize.two_kernels import Settings
from xla_fp8.hlo import Shape
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.quantize_call import QuantizeCall
from xla_fp8.target import Target
from xla_fp8.tracing import implementation, rewriting
from xla_fp8.tracing.options import Options

pytestmark = pytest.mark.unoptimized

INTERPRETED = Reduction(
    settings=Settings("separate", amax_block=64, amax_loads=2, amax_programs=1, cast_block=32, tile=(16, 16)),
    interpret=True,
)
CALLS = {
    "amax / 448": "1:[f32]x();2:[f32]amax(1);3:[f32]constant(448);4:[f32]divide(2,3);5:[f32]divide(1,4);"
    "6:[f8e4m3fn]store(5);7:[f32]result(4);",
    "448 / max(amax, eps)": "1:[f32]x();2:[f32]constant(448);3:[f32]amax(1);4:[f32]constant(1e-12);5:[f32]maximum(3,4);"
    "6:[f32]divide(2,5);7:[f32]multiply(1,6);8:[f8e4m3fn]store(7);9:[f32]constant(1);10:[f32]divide(9,6);"
    "11:[f32]result(10);12:[f32]result(3);",
    "1 where the amax is not finite": "1:[f32]x();2:[f32]constant(1);3:[f32]amax(1);4:[pred]is_finite(3);"
    "5:[f32]constant(0);6:[pred]gt(3,5);7:[f32]constant(448);8:[f32]divide(7,3);9:[f32]select(6,8,2);"
    "10:[f32]select(4,9,2);11:[f32]multiply(1,10);12:[f8e4m3fn]store(11);13:[f32]result(10);",
    "bf16, both orders, e5m2": "1:[bf16]x();2:[f32]convert(1);3:[bf16]amax(1);4:[f32]convert(3);5:[f32]constant(57344);"
    "6:[f32]divide(4,5);7:[f32]divide(2,6);8:[f8e5m2]store(7);9:[f8e5m2]store_transposed(7);10:[f32]result(6);",
    "transposed alone": "1:[f32]x();2:[f32]amax(1);3:[f32]constant(448);4:[f32]divide(2,3);5:[f32]divide(1,4);"
    "6:[f8e4m3fn]store_transposed(5);",
    "scale by operand": "1:[f32]x();2:[f32]scalar();3:[f32]divide(1,2);4:[f8e4m3fn]store(3);5:[f32]amax(1);"
    "6:[f32]result(5);",
    "reciprocal of an operand": "1:[bf16]x();2:[f32]convert(1);3:[f32]constant(1);4:[f32]scalar();5:[f32]divide(3,4);"
    "6:[f32]multiply(5,2);7:[f8e4m3fn]store(6);8:[bf16]amax(1);9:[f32]convert(8);10:[f32]result(9);",
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "fastest", lambda request: "reduction")
    monkeypatch.setattr(from_call, "_algorithms", lambda: {"reduction": INTERPRETED})


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("name", CALLS)
def test_bits_of_the_reference(name: str) -> None:
    call = QuantizeCall.parse(CALLS[name])
    wide = numpy_dtype(call.nodes[0].type)
    rng = np.random.default_rng(0)
    operands = [jnp.float32(0.37) for _ in call.scalars]
    for x in (rng.normal(size=(33, 65)) * 3, np.zeros((16, 16)), np.where(rng.random((20, 30)) < 0.01, np.nan, 1.5)):
        x = jnp.asarray(x.astype(wide))
        shape = Shape.array(call.nodes[0].type, x.shape)
        assert not isinstance(from_call.request_of(call, shape, "cuda"), No)
        found = jax.jit(lambda *values: from_call.run(call, values, "cuda"))(x, *operands)
        expected = jax.jit(lambda *values: reference_quantize.run(call, values))(x, *operands)
        for a, b in zip(found, expected, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1:[bf16]x();2:[bf16]amax(1);3:[bf16]constant(448);4:[bf16]divide(2,3);5:[bf16]divide(1,4);6:[f8e4m3fn]store(5);",
         "one f32 number"),
        ("1:[f32]x();2:[f32]constant(2);3:[f32]multiply(1,2);4:[f32]amax(3);5:[f32]divide(1,4);6:[f8e4m3fn]store(5);",
         "something else"),
        ("1:[f32]x();2:[f32]reduce_max(1);3:[f32]divide(1,2);4:[f8e4m3fn]store(3);", "something else"),
        ("1:[f32]x();2:[f32]amax(1);3:[f32]scalar();4:[f32]maximum(2,3);5:[f32]divide(1,4);6:[f8e4m3fn]store(5);",
         "neither"),
        ("1:[f32]x();2:[f32]scalar();3:[f32]divide(1,2);4:[f32]multiply(1,2);5:[f8e4m3fn]store(3);6:[f8e4m3fn]store(4);",
         "several tensors"),
        ("1:[f32]x();2:[f8e4m3fn]store(1);", "one f32 number"),
    ],
)  # fmt: skip
def test_what_stays_with_xla(text: str, reason: str) -> None:
    call = QuantizeCall.parse(text)
    verdict = from_call.request_of(call, Shape.array(call.nodes[0].type, (64, 64)), "cuda")
    assert isinstance(verdict, No)
    assert reason in verdict.reason


PASSES = "call-inliner,simplify,dynamic-quantize-rewriter,dce"


def quantized(x: Any) -> Any:
    amax = jnp.max(jnp.abs(x))
    scale = jnp.maximum(amax, 1e-12) / 448
    return jnp.clip(x / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn), scale


def region_of(platform: str) -> rewriting.Rewritten:
    jaxpr = jax.make_jaxpr(quantized)(jax.ShapeDtypeStruct((512, 512), jnp.float32))
    options = Options(tuple(PASSES.split(",")), Target.parse("h200"))
    return rewriting.rewritten(jaxpr, options, platform)


def test_a_region_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_fp8.backends.quantize.request._capability", lambda: (9, 0))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    (call,) = region_of("cuda").quantizations
    for is_partitioned in (False, True):
        jaxpr = str(implementation.of_quantization(call, "cuda", is_partitioned))
        assert ("quantize_amax" in jaxpr) == ("quantize_cast" in jaxpr) == (not is_partitioned)


def test_a_region_elsewhere() -> None:
    region = region_of("cpu")
    assert not region.quantizations
    assert [entry.op for entry in region.report.rewritten] == ["quantize"]


def test_under_jit() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 48)), jnp.float32)
    found = xla_fp8.jit(quantized, passes=PASSES)(x)
    for a, b in zip(found, jax.jit(quantized)(x), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_pallas_is_not_imported_before_a_kernel_runs() -> None:
    names = "xla_fp8.tracing", "jax.experimental.pallas"
    program = f"import sys, xla_fp8; xla_fp8.jit; print(*(name in sys.modules for name in {names}))"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.split() == ["True", "False"]
