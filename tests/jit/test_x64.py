"""x64 mode: what regions and backends are does not depend on it, when a function is traced or when it is lowered."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xla_fp8
from tests.jit.programs import F8, assert_close, conv, inputs, layer, tensors

BOUNDS: dict[str, Any] = {"ints": (-448, 448), "floats": (-448.0, 448.0), "f32": (jnp.float32(-448), jnp.float32(448))}


@pytest.fixture(autouse=True)
def no_fallback() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", xla_fp8.FallbackWarning)
        yield


@pytest.mark.parametrize("divide", [False, True])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS.keys())
def test_a_chain_with_numbers_of_32_bits(bounds: tuple[Any, Any], divide: bool) -> None:
    def fn(x8: jax.Array, w8: jax.Array, scale: jax.Array) -> jax.Array:
        y = conv(x8.astype(jnp.float32), w8.astype(jnp.float32))
        return jnp.clip(y / scale if divide else y * scale, *bounds).astype(F8)

    args = (*tensors(), jnp.float32(0.5))
    (outside,) = xla_fp8.explain(fn)(*args).rewritten
    with jax.enable_x64(True):
        assert_close(xla_fp8.jit(fn, strict=True)(*args), jax.jit(fn)(*args))
        (entry,) = xla_fp8.explain(fn)(*args).rewritten
    assert entry.graph == outside.graph


@pytest.mark.parametrize("traced", [False, True])
def test_traced_in_one_mode_and_lowered_in_the_other(traced: bool) -> None:
    args = inputs()
    with jax.enable_x64(traced):
        staged = xla_fp8.jit(layer, strict=True).trace(*args)
    with jax.enable_x64(not traced):
        compiled = staged.lower().compile()
    assert_close(compiled(*args), layer(*args))


def test_one_function_in_both_modes() -> None:
    fast = xla_fp8.jit(layer, strict=True)
    for mode in (False, True, False):
        with jax.enable_x64(mode):
            assert_close(fast(*inputs()), jax.jit(layer)(*inputs()))


@pytest.mark.parametrize("lowered", [False, True])
def test_values_of_64_bits_keep_them(lowered: bool) -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        y = conv(x8.astype(jnp.float32), w8.astype(jnp.float32)) * 0.01
        return jax.nn.relu(y).astype(jnp.float64)

    with jax.enable_x64(True):
        staged, wanted = xla_fp8.jit(fn).trace(*tensors()), fn(*tensors())
    with jax.enable_x64(lowered):
        compiled = staged.lower().compile()
    with jax.enable_x64(True):
        assert wanted.dtype == jnp.float64
        assert_close(compiled(*tensors()), wanted)
