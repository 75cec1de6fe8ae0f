"""fp8_dot and fp8_conv: FP8 contractions that train.

    forward    y  = contract(lhs8, rhs8)          lhs and rhs quantized to e4m3
    backward   dlhs = contract(g8, rhs8)          g quantized to e5m2
               drhs = contract(g8, lhs8), or contract(g, lhs) where that is faster: see `FilterGradient`

The casts are passed straight through. What is kept for the backward pass is lhs8 (or lhs) and rhs8, FP8 being a quarter
of the bytes of f32, also where jax.lax.scan stacks them. Second derivatives are those of the same formulas, with every
cast straight through; their contractions read dequantized tensors and cotangents that are not quantized.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, Protocol, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from xla_fp8.quantization.delayed import DelayedScale, DelayedScaling, observation
from xla_fp8.quantization.derivatives import link, straight_through
from xla_fp8.quantization.dot import DimensionNumbers, index_tuples
from xla_fp8.quantization.errors import QuantizationError
from xla_fp8.quantization.float8 import Float8
from xla_fp8.quantization.numerics import WIDE_DTYPES, amax_of, fp8_dtype
from xla_fp8.quantization.quantize import quantize

FilterGradient = Literal["auto", "wide", "fp8"]
"""What the gradient of rhs is computed from.

