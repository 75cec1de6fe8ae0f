"""Python's operators for a class that stands for an array: they compute with the array."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8.functions import FP8_DTYPES
from xla_fp8.quantization.numerics import WIDE_DTYPES

_OTHERS = (jax.Array, np.ndarray, np.generic, int, float, complex)

Binary = Callable[[Any, Any], Any]


def _binary(function: Binary) -> Binary:
    """The operator's method: function(array, other)."""

    def method(self: Operators, other: Any) -> Any:
        pair = self._pair(other)
        return NotImplemented if pair is None else function(*pair)

    return method


def _reflected(function: Binary) -> Binary:
    """The method of the operand on the right: function(other, array)."""

    def method(self: Operators, other: Any) -> Any:
        pair = self._pair(other)
        return NotImplemented if pair is None else function(*reversed(pair))

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda self: function(self.dequantize(jnp.float32))


class Operators:
    """Arithmetic and comparisons on `dequantize(dtype)`: in the other operand's type where that is float32, bfloat16 or
    float16, and else in float32. The results are jax.Arrays."""

    def dequantize(self, dtype: Any) -> jax.Array:
        raise NotImplementedError

    def _pair(self, other: Any) -> tuple[Any, Any] | None:
        """Both operands as arrays; None for an operand that is none."""
        if isinstance(other, Operators):
            return self.dequantize(jnp.float32), other.dequantize(jnp.float32)
        if not isinstance(other, _OTHERS):
            return None
        dtype = getattr(other, "dtype", None)
        if dtype in FP8_DTYPES:  # JAX promotes these with no other type
            other = jnp.asarray(other, jnp.float32)
        return self.dequantize(dtype if dtype in WIDE_DTYPES else jnp.float32), other

    __array_ufunc__ = None  # a NumPy array on the left leaves the operator to this class

    __add__, __radd__ = _binary(operator.add), _reflected(operator.add)
    __sub__, __rsub__ = _binary(operator.sub), _reflected(operator.sub)
    __mul__, __rmul__ = _binary(operator.mul), _reflected(operator.mul)
    __truediv__, __rtruediv__ = _binary(operator.truediv), _reflected(operator.truediv)
    __floordiv__, __rfloordiv__ = _binary(operator.floordiv), _reflected(operator.floordiv)
    __mod__, __rmod__ = _binary(operator.mod), _reflected(operator.mod)
    __pow__, __rpow__ = _binary(operator.pow), _reflected(operator.pow)
    __matmul__, __rmatmul__ = _binary(operator.matmul), _reflected(operator.matmul)
    __eq__ = _binary(operator.eq)
    __ne__ = _binary(operator.ne)
    __lt__, __le__ = _binary(operator.lt), _binary(operator.le)
    __gt__, __ge__ = _binary(operator.gt), _binary(operator.ge)
    __neg__, __pos__, __abs__ = _unary(operator.neg), _unary(operator.pos), _unary(operator.abs)

    __hash__ = None  # type: ignore[assignment]  # == is element by element, as for arrays
