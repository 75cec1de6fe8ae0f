"""How many FP8 roundings are in front of each result: chains, calls, loops, branches, graph calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.backends.roundings import fp8_roundings

X = jnp.ones((1, 4, 4, 16), jnp.float8_e4m3fn)
W = jnp.ones((16, 3, 3, 16), jnp.float8_e4m3fn)


def quantize(y: jax.Array) -> jax.Array:
    return jnp.clip(y, -448, 448).astype(jnp.float8_e4m3fn)


def wide(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(
        x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
    )


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return quantize(wide(x, w))


def module_of(function: Callable[..., Any], *arguments: jax.Array) -> hlo.HloModule:
    return hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(function).lower(*arguments)))


def three(x: jax.Array, w: jax.Array) -> Any:
    """FP8 of one layer, the amax of two, FP8 of three, and what no convolution has touched."""
    one = layer(x, w)
    second = wide(one, w)
    return one, jnp.max(jnp.abs(second)), jax.jit(layer)(quantize(second), w), quantize(x.astype(jnp.float32) * 3)


CASES: dict[str, tuple[Callable[..., Any], list[float]]] = {
    "three": (three, [1, 1, 3, 0]),
    "input_rounded_before": (lambda x, w: layer(quantize(x.astype(jnp.float32) / 3), w), [1]),
    "sum_of_two_depths": (
        lambda x, w: quantize(wide(layer(x, w), w) + layer(layer(x, w), w).astype(jnp.float32)),
        [3],
    ),
    "loop": (lambda x, w: lax.fori_loop(0, 3, lambda _, state: (layer(state[0], w), state[1]), (x, w)), [math.inf, 0]),
    "branches": (lambda x, w: lax.cond(x.sum() > 0, lambda: layer(layer(x, w), w), lambda: layer(x, w)), [2]),
    "dot": (lambda x, w: quantize(x.reshape(16, 16).astype(jnp.float32) @ w[:, 0, 0].astype(jnp.float32)), [1]),
}


@pytest.mark.parametrize("name", CASES)
def test_roundings(name: str) -> None:
    function, expected = CASES[name]
    assert fp8_roundings(module_of(function, X, W)) == expected


def test_a_rewritten_module_has_the_same() -> None:
    module = module_of(three, X, W)
    assert passes.run(module, target="h200").changed
    assert fp8_roundings(module) == CASES["three"][1]