"fp8": from the FP8 tensors, as the other two contractions. "wide": from lhs and the gradient of the result as they are.
"auto": wide of convolutions in 16 bits. No FP8 kernel computes filter gradients faster than bf16's (docs/benchmarks.md,
"Gradients"), so FP8 tensors would be converted back first, a pass over each; and in 16 bits lhs is mostly kept anyway,
by the activation that made it. In f32 the convolution would be slower than the conversion.
"""

FILTER_GRADIENT_DTYPES = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
"""What FP8 tensors may be converted to for the gradient of a filter."""


def fp8_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers | None = None,
    *,
    scaling: DelayedScaling | None = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    gradient_dtype: DTypeLike = jnp.float8_e5m2,
    power_of_two: bool = False,
    preferred_element_type: DTypeLike | None = None,
    scale_across_vmap: bool = False,
    filter_gradient: FilterGradient = "auto",
) -> jax.Array:
    """A matmul in FP8 that can be trained through: quantizes lhs and rhs, and backward the gradient of the result.

    Args:
        lhs, rhs: float32, bfloat16 or float16.
        dimension_numbers: as jax.lax.dot_general has them; None contracts the last dimension of lhs with the first of
            rhs, as a dense layer does.
        scaling: the state of delayed scaling, whose "gradient" is what its `update` takes; None scales dynamically,
            each tensor by its own amax. Its FP8 types are taken, and dtype, gradient_dtype, power_of_two are not.
        dtype: FP8 type of lhs and rhs.
        gradient_dtype: FP8 type of the gradient of the result.
        power_of_two: dynamic scales are powers of two.
        preferred_element_type: type of the result; that of lhs and rhs, promoted, if None. The dot is in f32.
        scale_across_vmap: under jax.vmap a dynamic scale is that of all examples together, as of a batch dimension, and
            not one for each: what FP8 convolutions and matmuls take. It is that of the innermost vmap.
        filter_gradient: what the gradient of rhs is computed from, see `FilterGradient`; "auto" is "fp8".

    Raises:
        QuantizationError: an operand or a scaling of another type; a filter_gradient that there is not.
    """
    if dimension_numbers is None:
        dimension_numbers = (((jnp.ndim(lhs) - 1,), (0,)), ((), ()))
    recipe = _recipe(
        _Dot(index_tuples(dimension_numbers)),
        lhs,
        rhs,
        dtype,
        gradient_dtype,
        power_of_two,
        preferred_element_type,
        scale_across_vmap,
        filter_gradient,
        scaling,
    )
    return _contract(recipe, jnp.asarray(lhs), jnp.asarray(rhs), scaling)


def fp8_conv(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    *,
    scaling: DelayedScaling | None = None,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    gradient_dtype: DTypeLike = jnp.float8_e5m2,
    power_of_two: bool = False,
    preferred_element_type: DTypeLike | None = None,
    scale_across_vmap: bool = False,
    filter_gradient: FilterGradient = "auto",
    filter_gradient_dtype: DTypeLike = jnp.bfloat16,
) -> jax.Array:
    """A convolution in FP8 that can be trained through: quantizes input and filter, and backward the gradient.

    Under `xla_fp8.jit` the forward convolution and the input gradient become FP8 graphs. Filter gradients do not.

    Args:
        lhs, rhs: input and filter, float32, bfloat16 or float16.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, feature_group_count,
        batch_group_count: as jax.lax.conv_general_dilated has them.
        scaling, dtype, gradient_dtype, power_of_two, preferred_element_type, scale_across_vmap: as `fp8_dot` has them.
        filter_gradient: what the filter's gradient is computed from, see `FilterGradient`; "auto" is "wide" where
            input and result are bfloat16, or both float16.
        filter_gradient_dtype: FP8 tensors are converted to it for the filter's gradient, which is then scaled in f32.
            bfloat16 holds every FP8 number; the sum is rounded to it. The other one is float32: of unscaled FP8
            numbers sums are too large for float16.

    Raises:
        QuantizationError: an operand or a scaling of another type; a filter_gradient or filter_gradient_dtype that
            there is not.
    """
    if jnp.dtype(filter_gradient_dtype) not in FILTER_GRADIENT_DTYPES:
        raise QuantizationError(
            f"filter_gradient_dtype={jnp.dtype(filter_gradient_dtype).name}: expected "
            f"{' or '.join(d.name for d in FILTER_GRADIENT_DTYPES)}, which hold sums of unscaled FP8 products"
        )
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    conv = _Conv(
        tuple(window_strides),
        padding if isinstance(padding, str) else tuple((low, high) for low, high in padding),
        None if lhs_dilation is None else tuple(lhs_dilation),
        None if rhs_dilation is None else tuple(rhs_dilation),
        numbers,
        feature_group_count,
        batch_group_count,
        jnp.dtype(filter_gradient_dtype),
    )
    recipe = _recipe(
        conv,
        lhs,
        rhs,
        dtype,
        gradient_dtype,
        power_of_two,
        preferred_element_type,
        scale_across_vmap,
        filter_gradient,
        scaling,
    )
    return _contract(recipe, jnp.asarray(lhs), jnp.asarray(rhs), scaling)


# What is contracted


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cast:
    """A tensor that was quantized, with the derivative of the tensor itself.

    Attributes:
        q: the FP8 tensor and its scale.
        through: zeros that differentiate like the tensor; of its shape and type.
    """

    q: Float8
    through: jax.Array

    @property
    def wide(self) -> jax.Array:
        """q.dequantize(), in f32."""
        return straight_through(lax.stop_gradient(self.q).dequantize(), self.through)

    def unscaled(self, dtype: DTypeLike) -> jax.Array:
        """q.unscaled(dtype): the tensor divided by its scale."""
        q = lax.stop_gradient(self.q)
        return straight_through(q.unscaled(dtype), self.through.astype(jnp.float32) / q.scale)


class Contraction(Protocol):
    """A function of lhs and rhs that is linear in each. Of the operand that a gradient is of, shape and type count.

    `prefers_wide`: whether "auto" is "wide", with lhs and result of these types.
    """

    def apply(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array: ...
    def lhs_gradient(self, g: Cast, lhs: jax.Array, rhs: Cast) -> jax.Array: ...
    def rhs_gradient(self, g: Cast, lhs: Cast, rhs: jax.Array) -> jax.Array: ...
    def prefers_wide(self, lhs: np.dtype[Any], result: np.dtype[Any]) -> bool: ...


@dataclasses.dataclass(frozen=True)
class _Dot:
    dimension_numbers: Any

    def apply(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(lhs, rhs, self.dimension_numbers)

    def lhs_gradient(self, g: Cast, lhs: jax.Array, rhs: Cast) -> jax.Array:
        return _transposed(lambda x: self.apply(x, rhs.wide), lhs, g.wide)

    def rhs_gradient(self, g: Cast, lhs: Cast, rhs: jax.Array) -> jax.Array:
        return _transposed(lambda x: self.apply(lhs.wide, x), rhs, g.wide)

    def prefers_wide(self, lhs: np.dtype[Any], result: np.dtype[Any]) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class _Conv:
    window_strides: tuple[int, ...]
    padding: Any
    lhs_dilation: tuple[int, ...] | None
    rhs_dilation: tuple[int, ...] | None
    dimension_numbers: Any
    feature_group_count: int
    batch_group_count: int
    filter_gradient_dtype: np.dtype[np.generic]

    def apply(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(
            lhs,
            rhs,
            self.window_strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.dimension_numbers,
            self.feature_group_count,
            self.batch_group_count,
        )

    def lhs_gradient(self, g: Cast, lhs: jax.Array, rhs: Cast) -> jax.Array:
        return _transposed(lambda x: self.apply(x, rhs.wide), lhs, g.wide)

    def rhs_gradient(self, g: Cast, lhs: Cast, rhs: jax.Array) -> jax.Array:
        wide = self.filter_gradient_dtype
        unscaled = lhs.unscaled(wide)
        gradient = _transposed(lambda x: self.apply(unscaled, x), rhs, g.unscaled(wide), wide)
        # One after the other: the product of both scales may underflow where the gradient does not.
        return gradient.astype(jnp.float32) * lhs.q.scale * g.q.scale

    def prefers_wide(self, lhs: np.dtype[Any], result: np.dtype[Any]) -> bool:
        return lhs == result and lhs.itemsize == 2


def _transposed(function: Any, operand: jax.Array, cotangent: jax.Array, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The transpose of a function that is linear in a tensor of the operand's shape, applied to a cotangent."""
    # Not a bare ShapeDtypeStruct: inside shard_map it matters over which mesh axes a tensor varies.
    aval = jax.eval_shape(lambda x: x.astype(dtype), operand)
    (result,) = jax.linear_transpose(function, aval)(cotangent)
    return jnp.asarray(result)


