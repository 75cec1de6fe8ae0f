"""How a network's convolutions and matmuls are computed in each recipe, and which layers stay in bf16."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import xla_fp8
from examples.networks.layers import PLAIN, Array, Ops, plain_conv, plain_dense

E4M3 = jnp.float8_e4m3fn
NHWC = ("NHWC", "HWIO", "NHWC")
AMAX = 32.0
"""What activations are taken to reach, where scales are static: times do not depend on it."""
_HIGH = ("stem", "classifier", "down0", "in", "out", "depthwise", "time1", "time2")
"""First and last layers, layers of one row for each image, and those with as many groups as channels."""


def is_high(layer: str) -> bool:
    """Whether a layer stays in bf16. Of a UNet's cross attention, what reads the 77 words of the text does too."""
    path = layer.split("/")
    if layer in _HIGH or path[-1] in ("time", "depthwise"):
        return True
    return "cross" in path and path[-1] in ("k", "v")


@dataclasses.dataclass(frozen=True)
class Static:
    """Inference: filters are FP8 already (`xla_fp8.Float8`), inputs have a scale that was found before."""

    scale: Array

    def conv(self, x: Array, w: Any, /, *, name: str, stride: int = 1, groups: int = 1) -> Array:
        if is_high(name):
            return plain_conv(x, w, name=name, stride=stride, groups=groups)
        q = xla_fp8.quantize(x, E4M3, scale=self.scale)
        return xla_fp8.conv_general_dilated(
            q.data,
            w.data,
            (stride, stride),
            "SAME",
            dimension_numbers=NHWC,
            lhs_scale=q.scale,
            rhs_scale=w.scale,
            out_dtype=x.dtype,
        )

    def dense(self, x: Array, w: Any, /, *, name: str) -> Array:
        if is_high(name):
            return plain_dense(x, w, name=name)
        q = xla_fp8.quantize(x, E4M3, scale=self.scale)
        numbers = (((x.ndim - 1,), (0,)), ((), ()))
        return xla_fp8.dot_general(q, w, numbers, preferred_element_type=jnp.float32).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Training: `fp8_conv` and `fp8_dot`, with the layers' states of delayed scaling; without them dynamic."""

    scaling: Mapping[str, xla_fp8.DelayedScaling]

    def conv(self, x: Array, w: Any, /, *, name: str, stride: int = 1, groups: int = 1) -> Array:
        if is_high(name):
            return plain_conv(x, w, name=name, stride=stride, groups=groups)
        return xla_fp8.fp8_conv(
            x,
            w,
            (stride, stride),
            "SAME",
            dimension_numbers=NHWC,
            scaling=self.scaling.get(name),
            preferred_element_type=x.dtype,
        )

    def dense(self, x: Array, w: Any, /, *, name: str) -> Array:
        if is_high(name):
            return plain_dense(x, w, name=name)
        return xla_fp8.fp8_dot(x, w, scaling=self.scaling.get(name), preferred_element_type=x.dtype)


def ops_of(recipe: str, state: Any) -> Ops:
    """The operations of a recipe; `state` is the scale of "static", the states of "delayed", and else nothing."""
    if recipe == "bf16":
        return PLAIN
    found = Static(state) if recipe == "static" else Trained(state)
    return Ops(found.conv, found.dense)


def layers_of(params: Any) -> list[str]:
    """The names of all layers with a filter or matrix in FP8."""
    found = [layer_at(path) for path, leaf in jax.tree_util.tree_leaves_with_path(params) if len(leaf.shape) > 1]
    return [name for name in found if not is_high(name)]


def layer_at(path: Any) -> str:
    """The name of the layer that has a parameter there."""
    parts = [str(key.key) for key in path]
    return "/".join(parts[:-1] if parts[-1] in ("w", "b") else parts)
