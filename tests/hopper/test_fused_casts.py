"""Fused casts on a Hopper GPU, beside the same program in f32 on the CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.fused_casts import CASES, E4M3, Array, Cases, affine, cast, group_norm, layer_norm, norm_and_silu, normal, of
from tests.training_steps import PROGRAMS, assert_kernels_compute_what_a_step_means, kernels, rewritten
from xla_fp8.backends.fused_cast import kernel, statistics

pytestmark = pytest.mark.hopper


def on_cpu(function: Any, arguments: list[Array]) -> Any:
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(function(*(jnp.asarray(np.asarray(x, np.float32)) for x in arguments)), np.float32)


LARGE: Cases = {
    "group norm of large images": (norm_and_silu, ((2, 64, 64, 320),)),
    "behind a concatenation, large": (
        lambda x, y: norm_and_silu(jnp.concatenate([x, y], -1)),
        ((4, 64, 64, 640), (4, 64, 64, 320)),
    ),
    "layer norm of long rows": (lambda x: cast(layer_norm(x, affine(2048))), ((4, 256, 2048),)),
}


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_as_the_program_in_f32(name: str) -> None:
    function, arguments = of(name, {**CASES, **LARGE})
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


def test_a_row_scaled_by_its_amax_is_nan_where_that_is() -> None:
    def scaled(x: Array) -> Array:
        wide = x.astype(jnp.float32) * 2 + 1
        return cast(wide / jnp.max(jnp.abs(wide), -1, keepdims=True) * 2 - 1, E4M3, 0.01)

    x = normal((256, 320)).at[3, 5].set(jnp.nan)
    assert kernel.NAME in xla_fp8.jit(scaled).lower(x).as_text()
    y = np.asarray(xla_fp8.jit(scaled)(x), np.float32)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(y).any(1)), [3])
    assert np.isnan(y[3]).all()


@pytest.mark.parametrize("shape", [(2, 64, 64, 320), (16, 32, 32, 640), (2, 8, 8, 2560), (1, 64, 64, 960)])
def test_group_norms_of_a_unet(shape: tuple[int, ...]) -> None:

    def norm(x: Array) -> Array:
        return cast(jax.nn.silu(group_norm(x, affine(shape[-1]))), E4M3, 0.01)

    x = normal(shape)
    ours, wanted = np.asarray(xla_fp8.jit(norm)(x), np.float32), on_cpu(norm, [x])
    assert np.mean(ours != wanted) < 0.005
    again = np.asarray(xla_fp8.jit(norm)(x), np.float32)
    np.testing.assert_array_equal(ours, again)


def grouped(x: Array, groups: int = 32) -> Array:
    return x.astype(jnp.float32).reshape(x.shape[0], -1, groups, x.shape[-1] // groups)


@pytest.mark.parametrize(
    "shapes",
    [
        ((16, 64, 64, 320),),
        ((2, 64, 64, 640), (2, 64, 64, 320)),
        ((1, 512, 512, 128),),
        ((3, 24, 24, 96),),
        ((1, 128, 128, 320),),
        ((2, 8, 8, 1280),),
        ((16, 8, 8, 1280), (16, 8, 8, 1280)),
        ((2, 16, 16, 640),),
        ((8, 16, 16, 1280),),
        ((16, 16, 16, 1280),),
    ],
    ids=str,
)
def test_statistics(shapes: tuple[tuple[int, ...], ...]) -> None:
    """Of images, groups and rows that differ, so that a sum of others would be seen."""

    def norm(*xs: Array) -> Array:
        x = jnp.concatenate(xs, -1)
        wide = grouped(x)
        mean = wide.mean((1, 3), keepdims=True)
        variance = (wide * wide).mean((1, 3), keepdims=True) - mean * mean
        return cast(jax.nn.silu((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape), E4M3, 0.01)

    rng = np.random.default_rng(0)
    images, channels = shapes[0][0], sum(shape[-1] for shape in shapes)
    of_groups = np.repeat(rng.normal(size=(2, images, 1, 1, 32)), channels // 32, axis=-1)
    rows = np.linspace(-1, 1, shapes[0][1])[:, None, None]  # no part of an image has its mean
    x = (rng.normal(size=(images, *shapes[0][1:3], channels)) + rows) * np.exp(of_groups[0]) + of_groups[1]
    ends = np.cumsum([shape[-1] for shape in shapes])[:-1]
    xs = [jnp.asarray(part, jnp.bfloat16) for part in np.split(x, ends, -1)]
    text = xla_fp8.jit(norm).lower(*xs).as_text()
    assert kernel.NAME in text
    assert (statistics.NAME in text) == (xs[0].shape[1] > 16 or x.size > 2**22)
    ours, wanted = np.asarray(xla_fp8.jit(norm)(*xs), np.float32), on_cpu(norm, xs)
    assert np.mean(ours != wanted) < 0.005
    np.testing.assert_array_equal(ours, np.asarray(xla_fp8.jit(norm)(*xs), np.float32))


def test_rows_of_many_lengths() -> None:

    for columns in (96, 192, 384, 768, 1024, 1280, 2048, 4096):
        x = normal((1024, columns))

        def norm(x: Array, columns: int = columns) -> Array:
            return cast(layer_norm(x, affine(columns)), E4M3, 0.01)

        ours, wanted = np.asarray(xla_fp8.jit(norm)(x), np.float32), on_cpu(norm, [x])
        assert np.mean(ours != wanted) < 0.005, columns


@pytest.mark.parametrize("name", PROGRAMS)
def test_training_steps(name: str) -> None:
    assert kernels(rewritten(name)[0])
    assert_kernels_compute_what_a_step_means(name)
