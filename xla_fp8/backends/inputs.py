"""Operands for a module's parameters: random ones that are sensible for FP8 programs, or those of an .npz file."""

from __future__ import annotations

import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from xla_fp8.errors import XlaFp8Error
from xla_fp8.hlo import HloModule, Shape
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall

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


def random_operands(call: GraphCall, shapes: Sequence[Shape] | None = None, seed: int = 0) -> list[Array]:
    """`random_inputs` of a graph call, or of `shapes` in place of its own; a clamp's lower bound is negative.

    Of two positive bounds the lower one may be the larger: the result would be one number, whoever computes it.
    """
    arrays = random_inputs(call.operand_shapes if shapes is None else shapes, seed)
    clamps = [side for side in call.graph.side_operands() if side.op == "clamp"]
    for lower in clamps[::2]:
        arrays[lower.index] = np.negative(arrays[lower.index])
    return arrays


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
        InputError: no .npz file, a broken one, or one with something else than arrays of numbers in it; or an array is
            missing or has another shape or type than its parameter.
    """
    arrays = _arrays(path)
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
        if array.dtype == np.dtype((np.void, dtype.itemsize)):
            array = array.view(dtype)
        if array.dtype != dtype or array.shape != parameter.shape.dimensions:
            raise InputError(
                f"{path}: parameter {number} (%{parameter.name}) is {parameter.shape}, but its array is "
                f"{array.dtype}{list(array.shape)}"
            )
        found.append(array)
    return found


def _arrays(path: str | os.PathLike[str]) -> dict[str, Array]:
    """Every array of an .npz file by its name. numpy's messages recommend pickle, which runs what the file says."""
    with open(path, "rb") as stream:
        start = stream.read(len(_NPY))
        if not start:
            raise InputError(f"{path} is empty: {_EXPECTED}")
        if start == _NPY:
            raise InputError(f"{path} is an .npy file, which holds one array: {_EXPECTED}")
        if not start.startswith(_ZIP):
            raise InputError(f"{path} is no .npz file: {_EXPECTED}")
        try:
            archive = zipfile.ZipFile(stream)
        except _BROKEN as error:
            raise InputError(f"{path} is broken, or was not written to its end ({_told(error)}): {_EXPECTED}") from None
        with archive:
            return {name.removesuffix(".npy"): _array(archive, name, path) for name in archive.namelist()}


def _array(archive: zipfile.ZipFile, name: str, path: str | os.PathLike[str]) -> Array:
    """One member of an .npz file."""
    where = f"{path}: {name.removesuffix('.npy')}"
    try:
        data = archive.read(name)  # all of it, so that its checksum is compared
        if not data.startswith(_NPY):
            raise InputError(f"{where} is no array: {_EXPECTED}")
        array: Array = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except _BROKEN as error:
        if "pickle" in str(error):
            raise InputError(f"{where} is an array of Python objects: save it as one of numbers") from None
        raise InputError(f"{where} cannot be read, the file is broken: {_told(error)}") from None
    return array


_NPY, _ZIP = b"\x93NUMPY", b"PK"
_EXPECTED = "expected a file that numpy.savez wrote, with an array for each parameter"
_BROKEN = (ValueError, EOFError, RuntimeError, OSError, zipfile.BadZipFile, zlib.error)
"""What a damaged file makes zipfile and numpy raise: RuntimeError of encryption marks, OSError of offsets."""


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
