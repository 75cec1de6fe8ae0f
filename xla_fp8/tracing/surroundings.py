"""What is traced on its own, apart from the function around it: under no mesh, and x64 mode as its types need it.

Regions and what backends make of graph calls are programs of their own. The user's `jax.set_mesh` would type them as
unsharded and gather their operands; x64 mode would make f64 of a Python number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from xla_fp8.hlo import Shape
from xla_fp8.hlo.literal import numpy_dtype


@contextlib.contextmanager
def apart(dtypes: Iterable[np.dtype[Any]]) -> Iterator[None]:
    """A context in which to trace and lower a program, wherever the caller is.

    Args:
        dtypes: of the program's values. x64 mode is on where one of them needs it, whatever the caller has.
    """
    with (
        jax.enable_x64(any(map(_needs_x64, dtypes))),
        jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())),
    ):
        yield


def dtypes_of_shapes(shapes: Iterable[Shape]) -> list[np.dtype[Any]]:
    """numpy's dtypes of HLO's arrays."""
    return [numpy_dtype(shape.element_type) for shape in shapes]


def _needs_x64(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == (16 if dtype.kind == "c" else 8)
