"""Literals: the text in `constant(...)` ↔ numpy arrays of every element type."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from xla_fp8.hlo.errors import HloAttributeError
from xla_fp8.hlo.shape import Shape

if TYPE_CHECKING:
    import numpy as np

_COMPLEX_RE = re.compile(r"\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\)")
_INDEX_PREFIX_RE = re.compile(r"[{,]\s*\d+:")
_PAYLOAD_RE = re.compile(r"(nan)\(0x[0-9a-fA-F]+\)")
_COMMENT_RE = re.compile(r"/\*.*?\*/", re.S)


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
    return np.dtype(found)


def parse(text: str, shape: Shape) -> np.ndarray[Any, Any]:
    """The array that `text` spells. Raises HloAttributeError where it does not fit `shape`."""
    import numpy as np

    dtype = numpy_dtype(shape.element_type)
    text = _PAYLOAD_RE.sub(r"\1", _COMMENT_RE.sub("", text))
    values: list[Any]
    try:
        if np.issubdtype(dtype, np.complexfloating):
            pairs = _COMPLEX_RE.findall(text)
            values = [complex(float(re_), float(im)) for re_, im in pairs]
        else:
            flat = _INDEX_PREFIX_RE.sub(",", text).replace("{", " ").replace("}", " ").replace(",", " ").split()
            if shape.element_type == "pred":
                values = [_parse_pred(v) for v in flat]
            elif re.fullmatch(r"[su]\d+", shape.element_type):
                values = [_parse_int(v) for v in flat]
            else:
                values = [float(v) for v in flat]
    except ValueError:
        raise HloAttributeError(f"{text[:60]!r} is not a literal of {shape}") from None
    if len(values) == 1 and shape.element_count != 1:
        values = values * shape.element_count
    if len(values) != shape.element_count:
        raise HloAttributeError(f"a literal of {shape} needs {shape.element_count} elements, found {len(values)}")
    # By way of f64: numpy cannot convert Python floats to every ml_dtypes type.
    wide = np.float64 if values and isinstance(values[0], float) else None
    try:
        array = np.array(values, dtype=wide) if wide else np.array(values or [], dtype=object if values else dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(dtype).reshape(shape.dimensions)
    except (OverflowError, TypeError, ValueError):
        raise HloAttributeError(f"{text[:60]!r} is not a literal of {shape}") from None


def format_scalar(value: float | int | bool, element_type: str) -> str:
    """The text of a scalar of that type as XLA's literal printer writes it: shortest form that reads back."""
    if element_type == "pred":
        return "true" if value else "false"
    if re.fullmatch(r"[su]\d+", element_type):
        return str(int(value))
    number = float(value)
    if number != number:
        return "nan"
    if number in (float("inf"), float("-inf")):
        return "inf" if number > 0 else "-inf"
    dtype = numpy_dtype(element_type)
    rounded = float(dtype.type(number))
    for digits in range(1, 18):
        text = f"{rounded:.{digits}g}"
        if float(dtype.type(float(text))) == rounded:
            return text
    return repr(rounded)


def _parse_pred(text: str) -> bool:
    if text in ("true", "1"):
        return True
    if text in ("false", "0"):
        return False
    raise ValueError(text)


def _parse_int(text: str) -> int:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text)
