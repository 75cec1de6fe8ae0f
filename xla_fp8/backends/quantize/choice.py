"""Which algorithm "auto" means: by scale, layout and size, as measured on an H200 (docs/quantization.md)."""

from __future__ import annotations

import math

import jax

from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize.request import Request

SMALLEST_OF_ATOMIC = 2**25
"""Elements from which `atomic` takes rows: there it was as fast as `reduction` or faster, within noise."""


def fastest(request: Request) -> str | None:
    """The name of the fastest algorithm with kernels; None where plain JAX is to be taken."""
    if not requests.supports(request, interpret=False).ok or not _is_on_one_device():
        return None
    # One pass, in which XLA's fusion is as fast. A given amax may come from a pass just before (`axis_name`): then
    # casting x from its end, as the kernels do, finds some of it in the L2 cache.
    if request.given == "scale":
        return None
    if request.layout == "row" and math.prod(request.shape) >= SMALLEST_OF_ATOMIC:
        return "atomic"
    return "reduction"


def _is_on_one_device() -> bool:
    """Whether what is traced now cannot be a part of an array of several devices, or is one shard of it.

    XLA's partitioner cannot look into a kernel: it would copy all of the array to each device first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names))
