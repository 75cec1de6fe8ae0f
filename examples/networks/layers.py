"""What the networks are made of: the operations that may be replaced, norms, attention and random parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Params = Mapping[str, Any]
Normal = Callable[[tuple[int, ...], float], Any]
"""(shape, standard deviation) → f32 numbers."""

EPS = 1e-5
NHWC = ("NHWC", "OHWI", "NHWC")
"""Filters as convolutions on a GPU read them: of HWIO they would be transposed in every call."""


class Conv(Protocol):
    """x [N,H,W,C] and filter [K,R,S,C/groups] → [N,H',W',K], padded as "SAME". `name` is the layer's."""

    def __call__(self, x: Array, w: Any, /, *, name: str, stride: int = 1, groups: int = 1) -> Array: ...


class Dense(Protocol):
    """x [..., C] and matrix [C,K] → [..., K]. `name` is the layer's."""

    def __call__(self, x: Array, w: Any, /, *, name: str) -> Array: ...


@dataclasses.dataclass(frozen=True)
class Ops:
    """How a network computes what it spends its time in. Results have the type of x."""

    conv: Conv
    dense: Dense


def plain_conv(x: Array, w: Any, /, *, name: str, stride: int = 1, groups: int = 1) -> Array:
    return lax.conv_general_dilated(
        x,
        w.astype(x.dtype),
        (stride, stride),
        "SAME",
        dimension_numbers=NHWC,
        feature_group_count=groups,
    )


def plain_dense(x: Array, w: Any, /, *, name: str) -> Array:
    return x @ w.astype(x.dtype)


PLAIN = Ops(plain_conv, plain_dense)
"""In the type of the activations."""


def normal(seed: int) -> Normal:
    """Parameters for the networks' `init`, made on the host."""
    rng = np.random.default_rng(seed)
    return lambda shape, std: (rng.standard_normal(shape, np.float32) * np.float32(std)).astype(np.float32)


def conv_filter(make: Normal, size: int, inputs: int, outputs: int, groups: int = 1) -> Any:
    """A filter [outputs,size,size,inputs/groups] whose outputs have about the variance of its inputs."""
    shape = (outputs, size, size, inputs // groups)
    return make(shape, (1.5 / (size * size * shape[3])) ** 0.5)


def matrix(make: Normal, inputs: int, outputs: int) -> Any:
    return make((inputs, outputs), inputs**-0.5)


def affine(channels: int) -> dict[str, Any]:
    """The scale and shift of a norm."""
    return {"gamma": np.ones(channels, np.float32), "beta": np.zeros(channels, np.float32)}


def normalized(x: Array, p: Params, mean: Array, var: Array) -> Array:
    """(x - mean) / sqrt(var + eps) * gamma + beta in f32, in the order in which flax writes it; in the type of x."""
    y = (x.astype(jnp.float32) - mean) * (lax.rsqrt(var + EPS) * p["gamma"]) + p["beta"]
    return y.astype(x.dtype)


def batch_norm(x: Array, p: Params) -> Array:
    """Inference: by the statistics in `p`."""
    return normalized(x, p, p["mean"], p["var"])


def batch_norm_of_batch(x: Array, p: Params, momentum: float = 0.9) -> tuple[Array, dict[str, Array]]:
    """Training: by the batch's own statistics; also returns what `p` keeps of them."""
    wide = x.astype(jnp.float32)
    mean = wide.mean((0, 1, 2))
    var = jnp.maximum((wide * wide).mean((0, 1, 2)) - mean * mean, 0)
    kept = {
        name: momentum * p[name] + (1 - momentum) * lax.stop_gradient(new)
        for name, new in (("mean", mean), ("var", var))
    }
    return normalized(x, p, mean, var), kept


def group_norm(x: Array, p: Params, groups: int = 32) -> Array:
    """Of an image [N,H,W,C]."""
    n, h, w, c = x.shape
    grouped = x.astype(jnp.float32).reshape(n, h * w, groups, c // groups)
    mean = grouped.mean((1, 3), keepdims=True)
    var = jnp.maximum((grouped * grouped).mean((1, 3), keepdims=True) - mean * mean, 0)
    y = ((grouped - mean) * lax.rsqrt(var + EPS)).reshape(x.shape)
    return (y * p["gamma"] + p["beta"]).astype(x.dtype)


def layer_norm(x: Array, p: Params) -> Array:
    """Over the last dimension."""
    wide = x.astype(jnp.float32)
    mean = wide.mean(-1, keepdims=True)
    var = jnp.maximum((wide * wide).mean(-1, keepdims=True) - mean * mean, 0)
    return normalized(x, p, mean, var)


def attention(q: Array, k: Array, v: Array, heads: int, trains: bool = False) -> Array:
    """Softmax attention of [N,T,C] to [N,S,C]; on a GPU by cuDNN's fused kernel.

    `trains`: the result is differentiated, which jax's call of cuDNN refuses where T or S is odd (a text of 77 tokens).
    XLA's own attention is used there."""
    split = [t.reshape(*t.shape[:2], heads, -1) for t in (q, k, v)]
    is_even = q.shape[1] % 2 == k.shape[1] % 2 == 0
    fused = jax.default_backend() == "gpu" and q.dtype == jnp.bfloat16 and (is_even or not trains)
    with jax.named_scope("attention"):
        y = jax.nn.dot_product_attention(*split, implementation="cudnn" if fused else "xla")
    return y.reshape(q.shape)


def cross_entropy(logits: Array, labels: Array) -> Array:
    """The mean over the batch, in f32."""
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))
