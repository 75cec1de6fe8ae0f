"""ConvNeXt (Liu et al. 2022): depthwise 7x7 convolutions, and all channels mixed by matrices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .layers import PLAIN, Array, Normal, Ops, Params, affine, conv_filter, layer_norm, matrix


@dataclasses.dataclass(frozen=True)
class Config:
    """
    Attributes:
        blocks, channels: of each stage.
        image: pixels of a side.
    """

    blocks: tuple[int, ...] = (3, 3, 9, 3)
    channels: tuple[int, ...] = (96, 192, 384, 768)
    classes: int = 1000
    image: int = 224


CONVNEXT_T = Config()
TINY = Config((1, 1), (16, 32), 10, 32)


def init(make: Normal, config: Config = CONVNEXT_T) -> dict[str, Any]:
    """Parameters."""
    params: dict[str, Any] = {}
    inputs = 3
    for stage, (count, c) in enumerate(zip(config.blocks, config.channels, strict=True)):
        size = 2 if stage else 4
        params[f"down{stage}"] = {
            "w": conv_filter(make, size, inputs, c),
            "b": np.zeros(c, np.float32),
            "norm": affine(inputs if stage else c),
        }
        for number in range(count):
            params[f"block{stage}_{number}"] = {
                "depthwise": {"w": conv_filter(make, 7, c, c, groups=c), "b": np.zeros(c, np.float32)},
                "norm": affine(c),
                "widen": {"w": matrix(make, c, 4 * c), "b": np.zeros(4 * c, np.float32)},
                "narrow": {"w": matrix(make, 4 * c, c), "b": np.zeros(c, np.float32)},
                "scale": np.full(c, 0.1, np.float32),
            }
        inputs = c
    params["norm"] = affine(inputs)
    params["classifier"] = {"w": matrix(make, inputs, config.classes), "b": np.zeros(config.classes, np.float32)}
    return params


def apply(params: Params, images: Array, ops: Ops = PLAIN) -> Array:
    """Images [N,H,W,3] → logits [N,classes], both of the type that is computed in."""

    def biased(y: Array, p: Params) -> Array:
        return y + p["b"].astype(y.dtype)

    y = images
    stage = 0
    while (down := params.get(f"down{stage}")) is not None:
        if stage:
            y = layer_norm(y, down["norm"])
        y = biased(ops.conv(y, down["w"], name=f"down{stage}", stride=2 if stage else 4), down)
        if not stage:
            y = layer_norm(y, down["norm"])
        number = 0
        while (block := params.get(f"block{stage}_{number}")) is not None:
            name, p = f"block{stage}_{number}", block["depthwise"]
            inner = ops.conv(y, p["w"], name=f"{name}/depthwise", groups=y.shape[-1])
            inner = layer_norm(biased(inner, p), block["norm"])
            inner = jax.nn.gelu(biased(ops.dense(inner, block["widen"]["w"], name=f"{name}/widen"), block["widen"]))
            inner = biased(ops.dense(inner, block["narrow"]["w"], name=f"{name}/narrow"), block["narrow"])
            y = y + inner * block["scale"].astype(y.dtype)
            number += 1
        stage += 1
    y = layer_norm(y.astype(jnp.float32).mean((1, 2)).astype(y.dtype), params["norm"])
    return biased(ops.dense(y, params["classifier"]["w"], name="classifier"), params["classifier"])
