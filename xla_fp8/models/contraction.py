"""A convolution or a dot, as a layer calls it: what is static of the call, and the ways to compute it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from xla_fp8.backends.depthwise.convolution import Convolution
from xla_fp8.backends.depthwise.primitive import convolve
from xla_fp8.models.errors import ModelError
from xla_fp8.models.recipe import Recipe
from xla_fp8.quantization.delayed import DelayedScaling
from xla_fp8.quantization.training import fp8_conv, fp8_dot

Kind = Literal["conv", "dot"]
Shape = tuple[int, ...]


class Operand(Protocol):
    """An array, or its type."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype[Any]: ...


@dataclasses.dataclass(frozen=True)
class Size:
    """How much arithmetic a contraction is.

    Attributes:
        flops: a multiply and an add are two.
        inputs, outputs: channels that are summed over (of one group; without the window's positions), and made.
        activations: elements of the input and of the result.
        weights: elements of the weight.
        groups: of a grouped convolution.
        depthwise: of a depthwise convolution that this project's kernel takes the type of its images, else "".
    """

    flops: int
    inputs: int
    outputs: int
    activations: int
    weights: int
    groups: int = 1
    depthwise: str = ""

    def of_examples(self, count: int) -> Size:
        """That of so many calls with one weight."""
        return dataclasses.replace(self, flops=self.flops * count, activations=self.activations * count)

    @property
    def intensity(self) -> float:
        """Operations for each element of input, weight and result."""
        return self.flops / max(1, self.activations + self.weights)


@dataclasses.dataclass(frozen=True)
class Contraction:
    """A function of an input (lhs) and a weight (rhs) that is linear in each.

    Attributes:
        arguments: what it is, in the words of `jax.lax`.
        preferred_element_type: of the result, as `jax.lax` has it.
        precision, out_sharding: as `jax.lax` has them; of the wide contraction alone.
    """

    kind: ClassVar[Kind]
    arguments: Mapping[str, Any]
    preferred_element_type: DTypeLike | None = None
    precision: Any = None
    out_sharding: Any = None

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """As JAX computes it."""
        raise NotImplementedError

    def wide_by_kernel(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """The same, on a Hopper GPU by a kernel of this project where one takes it."""
        return self.wide(lhs, rhs)

    def trained(
        self, lhs: jax.Array, rhs: jax.Array, recipe: Recipe, scaling: DelayedScaling | None, across_vmap: bool
    ) -> jax.Array:
        """As fp8_conv or fp8_dot computes it; `across_vmap` as they have it."""
        raise NotImplementedError

    def size(self, lhs: Operand, rhs: Operand) -> Size:
        """Of operands of these shapes and types."""
        raise NotImplementedError

    def summed(self, rhs: Shape) -> Shape:
        """Dimensions of the weight that are summed over: the others are output channels."""
        raise NotImplementedError

    def along_output(self, factors: jax.Array, ndim: int) -> jax.Array:
        """One number for each output channel, of the weight's rank with 1 where it sums, shaped to scale the result.

        Args:
            ndim: dimensions of the result.
        """
        raise NotImplementedError

    def _wide_options(self) -> dict[str, Any]:
        options = {"preferred_element_type": self.preferred_element_type, "precision": self.precision}
        return options if self.out_sharding is None else options | {"out_sharding": self.out_sharding}

    def _trained_options(self, recipe: Recipe, scaling: DelayedScaling | None, across_vmap: bool) -> dict[str, Any]:
        if self.out_sharding is not None:
            raise ModelError(
                f"out_sharding={self.out_sharding} of a {self.kind} in FP8: reshard the layer's output instead"
            )
        return {
            "preferred_element_type": self.preferred_element_type,
            "scaling": scaling,
            "dtype": recipe.dtype,
            "gradient_dtype": recipe.gradient_dtype,
            "power_of_two": recipe.power_of_two,
            "filter_gradient": recipe.filter_gradient,
            "scale_across_vmap": across_vmap,
        }

    def result_dtype(self, lhs: Operand) -> np.dtype[Any]:
        """The result's type where the weight is FP8 already."""
        return jnp.dtype(self.preferred_element_type or lhs.dtype)


def abstract(shape: Shape, dtype: DTypeLike, *, weak_type: bool = False) -> Any:
    """An array's shape and type without the array."""
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)  # type: ignore[no-untyped-call]


