"""Dots of unusual sizes in a converted function: empty dimensions, and weights without output channels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8

pytestmark = pytest.mark.unoptimized


def recipe(**options: object) -> xla_fp8.Recipe:
    return xla_fp8.Recipe("dynamic", min_flops=0, keep_first=0, keep_last=0, **options)


def test_dots_of_nothing() -> None:
    def product(w: jax.Array) -> jax.Array:
        return jax.lax.associative_scan(jnp.matmul, jnp.stack([w] * 4))

    w = jnp.eye(16) * 0.5
    np.testing.assert_allclose(xla_fp8.convert(product)(w), product(w), rtol=0.1)
    empty = xla_fp8.convert(lambda x, w: x @ w, recipe(channel_multiple=1))(jnp.ones((4, 0)), jnp.ones((0, 8)))
    np.testing.assert_array_equal(empty, np.zeros((4, 8)))


@pytest.mark.parametrize("weights", ["channel", "tensor"])
def test_a_weight_without_output_channels(weights: str) -> None:
    x = jax.random.normal(jax.random.key(0), (8, 16))
    v = jax.random.normal(jax.random.key(1), (16,))
    converted = xla_fp8.convert(lambda x, v: x @ v, recipe(channel_multiple=1, weights=weights))
    np.testing.assert_allclose(converted(x, v), x @ v, atol=0.5)
