"""The shape of an FP8 array's scale, and what becomes of it when the array is indexed, reshaped or transposed.

A scale's dimensions are the leading dimensions of the data: each is 1 or the data's, and those that are missing at the
end count as 1. So [] is one scale for everything; [1, 1, 1, C] one for each channel of [N, H, W, C]; and jax.vmap,
which puts a dimension in front of both, makes [B] of [].
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from xla_fp8.quantization.errors import QuantizationError

Shape = tuple[int, ...]


def aligned(scale: Any, ndim: int) -> Any:
    """`scale` with ones appended to its shape until it has `ndim` dimensions; [] where it has none."""
    return scale.reshape(scale.shape + (1,) * (ndim - len(scale.shape))) if scale.shape else scale


def full(scale: Any, ndim: int) -> Any:
    """As `aligned`; [] where it is one number, which is what the compiler's matchers take."""
    return scale.reshape(()) if all(d == 1 for d in scale.shape) else aligned(scale, ndim)


def check(scale: Shape, data: Shape) -> None:
    """Raises QuantizationError where a scale of that shape does not scale data of that shape."""
    if len(scale) > len(data) or any(s not in (1, d) for s, d in zip(scale, data, strict=False)):
        raise QuantizationError(
            f"a scale of shape {list(scale)} does not fit data of shape {list(data)}: it is [], or each of its "
            "dimensions is 1 or the data's"
        )


def kept_dimensions(axis: int | Sequence[int] | None, ndim: int) -> Shape:
    """`axis`, as quantize takes it, as ascending dimensions."""
    if axis is None:
        return ()
    axes = [operator.index(a) for a in (axis if isinstance(axis, Sequence) else (axis,))]
    for a in axes:
        if not -ndim <= a < ndim:
            raise QuantizationError(f"axis={axis}: the tensor has {ndim} dimensions")
    kept = sorted({a % ndim for a in axes})
    if len(kept) < len(axes):
        raise QuantizationError(f"axis={axis} names a dimension twice")
    return tuple(kept)


def given(value: ArrayLike, shape: Shape, kept: Shape, name: str) -> jax.Array:
    """A scale or amax that the caller gives, as f32 of the shape that `kept` asks for."""
    array = jnp.asarray(value, jnp.float32)
    wanted = tuple(d if i in kept else 1 for i, d in enumerate(shape)) if kept else ()
    if array.shape in (wanted, tuple(shape[i] for i in kept)) or (not kept and array.size == 1):
        return array.reshape(wanted)
    if not kept:
        raise QuantizationError(
            f"{name} has shape {list(array.shape)}: without axis= it is one number; say which dimension of the tensor "
            f"{list(shape)} has a scale for each index with axis="
        )
    raise QuantizationError(
        f"{name} has shape {list(array.shape)}: with axis={kept if len(kept) > 1 else kept[0]} and a tensor of shape "
        f"{list(shape)} it must be {[shape[i] for i in kept]} or {list(wanted)}"
    )


def indexed(scale: jax.Array, shape: Shape, index: Any) -> jax.Array:
    """The scale of data[index], data being of `shape` and the scale `aligned`."""
    if scale.ndim == 0:
        return scale
    entries = list(index) if isinstance(index, tuple) else [index]
    consumed = sum(entry is not None and entry is not Ellipsis for entry in entries)
    missing = [slice(None)] * (len(shape) - consumed)
    ellipses = [i for i, entry in enumerate(entries) if entry is Ellipsis]
    position = ellipses[0] if ellipses else len(entries)
    entries[position : position + len(ellipses)] = missing
    dimension = 0
    for i, entry in enumerate(entries):
        if entry is None:
            continue
        is_integer = _is_integer(entry)
        if not is_integer and not isinstance(entry, slice):
            if scale.size == 1:
                return scale.reshape(())
            raise QuantizationError(
                f"an FP8 array with scales of shape {list(scale.shape)} is indexed with integers, slices, None and "
                f"..., not with {type(entry).__name__}: which scale belongs to which result depends on the values; "
                "index q.dequantize() instead"
            )
        if scale.shape[dimension] == 1:  # this dimension shares one scale
            entries[i] = 0 if is_integer else slice(None)
        dimension += 1
    return scale[tuple(entries)]


def _is_integer(entry: Any) -> bool:
    """Whether an index picks one position of one dimension; a traced integer does too."""
    if isinstance(entry, bool):
        return False
    if hasattr(entry, "dtype"):
        return entry.ndim == 0 and jnp.issubdtype(entry.dtype, jnp.integer)
    return hasattr(entry, "__index__")


def reshaped(scale: jax.Array, old: Shape, new: Shape) -> jax.Array:
    """The scale of data.reshape(new), data being of shape `old` and the scale `aligned`.

    A dimension with a scale for each index must stay a dimension of its size, with as many elements before it.
    """
    if scale.ndim == 0:
        return scale
    result = [1] * len(new)
    for d, size in enumerate(scale.shape):
        if size == 1:
            continue
        before = math.prod(old[:d])
        found = [i for i, n in enumerate(new) if n == size and math.prod(new[:i]) == before]
        if not found:
            raise QuantizationError(
                f"cannot reshape {list(old)} to {list(new)}: dimension {d} has a scale for each of its {size} indices "
                "and does not stay a dimension of its own; reshape before quantizing, or q.dequantize()"
            )
        result[found[0]] = size
    return scale.reshape(result)


def transposed(scale: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The scale of data.transpose(axes); the scale is `aligned`."""
    return scale if scale.ndim == 0 else scale.transpose(axes)
