"""How a contraction of a model is computed: wide, in FP8 to train, in FP8 with fixed scales, or watched.

An operator is immutable and hashable and holds no arrays: what it needs of those (the state) is kept by the framework
in its own way, and handed to it at each call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8 import _jax_compat
from xla_fp8.models.contraction import Contraction, Size
from xla_fp8.models.errors import ModelError
from xla_fp8.models.recipe import Recipe
from xla_fp8.quantization.delayed import DelayedScaling
from xla_fp8.quantization.float8 import Float8
from xla_fp8.quantization.numerics import WIDE_DTYPES, amax_of
from xla_fp8.quantization.quantize import quantize


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StaticScales:
    """The fixed scales of a layer. A pytree.

    Attributes:
        lhs: float32[], of the input.
        rhs: float32, of the weight: [], or of the weight's rank with 1 in the dimensions that are summed over.
    """

    lhs: jax.Array
    rhs: jax.Array


State = DelayedScaling | StaticScales | None


class Operator(Protocol):
    """Computes a contraction of a model."""

    @property
    def name(self) -> str:
        """The layer's, as in reports and profiles."""
        ...

    def initial_state(self) -> State:
        """What the framework keeps for it before the first step."""
        ...

    def __call__(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, state: State = None) -> jax.Array: ...


@dataclasses.dataclass(frozen=True)
class Wide:
    """In the types that it has.

    Attributes:
        reason: why it stays so.
        by_kernel: a depthwise convolution is left to this project's kernel where that takes it. Else JAX computes it,
            as if the layer had no operator.
    """

    name: str
    reason: str
    by_kernel: bool = False

    def initial_state(self) -> State:
        return None

    def __call__(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, state: State = None) -> jax.Array:
        return contraction.wide_by_kernel(lhs, rhs) if self.by_kernel else contraction.wide(lhs, rhs)


@dataclasses.dataclass(frozen=True)
class Train:
    """In FP8 with derivatives, its scales dynamic or delayed; calls that are too small for the recipe stay wide.

    Attributes:
        across_vmap: under jax.vmap one scale for all examples.
        by_hand: whether every call is in FP8, small ones too.
    """

    name: str
    recipe: Recipe
    across_vmap: bool = False
    by_hand: bool = False

    def initial_state(self) -> State:
        return self.recipe.initial_scaling() if self.recipe.scaling == "delayed" else None

    def __call__(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, state: State = None) -> jax.Array:
        if not self.by_hand and why_wide(self.recipe, contraction, lhs, rhs):
            return contraction.wide_by_kernel(lhs, rhs) if self.recipe.depthwise else contraction.wide(lhs, rhs)
        if self.recipe.scaling == "delayed" and not isinstance(state, DelayedScaling):
            raise ModelError(
                f"{self.name}: delayed scaling needs the layer's state; convert the model with xla_fp8.convert, which "
                "keeps it (of a function, what its init made for arguments of these sizes), or use dynamic scales"
            )
        scaling = state if isinstance(state, DelayedScaling) else None
        with jax.named_scope(f"fp8:{self.name}"):
            if self.recipe.weights == "tensor":
                return contraction.trained(lhs, rhs, self.recipe, scaling, self.across_vmap)
            factors = channel_factors(contraction, rhs)
            y = contraction.trained(lhs, rhs / factors, self.recipe, scaling, self.across_vmap)
            return y * contraction.along_output(factors, y.ndim)


@dataclasses.dataclass(frozen=True)
class Infer:
    """In FP8 with fixed scales; the weight is FP8 already. It has no derivative."""

    name: str
    recipe: Recipe

    def initial_state(self) -> State:
        return None

    def __call__(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, state: State = None) -> jax.Array:
        if not isinstance(state, StaticScales):
            raise ModelError(f"{self.name}: fixed scales are missing; make the model with xla_fp8.calibrate")
        with jax.named_scope(f"fp8:{self.name}"):
            left = quantize(lhs, self.recipe.dtype, scale=state.lhs)
            wide = dataclasses.replace(contraction, preferred_element_type=None)
            result = contraction.result_dtype(lhs)
            # A plain function's weight is an argument like any other.
            is_wide = rhs.dtype in WIDE_DTYPES
            right = _with_scales(rhs, self.recipe, state.rhs) if is_wide else Float8(rhs, state.rhs)
            if right.scale.size == 1:
                return wide.wide(left.dequantize(), right.dequantize()).astype(result)
            y = wide.wide(left.dequantize(), right.unscaled())
            return (y * contraction.along_output(right.scale, y.ndim)).astype(result)