# The derivative rule


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """What is static of one call. dtype, gradient_dtype, power_of_two and across_vmap are of dynamic scales."""

    contraction: Contraction
    dtype: np.dtype[np.generic]
    gradient_dtype: np.dtype[np.generic]
    power_of_two: bool
    across_vmap: bool
    result: np.dtype[np.generic]
    is_wide: bool


def _recipe(
    contraction: Contraction,
    lhs: jax.Array,
    rhs: jax.Array,
    dtype: DTypeLike,
    gradient_dtype: DTypeLike,
    power_of_two: bool,
    preferred_element_type: DTypeLike | None,
    across_vmap: bool,
    filter_gradient: FilterGradient,
    scaling: DelayedScaling | None,
) -> _Recipe:
    operands: list[tuple[Any, str]] = [(lhs, "lhs"), (rhs, "rhs")]
    for operand, name in operands:
        if isinstance(operand, Float8):
            raise QuantizationError(
                f"{name} is a Float8: fp8_dot and fp8_conv quantize by themselves, and give a Float8 no gradient. Pass "
                "the tensor that it was made of, or multiply with xla_fp8.dot_general"
            )
        if (found := jnp.result_type(operand)) not in WIDE_DTYPES:
            raise QuantizationError(
                f"{name} is {found.name}: fp8_dot and fp8_conv take {', '.join(d.name for d in WIDE_DTYPES)}, and "
                "quantize by themselves"
            )
    if scaling is not None and not isinstance(scaling, DelayedScaling):
        raise QuantizationError(
            f"scaling is a {type(scaling).__name__}: expected a DelayedScaling, as DelayedScaling.create makes it (a "
            "checkpoint gives one back where it is told the structure of what it restores)"
        )
    if filter_gradient not in get_args(FilterGradient):
        expected = ", ".join(map(repr, get_args(FilterGradient)))
        raise QuantizationError(f"filter_gradient={filter_gradient!r}: expected one of {expected}")
    result = jnp.dtype(preferred_element_type or jnp.result_type(lhs, rhs))
    if not jnp.issubdtype(result, jnp.floating):
        raise QuantizationError(f"preferred_element_type={result.name}: the result is of a float type")
    is_wide = filter_gradient == "wide"
    if filter_gradient == "auto":
        is_wide = contraction.prefers_wide(jnp.result_type(lhs), result)
    return _Recipe(contraction, fp8_dtype(dtype), fp8_dtype(gradient_dtype), power_of_two, across_vmap, result, is_wide)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract(recipe: _Recipe, lhs: jax.Array, rhs: jax.Array, scaling: DelayedScaling | None) -> jax.Array:
    return _forward(recipe, lhs, rhs, scaling)[0]


