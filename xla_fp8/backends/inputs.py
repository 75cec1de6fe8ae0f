"""Operands for a module's parameters: random ones that are sensible for FP8 programs, or those of an .npz file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from xla_fp8.errors import XlaFp8Error
from xla_fp8.hlo import HloModule, Shape
from xla_fp8.hlo.literal import numpy_dtype

Array = np.ndarray[Any, Any]


class InputError(XlaFp8Error):
    """A file of inputs that does not fit the module."""


def random_inputs(shapes: Sequence[Shape], seed: int = 0) -> list[Array]:
    """One array for each shape; the same seed gives the same arrays.

    FP8 tensors have random signs and exponents from 2^-8 to 2^3 (less where the type has less), and some zeros. Float
    scalars are positive, log-uniform from 1/4 to 4, as scales are. Other floats are normal. Integers are from 0 to 7,
    so that an index is one; predicates are random.
    """
    rng = np.random.default_rng(seed)
    return [_random(shape, rng) for shape in shapes]


def _random(shape: Shape, rng: np.random.Generator) -> Array:
    dtype, sizes = numpy_dtype(shape.element_type), shape.dimensions
    if dtype == np.bool_:
        return np.asarray(rng.random(sizes) < 0.5)
    if shape.element_type[0] in "su":
        largest = min(8, 1 << (int(shape.element_type[1:]) - (shape.element_type[0] == "s")))
        return np.asarray(rng.integers(0, largest, sizes)).astype(dtype)
    if dtype.kind == "c":
        return np.asarray(rng.normal(size=sizes) + 1j * rng.normal(size=sizes)).astype(dtype)
    if shape.is_scalar:
        value = np.exp2(rng.uniform(-2, 2, sizes))
    elif dtype.itemsize == 1:
        info = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
        exponents = rng.integers(max(-8, int(info.minexp)), min(4, int(info.maxexp)), sizes)
        value = np.ldexp(rng.uniform(1, 2, sizes), exponents) * rng.choice([-1.0, 1.0], sizes)
        value = np.where(rng.random(sizes) < 1 / 32, 0.0, value)
    else:
        value = rng.normal(size=sizes)
    return np.asarray(value).astype(dtype)


def read_inputs(path: str | os.PathLike[str], module: HloModule) -> list[Array]:
    """The arrays of an .npz file, one for each parameter: under the parameter's name, its number, or `arr_NUMBER`.

    numpy saves types of ml_dtypes as raw bytes; those are read back as the parameter's type.

    Raises:
        OSError: the file cannot be read.
        InputError: no .npz file, or an array is missing or has another shape or type than its parameter.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path} is not an .npz file of plain arrays: {error}") from error
    found = []
    for number, parameter in enumerate(module.entry.parameters):
        names = (parameter.name, str(number), f"arr_{number}")
        array = next((arrays[name] for name in names if name in arrays), None)
        if array is None:
            raise InputError(
                f"{path} has no array for parameter {number}: expected one named {' or '.join(names)}, "
                f"found {', '.join(arrays) or 'none'}"
            )
        dtype = numpy_dtype(parameter.shape.element_type)
        if array.dtype.kind == "V" and array.dtype.itemsize == dtype.itemsize:
            array = array.view(dtype)
        if array.dtype != dtype or array.shape != parameter.shape.dimensions:
            raise InputError(
                f"{path}: parameter {number} (%{parameter.name}) is {parameter.shape}, but its array is "
                f"{array.dtype}{list(array.shape)}"
            )
        found.append(array)
    return found
