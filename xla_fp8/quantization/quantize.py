"""quantize: a high-precision tensor → Float8."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from xla_fp8.quantization import algorithms, scale_shapes
from xla_fp8.quantization.algorithms import LAYOUTS, Layout, Request
from xla_fp8.quantization.derivatives import refuse
from xla_fp8.quantization.errors import QuantizationError
from xla_fp8.quantization.float8 import Float8
from xla_fp8.quantization.numerics import WIDE_DTYPES, ScaleRule, amax_of


def quantize(
    x: Any,
    dtype: DTypeLike = jnp.float8_e4m3fn,
    *,
    scale: ArrayLike | None = None,
    amax: ArrayLike | None = None,
    axis: int | Sequence[int] | None = None,
    layout: Layout = "row",
    algorithm: str = "auto",
    power_of_two: bool = False,
    eps: float | None = None,
    axis_name: Hashable | None = None,
    return_amax: bool = False,
) -> Any:
    """Rounds x to FP8 with a scale: x ≈ data * scale, with saturation.

    By default the scale is dynamic: scale = amax / largest, where amax is the largest |x| of the whole tensor and
    `largest` that of the FP8 type. docs/quantization.md has the arithmetic to the last bit, and a table of what becomes
    of zeros, NaN, infinities and subnormal numbers.

    Args:
        x: float32, bfloat16 or float16, of any shape.
        dtype: float8_e4m3fn (largest 448) or float8_e5m2 (57344).
        scale: the scale is given, usually of an earlier step ("delayed scaling"); larger values saturate. With
            return_amax the same pass over x also finds what a later scale needs.
        amax: the amax is given; it may be larger than any |x|.
        axis: dimensions with a scale for each index ("per channel"); negative ones count from the end. The scale
            then has x's rank with 1 in every other dimension; `scale` and `amax` may be given so, or of shape
            [sizes of these dimensions].
        layout: "row" makes `data`; "transposed" the copy with the last two dimensions exchanged; "both" both. FP8
            matmuls on Hopper want the contracted dimension contiguous, forward and backward a different one.
        algorithm: "auto" or a name from `xla_fp8.quantization.algorithms.ALGORITHMS`. All give the same bits.
        power_of_two: round the scale up to a power of two.
        eps: amaxes below this count as this; see `ScaleRule`.
        axis_name: inside shard_map or vmap: mesh axes over which the amax is that of all shards. Outside of them the
            amax of a sharded array is that of the whole array by itself.
        return_amax: also return the largest |x|, before eps.

    Returns:
        Float8, or (Float8, amax) with amax a float32 of the scale's shape.

    Raises:
        QuantizationError: a type, axis, layout or algorithm that there is not; a scale or amax of the wrong shape.
        DifferentiationError: when it is differentiated.
    """
    if isinstance(x, Float8):
        raise QuantizationError("x is a Float8 already; x.astype(dtype) changes its type")
    x = jnp.asarray(x)
    if x.dtype not in WIDE_DTYPES:
        raise QuantizationError(
            f"quantize takes {', '.join(d.name for d in WIDE_DTYPES)}, not {x.dtype.name}"
            + (": convert it with astype first" if jnp.issubdtype(x.dtype, jnp.number) else "")
        )
    rule = ScaleRule(jnp.dtype(dtype), power_of_two, eps)
    if layout not in LAYOUTS:
        raise QuantizationError(f"there is no layout {layout!r}: expected {', '.join(LAYOUTS)}")
    if layout != "row" and x.ndim < 2:
        raise QuantizationError(f"layout={layout!r} exchanges the last two dimensions, and x has shape {list(x.shape)}")
    if scale is not None and (amax is not None or power_of_two or eps is not None):
        raise QuantizationError("with scale= there is no scale to make: leave amax=, power_of_two= and eps= out")
    kept = scale_shapes.kept_dimensions(axis, x.ndim)
    request = Request(
        x.shape,
        x.dtype,
        rule,
        kept,
        layout,
        "scale" if scale is not None else "amax" if amax is not None else "",
        return_amax,
        algorithms.current_platform(),
    )
    algorithms.choose(algorithm, request)  # a wrong name is told even where there is nothing to differentiate
    x = refuse(x, "xla_fp8.quantize")
    known = None
    if scale is not None:
        known = scale_shapes.given(scale, x.shape, kept, "scale")
    elif amax is not None:
        known = scale_shapes.given(amax, x.shape, kept, "amax")
    found = None
    if axis_name is not None and (known is None or return_amax):
        found = lax.pmax(amax_of(x, kept), axis_name)  # type: ignore[no-untyped-call]
        request = dataclasses.replace(request, given=request.given or "amax", wants_amax=False)
    row, transposed, used, own = algorithms.run(algorithm, request, x, found if known is None else known)
    quantized = Float8(row, used, transposed)
    return (quantized, own if found is None else found) if return_amax else quantized
