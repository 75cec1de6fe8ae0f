"""fake_quantize: quantize and dequantize, straight through for gradients."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from xla_fp8.quantization import scale_shapes
from xla_fp8.quantization.derivatives import straight_through
from xla_fp8.quantization.errors import QuantizationError
from xla_fp8.quantization.quantize import quantize

SATURATED = ("pass", "zero")
_ROUNDING = np.float32(1 + 2.0**-20)
"""largest * scale, rounded, may lie a little below the amax that the scale comes from."""


def fake_quantize(
    x: ArrayLike,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    axis: int | Sequence[int] | None = None,
    power_of_two: bool = False,
    eps: float | None = None,
    axis_name: Hashable | None = None,
    saturated: Literal["pass", "zero"] = "pass",
) -> jax.Array:
    """x rounded to what FP8 can hold, in x's own type: `quantize(x, dtype, ...).dequantize(x.dtype)`.

    The derivative is straight through, as if nothing had been rounded; the scale counts as a constant.

    Args:
        x: float32, bfloat16 or float16.
        dtype, scale, amax, axis, power_of_two, eps, axis_name: as `xla_fp8.quantize` has them.
        saturated: the gradient of values beyond largest * |scale|, of which there are some only where `scale` or `amax`
            is given: "pass" passes it like any other's; "zero" stops it, as the slope of a clamp does.

    Raises:
        QuantizationError: as `xla_fp8.quantize`; an unknown `saturated`.
    """
    if saturated not in SATURATED:
        raise QuantizationError(f"there is no saturated={saturated!r}: expected {' or '.join(SATURATED)}")
    x = jnp.asarray(x)
    constant = lax.stop_gradient(x)
    q = quantize(
        constant,
        dtype,
        scale=scale if scale is None else lax.stop_gradient(scale),
        amax=amax if amax is None else lax.stop_gradient(amax),
        axis=axis,
        power_of_two=power_of_two,
        eps=eps,
        axis_name=axis_name,
    )
    through = x
    if saturated == "zero":
        largest = np.float32(jnp.finfo(q.dtype).max)  # type: ignore[no-untyped-call]
        bound = jnp.abs(scale_shapes.full(q.scale, x.ndim)) * largest * _ROUNDING  # a given scale may be negative
        through = jnp.where(jnp.abs(constant.astype(jnp.float32)) > bound, constant, x)
    return straight_through(q.dequantize(x.dtype), through)
