"""Networks in FP8: for training by `xla_fp8.convert`; for inference with filters that are FP8 already.

`xla_fp8.calibrate` stores the weights of a module in FP8. Of a plain function the weights are arguments, so here the
static recipe is written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

import xla_fp8
from examples.networks.layers import NHWC, Array, Ops, plain_conv, plain_dense

E4M3 = jnp.float8_e4m3fn
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


def static(scale: Array) -> Ops:
    """The operations of inference with that scale."""
    found = Static(scale)
    return Ops(found.conv, found.dense)


def converted(network: Callable[..., Any], recipe: str, tiny: bool) -> Any:
    """The function of a network, for training. All but attention, where there is no weight, is up to the recipe."""
    least = 0 if tiny else xla_fp8.Recipe().min_flops
    return xla_fp8.convert(
        network,
        xla_fp8.Recipe(recipe, min_flops=least),  # type: ignore[arg-type]
        filter=lambda layer: "attention" not in layer.name,
    )


def layer_at(path: Any) -> str:
    """The name of the layer that has a parameter there."""
    parts = [str(key.key) for key in path]
    return "/".join(parts[:-1] if parts[-1] in ("w", "b") else parts)
