"""A depthwise convolution as JAX programs write it, in any order of dimensions: as XLA computes it, and by kernels.

Between input x, filter w and output y stands one sum of products, sum y * x * w. Each of the three, computed from the
other two, is linear in both; and what differentiation asks for is again one of the three::

    output = of(input, filter)        the convolution
    input  = of(filter, output)       the input's gradient, output being a cotangent
    filter = of(input, output)        the filter's
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8.backends.depthwise.problem import Problem, supports
from xla_fp8.backends.protocol import No
from xla_fp8.target import Verdict

Part = Literal["output", "input", "filter"]

OPERANDS: MappingProxyType[Part, tuple[Part, Part]] = MappingProxyType(
    {"output": ("input", "filter"), "input": ("filter", "output"), "filter": ("input", "output")}
)
"""What each is computed from."""


@dataclasses.dataclass(frozen=True)
class Convolution:
    """What is static of a depthwise convolution of images. Hashable.

    Attributes:
        input, filter: shapes, of four dimensions.
        dtype: of input and output.
        filter_dtype: of the filter and its gradient; `dtype`, or a wider type in which XLA then computes.
        window_strides, padding: down and across; padding as (low, high).
        numbers: where batch, channels, rows and columns are.
        precision: as `jax.lax.conv_general_dilated` has it; kernels compute in float32 whatever it is.
    """

    input: tuple[int, ...]
    filter: tuple[int, ...]
    dtype: np.dtype[Any]
    filter_dtype: np.dtype[Any]
    window_strides: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    numbers: lax.ConvDimensionNumbers
    precision: Any = None

    @staticmethod
    def of(
        lhs: Any,
        rhs: Any,
        window_strides: Sequence[int],
        padding: str | Sequence[tuple[int, int]],
        lhs_dilation: Sequence[int] | None = None,
        rhs_dilation: Sequence[int] | None = None,
        dimension_numbers: Any = None,
        feature_group_count: int = 1,
        batch_group_count: int = 1,
        precision: Any = None,
    ) -> Convolution | None:
        """From the arguments of `jax.lax.conv_general_dilated`; None where it is not depthwise, or not of images.

        Depthwise: each channel is a group, with one filter. lhs and rhs are arrays or types.
        """
        if len(lhs.shape) != 4 or len(rhs.shape) != 4:
            return None
        numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
        channels = lhs.shape[numbers.lhs_spec[1]]
        outputs, inputs = (rhs.shape[dimension] for dimension in numbers.rhs_spec[:2])
        if not channels == outputs == feature_group_count or inputs != 1 or batch_group_count != 1:
            return None
        if any(factor != 1 for factor in (*(lhs_dilation or ()), *(rhs_dilation or ()))):
            return None
        strides = tuple(map(int, window_strides))
        (top, bottom), (left, right) = _padding(lhs.shape, rhs.shape, numbers, strides, padding)
        return Convolution(
            tuple(lhs.shape),
            tuple(rhs.shape),
            jnp.dtype(lhs.dtype),
            jnp.dtype(rhs.dtype),
            (strides[0], strides[1]),
            ((top, bottom), (left, right)),
            numbers,
            precision,
        )

    @functools.cached_property
    def problem(self) -> Problem:
        """The same as kernels have it, on images [N,H,W,C] and filters [R,S,C]."""
        n, c, h, w = (self.input[dimension] for dimension in self.numbers.lhs_spec)
        r, s = (self.filter[dimension] for dimension in self.numbers.rhs_spec[2:])
        return Problem(n, h, w, c, (r, s), self.window_strides, self.padding, self.dtype)

    @functools.cached_property
    def supported(self) -> Verdict:
        """`Yes` where kernels on a Hopper GPU take it, or `No`."""
        if not all(isinstance(size, int) for size in (*self.input, *self.filter)):  # of jax.export
            return No("sizes that are not known")
        if self.filter_dtype not in (self.dtype, np.float32):
            return No(f"a {self.filter_dtype.name} filter of {self.dtype.name} images")
        is_last = self.numbers.lhs_spec[1] == self.numbers.out_spec[1] == 3
        if not is_last and self.dtype.itemsize > 2:
            # Of 16 bits XLA's own convolutions have channels last too, and it stores what is around them like that.
            return No(f"{self.dtype.name} images whose channels are not their last dimension")
        return supports(self.problem)

    def shape(self, part: Part) -> tuple[int, ...]:
        if part != "output":
            return self.input if part == "input" else self.filter
        n, p, q, c = self.problem.output_shape
        found = dict(zip(self.numbers.out_spec, (n, c, p, q), strict=True))
        return tuple(found[dimension] for dimension in range(4))

    def dtype_of(self, part: Part) -> np.dtype[Any]:
        return self.filter_dtype if part == "filter" else self.dtype

    def batch_dimension(self, part: Part) -> int:
        """Of input or output."""
        spec = self.numbers.lhs_spec if part == "input" else self.numbers.out_spec
        return int(spec[0])

    def with_batch(self, times: int) -> Convolution:
        """Of so many times as many images."""
        shape = list(self.input)
        shape[self.batch_dimension("input")] *= times
        return dataclasses.replace(self, input=tuple(shape))

    def by_lax(self, part: Part, *operands: jax.Array) -> jax.Array:
        """One of the three as JAX computes it, on any device."""
        if part == "output":
            return self._convolved(*operands)
        if part == "input":
            w, cotangent = operands
            return self._transposed(part, lambda x: self._convolved(x, w), cotangent)
        x, cotangent = operands
        return self._transposed(part, lambda w: self._convolved(x, w), cotangent)

    def by_kernel(self, part: Part) -> Callable[..., jax.Array] | None:
        """One of the three as a function of its operands, by a kernel; None where no kernel has it."""
        problem = self.problem
        if not self.supported.ok:
            return None
        # Pallas is imported where a kernel is meant, and not with all of xla_fp8.
        if part == "filter":
            from xla_fp8.backends.depthwise.filter_gradient import filter_gradient

            return lambda x, y: self._filter_as_given(
                filter_gradient(problem, self._images(x, "input"), self._images(y))
            )
        from xla_fp8.backends.depthwise.forward import forward

        if part == "output":
            return lambda x, w: self._as_given(forward(problem, self._images(x, "input"), self._window(w)), "output")
        backward = problem.input_gradient
        if backward is None or not supports(backward).ok:
            return None
        return lambda w, y: self._as_given(forward(backward, self._images(y), self._window(w)[::-1, ::-1]), "input")

    def _convolved(self, x: jax.Array, w: jax.Array) -> jax.Array:
        wide = np.promote_types(self.dtype, self.filter_dtype)  # jnp's refuses where promotion is strict
        y = lax.conv_general_dilated(
            x.astype(wide),
            w.astype(wide),
            self.window_strides,
            self.padding,
            dimension_numbers=self.numbers,
            feature_group_count=self.problem.channels,
            precision=self.precision,
        )
        return y.astype(self.dtype)

    def _transposed(self, part: Part, function: Callable[[jax.Array], jax.Array], cotangent: jax.Array) -> jax.Array:
        # Not a bare ShapeDtypeStruct: inside shard_map it matters over which mesh axes a tensor varies.
        shape, dtype = self.shape(part), self.dtype_of(part)
        aval = jax.eval_shape(lambda y: jnp.broadcast_to(jnp.sum(y).astype(dtype), shape), cotangent)
        (result,) = jax.linear_transpose(function, aval)(cotangent)
        return jnp.asarray(result)

    # Between the program's order of dimensions and the kernels'

    def _order(self, part: Part) -> tuple[int, ...]:
        """Where batch, rows, columns and channels are."""
        batch, channels, rows, columns = self.numbers.lhs_spec if part == "input" else self.numbers.out_spec
        return batch, rows, columns, channels

    def _images(self, x: jax.Array, part: Part = "output") -> jax.Array:
        return x.transpose(self._order(part))

    def _as_given(self, images: jax.Array, part: Part) -> jax.Array:
        return images.transpose(np.argsort(self._order(part)))

    def _window(self, w: jax.Array) -> jax.Array:
        outputs, inputs, rows, columns = self.numbers.rhs_spec
        return w.transpose((rows, columns, inputs, outputs)).reshape(self.problem.filter_shape)

    def _filter_as_given(self, window: jax.Array) -> jax.Array:
        outputs, inputs, rows, columns = self.numbers.rhs_spec
        back = np.argsort((rows, columns, inputs, outputs))
        return window[:, :, None].transpose(back).astype(self.filter_dtype)


def _padding(
    image: Sequence[int],
    filter: Sequence[int],
    numbers: lax.ConvDimensionNumbers,
    strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
) -> list[tuple[int, int]]:
    """(low, high) down and across."""
    if not isinstance(padding, str):
        return [(int(low), int(high)) for low, high in padding]
    sizes = [image[dimension] for dimension in numbers.lhs_spec[2:]]
    window = [filter[dimension] for dimension in numbers.rhs_spec[2:]]
    pairs: list[tuple[int, int]] = lax.padtype_to_pads(sizes, window, strides, padding)
    return pairs
