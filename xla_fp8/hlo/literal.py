"""Literals: the text in `constant(...)` ↔ numpy arrays of every element type."""

from __future__ import annotations

import functools
import math
import re
from typing import TYPE_CHECKING, Any

from xla_fp8.hlo.errors import HloAttributeError
from xla_fp8.hlo.shape import Shape

if TYPE_CHECKING:
    import numpy as np

_COMPLEX_RE = re.compile(r"\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\)")
_INDEX_PREFIX_RE = re.compile(r"[{,]\s*\d+:")
_PAYLOAD_RE = re.compile(r"(nan)\(0x[0-9a-fA-F]+\)")
_INTEGER_RE = re.compile(r"([su])(\d+)")
_COMMENT_RE = re.compile(r"/\*.*?\*/", re.S)


@functools.cache  # there are some thirty, and an array may be asked for its own again and again
def numpy_dtype(element_type: str) -> np.dtype[Any]:
    """The numpy (or ml_dtypes) type that holds an element type. Raises HloAttributeError for token, opaque, ..."""
    import ml_dtypes
    import numpy as np

    numpy_names = {"pred": "bool", "c64": "complex64", "c128": "complex128"}
    if element_type in numpy_names:
        return np.dtype(numpy_names[element_type])
    if re.fullmatch(r"[suf](8|16|32|64)", element_type):
        kind = {"s": "int", "u": "uint", "f": "float"}[element_type[0]]
        return np.dtype(f"{kind}{element_type[1:]}")
    extended = {"bf16": "bfloat16", "s4": "int4", "u4": "uint4", "s2": "int2", "u2": "uint2"}
    # f8e4m3fn is ml_dtypes' float8_e4m3fn.
    name = extended.get(element_type, re.sub(r"^f(\d)(e.*)$", r"float\1_\2", element_type))
    found = getattr(ml_dtypes, name, None)
    if found is None:
        raise HloAttributeError(f"literals of element type {element_type} are not supported")
    dtype: np.dtype[Any] = np.dtype(found)
    return dtype


def parse(text: str, shape: Shape) -> np.ndarray[Any, Any]:
    """The array that `text` spells. Raises HloAttributeError where it does not fit `shape`, in count or in range."""
    import numpy as np

    dtype = numpy_dtype(shape.element_type)
    bare = _PAYLOAD_RE.sub(r"\1", _COMMENT_RE.sub("", text))
    try:
        if np.issubdtype(dtype, np.complexfloating):
            pairs = _COMPLEX_RE.findall(bare)
            array = np.array([complex(float(real), float(imaginary)) for real, imaginary in pairs], np.complex128)
        else:
            flat = _INDEX_PREFIX_RE.sub(",", bare).replace("{", " ").replace("}", " ").replace(",", " ").split()
            if shape.element_type == "pred":
                array = np.array([_parse_pred(value) for value in flat], np.bool_)
            elif integer := _INTEGER_RE.fullmatch(shape.element_type):
                array = np.array([_parse_int(value, integer[1] == "s", int(integer[2])) for value in flat], dtype)
            else:
                # By way of f64: numpy cannot convert Python floats to every ml_dtypes type.
                array = np.array([float(value) for value in flat], np.float64)
    except (OverflowError, ValueError):
        raise HloAttributeError(f"{text[:60]!r} is not a literal of {shape}") from None
    if array.size != shape.element_count:
        raise HloAttributeError(f"a literal of {shape} needs {shape.element_count} elements, found {array.size}")
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype).reshape(shape.dimensions)
    if array.dtype.kind in "fc":
        # Infinities are taken as they are (XLA reads one as NaN where the type has none); finite values must fit.
        lost = np.isfinite(array).reshape(shape.dimensions) & ~np.isfinite(result.astype(array.dtype))
        if lost.any():
            raise HloAttributeError(f"{text[:60]!r} is out of the range of {shape.element_type}")
    return result


def format_scalar(value: float | int | bool, element_type: str) -> str:
    """The text of a scalar of that type as XLA's literal printer writes it; it reads back as the same value."""
    import ml_dtypes
    import numpy as np

    if element_type == "pred":
        return "true" if value else "false"
    if _INTEGER_RE.fullmatch(element_type):
        return str(int(value))
    dtype = numpy_dtype(element_type)
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = float(dtype.type(value))
    if not math.isfinite(rounded):
        return "nan" if math.isnan(rounded) else "inf" if rounded > 0 else "-inf"
    # XLA's RoundTripFpToString: digits10 for f32 and f64 where that is enough, else max_digits10.
    finfo: Any = ml_dtypes.finfo  # has no types
    bits = finfo(dtype).nmant + 1
    for digits in {"f32": (6, 9), "f64": (15, 17)}.get(element_type, ()):
        if float(dtype.type(float(f"{rounded:.{digits}g}"))) == rounded:
            return f"{rounded:.{digits}g}"
    return f"{rounded:.{1 + math.ceil(bits * math.log10(2))}g}"


def _parse_pred(text: str) -> bool:
    return text == "true" or (text != "false" and int(text) != 0)


def _parse_int(text: str, signed: bool, bits: int) -> int:
    value = int(text)
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    if low <= value <= high:
        return value
    if bits == 64 and -(1 << 63) <= value < 1 << 64:
        # XLA reads every integer into 64 bits, so -1 is u64's largest.
        return value - (1 << 64) if value > high else value + (1 << 64)
    raise ValueError(text)
