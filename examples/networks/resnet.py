"""ResNet with bottleneck blocks (He et al. 2015; the stride is in the 3x3 convolution, as in the usual "v1.5")."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .layers import (
    PLAIN,
    Array,
    Normal,
    Ops,
    Params,
    affine,
    batch_norm,
    batch_norm_of_batch,
    conv_filter,
    matrix,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """
    Attributes:
        blocks: of each stage; every stage has half the pixels and twice the channels of the one before.
        width: channels inside the blocks of the first stage; outside they are four times as many.
        image: pixels of a side.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 64
    classes: int = 1000
    image: int = 224


RESNET50 = Config()
TINY = Config((1, 1), 16, 10, 32)


def _bn(channels: int) -> dict[str, Any]:
    return affine(channels) | {"mean": np.zeros(channels, np.float32), "var": np.ones(channels, np.float32)}


def init(make: Normal, config: Config = RESNET50) -> dict[str, Any]:
    """Parameters, with the statistics of the batch norms ("mean" and "var") among them."""
    params: dict[str, Any] = {"stem": {"w": conv_filter(make, 7, 3, config.width), "bn": _bn(config.width)}}
    inputs = config.width
    for stage, count in enumerate(config.blocks):
        inner, outputs = config.width << stage, 4 * config.width << stage
        for number in range(count):
            block = {}
            sizes = {"conv1": (1, inputs, inner), "conv2": (3, inner, inner), "conv3": (1, inner, outputs)}
            if number == 0:
                sizes["shortcut"] = (1, inputs, outputs)
            for name, (size, c, k) in sizes.items():
                block[name] = {"w": conv_filter(make, size, c, k), "bn": _bn(k)}
            params[f"block{stage}_{number}"] = block
            inputs = outputs
    params["classifier"] = {"w": matrix(make, inputs, config.classes), "b": np.zeros(config.classes, np.float32)}
    return params


def apply(params: Params, images: Array, ops: Ops = PLAIN) -> Array:
    """Inference: images [N,H,W,3] → logits [N,classes], both of the type that is computed in."""
    return _network(params, images, ops, None)


def apply_training(params: Params, images: Array, ops: Ops = PLAIN) -> tuple[Array, dict[str, Any]]:
    """Training: logits, and for each layer the new statistics of its batch norm."""
    statistics: dict[str, Any] = {}
    return _network(params, images, ops, statistics), statistics


def _network(params: Params, images: Array, ops: Ops, statistics: dict[str, Any] | None) -> Array:
    def layer(y: Array, p: Params, name: str, stride: int = 1) -> Array:
        y = ops.conv(y, p["w"], name=name, stride=stride)
        if statistics is None:
            return batch_norm(y, p["bn"])
        y, statistics[name] = batch_norm_of_batch(y, p["bn"])
        return y

    y = jax.nn.relu(layer(images, params["stem"], "stem", 2))
    y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for name, block in params.items():
        if not name.startswith("block"):
            continue
        stride = 2 if name.endswith("_0") and not name.startswith("block0") else 1
        shortcut = layer(y, block["shortcut"], f"{name}/shortcut", stride) if "shortcut" in block else y
        inner = jax.nn.relu(layer(y, block["conv1"], f"{name}/conv1"))
        inner = jax.nn.relu(layer(inner, block["conv2"], f"{name}/conv2", stride))
        y = jax.nn.relu(layer(inner, block["conv3"], f"{name}/conv3") + shortcut)
    y = y.astype(jnp.float32).mean((1, 2)).astype(y.dtype)
    classifier = params["classifier"]
    return ops.dense(y, classifier["w"], name="classifier") + classifier["b"].astype(y.dtype)


def with_statistics(params: Params, statistics: Params) -> dict[str, Any]:
    """The parameters with new statistics in their batch norms."""

    def updated(tree: Params, path: str) -> Any:
        if path in statistics:
            return {**tree, "bn": {**tree["bn"], **statistics[path]}}
        return {
            name: updated(part, f"{path}/{name}".lstrip("/")) if isinstance(part, dict) else part
            for name, part in tree.items()
        }

    return updated(params, "")
