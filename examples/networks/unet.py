"""The denoising UNet of Stable Diffusion 1 (Rombach et al. 2022): residual blocks and transformers on latents."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .layers import PLAIN, Array, Normal, Ops, Params, affine, attention, conv_filter, group_norm, layer_norm, matrix


@dataclasses.dataclass(frozen=True)
class Config:
    """
    Attributes:
        channels: of each level; each has half the pixels of the one before.
        transformers: levels with attention.
        blocks: residual blocks of each level on the way down; one more on the way up.
        heads: of the attention.
        latent: pixels and channels of the latents.
        context: length and channels of the text's encoding.
    """

    channels: tuple[int, ...] = (320, 640, 1280, 1280)
    transformers: tuple[int, ...] = (0, 1, 2)
    blocks: int = 2
    heads: int = 8
    latent: tuple[int, int] = (64, 4)
    context: tuple[int, int] = (77, 768)


SD1 = Config()
TINY = Config((32, 64), (1,), 1, 2, (8, 4), (4, 16))


def init(make: Normal, config: Config = SD1) -> dict[str, Any]:
    """Parameters; in the order in which `apply` uses them."""
    first, time = config.channels[0], 4 * config.channels[0]
    params: dict[str, Any] = {
        "time1": _dense(make, first, time),
        "time2": _dense(make, time, time),
        "in": _conv(make, 3, config.latent[1], first),
    }
    skips, c = [first], first
    for level, width in enumerate(config.channels):
        for number in range(config.blocks):
            params[f"down{level}_{number}"] = _block(make, config, level, c, width, time)
            c = width
            skips.append(c)
        if level + 1 < len(config.channels):
            params[f"down{level}_sample"] = _conv(make, 3, c, c)
            skips.append(c)
    params["middle0"] = _residual(make, c, c, time)
    params["middle1"] = _transformer(make, c, config.context[1])
    params["middle2"] = _residual(make, c, c, time)
    for level, width in reversed(list(enumerate(config.channels))):
        for number in range(config.blocks + 1):
            params[f"up{level}_{number}"] = _block(make, config, level, c + skips.pop(), width, time)
            c = width
        if level:
            params[f"up{level}_sample"] = _conv(make, 3, c, c)
    params["out_norm"] = affine(c)
    params["out"] = _conv(make, 3, c, config.latent[1])
    return params


def _conv(make: Normal, size: int, inputs: int, outputs: int) -> dict[str, Any]:
    return {"w": conv_filter(make, size, inputs, outputs), "b": np.zeros(outputs, np.float32)}


def _dense(make: Normal, inputs: int, outputs: int) -> dict[str, Any]:
    return {"w": matrix(make, inputs, outputs), "b": np.zeros(outputs, np.float32)}


def _residual(make: Normal, inputs: int, outputs: int, time: int) -> dict[str, Any]:
    block = {
        "norm1": affine(inputs),
        "conv1": _conv(make, 3, inputs, outputs),
        "time": _dense(make, time, outputs),
        "norm2": affine(outputs),
        "conv2": _conv(make, 3, outputs, outputs),
    }
    return block | ({"shortcut": _conv(make, 1, inputs, outputs)} if inputs != outputs else {})


def _transformer(make: Normal, c: int, context: int) -> dict[str, Any]:
    return {
        "norm": affine(c),
        "in": _conv(make, 1, c, c),
        "norm1": affine(c),
        "self": {name: matrix(make, c, c) for name in "qkvo"},
        "norm2": affine(c),
        "cross": {name: matrix(make, context if name in "kv" else c, c) for name in "qkvo"},
        "norm3": affine(c),
        "gate": _dense(make, c, 8 * c),
        "down": _dense(make, 4 * c, c),
        "out": _conv(make, 1, c, c),
    }


def _block(make: Normal, config: Config, level: int, inputs: int, outputs: int, time: int) -> dict[str, Any]:
    block = {"residual": _residual(make, inputs, outputs, time)}
    if level in config.transformers:
        block["transformer"] = _transformer(make, outputs, config.context[1])
    return block


def apply(
    params: Params,
    latents: Array,
    times: Array,
    context: Array,
    ops: Ops = PLAIN,
    config: Config = SD1,
    trains: bool = False,
) -> Array:
    """The noise in `latents` [N,H,W,4] at `times` [N], given the text's encoding [N,T,C]; of the latents' type.

    `trains` where it is differentiated.
    """
    net = _Net(params, ops, config.heads, context.astype(latents.dtype), trains)
    frequencies = jnp.exp(-math.log(10000) * jnp.arange(config.channels[0] // 2) / (config.channels[0] // 2))
    angles = times[:, None].astype(jnp.float32) * frequencies
    t = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1).astype(latents.dtype)
    t = jax.nn.silu(net.dense(jax.nn.silu(net.dense(t, "time1")), "time2"))

    y = net.conv(latents, "in")
    skips = [y]
    for level in range(len(config.channels)):
        for number in range(config.blocks):
            y = net.block(y, t, f"down{level}_{number}")
            skips.append(y)
        if level + 1 < len(config.channels):
            y = net.conv(y, f"down{level}_sample", stride=2)
            skips.append(y)
    y = net.residual(y, t, "middle0")
    y = net.transformer(y, "middle1")
    y = net.residual(y, t, "middle2")
    for level in reversed(range(len(config.channels))):
        for number in range(config.blocks + 1):
            y = net.block(jnp.concatenate([y, skips.pop()], -1), t, f"up{level}_{number}")
        if level:
            y = net.conv(y.repeat(2, 1).repeat(2, 2), f"up{level}_sample")
    return net.conv(jax.nn.silu(group_norm(y, params["out_norm"])), "out")


@dataclasses.dataclass(frozen=True)
class _Net:
    """Layers by their path in the parameters, which is their name too."""

    params: Params
    ops: Ops
    heads: int
    context: Array
    trains: bool

    def at(self, name: str) -> Any:
        found: Any = self.params
        for part in name.split("/"):
            found = found[part]
        return found

    def conv(self, x: Array, name: str, stride: int = 1) -> Array:
        p = self.at(name)
        return self.ops.conv(x, p["w"], name=name, stride=stride) + p["b"].astype(x.dtype)

    def dense(self, x: Array, name: str) -> Array:
        p = self.at(name)
        return self.ops.dense(x, p["w"], name=name) + p["b"].astype(x.dtype)

    def block(self, x: Array, t: Array, name: str) -> Array:
        y = self.residual(x, t, f"{name}/residual")
        return self.transformer(y, f"{name}/transformer") if "transformer" in self.at(name) else y

    def residual(self, x: Array, t: Array, name: str) -> Array:
        p = self.at(name)
        y = self.conv(jax.nn.silu(group_norm(x, p["norm1"])), f"{name}/conv1")
        y = y + self.dense(t, f"{name}/time")[:, None, None, :]
        y = self.conv(jax.nn.silu(group_norm(y, p["norm2"])), f"{name}/conv2")
        return y + (self.conv(x, f"{name}/shortcut") if "shortcut" in p else x)

    def transformer(self, x: Array, name: str) -> Array:
        p = self.at(name)
        n, h, w, c = x.shape
        y = self.conv(group_norm(x, p["norm"]), f"{name}/in").reshape(n, h * w, c)
        normed = layer_norm(y, p["norm1"])
        y = y + self.attend(normed, normed, f"{name}/self")
        y = y + self.attend(layer_norm(y, p["norm2"]), self.context, f"{name}/cross")
        value, gate = jnp.split(self.dense(layer_norm(y, p["norm3"]), f"{name}/gate"), 2, -1)
        y = y + self.dense(value * jax.nn.gelu(gate), f"{name}/down")
        return x + self.conv(y.reshape(x.shape), f"{name}/out")

    def attend(self, x: Array, context: Array, name: str) -> Array:
        p = self.at(name)
        q, k, v = (
            self.ops.dense(source, p[part], name=f"{name}/{part}")
            for part, source in (("q", x), ("k", context), ("v", context))
        )
        return self.ops.dense(attention(q, k, v, self.heads, self.trains), p["o"], name=f"{name}/o")
