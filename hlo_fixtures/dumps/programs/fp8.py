"""FP8 programs as users write them: quantize/dequantize chains around convolutions and matmuls, and their gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .catalog import array, dump

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FP8 = [
    "float8_e3m4",
    "float8_e4m3",
    "float8_e4m3b11fnuz",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
]


def quantize(x: jax.Array, scale: jax.Array, dtype: Any = E4M3) -> jax.Array:
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x * scale.astype(x.dtype), -limit, limit).astype(dtype)


def dequantize(x: jax.Array, scale: jax.Array, wide: Any = jnp.float32) -> jax.Array:
    return x.astype(wide) * scale.astype(wide)


def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC"))


def scaled_conv(x: jax.Array, w: jax.Array, s: dict[str, jax.Array], wide: Any = jnp.float32) -> jax.Array:
    return conv(dequantize(x, s["x"], wide), dequantize(w, s["w"], wide))


SCALES = {name: array(()) for name in ("x", "w", "y")}
X, W = array((2, 8, 8, 16), E4M3), array((32, 3, 3, 16), E4M3)


@dump("full", "as_hlo_text")
def fp8_conv_relu_amax() -> Any:
    def f(x: jax.Array, w: jax.Array, bias: jax.Array, s: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y = jax.nn.relu(scaled_conv(x, w, s) + bias)
        return quantize(y, s["y"]), jnp.abs(y).max()

    return f, (X, W, array((32,)), SCALES)


@dump("full", "old_metadata")
def fp8_conv_residual_bf16() -> Any:
    def f(x: jax.Array, w: jax.Array, skip: jax.Array, s: dict[str, jax.Array]) -> jax.Array:
        return quantize(jax.nn.silu(scaled_conv(x, w, s, jnp.bfloat16) + skip), s["y"], E5M2)

    return jax.jit(f), (X, W, array((2, 8, 8, 32), "bfloat16"), SCALES)


@jax.custom_vjp
def fp8_conv(x: jax.Array, w: jax.Array, s: dict[str, jax.Array]) -> jax.Array:
    """Convolution of fake-quantized operands; the cotangent is quantized to e5m2, as FP8 training does."""
    return scaled_conv(quantize(x, 1 / s["x"]), quantize(w, 1 / s["w"]), s)


def fp8_conv_forward(x: jax.Array, w: jax.Array, s: dict[str, jax.Array]) -> Any:
    x8, w8 = quantize(x, 1 / s["x"]), quantize(w, 1 / s["w"])
    return scaled_conv(x8, w8, s), (x8, w8, s)


def fp8_conv_backward(saved: Any, g: jax.Array) -> Any:
    x8, w8, s = saved
    g = dequantize(quantize(g, 1 / s["g"], E5M2), s["g"])
    _, pullback = jax.vjp(conv, dequantize(x8, s["x"]), dequantize(w8, s["w"]))
    return *pullback(g), jax.tree.map(jnp.zeros_like, s)


fp8_conv.defvjp(fp8_conv_forward, fp8_conv_backward)


def fp8_bottleneck(params: Any, x: jax.Array) -> jax.Array:
    y = x
    for layer in params:
        y = jax.nn.relu(fp8_conv(y, layer["w"], layer["s"]))
    return x + y


def fp8_params() -> Any:
    shapes = [(16, 1, 1, 64), (16, 3, 3, 16), (64, 1, 1, 16)]
    return [{"w": array(shape), "s": {name: array(()) for name in "xwg"}} for shape in shapes]


@dump("full", "compiled")
def fp8_conv_chain_forward() -> Any:
    return fp8_bottleneck, (fp8_params(), array((2, 8, 8, 64)))


@dump("full", "short")
def fp8_conv_chain_backward() -> Any:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (fp8_bottleneck(params, x) ** 2).mean()

    return jax.value_and_grad(loss, argnums=(0, 1)), (fp8_params(), array((2, 8, 8, 64)))


@dump("full")
def fp8_dense_delayed_scaling() -> Any:
    """A matmul whose scales come from a history of amax values, which the step updates."""

    def f(x: jax.Array, w: jax.Array, history: jax.Array) -> tuple[jax.Array, jax.Array]:
        scale = jnp.maximum(history.max(1), 1e-12) / float(jnp.finfo(E4M3).max)
        x8, w8 = quantize(x, 1 / scale[0]), quantize(w, 1 / scale[1])
        y = lax.dot_general(x8, w8, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32) * scale[0] * scale[1]
        amax = jnp.stack([jnp.abs(x).max(), jnp.abs(w).max()])
        return y, jnp.roll(history, 1, 1).at[:, 0].set(amax)

    return f, (array((32, 64)), array((64, 128)), array((2, 16)))


@dump("full")
def fp8_all_types() -> Any:
    """Conversions to, from and between every 8-bit float, with constants, and the 4-bit one."""

    def f(x: jax.Array) -> list[jax.Array]:
        results = []
        for name in FP8:
            table = jnp.asarray([0.5, 1.0, 2.0, 4.0], name)
            y = x.astype(name)
            results += [
                y,
                y.astype(jnp.bfloat16),
                table,
                (y.astype(jnp.float32) * table.astype(jnp.float32)).astype(E5M2),
            ]
        results.append(x.astype("float4_e2m1fn").astype(jnp.float32))
        results.append(lax.bitcast_convert_type(x.astype(E4M3), jnp.uint8))
        return results

    return f, (array((3, 4)),)
