"""Programs that end in a cast to FP8 with a norm, an activation or a gate in front of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xla_fp8
from tests.scripts import load_script

Array = jax.Array
E4M3, E5M2, F32, BF16 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float32, jnp.bfloat16
IMAGE, ROWS = (2, 16, 16, 320), (2, 256, 320)

_layers = load_script("examples/networks/layers.py")
group_norm, layer_norm = _layers.group_norm, _layers.layer_norm


def normal(shape: tuple[int, ...], dtype: Any = BF16, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * 2, dtype)


def affine(channels: int) -> dict[str, Any]:
    rng = np.random.default_rng(channels)
    return {
        "gamma": rng.uniform(0.5, 1.5, channels).astype(np.float32),
        "beta": rng.normal(size=channels).astype(np.float32),
    }


def cast(x: Array, dtype: Any = E4M3, scale: float = 0.02) -> Array:
    data: Array = xla_fp8.quantize(x, dtype, scale=scale).data
    return data


def norm_and_silu(x: Array) -> Array:
    return cast(jax.nn.silu(group_norm(x, affine(x.shape[-1]))))


def gate(x: Array) -> Array:
    value, gated = jnp.split(x, 2, -1)
    return cast(value * jax.nn.gelu(gated.astype(F32)))


def rms(x: Array) -> Array:
    wide = x.astype(F32)
    return cast(wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6) * affine(x.shape[-1])["gamma"])


def group_norm_by_variance(x: Array) -> Array:
    n, h, w, c = x.shape
    grouped = x.astype(F32).reshape(n, h * w, 32, c // 32)
    mean, variance = grouped.mean((1, 3), keepdims=True), grouped.var((1, 3), keepdims=True)
    return cast(jax.nn.silu((grouped - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape))


def group_norm_of_flax(x: Array, gamma: Array) -> Array:
    """As `flax.linen.GroupNorm` is traced: statistics are repeated for each channel, and gamma is a part of them."""
    n, h, w, c = x.shape
    grouped = x.reshape(n, h, w, 32, c // 32).astype(F32)
    mean, square = grouped.mean((1, 2, 4)), jnp.square(grouped).mean((1, 2, 4))
    variance = jnp.maximum(square - jnp.square(mean), 0)
    mean, variance = (jnp.repeat(s, c // 32, -1).reshape(n, 1, 1, c) for s in (mean, variance))
    scale = jax.lax.rsqrt(variance + 1e-6) * gamma.reshape(1, 1, 1, c)
    return cast(jax.nn.silu(((x.astype(F32) - mean) * scale + 0.5).astype(x.dtype)))


def masked_softmax(x: Array) -> Array:
    wide = jnp.where(x > -1, x.astype(F32), -jnp.inf)
    return cast(jax.nn.softmax(wide), E5M2, 1e-3)


CASES: dict[str, tuple[Callable[..., Array], tuple[tuple[int, ...], ...]]] = {
    "group norm": (lambda x: cast(group_norm(x, affine(320))), (IMAGE,)),
    "group norm and silu": (norm_and_silu, (IMAGE,)),
    "group norm of one image": (norm_and_silu, ((1, 16, 32, 640),)),
    "group norm, one group a tile": (norm_and_silu, ((2, 16, 8, 2048),)),
    "group norm of many rows": (norm_and_silu, ((1, 64, 64, 64),)),
    "group norm of 9 * 2^6 rows": (norm_and_silu, ((2, 24, 24, 96),)),
    "group norm of f16": (lambda x: norm_and_silu(x.astype(jnp.float16)), (IMAGE,)),
    "group norm of small images": (norm_and_silu, ((2, 8, 8, 1280),)),
    "group norm of small images, two groups a program": (norm_and_silu, ((2, 8, 8, 640),)),
    "group norm of small images, behind a concatenation and a sum": (
        lambda x, y, t: norm_and_silu(jnp.concatenate([x, y], -1) * 2 + t[:, None, None]),
        ((2, 8, 8, 1280), (2, 8, 8, 1280), (2, 2560)),
    ),
    "group norm of Flax": (group_norm_of_flax, (IMAGE, (1, 320))),
    "group norm of Flax, of one image": (group_norm_of_flax, ((1, 16, 32, 320), (1, 320))),
    "group norm by variance": (group_norm_by_variance, (IMAGE,)),
    "group norm and numbers of groups": (
        lambda x, s: cast((group_norm(x, affine(320)).reshape(2, 256, 32, 10) * s[:, None, :, None]).reshape(x.shape)),
        (IMAGE, (2, 32)),
    ),
    "behind a sum with numbers of an image": (lambda x, t: norm_and_silu(x + t[:, None, None]), (IMAGE, (2, 320))),
    "behind a concatenation": (lambda x, y: norm_and_silu(jnp.concatenate([x, y], -1)), (IMAGE, (2, 16, 16, 160))),
    "layer norm": (lambda x: cast(layer_norm(x, affine(320))), (ROWS,)),
    "layer norm and relu": (lambda x: cast(jax.nn.relu(layer_norm(x, affine(256)))), ((2, 256, 256),)),
    "layer norm, one scale for each row": (
        lambda x, s: (jnp.clip(layer_norm(x, affine(320)) / s[..., None], -448, 448)).astype(E4M3),
        (ROWS, (2, 256)),
    ),
    "rms norm": (rms, (ROWS,)),
    "gate": (gate, ((2, 256, 640),)),
    "gate by slices": (lambda x: cast(x[..., :320] * jax.nn.silu(x[..., 320:])), ((2, 256, 640),)),
    "exact gelu": (lambda x: cast(jax.nn.gelu(x * 2 + 1, approximate=False)), (ROWS,)),
    "masked softmax": (masked_softmax, ((8, 64, 256),)),
}


Cases = Mapping[str, tuple[Callable[..., Array], tuple[tuple[int, ...], ...]]]


def of(name: str, cases: Cases = CASES) -> tuple[Callable[..., Array], list[Array]]:
    function, shapes = cases[name]
    return function, [jnp.abs(x) + 0.01 if len(x.shape) == 2 else x for x in map(normal, shapes)]
