"""Edges of the quantized types that programs meet: empty results, FP8 beside FP8, export, lines of dumps."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import xla_fp8

MATMUL = (((1,), (0,)), ((), ()))


def test_an_empty_result_has_the_amax_0() -> None:
    q = xla_fp8.quantize
    y, amax = xla_fp8.dot_general(q(jnp.ones((0, 8))), q(jnp.ones((8, 3))), MATMUL, return_amax=True)
    assert y.shape == (0, 3)
    assert amax == 0


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_an_fp8_array_beside_a_float8_counts_as_f32(dtype: jnp.dtype) -> None:
    q = xla_fp8.quantize(jnp.asarray([1.0, 2.0, 3.0]))
    for found in (q + jnp.ones(3, dtype), jnp.ones(3, dtype) + q):
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, q.dequantize() + 1)


def test_an_exported_function_takes_and_gives_float8() -> None:
    q = xla_fp8.quantize(jnp.linspace(-3, 3, 12).reshape(3, 4), layout="both")
    exported = export.export(jax.jit(lambda q: (q, xla_fp8.quantize(q.dequantize() * 2))))(q)
    same, doubled = export.deserialize(exported.serialize()).call(q)
    assert isinstance(same, xla_fp8.Float8)
    np.testing.assert_array_equal(same.transposed, q.transposed)
    np.testing.assert_allclose(doubled.dequantize(), q.dequantize() * 2, rtol=1e-6)
