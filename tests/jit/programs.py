"""FP8 programs that the tests of xla_fp8.jit share, and how their numbers are compared."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

F8 = jnp.float8_e4m3fn
LAYOUT = ("NHWC", "HWIO", "NHWC")


def quantize(x: jax.Array, scale: Any) -> jax.Array:
    return jnp.clip(x * scale, -448, 448).astype(F8)


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT)


def layer(x8: jax.Array, w8: jax.Array, x_scale: Any, w_scale: Any, y_scale: Any) -> tuple[jax.Array, jax.Array]:
    """A quantized convolution with relu: (y in FP8, amax)."""
    y = conv(x8.astype(jnp.float32) * x_scale, w8.astype(jnp.float32) * w_scale)
    y = jax.nn.relu(y)
    return quantize(y, y_scale), jnp.max(jnp.abs(y))


def wide_layer(x8: jax.Array, w8: jax.Array, scale: Any = 0.01) -> jax.Array:
    """A quantized convolution with an f32 result."""
    return conv(x8.astype(jnp.float32) * scale, w8.astype(jnp.float32))


def inputs(batch: int = 2, seed: int = 0, channels: int = 4) -> tuple[Any, ...]:
    """Arguments of `layer`."""
    rng = np.random.default_rng(seed)
    x8 = jnp.asarray(rng.normal(size=(batch, 6, 6, channels)) * 30, F8)
    w8 = jnp.asarray(rng.normal(size=(3, 3, channels, 8)) * 30, F8)
    return x8, w8, jnp.float32(0.02), jnp.float32(0.01), jnp.float32(20.0)


def tensors(batch: int = 2, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Arguments of `wide_layer`."""
    return inputs(batch, seed)[:2]


def assert_close(actual: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Equal trees, types and shapes; floats to a tolerance, FP8 to one step in at most 0.5% of the elements."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for got, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert jnp.shape(got) == jnp.shape(wanted)
        assert jnp.result_type(got) == jnp.result_type(wanted)
        a, b = np.asarray(got), np.asarray(wanted)
        if a.dtype == F8:
            steps = np.abs(_ordered(a) - _ordered(b))
            assert steps.max(initial=0) <= 1
            assert np.count_nonzero(steps) <= 0.005 * steps.size
        else:
            scale = float(np.max(np.abs(b), initial=1.0)) if b.dtype.kind == "f" else 1.0
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol * scale)


def _ordered(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """FP8 bit patterns as integers in the order of the values."""
    bits = values.view(np.uint8).astype(np.int32)
    return np.where(bits & 0x80, -(bits & 0x7F), bits)