class Conv(Contraction):
    """`jax.lax.conv_general_dilated`."""

    kind = "conv"

    @staticmethod
    def of(
        lhs: Any,
        rhs: Any,
        window_strides: Sequence[int],
        padding: Any,
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: Any = None,
    ) -> Conv:
        """From the arguments of `jax.lax.conv_general_dilated`."""
        arguments = {
            "window_strides": tuple(window_strides),
            "padding": padding if isinstance(padding, str) else tuple((low, high) for low, high in padding),
            "lhs_dilation": lhs_dilation and tuple(lhs_dilation),
            "rhs_dilation": rhs_dilation and tuple(rhs_dilation),
            "dimension_numbers": lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers),
            "feature_group_count": feature_group_count,
            "batch_group_count": batch_group_count,
        }
        return Conv(arguments, preferred_element_type, precision, out_sharding)

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(lhs, rhs, **self.arguments, **self._wide_options())

    def wide_by_kernel(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        depthwise = self._depthwise(lhs, rhs)
        return self.wide(lhs, rhs) if depthwise is None else convolve(depthwise, lhs, rhs)

    def _depthwise(self, lhs: Operand, rhs: Operand) -> Convolution | None:
        """What the kernel of depthwise convolutions is asked for; None where it does not take this one."""
        if lhs.dtype != rhs.dtype or self.result_dtype(lhs) != lhs.dtype or self.out_sharding is not None:
            return None
        found = Convolution.of(lhs, rhs, **self.arguments, precision=self.precision)
        return found if found is not None and found.supported.ok else None

    def trained(
        self, lhs: jax.Array, rhs: jax.Array, recipe: Recipe, scaling: DelayedScaling | None, across_vmap: bool
    ) -> jax.Array:
        return fp8_conv(lhs, rhs, **self.arguments, **self._trained_options(recipe, scaling, across_vmap))

    def size(self, lhs: Operand, rhs: Operand) -> Size:
        numbers = self.arguments["dimension_numbers"]
        groups = self.arguments["feature_group_count"] * self.arguments["batch_group_count"]
        operands = [abstract(operand.shape, jnp.float32) for operand in (lhs, rhs)]
        result = jax.eval_shape(dataclasses.replace(self, preferred_element_type=None).wide, *operands)
        outputs, inputs, *window = (rhs.shape[dimension] for dimension in numbers.rhs_spec)
        flops = 2 * math.prod(result.shape) * inputs * math.prod(window)
        activations = math.prod(lhs.shape) + math.prod(result.shape)
        depthwise = lhs.dtype.name if self._depthwise(lhs, rhs) is not None else ""
        return Size(flops, inputs, outputs, activations, math.prod(rhs.shape), groups, depthwise)

    def summed(self, rhs: Shape) -> Shape:
        return tuple(self.arguments["dimension_numbers"].rhs_spec[1:])

    def along_output(self, factors: jax.Array, ndim: int) -> jax.Array:
        channel = self.arguments["dimension_numbers"].out_spec[1]
        return factors.reshape([-1 if dimension == channel else 1 for dimension in range(ndim)])


class Dot(Contraction):
    """`jax.lax.dot_general`."""

    kind = "dot"

    @staticmethod
    def of(
        lhs: Any,
        rhs: Any,
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: Any = None,
    ) -> Dot:
        """From the arguments of `jax.lax.dot_general`."""
        contracted, batch = dimension_numbers
        numbers = tuple(tuple(tuple(dimensions) for dimensions in pair) for pair in (contracted, batch))
        return Dot({"dimension_numbers": numbers}, preferred_element_type, precision, out_sharding)

    def wide(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return lax.dot_general(lhs, rhs, **self.arguments, **self._wide_options())

    def trained(
        self, lhs: jax.Array, rhs: jax.Array, recipe: Recipe, scaling: DelayedScaling | None, across_vmap: bool
    ) -> jax.Array:
        return fp8_dot(lhs, rhs, **self.arguments, **self._trained_options(recipe, scaling, across_vmap))

    def size(self, lhs: Operand, rhs: Operand) -> Size:
        (left, right), (_, right_batch) = self.arguments["dimension_numbers"]
        inputs = math.prod(lhs.shape[dimension] for dimension in left)
        elements, weights = math.prod(lhs.shape), math.prod(rhs.shape)
        summed = (*right, *right_batch)
        outputs = math.prod(size for dimension, size in enumerate(rhs.shape) if dimension not in summed)
        result = elements // max(1, inputs) * outputs
        return Size(2 * elements * outputs, inputs, outputs, elements + result, weights)

    def summed(self, rhs: Shape) -> Shape:
        return tuple(self.arguments["dimension_numbers"][0][1])

    def along_output(self, factors: jax.Array, ndim: int) -> jax.Array:
        if factors.ndim == 0:  # of a weight without output channels
            return factors
        # The result's dimensions: batch, the free ones of lhs, those of rhs.
        (_, contracted), (_, batch) = self.arguments["dimension_numbers"]
        free = [d for d in range(factors.ndim) if d not in (*contracted, *batch)]
        ordered = factors.transpose((*batch, *free, *contracted))
        of_batch, of_free = ordered.shape[: len(batch)], ordered.shape[len(batch) : len(batch) + len(free)]
        return ordered.reshape((*of_batch, *(1,) * (ndim - len(batch) - len(free)), *of_free))
