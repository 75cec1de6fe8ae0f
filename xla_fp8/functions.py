"""Convolutions on FP8 tensors and the saturating cast, written as the chains that the passes fuse.

    y, amax = xla_fp8.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"),
        lhs_scale=x_scale, rhs_scale=w_scale, bias=b, activation="relu",
        out_scale=1 / y_scale, out_dtype=jnp.float8_e4m3fn, return_amax=True)

They are plain JAX: without `xla_fp8.jit` they compute the same, unfused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

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
        TypeError: another dtype.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in FP8_DTYPES:
        raise TypeError(f"saturating_cast rounds to {' or '.join(d.name for d in FP8_DTYPES)}, not to {dtype.name}")
    x = jnp.asarray(x)
    largest = jnp.asarray(jnp.finfo(dtype).max, x.dtype)  # type: ignore[no-untyped-call]
    return lax.clamp(-largest, x, largest).astype(dtype)


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
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

    Args:
        lhs, rhs: input and filter, usually float8_e4m3fn or float8_e5m2.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count, precision, out_sharding: as jax.lax.conv_general_dilated has them.
        preferred_element_type: the type in which everything up to the final cast is written; float32 if None. A fused
            graph computes in f32 whatever it is.
        lhs_scale: scalar.
        rhs_scale: scalar, or one for each output channel, of shape [output channels].
        bias: of shape [output channels].
        residual: a tensor of the result's shape, of any float type.
        residual_scale: scalar.
        activation: a name from `ACTIVATIONS`, or a function of an array.
        out_scale: scalar that y is multiplied by before the cast.
        out_dtype: type of the result; `preferred_element_type` if None.
        return_amax: also return the largest |y|, before out_scale: what delayed scaling needs.

    Returns:
        The result, or (result, amax) with amax a scalar of `preferred_element_type`.

    Raises:
        TypeError: a scale or bias of the wrong shape, or an activation of unknown name.
    """
    wide = jnp.dtype(jnp.float32 if preferred_element_type is None else preferred_element_type)
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
        y = y + _along(bias, wide, y.shape, numbers.out_spec[1], "bias")
    if residual is not None:
        y = y + _scaled(jnp.asarray(residual), wide, residual_scale, "residual_scale")
    if isinstance(activation, str):
        if activation not in ACTIVATIONS:
            raise TypeError(f"there is no activation {activation!r}: expected a function or {', '.join(ACTIVATIONS)}")
        activation = ACTIVATIONS[activation]
    if activation is not None:
        y = activation(y)
    result = y if out_scale is None else y * _scalar(out_scale, wide, "out_scale")
    if out_dtype is not None:
        out_dtype = jnp.dtype(out_dtype)
        result = saturating_cast(result, out_dtype) if out_dtype in FP8_DTYPES else result.astype(out_dtype)
    return (result, jnp.max(jnp.abs(y))) if return_amax else result


def _scaled(x: jax.Array, wide: Any, scale: ArrayLike | None, name: str, channel: int | None = None) -> jax.Array:
    """convert(x) * scale in the wide type; `channel` is the dimension along which a vector of scales may run."""
    x = x.astype(wide)
    if scale is None:
        return x
    if channel is not None and jnp.ndim(scale) == 1:
        return x * _along(scale, wide, x.shape, channel, name)
    return x * _scalar(scale, wide, name)


def _scalar(value: ArrayLike, wide: Any, name: str) -> jax.Array:
    if jnp.size(value) != 1:
        raise TypeError(f"{name} must be one number for the whole tensor, not an array of shape {jnp.shape(value)}")
    return jnp.asarray(value).astype(wide).reshape(())


def _along(value: ArrayLike, wide: Any, shape: Sequence[int], dimension: int, name: str) -> jax.Array:
    """A vector broadcast along one dimension of `shape`."""
    if jnp.shape(value) != (shape[dimension],):
        raise TypeError(
            f"{name} must have shape [{shape[dimension]}], one for each output channel, not {jnp.shape(value)}"
        )
    return lax.broadcast_in_dim(jnp.asarray(value).astype(wide), tuple(shape), (dimension,))
