"""The state of delayed scaling: many at once, and stacked for a scan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from xla_fp8 import DelayedScaling
from xla_fp8.quantization.delayed import update_all

pytestmark = pytest.mark.unoptimized


def random_like(state: DelayedScaling, seed: int) -> DelayedScaling:
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(np.abs(random.normal(size=leaf.shape)), jnp.float32), state)


def layers(count: int) -> tuple[list[DelayedScaling], list[DelayedScaling]]:
    """States of several recipes, and what their layers saw: an infinity and NaN among it."""
    recipes: Sequence[dict[str, Any]] = ({}, {"margin": 1.0}, {"power_of_two": True}, {"length": 8})
    empty = [DelayedScaling.create(**recipes[number % len(recipes)]) for number in range(count)]
    states = [random_like(state, number) for number, state in enumerate(empty)]
    observed = [random_like(state, 1000 + number) for number, state in enumerate(empty)]
    for number, amax in ((1, np.inf), (2, np.nan)):
        observed[number] = jax.tree.map(lambda leaf, amax=amax: jnp.full_like(leaf, amax), observed[number])
    return states, observed


def one_at_a_time(states: Sequence[DelayedScaling], observed: Sequence[DelayedScaling]) -> list[DelayedScaling]:
    return [
        DelayedScaling(s.lhs.update(o.lhs), s.rhs.update(o.rhs), s.gradient.update(o.gradient))
        for s, o in zip(states, observed, strict=True)
    ]


def assert_equal(left: Any, right: Any) -> None:
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.parametrize("update", [update_all, jax.jit(update_all)], ids=["eager", "jit"])
def test_many_at_once_are_updated_as_one_at_a_time(update: Any) -> None:
    states, observed = layers(68)  # 34 scales of operands of each kind: more than the 32 that are stacked
    assert_equal(update(states, observed), one_at_a_time(states, observed))


def test_states_and_amaxes_may_come_from_elsewhere() -> None:
    states, observed = layers(3)
    assert_equal(update_all(jax.device_get(states), jax.device_get(observed)), update_all(states, observed))
    state = states[0].lhs
    for amax in (2.0, 2, np.float64(2), jnp.bfloat16(2)):
        assert_equal(state.update(amax), state.update(jnp.float32(2)))
        assert state.update(amax).amax_history.dtype == jnp.float32


def test_many_at_once_take_few_reductions() -> None:
    states, observed = layers(40)
    text = str(jax.make_jaxpr(update_all)(states, observed))
    # 120 scales of four recipes in two FP8 types, at most 20 of a kind.
    assert text.count("reduce_max") == 8


def test_a_stacked_state_of_a_scan_is_updated_layer_by_layer() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16, 16)), jnp.float32)
    states = [random_like(DelayedScaling.create(length=4), number) for number in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def scanned(state: DelayedScaling) -> jax.Array:
        def layer(x: jax.Array, of_layer: Any) -> tuple[jax.Array, None]:
            w, state = of_layer
            return jnp.tanh(xla_fp8.fp8_dot(x, w, scaling=state)), None

        return jnp.sum(lax.scan(layer, x, (weights, state))[0])

    def unrolled(states: list[DelayedScaling]) -> jax.Array:
        y = x
        for w, state in zip(weights, states, strict=True):
            y = jnp.tanh(xla_fp8.fp8_dot(y, w, scaling=state))
        return jnp.sum(y)

    updated = stacked.update(jax.grad(scanned)(stacked))
    expected = one_at_a_time(states, jax.grad(unrolled)(states))
    assert_equal(updated, jax.tree.map(lambda *leaves: jnp.stack(leaves), *expected))
