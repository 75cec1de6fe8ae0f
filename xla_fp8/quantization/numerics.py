"""From the largest absolute value of a tensor (amax) to its scale: the arithmetic that every kernel repeats bit by bit.

    multiplier = largest / max(amax, eps)     what x is multiplied by before the saturating cast
    scale      = amax * (1 / largest)         so that x ≈ data * scale

All in f32, where `largest` is the largest value of the FP8 type. `scale` is a product with the constant
f32(1 / largest) and no quotient, because XLA makes that product of a quotient by a constant (its algebraic simplifier
does), which is another number in every second case.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from xla_fp8.functions import FP8_DTYPES, saturating_cast
from xla_fp8.quantization.errors import QuantizationError

WIDE_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.float32, jnp.bfloat16, jnp.float16))
"""What can be quantized."""

_SMALLEST_NORMAL = 2.0**-126
_LARGEST_F32 = float(np.finfo(np.float32).max)
_EXPONENT_BITS = 0x7F800000


def fp8_dtype(dtype: DTypeLike) -> np.dtype[np.generic]:
    """`dtype` as a NumPy dtype. Raises QuantizationError where it is not float8_e4m3fn or float8_e5m2."""
    found = jnp.dtype(dtype)
    if found not in FP8_DTYPES:
        raise QuantizationError(f"quantize to {' or '.join(d.name for d in FP8_DTYPES)}, not to {found.name}")
    return found


@dataclasses.dataclass(frozen=True)
class ScaleRule:
    """How an amax becomes a scale. Hashable; its methods are plain arithmetic on f32 arrays, fit for kernels.

    Attributes:
        dtype: float8_e4m3fn or float8_e5m2.
        power_of_two: round the multiplier down to a power of two, so that scaling rounds nothing.
        eps: the smallest amax that a scale is made of; a smaller one counts as `eps`. None means `largest` * 2^-126,
            about 5e-36 (e4m3fn) or 7e-34 (e5m2): with less, the multiplier would overflow or the scale be subnormal.
    """

    dtype: np.dtype[np.generic]
    power_of_two: bool = False
    eps: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", fp8_dtype(self.dtype))
        if self.eps is None:
            return
        object.__setattr__(self, "eps", float(self.eps))  # an array would make the rule unhashable
        if not self._least_amax <= self.eps <= _LARGEST_F32:
            raise QuantizationError(
                f"eps={self.eps:g}: expected a number from {self._least_amax:.3g}, below which the multiplier "
                f"{self.largest:g} / eps would overflow f32, to {_LARGEST_F32:.3g}"
            )

    @functools.cached_property
    def largest(self) -> float:
        """The largest value of the FP8 type: 448 (e4m3fn) or 57344 (e5m2)."""
        return float(jnp.finfo(self.dtype).max)  # type: ignore[no-untyped-call]

    @property
    def _least_amax(self) -> float:
        return self.largest * _SMALLEST_NORMAL

    keeps_nan: ClassVar[bool] = True
    """The multiplier and the scale of an amax that is NaN are NaN."""

    def of_amax(self, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(multiplier, scale) of an f32 amax of any shape, element by element.

        Zero gives (1, 1), infinity (0, inf), NaN (NaN, NaN). The multiplier is at most 2^126 and both are normal
        numbers for every other amax.
        """
        clamped = jnp.maximum(amax, np.float32(self._least_amax if self.eps is None else self.eps))
        multiplier = np.float32(self.largest) / clamped
        if self.power_of_two:
            bits = lax.bitcast_convert_type(multiplier, jnp.uint32) & np.uint32(_EXPONENT_BITS)
            # The exponent bits alone make an infinity of a NaN.
            power = lax.bitcast_convert_type(bits, jnp.float32)
            multiplier = lax.select(jnp.isnan(multiplier), multiplier, power)
            scale = np.float32(1) / multiplier  # exact
        else:
            scale = clamped * np.float32(1 / self.largest)
        nothing, one = amax == 0, jnp.ones_like(amax)
        return lax.select(nothing, one, multiplier), lax.select(nothing, one, scale)

    def of_scale(self, scale: jax.Array) -> jax.Array:
        """The multiplier of a scale that is given: 1 / scale."""
        return np.float32(1) / scale

    def scaled(self, x: jax.Array, multiplier: jax.Array) -> jax.Array:
        """What is cast, of x and the multiplier in f32."""
        return x * multiplier

    def cast(self, x: jax.Array, multiplier: jax.Array) -> jax.Array:
        """x * multiplier in f32, rounded to FP8 with saturation. NaN stays NaN; infinity becomes the largest value."""
        return saturating_cast(self.scaled(x.astype(jnp.float32), multiplier), self.dtype)


def with_margin(amax: jax.Array, margin: float) -> jax.Array:
    """2^margin times an f32 amax, and at most what f32 holds: an infinite scale would make NaN of every tensor."""
    return jnp.minimum(amax * np.float32(2.0**margin), np.float32(_LARGEST_F32))


def amax_of(x: jax.Array, kept: tuple[int, ...] = ()) -> jax.Array:
    """The largest |x| as f32: of the whole tensor, shape [], or over all dimensions but `kept`, which stay, as ones.

    NaN if there is one; 0 where there is nothing.
    """
    reduced = tuple(d for d in range(x.ndim) if d not in kept)
    shape = tuple(x.shape[d] if d in kept else 1 for d in range(x.ndim)) if kept else ()
    if math.prod(x.shape[d] for d in reduced) == 0:  # the largest of nothing
        return jnp.zeros(shape, jnp.float32)
    return jnp.max(jnp.abs(x), axis=reduced, keepdims=bool(kept)).astype(jnp.float32)
