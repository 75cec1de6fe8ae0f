"""Networks in plain JAX: ResNet-50, a UNet block with attention, a transformer layer; forward and training step.

Parameters are arguments, so that the dumps hold no weights; images are small, which changes no line of HLO.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .catalog import array, dump

Params = dict[str, Any]


def conv(x: jax.Array, w: jax.Array, stride: int = 1, padding: str = "SAME") -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def sgd(loss: Any) -> Any:
    """One step of SGD with momentum on `loss(params, *batch)`."""

    def step(params: Params, momentum: Params, *batch: jax.Array) -> tuple[Params, Params, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, *batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum)
        return params, momentum, value

    return step


# ResNet-50 (He et al. 2015, with the stride on the 3x3 convolution), batch statistics in training mode.

STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))


def batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean((0, 1, 2))
    variance = ((x - mean) ** 2).mean((0, 1, 2))
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def bottleneck(x: jax.Array, block: Params, stride: int) -> jax.Array:
    y = jax.nn.relu(batch_norm(conv(x, block["conv1"]), *block["norm1"]))
    y = jax.nn.relu(batch_norm(conv(y, block["conv2"], stride), *block["norm2"]))
    y = batch_norm(conv(y, block["conv3"]), *block["norm3"])
    if "shortcut" in block:
        x = batch_norm(conv(x, block["shortcut"], stride), *block["norm"])
    return jax.nn.relu(x + y)


def resnet(params: Params, images: jax.Array) -> jax.Array:
    x = jax.nn.relu(batch_norm(conv(images, params["stem"], 2), *params["norm"]))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for stage, blocks in enumerate(params["stages"]):
        for index, block in enumerate(blocks):
            x = bottleneck(x, block, 2 if stage and not index else 1)
    return x.mean((1, 2)) @ params["head"] + params["head_bias"]


def resnet_params() -> Params:
    def norm(channels: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return array((channels,)), array((channels,))

    stages, inputs = [], 64
    for count, width in STAGES:
        blocks = []
        for index in range(count):
            block: Params = {
                "conv1": array((1, 1, inputs, width)),
                "norm1": norm(width),
                "conv2": array((3, 3, width, width)),
                "norm2": norm(width),
                "conv3": array((1, 1, width, 4 * width)),
                "norm3": norm(4 * width),
            }
            if index == 0:
                block |= {"shortcut": array((1, 1, inputs, 4 * width)), "norm": norm(4 * width)}
            blocks.append(block)
            inputs = 4 * width
        stages.append(blocks)
    head = {"head": array((inputs, 1000)), "head_bias": array((1000,))}
    return {"stem": array((7, 7, 3, 64)), "norm": norm(64), "stages": stages, **head}


def resnet_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(resnet(params, images)), labels[:, None], 1).mean()


@dump("full", "compiled")
def resnet50_forward() -> Any:
    return resnet, (resnet_params(), array((2, 32, 32, 3)))


@dump("full", "short")
def resnet50_training_step() -> Any:
    params = resnet_params()
    return sgd(resnet_loss), (params, params, array((2, 32, 32, 3)), array((2,), "int32"))


# A UNet block with attention, as diffusion models have it: group norm, SiLU, time embedding, down, attention, up, skip.


def group_norm(x: jax.Array, scale: jax.Array, groups: int = 8) -> jax.Array:
    y = x.reshape(*x.shape[:-1], groups, -1)
    mean = y.mean((1, 2, 4), keepdims=True)
    y = (y - mean) * lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
    return y.reshape(x.shape) * scale


def attention(x: jax.Array, wqkv: jax.Array, wout: jax.Array, heads: int, causal: bool = False) -> jax.Array:
    """x: [batch, length, width]."""
    batch, length, width = x.shape
    q, k, v = jnp.split((x @ wqkv).reshape(batch, length, 3 * heads, width // heads), 3, 2)
    logits = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    if causal:
        logits = jnp.where(jnp.tril(jnp.ones((length, length), bool)), logits, -1e9)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(logits), v)
    return mixed.reshape(batch, length, width) @ wout


def unet(params: Params, x: jax.Array, time: jax.Array) -> jax.Array:
    def residual_block(x: jax.Array, p: Params) -> jax.Array:
        y = conv(jax.nn.silu(group_norm(x, p["scale1"])), p["conv1"])
        y = y + (jax.nn.silu(embedding) @ p["time"])[:, None, None, :]
        y = conv(jax.nn.silu(group_norm(y, p["scale2"])), p["conv2"])
        return y + (conv(x, p["skip"]) if "skip" in p else x)

    frequencies = jnp.exp(-jnp.log(10000.0) * jnp.arange(32) / 32)
    angles = time[:, None] * frequencies
    embedding = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], 1) @ params["embed"]

    x = conv(x, params["in"])
    high = residual_block(x, params["down"])
    low = conv(high, params["shrink"], 2)
    batch, height, width, channels = low.shape
    tokens = group_norm(low, params["scale"]).reshape(batch, height * width, channels)
    low = low + attention(tokens, params["qkv"], params["out"], 4).reshape(low.shape)
    low = residual_block(low, params["middle"])
    up = jax.image.resize(low, high.shape, "nearest")
    return conv(residual_block(jnp.concatenate([up, high], -1), params["up"]), params["final"])


def unet_params(c: int = 32) -> Params:
    def block(inputs: int) -> Params:
        p = {"scale1": array((inputs,)), "conv1": array((3, 3, inputs, c)), "time": array((128, c))}
        p |= {"scale2": array((c,)), "conv2": array((3, 3, c, c))}
        return p if inputs == c else {**p, "skip": array((1, 1, inputs, c))}

    blocks = {"down": block(c), "middle": block(c), "up": block(2 * c)}
    attend = {"scale": array((c,)), "qkv": array((c, 3 * c)), "out": array((c, c))}
    convs = {"in": array((3, 3, 4, c)), "shrink": array((3, 3, c, c)), "final": array((3, 3, c, 4))}
    return {"embed": array((64, 128)), **blocks, **attend, **convs}


def unet_loss(params: Params, x: jax.Array, time: jax.Array, noise: jax.Array) -> jax.Array:
    return ((unet(params, x, time) - noise) ** 2).mean()


@dump("full", "typed")
def unet_block_forward() -> Any:
    return unet, (unet_params(), array((2, 16, 16, 4)), array((2,)))


@dump("full", "compiled")
def unet_block_training_step() -> Any:
    params = unet_params()
    return sgd(unet_loss), (params, params, array((2, 16, 16, 4)), array((2,)), array((2, 16, 16, 4)))


# A transformer layer in bfloat16, with rematerialization in its training step.


def transformer(params: Params, x: jax.Array) -> jax.Array:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)

    x = x + attention(norm(x, params["scale1"]), params["qkv"], params["out"], 4, causal=True)
    gate, up = jnp.split(norm(x, params["scale2"]) @ params["in"], 2, -1)
    return x + (jax.nn.gelu(gate) * up) @ params["down"]


def transformer_params(d: int = 64) -> Params:
    matrices = {"qkv": (d, 3 * d), "out": (d, d), "in": (d, 8 * d), "down": (4 * d, d)}
    scales = {"scale1": array((d,)), "scale2": array((d,))}
    return {**{name: array(shape, "bfloat16") for name, shape in matrices.items()}, **scales}


@dump("full", "compiled")
def transformer_layer_forward() -> Any:
    return transformer, (transformer_params(), array((2, 16, 64), "bfloat16"))


@dump("full", "proto")
def transformer_layer_training_step() -> Any:
    def loss(params: Params, x: jax.Array) -> jax.Array:
        return jax.checkpoint(transformer)(params, x).astype(jnp.float32).var()

    params = transformer_params()
    return sgd(loss), (params, params, array((2, 16, 64), "bfloat16"))
