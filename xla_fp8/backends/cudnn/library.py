"""cuDNN's Python front end (nvidia-cudnn-frontend): imported on first use, with one message where it is missing.

Every name of the front end that is not documented stands here. Tried with 1.22.1 and 1.32.0.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from xla_fp8.backends.cudnn.errors import CudnnMissingError

PIP_LINE = "pip install 'xla-fp8[cuda13]'"


@functools.cache
def cudnn() -> Any:
    """The module `cudnn`.

    Raises:
        CudnnMissingError: the front end is not installed, or does not find libcudnn.
    """
    return _imported("cudnn")


@functools.cache
def tvm_ffi() -> Any:
    """The module `tvm_ffi`, which hands device pointers and XLA's stream to Python. Raises CudnnMissingError."""
    return _imported("tvm_ffi")


@functools.cache
def jax_tvm_ffi() -> Any:
    """The module `jax_tvm_ffi`, which makes a function an XLA FFI target. Raises CudnnMissingError."""
    return _imported("jax_tvm_ffi")


def _imported(module: str) -> Any:
    if missing := why_missing((module,)):
        raise CudnnMissingError(missing)
    try:
        return importlib.import_module(module)
    except Exception as error:  # a library that does not load raises what it likes
        raise CudnnMissingError(f"{_DISTRIBUTIONS[module]} is installed but does not load: {error}") from error


_DISTRIBUTIONS = {"cudnn": "nvidia-cudnn-frontend", "tvm_ffi": "apache-tvm-ffi", "jax_tvm_ffi": "jax-tvm-ffi"}


def why_missing(modules: Sequence[str] = ("cudnn",)) -> str | None:
    """Which of these modules is not installed, with the pip line that adds it; None where all are.

    Imports nothing: quick, and safe where there is no driver.
    """
    for module in modules:
        if importlib.util.find_spec(module) is None:
            return f"{_DISTRIBUTIONS[module]} is not installed: {PIP_LINE}"
    return None


def version() -> tuple[int, int, int]:
    """The version of libcudnn, e.g. (9, 19, 0). Raises CudnnMissingError."""
    number = int(cudnn().backend_version())
    # Since 9.0: major * 10000 + minor * 100 + patch (cudnn_version.h).
    return number // 10000, number // 100 % 100, number % 100


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def execute(graph: Any, pointers: Mapping[int, int], workspace: int, handle: Any) -> None:
    """Runs the built plan of `graph` on the handle's stream; `pointers` are device addresses by tensor uid.

    The public `execute` looks at every argument for the tensor it may be; this takes addresses as they are.
    """
    graph._execute(pointers, workspace, handle)
