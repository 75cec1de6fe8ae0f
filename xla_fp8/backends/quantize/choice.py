"""Which algorithm "auto" means: by the size of the tensor, as measured on an H200 (docs/quantization.md)."""

from __future__ import annotations

import math

import jax

from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize.request import Request

LARGEST_OF_SINGLE_PASS = 2**26
"""Elements up to which one launch with a barrier is faster than two kernels."""


def fastest(request: Request) -> str | None:
    """The name of the fastest algorithm with kernels; None where plain JAX is to be taken."""
    if not requests.supports(request, interpret=False).ok or not _is_on_one_device():
        return None
    return "single_pass" if math.prod(request.shape) <= LARGEST_OF_SINGLE_PASS else "atomic"


def _is_on_one_device() -> bool:
    """Whether what is traced now cannot be a part of an array of several devices, or is one shard of it.

    XLA's partitioner cannot look into a kernel: it would copy all of the array to each device first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names))
