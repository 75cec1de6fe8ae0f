"""Fused casts on a Hopper GPU, beside the same program in f32 on the CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from examples.networks.layers import group_norm, layer_norm
from tests.fused_casts import CASES, E4M3, Array, affine, cast, normal, of
from xla_fp8.backends.fused_cast import kernel

pytestmark = pytest.mark.hopper


def on_cpu(function: Any, arguments: list[Array]) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(function(*(jnp.asarray(np.asarray(x, np.float32)) for x in arguments)), np.float32)


@pytest.mark.parametrize("name", CASES)
def test_as_the_program_in_f32(name: str) -> None:
    function, arguments = of(name)
    compiled = xla_fp8.jit(function).lower(*arguments)
    assert kernel.NAME in compiled.as_text()
    ours, wanted = np.asarray(compiled.compile()(*arguments), np.float32), on_cpu(function, arguments)
    differ = ours != wanted
    # tanh is 2^-11 off on the device, the rest 2^-21.
    assert np.mean(differ) < (0.02 if name == "gate" else 0.005)
    assert np.linalg.norm(ours - wanted) < 0.01 * np.linalg.norm(wanted)


def test_nan_stays_and_what_is_too_large_saturates() -> None:
    def scaled(x: Array) -> Array:
        return cast(jax.nn.silu(x * 3 + 1) * 1e3 - 7, E4M3, 1.0)

    x = normal((256, 320)).at[3, 5].set(jnp.nan).at[7].set(jnp.inf).at[9].set(3e38)
    y = np.asarray(xla_fp8.jit(scaled)(x), np.float32)
    assert kernel.NAME in xla_fp8.jit(scaled).lower(x).as_text()
    assert np.isnan(y).sum() == 1
    assert np.isnan(y[3, 5])
    assert np.all(y[7] == 448)
    assert np.all(y[9] == 448)


@pytest.mark.parametrize("shape", [(2, 64, 64, 320), (16, 32, 32, 640), (2, 8, 8, 2560), (1, 64, 64, 960)])
def test_group_norms_of_a_unet(shape: tuple[int, ...]) -> None:

    def norm(x: Array) -> Array:
        return cast(jax.nn.silu(group_norm(x, affine(shape[-1]))), E4M3, 0.01)

    x = normal(shape)
    ours, wanted = np.asarray(xla_fp8.jit(norm)(x), np.float32), on_cpu(norm, [x])
    assert np.mean(ours != wanted) < 0.005
    again = np.asarray(xla_fp8.jit(norm)(x), np.float32)
    np.testing.assert_array_equal(ours, again)


def test_rows_of_many_lengths() -> None:

    for columns in (96, 192, 384, 768, 1024, 1280, 2048, 4096):
        x = normal((1024, columns))

        def norm(x: Array, columns: int = columns) -> Array:
            return cast(layer_norm(x, affine(columns)), E4M3, 0.01)

        ours, wanted = np.asarray(xla_fp8.jit(norm)(x), np.float32), on_cpu(norm, [x])
        assert np.mean(ours != wanted) < 0.005, columns
