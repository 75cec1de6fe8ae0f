"""Calibration leaves a weight wide that the model reads besides the layer that it belongs to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xla_fp8

pytestmark = pytest.mark.unoptimized

EVERY = xla_fp8.Recipe("static", min_flops=0, keep_first=0, keep_last=0)

Rest = Callable[[jax.Array, jax.Array, Any], Any]
"""What a model does with the result of its layers, a weight [32 inputs, 64 outputs], and the layer behind it."""


class OfNnx(nnx.Module):
    def __init__(self, rest: Rest) -> None:
        rngs = nnx.Rngs(0)
        self.encoder, self.other = nnx.Linear(32, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)
        self.rest = rest

    def __call__(self, x: jax.Array) -> Any:
        h = self.other(nnx.relu(self.encoder(x)))
        return self.rest(h, self.encoder.kernel[...], self.other)


class OfEquinox(eqx.Module):
    encoder: eqx.nn.Linear
    other: eqx.nn.Linear
    rest: Rest = eqx.field(static=True)

    def __init__(self, rest: Rest) -> None:
        keys = jax.random.split(jax.random.key(0))
        self.encoder, self.other = eqx.nn.Linear(32, 64, key=keys[0]), eqx.nn.Linear(64, 64, key=keys[1])
        self.rest = rest

    def __call__(self, x: jax.Array) -> Any:
        h = jax.vmap(self.other)(jax.nn.relu(jax.vmap(self.encoder)(x)))
        return self.rest(h, self.encoder.weight.T, jax.vmap(self.other))


def in_scan(h: jax.Array, weight: jax.Array, other: Any) -> jax.Array:
    return jax.lax.scan(lambda h, _: (h @ weight.T.astype(h.dtype) @ weight.astype(h.dtype), None), h, None, 2)[0]


def in_branch(h: jax.Array, weight: jax.Array, other: Any) -> jax.Array:
    return jax.lax.cond(h[0, 0] > 1e9, lambda h: h, lambda h: h * jnp.mean(jnp.abs(weight.astype(h.dtype))), h)


READS: dict[str, Rest] = {
    "tied": lambda h, weight, other: h @ weight.T.astype(h.dtype),
    "penalty": lambda h, weight, other: (h, jnp.sum(weight.astype(jnp.float32) ** 2)),
    "returned": lambda h, weight, other: (h, weight),
    "jit": lambda h, weight, other: jax.jit(lambda h, weight: h @ weight.T.astype(h.dtype))(h, weight),
    "remat": lambda h, weight, other: jax.checkpoint(lambda h: h @ weight.T.astype(h.dtype))(h),
    "scan": in_scan,
    "branch": in_branch,
    "input of another layer": lambda h, weight, other: h + jnp.mean(other(weight.astype(h.dtype))),
}

UNREAD: dict[str, Rest] = {
    "nothing": lambda h, weight, other: h,
    "shape": lambda h, weight, other: h / weight.shape[0] + jnp.zeros_like(h, weight.dtype).astype(h.dtype),
    "dead code": lambda h, weight, other: (jnp.sum(weight.astype(h.dtype)), h)[1],
    "layer in a scan": lambda h, weight, other: jax.lax.scan(lambda h, _: (jnp.sin(other(h)), None), h, None, 2)[0],
    "layer in remat": lambda h, weight, other: jax.checkpoint(lambda h: other(h))(h),
}


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(8, 32)), jnp.float32)


def converted(model: Any) -> list[str]:
    return sorted(layer.name for layer in xla_fp8.conversion_report(model).converted)


def reasons(model: Any) -> dict[str, str]:
    return {layer.name: reason for layer, reason in xla_fp8.conversion_report(model).kept}


def assert_near(served: Any, wide: Any) -> None:
    for of, against in zip(jax.tree.leaves(served), jax.tree.leaves(wide), strict=True):
        assert jnp.linalg.norm(of - against) < 0.1 * jnp.linalg.norm(against)


@pytest.mark.parametrize("kind", [OfNnx, OfEquinox])
@pytest.mark.parametrize("how", READS)
def test_a_weight_that_the_model_reads_stays_wide_and_the_layer_beside_it_does_not(
    kind: Any, how: str, x: jax.Array
) -> None:
    model = kind(READS[how])
    served = xla_fp8.calibrate(model, [x], EVERY)
    assert converted(served) == ["other"]
    assert "something else reads its weight too" in reasons(served)["encoder"]
    assert_near(served(x), model(x))


@pytest.mark.parametrize("kind", [OfNnx, OfEquinox])
@pytest.mark.parametrize("how", UNREAD)
def test_a_weight_that_only_its_layer_reads_becomes_fp8(kind: Any, how: str, x: jax.Array) -> None:
    model = kind(UNREAD[how])
    served = xla_fp8.calibrate(model, [x], EVERY)
    assert converted(served) == ["encoder", "other"]
    if how != "dead code":
        assert_near(served(x), model(x))


def test_a_read_whose_result_goes_to_a_variable_counts(x: jax.Array) -> None:
    class Noting(nnx.Module):
        def __init__(self) -> None:
            self.layer, self.other = (nnx.Linear(32, 32, rngs=nnx.Rngs(seed)) for seed in (0, 1))
            self.norm = nnx.Variable(jnp.zeros(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.norm[...] = jnp.sum(jnp.abs(self.layer.kernel[...].astype(jnp.float32)))
            return self.other(self.layer(x))

    model = Noting()
    served = xla_fp8.calibrate(model, [x], EVERY)
    served(x), model(x)
    assert converted(served) == ["other"]
    np.testing.assert_allclose(served.norm[...], jnp.sum(jnp.abs(model.layer.kernel[...])), rtol=1e-6)


def test_a_read_that_only_some_batches_make_counts(x: jax.Array) -> None:
    def call(model: Any, x: jax.Array, decode: bool) -> jax.Array:
        h = model(x)
        return h @ model.encoder.weight.astype(h.dtype) if decode else h

    served = xla_fp8.calibrate(OfEquinox(UNREAD["nothing"]), [(x, False), (x, True)], EVERY, call=call)
    assert converted(served) == ["other"]


@pytest.mark.parametrize("kind", [OfNnx, OfEquinox])
@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda model, x: model(x) if model(x).max() > 0 else x, "cannot be traced"),
        (lambda model, x: float(model(x)[0, 0]), "cannot be traced"),
        (lambda model, x: model(x) is None, "returns no array"),
    ],
)
def test_where_nothing_can_be_told_every_layer_stays_wide(kind: Any, call: Any, why: str, x: jax.Array) -> None:
    model = kind(READS["tied"])
    served = xla_fp8.calibrate(model, [x], EVERY, call=call)
    assert converted(served) == []
    assert all(why in reason for reason in reasons(served).values())
    np.testing.assert_array_equal(served(x), model(x))


def test_calibration_leaves_the_model_as_it_was(x: jax.Array) -> None:
    model = OfNnx(READS["tied"])
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model))]
    xla_fp8.calibrate(model, [x], EVERY)
    for leaf, old in zip(jax.tree.leaves(nnx.state(model)), before, strict=True):
        np.testing.assert_array_equal(leaf, old)
