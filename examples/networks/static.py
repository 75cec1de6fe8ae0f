"""Inference in FP8 with fixed scales: filters stored as FP8, inputs quantized by scales found on sample batches.

    amaxes = observed(unet.apply, params, latents, times, context)
    ops = static(scales_of(amaxes))
    noise = unet.apply(stored(params, fp8=True), latents, times, context, ops)

`xla_fp8.calibrate` does this for a module of Flax or Equinox. The parameters of these networks are arguments, so here
it is written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import xla_fp8

from .layers import NHWC, Array, Ops, plain_conv, plain_dense

E4M3 = jnp.float8_e4m3fn
_HIGH = frozenset({"stem", "classifier", "down0", "in", "out", "time1", "time2"})


def is_high(layer: str) -> bool:
    """Whether a layer stays in bf16: first and last ones, depthwise ones, and those that have few rows to multiply, one
    for each image or one for each word of a text."""
    parts = layer.split("/")
    return layer in _HIGH or parts[-1] in ("time", "depthwise") or ("cross" in parts and parts[-1] in ("k", "v"))


def is_depthwise(layer: str) -> bool:
    """Whether a layer is a depthwise convolution, which is served by this project's kernels."""
    return layer.split("/")[-1] == "depthwise"


def layer_at(path: Any) -> str:
    """The name of the layer whose filter or matrix is at a path of the parameters."""
    parts = [str(key.key) for key in path]
    return "/".join(parts[:-1] if parts[-1] in ("w", "b") else parts)


@dataclasses.dataclass(frozen=True)
class _Static:
    """What one call of a network quantizes: a tensor that several layers read once, by the scale of the first."""

    scales: Mapping[str, Array]
    done: dict[int, tuple[Array, xla_fp8.Float8]] = dataclasses.field(default_factory=dict)

    def quantized(self, x: Array, name: str) -> xla_fp8.Float8:
        if id(x) not in self.done:
            self.done[id(x)] = x, xla_fp8.quantize(x, E4M3, scale=self.scales[name])
        return self.done[id(x)][1]

    def conv(self, x: Array, w: Any, /, *, name: str, stride: int = 1, groups: int = 1) -> Array:
        if is_depthwise(name):
            return xla_fp8.depthwise_conv(x, w, window_strides=(stride, stride))
        if is_high(name):
            return plain_conv(x, w, name=name, stride=stride, groups=groups)
        q = self.quantized(x, name)
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
        q = self.quantized(x, name)
        numbers = (((x.ndim - 1,), (1,)), ((), ()))
        return xla_fp8.dot_general(q, w, numbers, preferred_element_type=jnp.float32).astype(x.dtype)


def static(scales: Mapping[str, Array]) -> Ops:
    """The operations of FP8 inference, by the scale of each layer's input; for one call of the network."""
    found = _Static(scales)
    return Ops(found.conv, found.dense)


def observed(apply: Callable[..., Any], params: Any, *inputs: Any, **options: Any) -> dict[str, Array]:
    """The largest magnitude of each FP8 layer's input, when the network runs on a batch."""

    def run(params: Any, inputs: Any) -> dict[str, Array]:
        amaxes: dict[str, Array] = {}

        def note(name: str, x: Array) -> None:
            if not is_high(name):
                amaxes[name] = jnp.max(jnp.abs(x)).astype(jnp.float32)

        def conv(x: Array, w: Any, /, *, name: str, stride: int = 1, groups: int = 1) -> Array:
            note(name, x)
            return plain_conv(x, w, name=name, stride=stride, groups=groups)

        def dense(x: Array, w: Any, /, *, name: str) -> Array:
            note(name, x)
            return plain_dense(x, w, name=name)

        apply(params, *inputs, ops=Ops(conv, dense), **options)
        return amaxes

    return jax.jit(run)(params, inputs)


def scales_of(amaxes: Mapping[str, Array], margin: float = 1.25) -> dict[str, Array]:
    """Scales with some room: what is larger on another batch saturates."""
    largest = float(jnp.finfo(E4M3).max)
    return {name: jnp.maximum(amax * margin, 1e-6) / largest for name, amax in amaxes.items()}


def stored(params: Any, fp8: bool) -> Any:
    """Parameters as they are served: filters and matrices in FP8 where their layer is, all others in bf16.

    A matrix in FP8 is stored as [outputs, inputs]: FP8 tensor cores want what is summed over innermost, and one that is
    an argument would be transposed at every call. The filter of a depthwise convolution is [R,S,C] beside it, as its
    kernel reads it.
    """

    def of(path: Any, leaf: Any) -> Any:
        if leaf.ndim < 2:
            return jnp.asarray(leaf)
        if fp8 and is_depthwise(layer_at(path)):
            return jnp.asarray(leaf[..., 0].transpose(1, 2, 0), jnp.bfloat16)
        if fp8 and not is_high(layer_at(path)):
            return xla_fp8.quantize(leaf.T if leaf.ndim == 2 else leaf, E4M3)
        return jnp.asarray(leaf, jnp.bfloat16)

    return jax.tree_util.tree_map_with_path(of, params)
