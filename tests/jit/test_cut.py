"""The cut by itself: whatever the data flow, what comes out is a valid jaxpr that computes the same."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.extend import core

import xla_fp8
from tests.jit.programs import F8, assert_close, conv, quantize
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_jaxpr, is_region

X = jnp.linspace(-2, 2, 1 * 3 * 3 * 2).reshape(1, 3, 3, 2)
W8 = jnp.linspace(-1, 1, 3 * 3 * 2 * 2).reshape(3, 3, 2, 2).astype(F8)


def program(x: jax.Array, seed: int, size: int) -> jax.Array:
    """A random graph of quantized convolutions, elementwise operations, and sorts, which no region may hold."""
    choose = random.Random(seed)
    values = [x]
    for _ in range(size):
        a, b = choose.choice(values), choose.choice(values)
        steps = (
            lambda a, b: conv(quantize(a, 1.0).astype(jnp.float32) * 0.5, W8.astype(jnp.float32)),
            lambda a, b: conv(quantize(a, 1.0).astype(jnp.float32), W8.astype(jnp.float32)) + b,
            lambda a, b: a + b,
            lambda a, b: jax.nn.relu(a) * jnp.tanh(jnp.max(jnp.abs(b))),
            lambda a, b: lax.sort(a, dimension=3),
            lambda a, b: quantize(a, 2.0).astype(jnp.float32) + b * 0.5,
            lambda a, b: jnp.tanh(a / (1 + jnp.max(jnp.abs(lax.sort(b, dimension=1))))),
            lambda a, b: lax.cond(a[0, 0, 0, 0] > 0, lambda a, b: a - b, lambda a, b: a * b, a, b),
        )
        values.append(choose.choice(steps)(a, b))
    return sum(values[1:], x)


@settings(max_examples=150)
@given(seed=st.integers(0, 10**9), size=st.integers(1, 25))
def test_cut_of_any_data_flow_is_a_valid_jaxpr(seed: int, size: int) -> None:
    closed = jax.make_jaxpr(lambda x: program(x, seed, size))(X)
    result = cut_jaxpr(closed, Options())
    core.check_jaxpr(getattr(result, "jaxpr", result))  # types, and every variable made before it is read
    assert result.out_avals == closed.out_avals
    regions = [equation for equation in result.jaxpr.eqns if is_region(equation)]
    for region in regions:
        core.check_jaxpr(region.params["jaxpr"].jaxpr)
    contractions = [e for e in result.jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    inside = [e for r in regions for e in r.params["jaxpr"].jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert contractions == []
    # A convolution that nobody reads may go.
    assert len(inside) <= sum(e.primitive.name == "conv_general_dilated" for e in closed.jaxpr.eqns)


@pytest.mark.parametrize("seed", range(6))
def test_cut_of_random_data_flow_computes_the_same(seed: int) -> None:
    def fn(x: jax.Array) -> jax.Array:
        return program(x, seed, 12)

    # Regions that stay as they were: rounding differently would change later FP8 values by steps.
    assert_close(xla_fp8.jit(fn, backend="xla")(X), jax.jit(fn)(X))


def regions_of(fn: Any, *arguments: Any) -> list[Any]:
    return [e for e in cut_jaxpr(jax.make_jaxpr(fn)(*arguments), Options()).jaxpr.eqns if is_region(e)]


def wide(x: jax.Array) -> jax.Array:
    return conv(quantize(x, 1.0).astype(jnp.float32), W8.astype(jnp.float32))


def test_equal_regions_are_one_object_which_jax_lowers_once() -> None:
    def fn(x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.cumsum(wide(x), 1)
        return jnp.cumsum(wide(x) * 2, 1)

    *equal, other = (region.params["jaxpr"] for region in regions_of(fn, X))
    assert equal == [equal[0]] * 3
    assert other is not equal[0]


def test_equal_regions_in_other_scopes_or_with_other_literals_are_apart() -> None:
    def fn(x: jax.Array) -> list[jax.Array]:
        results = []
        for scope, factor in (("a", 2.0), ("b", 2.0), ("b", 3.0)):
            with jax.named_scope(scope):
                results.append(wide(x) * factor)
        return results

    assert len({id(region.params["jaxpr"]) for region in regions_of(fn, X)}) == 3


def test_what_nobody_reads_is_no_region() -> None:
    assert len(regions_of(lambda x: (wide(x), x)[1] + wide(x).sum(), X)) == 1


def test_a_region_has_no_more_than_the_chain() -> None:
    def fn(x: jax.Array) -> jax.Array:
        before = jnp.cumsum(jnp.sin(x), 1)
        y = conv(quantize(before, 1.0).astype(jnp.float32), W8.astype(jnp.float32))
        return jnp.cumsum(jax.nn.relu(y), 1)

    result = cut_jaxpr(jax.make_jaxpr(fn)(X), Options())
    (region,) = [equation for equation in result.jaxpr.eqns if is_region(equation)]
    names = [equation.primitive.name for equation in region.params["jaxpr"].jaxpr.eqns]
    assert names == ["convert_element_type", "convert_element_type", "conv_general_dilated", "custom_jvp_call"]


def test_nothing_to_cut_is_the_same_object() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.sin(x) @ x)(jnp.eye(3))
    assert cut_jaxpr(closed, Options()) is closed
