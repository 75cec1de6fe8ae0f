"""Convolutions on FP8 tensors and the saturating cast, written as the chains that the passes fuse.

    y, amax = xla_fp8.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        lhs_scale=x_scale, rhs_scale=w_scale, bias=b, activation="relu",
        out_scale=1 / y_scale, out_dtype=jnp.float8_e4m3fn, return_amax=True)

They are plain JAX: without `xla_fp8.jit` they compute the same, unfused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from xla_fp8 import _jax_compat

# Dumps name the line on which a function of this package is called, not ours.
_jax_compat.hide_from_sources(str(Path(__file__).parent))

FP8_DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = MappingProxyType(
    {
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "leaky_relu": jax.nn.leaky_relu,
        "elu": jax.nn.elu,
        "silu": jax.nn.silu,
        "gelu": lambda y: jax.nn.gelu(y, approximate=False),
        "gelu_tanh": lambda y: jax.nn.gelu(y, approximate=True),
        "sigmoid": jax.nn.sigmoid,
        "tanh": jnp.tanh,
    }
)
"""Activations by name: those that a graph can hold. The last five need the extended dialect, which `jit` uses."""


def saturating_cast(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Rounds to FP8; what lies beyond the type's largest value, infinities too, becomes that value. NaN stays NaN.

    A bare `astype` makes NaN (e4m3fn) or infinity (e5m2) of large values, and is not fused for that reason.

    Args:
        x: of any shape and float type.
        dtype: float8_e4m3fn (largest value 448) or float8_e5m2 (57344).

    Raises:
        TypeError: another dtype, or an `x` that is not of a float type.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in FP8_DTYPES:
        raise TypeError(f"saturating_cast rounds to {_FP8_NAMES}, not to {dtype.name}")
    x = _floats(x, "x")
    if x.dtype.itemsize == 1:  # an FP8 type may have no such number as the other's largest
        x = x.astype(jnp.float32)
    # Of NumPy: what JAX negates stands outside of a differentiated scan, where it is no constant any more.
    largest = np.asarray(jnp.finfo(dtype).max, x.dtype)  # type: ignore[no-untyped-call]
    return lax.clamp(-largest, x, largest).astype(dtype)


def conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    lhs_scale: ArrayLike | None = None,
    rhs_scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    residual_scale: ArrayLike | None = None,
    activation: str | Callable[[jax.Array], jax.Array] | None = None,
    out_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_amax: bool = False,
) -> Any:
    """`jax.lax.conv_general_dilated` of scaled FP8 tensors, with an epilogue:

        y = activation(conv(lhs * lhs_scale, rhs * rhs_scale) + bias + residual * residual_scale)
        result = saturating_cast(y * out_scale, out_dtype)

    "One number" below is a scalar, or an array of one element, of any real type.

    Args:
        lhs, rhs: input and filter, usually float8_e4m3fn or float8_e5m2; any float type is taken.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count, precision, out_sharding: as jax.lax.conv_general_dilated has them.
        preferred_element_type: the type in which everything up to the final cast is written: float32 (if None),
            bfloat16 or float16; float64 computes, but is not fused. A fused graph computes in f32 whatever it is.
        lhs_scale: one number.
        rhs_scale: one number, or one for each output channel, of shape [output channels].
        bias: of shape [output channels] and any float type.
        residual: a tensor of the result's shape, of any float type.
        residual_scale: one number; only with a residual. It is part of the graph where the residual is FP8; else it is
            multiplied in front of it.
        activation: a name from `ACTIVATIONS`, or a function of an array that keeps its shape and type.
        out_scale: one number that y is multiplied by before the cast.
        out_dtype: type of the result: float8_e4m3fn or float8_e5m2 (saturated), or a wider float type;
            `preferred_element_type` if None.
        return_amax: also return the largest |y|, before out_scale: what delayed scaling needs.

    Returns:
        The result, or (result, amax) with amax a scalar of `preferred_element_type`.

    Raises:
        TypeError: an argument of the wrong shape or type, a residual_scale without a residual, or an activation of
            unknown name. The message names the argument, what it should be and what it is.
    """
    wide = _wide(jnp.float32 if preferred_element_type is None else preferred_element_type, "preferred_element_type")
    out = None if out_dtype is None else jnp.dtype(out_dtype)
    if out is not None and out not in FP8_DTYPES:
        out = _wide(out, "out_dtype", ", ".join(dtype.name for dtype in FP8_DTYPES) + ", ")
    if residual is None and residual_scale is not None:
        raise TypeError("residual_scale was given without a residual: give the tensor that it scales, or leave it out")
    activate = _activation(activation)
    lhs, rhs = _floats(lhs, "lhs"), _floats(rhs, "rhs")
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    y = lax.conv_general_dilated(
        _scaled(lhs, wide, lhs_scale, "lhs_scale"),
        _scaled(rhs, wide, rhs_scale, "rhs_scale", numbers.rhs_spec[0]),
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        numbers,
        feature_group_count,
        batch_group_count,
        precision,
        wide,
        **({} if out_sharding is None else {"out_sharding": out_sharding}),
    )
    if bias is not None:
        y = y + _along(_floats(bias, "bias"), wide, y.shape, numbers.out_spec[1], "bias")
    if residual is not None:
        residual = _floats(residual, "residual")
        if residual.shape != y.shape:
            raise TypeError(f"residual must have the result's shape {list(y.shape)}, not {list(residual.shape)}")
        y = y + _scaled(residual, wide, residual_scale, "residual_scale")
    if activate is not None:
        before, y = y, activate(y)
        if (jnp.shape(y), jnp.result_type(y)) != (before.shape, before.dtype):
            raise TypeError(
                f"activation must keep the shape and type of its argument, {before.dtype.name}{list(before.shape)}; "
                f"it returned {jnp.result_type(y).name}{list(jnp.shape(y))}"
            )
    result = y if out_scale is None else y * _one_number(out_scale, wide, "out_scale")
    if out is not None:
        result = saturating_cast(result, out) if out in FP8_DTYPES else result.astype(out)
    return (result, _amax(y)) if return_amax else result


_FP8_NAMES = " or ".join(dtype.name for dtype in FP8_DTYPES)


def _wide(dtype: DTypeLike, name: str, others: str = "") -> np.dtype[Any]:
    """A float type of at least 16 bits."""
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize == 1:
        raise TypeError(f"{name} must be {others}float32, bfloat16, float16 or float64, not {dtype.name}")
    return jax.dtypes.canonicalize_dtype(dtype)


def _activation(activation: str | Callable[[jax.Array], jax.Array] | None) -> Callable[[jax.Array], jax.Array] | None:
    if activation is None or callable(activation):
        return activation
    if activation not in ACTIVATIONS:
        raise TypeError(f"there is no activation {activation!r}: expected a function or {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _floats(x: ArrayLike, name: str) -> jax.Array:
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be of a float type, not {x.dtype.name}{list(x.shape)}")
    return x


def _scaled(x: jax.Array, wide: Any, scale: ArrayLike | None, name: str, channel: int | None = None) -> jax.Array:
    """convert(x) * scale in the wide type; `channel` is the dimension along which a vector of scales may run."""
    x = x.astype(wide)
    if scale is None:
        return x
    if channel is not None and jnp.size(scale) != 1:
        return x * _along(_real(scale, name), wide, x.shape, channel, name, "one number, or ")
    return x * _one_number(scale, wide, name)


def _real(value: ArrayLike, name: str) -> jax.Array:
    value = jnp.asarray(value)
    if not (jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)):
        raise TypeError(f"{name} must be of a float or integer type, not {value.dtype.name}{list(value.shape)}")
    return value


def _one_number(value: ArrayLike, wide: Any, name: str) -> jax.Array:
    value = _real(value, name)
    if value.size != 1:
        raise TypeError(f"{name} must be one number for the whole tensor, not an array of shape {list(value.shape)}")
    return value.astype(wide).reshape(())


def _along(value: jax.Array, wide: Any, shape: Sequence[int], dimension: int, name: str, or_: str = "") -> jax.Array:
    """A vector broadcast along one dimension of `shape`."""
    if value.shape != (shape[dimension],):
        raise TypeError(
            f"{name} must be {or_}of shape [{shape[dimension]}], one for each output channel, not {list(value.shape)}"
        )
    return lax.broadcast_in_dim(value.astype(wide), tuple(shape), (dimension,))


def _amax(y: jax.Array) -> jax.Array:
    """The largest |y|; 0 where there is none, as a graph has it."""
    return jnp.max(jnp.abs(y)) if y.size else jnp.zeros((), y.dtype)
