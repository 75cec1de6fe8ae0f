"""Transposes of FP8 tensors on a Hopper GPU: bit for bit those of XLA, and in a training step."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.fused_casts import BF16, F32, Array, normal
from xla_fp8.backends.transpose import exchange, kernel
from xla_fp8.backends.transpose.exchange import kernel_exchange
from xla_fp8.backends.transpose.primitive import transpose

pytestmark = pytest.mark.hopper

CASES = {
    "whole tiles": ((16384, 1280), (1, 0)),
    "columns left over": ((65536, 320), (1, 0)),
    "rows and columns left over": ((1040, 1296), (1, 0)),
    "16 columns": ((65552, 16), (1, 0)),
    "16 rows": ((16, 65552), (1, 0)),
    "filter": ((640, 3, 3, 1280), (3, 1, 2, 0)),
    "filter with tiles left over": ((336, 3, 3, 368), (3, 1, 2, 0)),
    "batch": ((16, 256, 8, 160), (0, 3, 1, 2)),
    "1.9 GiB": ((2**21 - 2**14, 960), (1, 0)),
}


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_of_xla(name: str, dtype: Any) -> None:
    shape, permutation = CASES[name]
    assert kernel_exchange(shape, permutation, np.dtype(dtype)) is not None
    x = jax.jit(lambda: jax.lax.bitcast_convert_type(jax.random.bits(jax.random.key(0), shape, jnp.uint8), dtype))()
    lowered = jax.jit(lambda x: transpose(x, permutation)).lower(x)
    assert kernel.NAME in lowered.as_text()

    @jax.jit
    def differ(x: Array, y: Array) -> Array:
        as_bytes = jax.lax.bitcast_convert_type(x, jnp.uint8).transpose(permutation)
        return jnp.sum(as_bytes != jax.lax.bitcast_convert_type(y, jnp.uint8))

    assert int(differ(x, lowered.compile()(x))) == 0


def step(function: Any) -> Any:
    return jax.value_and_grad(lambda *arguments: jnp.sum(jnp.square(function(*arguments).astype(F32))), (0, 1))


def assert_kernels_change_nothing(
    function: Any, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch, backend: str = "auto"
) -> None:
    """The step with kernels that transpose beside the same one without.

    Not bit for bit: of a dot whose operands come otherwise XLA may choose another kernel, which adds up otherwise.
    """
    with_kernels = xla_fp8.jit(step(function), backend=backend).lower(*arguments)
    assert kernel.NAME in with_kernels.as_text()
    monkeypatch.setattr(exchange, "SMALLEST_SIZE", 2**40)
    without = xla_fp8.jit(step(function), backend=backend).lower(*arguments)
    assert kernel.NAME not in without.as_text()
    results = [jax.tree.leaves(lowered.compile()(*arguments)) for lowered in (with_kernels, without)]
    for found, wanted in zip(*results, strict=True):
        found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
        assert np.linalg.norm(found - wanted) <= 1e-3 * np.linalg.norm(wanted)


def test_filter_gradients_of_a_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: Array, w: Array) -> Array:
        scaling = xla_fp8.DelayedScaling.create(amax=8.0)
        y: Array = xla_fp8.fp8_dot(x, w.astype(BF16), scaling=scaling)
        return y

    arguments = normal((16, 1024, 640), BF16), normal((640, 1280), F32) / 25
    assert_kernels_change_nothing(layer, arguments, monkeypatch)


def test_the_filter_of_an_input_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer(x: Array, w: Array) -> Array:
        scaling, numbers = xla_fp8.DelayedScaling.create(amax=8.0), ("NHWC", "OHWI", "NHWC")
        y: Array = xla_fp8.fp8_conv(x, w.astype(BF16), (1, 1), "SAME", dimension_numbers=numbers, scaling=scaling)
        return y

    arguments = normal((8, 32, 32, 512), BF16), normal((640, 3, 3, 512), F32) / 68
    assert_kernels_change_nothing(layer, arguments, monkeypatch, backend="mosaic")