@dataclasses.dataclass(frozen=True)
class Watch:
    """Hands a contraction and its operands to a function, which returns the result.

    Attributes:
        function: (name, contraction, lhs, rhs) → result. It may be called while JAX traces.
    """

    name: str
    function: Callable[[str, Contraction, jax.Array, jax.Array], jax.Array]

    def initial_state(self) -> State:
        return None

    def __call__(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, state: State = None) -> jax.Array:
        return self.function(self.name, contraction, lhs, rhs)


def leaves_alone(operator: Operator) -> bool:
    """Whether a layer is computed as if it had no operator."""
    return isinstance(operator, Wide) and not operator.by_kernel


def why_wide(recipe: Recipe, contraction: Contraction, lhs: jax.Array, rhs: jax.Array) -> str:
    """Why a call gains nothing in FP8 by the recipe's rules; empty where it may gain."""
    for operand in (lhs, rhs):
        if operand.dtype not in WIDE_DTYPES:
            return f"{operand.dtype.name} operands; {', '.join(d.name for d in WIDE_DTYPES)} are quantized"
    return why_small(recipe, call_size(contraction, lhs, rhs))


def call_size(contraction: Contraction, lhs: jax.Array, rhs: jax.Array) -> Size:
    """The arithmetic of a call, that of all examples where it stands under jax.vmap."""
    return contraction.size(lhs, rhs).of_examples(_jax_compat.vmapped_examples(lhs))


def why_small(recipe: Recipe, size: Size) -> str:
    """Why arithmetic of this size gains nothing in FP8 by the recipe's rules; empty where it may gain."""
    multiple = recipe.channel_multiple
    if size.groups != 1:
        return f"{size.groups} groups: each is a convolution of its own, too small for FP8"
    if size.inputs % multiple or size.outputs % multiple:
        return f"{size.inputs} → {size.outputs} channels: not both a multiple of {multiple}"
    if size.flops < recipe.least_flops:
        return f"{size.flops / 1e9:.3g} GFLOP, less than {recipe.least_flops / 1e9:.3g}"
    if size.intensity < recipe.least_intensity:
        return (
            f"{size.intensity:.3g} operations for each element of input, weight and result, less than "
            f"{recipe.least_intensity:.3g}: to quantize them takes longer than FP8 gains"
        )
    return ""


def channel_factors(contraction: Contraction, rhs: jax.Array) -> jax.Array:
    """For each output channel of a weight the power of two by which it is smaller than the largest channel.

    The weight divided by it has channels that are alike, within a factor of two, so that one scale serves them all; and
    the result times it is what it was. Powers of two round nothing. And the gradient, which meets them first, is
    quantized with them in it: in front of the backward contraction, which sums over these channels, a scale for each
    could stand nowhere.
    """
    of_channel = amax_of(lax.stop_gradient(rhs), _output_channels(contraction, rhs))
    ratio = of_channel / jnp.max(of_channel)
    # Zeros, NaN and channels that are nearly nothing keep their size.
    least = max(2.0**-60, float(jnp.finfo(rhs.dtype).tiny))  # type: ignore[no-untyped-call]
    usable = (ratio >= np.float32(least)) & jnp.isfinite(ratio)
    bits = lax.bitcast_convert_type(jnp.where(usable, ratio, 1), jnp.uint32) & np.uint32(_EXPONENT_BITS)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(rhs.dtype)


_EXPONENT_BITS = 0x7F800000


def quantized_weight(rhs: jax.Array, contraction: Contraction, recipe: Recipe) -> Float8:
    """A weight in FP8 with the scales of the recipe, fixed."""
    axis = None if recipe.weights == "tensor" else _output_channels(contraction, rhs)
    quantized: Float8 = quantize(rhs, recipe.dtype, axis=axis, power_of_two=recipe.power_of_two)
    return quantized


def _output_channels(contraction: Contraction, rhs: jax.Array) -> tuple[int, ...]:
    """Dimensions of a weight that are not summed over."""
    summed = contraction.summed(rhs.shape)
    return tuple(d for d in range(rhs.ndim) if d not in summed)


def _with_scales(rhs: jax.Array, recipe: Recipe, scale: jax.Array) -> Float8:
    axis = tuple(d for d, size in enumerate(scale.shape) if size == rhs.shape[d] and size > 1) or None
    quantized: Float8 = quantize(rhs, recipe.dtype, scale=scale, axis=axis)
    return quantized