def _forward(recipe: _Recipe, lhs: jax.Array, rhs: jax.Array, scaling: DelayedScaling | None) -> tuple[jax.Array, Any]:
    states = _states(lax.stop_gradient(scaling))
    left, left_amax = _cast(lhs, recipe, recipe.dtype, states[0])
    right, right_amax = _cast(rhs, recipe, recipe.dtype, states[1])
    y = recipe.contraction.apply(left.wide, right.wide).astype(recipe.result)
    return y, (lhs if recipe.is_wide else left, right, states, (left_amax, right_amax))


def _backward(recipe: _Recipe, residuals: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, DelayedScaling | None]:
    left, right, states, amaxes = residuals
    contraction, lhs, rhs = recipe.contraction, left if recipe.is_wide else left.through, right.through
    gradient, amax = _cast(g, recipe, recipe.gradient_dtype, states[2])
    if recipe.is_wide:
        common = jnp.promote_types(lhs.dtype, g.dtype)
        wide = lhs.astype(common)
        rhs_gradient = _transposed(lambda x: contraction.apply(wide, x), rhs, g.astype(common), common)
    else:
        rhs_gradient = contraction.rhs_gradient(gradient, left, rhs)
    observed = None
    if states[2] is not None:
        observed = DelayedScaling(*map(observation, states, (*amaxes, amax)))
    return (
        contraction.lhs_gradient(gradient, lhs, right).astype(lhs.dtype),
        rhs_gradient.astype(rhs.dtype),
        observed,
    )


_contract.defvjp(_forward, _backward)


def _states(scaling: DelayedScaling | None) -> tuple[DelayedScale | None, ...]:
    """Those of lhs, rhs and gradient; None where scales are dynamic."""
    return (None,) * 3 if scaling is None else (scaling.lhs, scaling.rhs, scaling.gradient)


def _cast(
    x: jax.Array, recipe: _Recipe, dtype: np.dtype[np.generic], state: DelayedScale | None
) -> tuple[Cast, jax.Array | None]:
    """x quantized, and with delayed scaling its amax."""
    constant = lax.stop_gradient(x)
    if state is None:
        amax = amax_of_all_examples(constant) if recipe.across_vmap else None
        return Cast(quantize(constant, dtype, amax=amax, power_of_two=recipe.power_of_two), link(x)), None
    q, amax = quantize(constant, state.rule.dtype, scale=state.scale, return_amax=True)
    return Cast(q, link(x)), amax


@jax.custom_batching.custom_vmap
def amax_of_all_examples(x: jax.Array) -> jax.Array:
    """amax_of(x), under jax.vmap of the whole batch. Behind the innermost vmap it is the plain maximum, which
    passes and kernels know."""
    return amax_of(x)


@amax_of_all_examples.def_vmap
def _of_all_examples(axis_size: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return amax_of(x), False
