"""dot_general of FP8 arrays, written as the chain that compilers match.

    convert(lhs8) * scale ─┐
    convert(rhs8) * scale ─┴─ dot ─ * scales by channel ─ * out_scale ─ clamp ─ convert → Float8
                                                       └─ reduce-max(abs) → amax

A scale that is one number stands in front of the dot, where XLA's gemm-rewriter looks for it (MatchFp8Param in
gemm_rewriter.cc); it takes scalars only, so scales by channel stand behind the dot.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from xla_fp8.functions import FP8_DTYPES, saturating_cast
from xla_fp8.quantization.errors import QuantizationError
from xla_fp8.quantization.float8 import Float8

DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


def index_tuples(dimension_numbers: Any) -> DimensionNumbers:
    """Dimension numbers as tuples. JAX takes one number in place of a sequence of one, too."""

    def indices(dimensions: Any) -> tuple[int, ...]:
        try:
            return (operator.index(dimensions),)
        except TypeError:
            return tuple(map(operator.index, dimensions))

    (contracted, batch) = dimension_numbers
    return (indices(contracted[0]), indices(contracted[1])), (indices(batch[0]), indices(batch[1]))


def dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_scale: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    return_amax: bool = False,
) -> Any:
    """`jax.lax.dot_general` of FP8 arrays:

        y = dot(lhs.dequantize(), rhs.dequantize())
        result = saturating_cast(y * out_scale, out_dtype)

    Two Float8 are multiplied as FP8 tensors where the compiler matches the chain. A Float8 and another array are
    multiplied in the array's type; the gradient flows to the array.

    Args:
        lhs, rhs: Float8, or arrays. Of a Float8 in both layouts the copy is read whose contracted dimension is
            the last. It may have a scale for each index of dimensions that are not contracted.
        dimension_numbers, precision: as jax.lax.dot_general has them.
        preferred_element_type: the type of y; float32 if None and both are Float8, else as jax.lax.dot_general.
            Two Float8 are multiplied and scaled in float32 and rounded to it once.
        out_scale: scalar that y is multiplied by before the cast.
        out_dtype: type of the result. For float8_e4m3fn and float8_e5m2 it is a Float8 with the scale 1 / out_scale.
        return_amax: also return the largest |y|, before out_scale: what delayed scaling needs.

    Returns:
        A jax.Array, or a Float8; or (it, amax) with amax a float32 scalar.

    Raises:
        QuantizationError: a scale along a contracted dimension, or an out_scale that is no scalar.
    """
    left, right = isinstance(lhs, Float8), isinstance(rhs, Float8)
    if left and right:
        y = _float8_dot(lhs, rhs, dimension_numbers, precision)
        if preferred_element_type is not None:
            y = y.astype(preferred_element_type)
    else:
        lhs = lhs.dequantize(_wide(rhs)) if left else jnp.asarray(lhs)
        rhs = rhs.dequantize(_wide(lhs)) if right else jnp.asarray(rhs)
        y = lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    result = _cast(y, out_scale, out_dtype)
    if not return_amax:
        return result
    return result, jnp.max(jnp.abs(y)).astype(jnp.float32) if y.size else jnp.float32(0)


def _wide(array: ArrayLike) -> Any:
    """The type in which a Float8 meets `array`."""
    dtype = jnp.asarray(array).dtype
    return dtype if jnp.issubdtype(dtype, jnp.floating) and dtype not in FP8_DTYPES else jnp.dtype(jnp.float32)


def _cast(y: jax.Array, out_scale: ArrayLike | None, out_dtype: DTypeLike | None) -> Any:
    scale = jnp.float32(1)
    if out_scale is not None:
        if jnp.size(out_scale) != 1:
            raise QuantizationError(f"out_scale must be one number, not an array of shape {jnp.shape(out_scale)}")
        scale = jnp.asarray(out_scale, jnp.float32).reshape(())
        if jnp.issubdtype(y.dtype, jnp.inexact) and y.dtype.itemsize > 1:
            y = y * scale.astype(y.dtype)
        else:  # such a type hardly holds a scale: as an integer 0.5 is 0
            scaled = y.astype(jnp.float32) * scale
            y = scaled.astype(y.dtype) if out_dtype is None else scaled
    if out_dtype is None:
        return y
    wanted = jnp.dtype(out_dtype)
    return Float8(saturating_cast(y, wanted), 1 / scale) if wanted in FP8_DTYPES else y.astype(wanted)


def _float8_dot(lhs: Float8, rhs: Float8, dimension_numbers: DimensionNumbers, precision: Any) -> jax.Array:
    """The dot of two Float8, scaled, in f32."""
    # First of all JAX says what is wrong with shapes and numbers, in the terms in which they were given.
    shapes = (jax.ShapeDtypeStruct(q.shape, jnp.float32) for q in (lhs, rhs))  # type: ignore[no-untyped-call]
    jax.eval_shape(functools.partial(lax.dot_general, dimension_numbers=dimension_numbers), *shapes)
    (left_contracted, right_contracted), (left_batch, right_batch) = index_tuples(dimension_numbers)
    left = _operand(lhs, left_contracted, left_batch, "lhs")
    right = _operand(rhs, right_contracted, right_batch, "rhs")
    numbers = ((left.contracted, right.contracted), (left.batch, right.batch))
    y = lax.dot_general(left.wide, right.wide, numbers, precision)
    # The result's dimensions: batch, the free ones of lhs, those of rhs.
    batch, free = len(left.batch), y.ndim - len(left.batch)
    if left.factor is not None:
        y = y * left.factor.reshape(left.factor.shape + (1,) * (y.ndim - left.factor.ndim))
    if right.factor is not None:
        between = (1,) * (free - (right.factor.ndim - batch))
        y = y * right.factor.reshape(right.factor.shape[:batch] + between + right.factor.shape[batch:])
    return y


@dataclasses.dataclass(frozen=True)
class _Operand:
    """An operand of a dot.

    Attributes:
        wide: the dequantized copy that is read, in f32; not yet scaled where there is a factor.
        contracted, batch: dimensions of that copy.
        factor: scales by channel, with the dimensions (batch, free) of the operand; 1 where they do not vary.
    """

    wide: jax.Array
    contracted: tuple[int, ...]
    batch: tuple[int, ...]
    factor: jax.Array | None


def _operand(q: Float8, contracted: Sequence[int], batch: Sequence[int], name: str) -> _Operand:
    scale = q.full_scale()
    factor = None
    of_copy = {d: d for d in range(q.ndim)}
    if q.transposed is not None and _prefers_transposed(q, contracted, batch):
        read = Float8(q.transposed, scale)
        of_copy |= {q.ndim - 1: q.ndim - 2, q.ndim - 2: q.ndim - 1}
    else:
        read = Float8(q.row_major(), scale)
    if scale.ndim > 0:
        for d in contracted:
            if scale.shape[d] != 1:
                raise QuantizationError(
                    f"{name} has a scale for each index of dimension {d}, which is contracted: such scales cannot move "
                    "behind the dot. Quantize with another axis=, or multiply dequantized arrays"
                )
        free = [d for d in range(q.ndim) if d not in batch and d not in contracted]
        factor = scale.transpose([*batch, *free, *contracted]).reshape([scale.shape[d] for d in [*batch, *free]])
    return _Operand(
        read.unscaled() if factor is not None else read.dequantize(),
        tuple(of_copy[d] for d in contracted),
        tuple(of_copy[d] for d in batch),
        factor,
    )


def _prefers_transposed(q: Float8, contracted: Sequence[int], batch: Sequence[int]) -> bool:
    """Whether the transposed copy serves: where it is the only one, or makes the contracted dimension the last.

    Not where both of the last two dimensions are free: their order is that of the result.
    """
    last, other = q.ndim - 1, q.ndim - 2
    if not {last, other} & {*contracted, *batch}:
        return False
    return q.data is None or (tuple(contracted) == (other,) and last not in batch)
