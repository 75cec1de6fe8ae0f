"""Which algorithm "auto" means: by scale, layout and size, as measured on an H200 (docs/quantization.md)."""

from __future__ import annotations

import math

import jax

from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize.request import Request

SMALLEST_OF_ATOMIC = 2**25
"""Elements from which `atomic` takes rows: there it was as fast as `reduction` or faster, within noise."""

SMALLEST_OF_RESIDENT = 2**24
"""Elements from which `resident` takes a given scale and a transposed copy: the smallest that was measured."""

SMALLEST_OF_PROGRAMS = 10**6
"""Elements from which what a program spells out is worth finding: microseconds each time it runs."""


def fastest(request: Request) -> str | None:
    """The name of the fastest algorithm with kernels; None where plain JAX is to be taken.

    Never one whose programs wait for each other (`single_pass`, and `resident` where it has to find the scale), though
    `resident` is often the fastest: they must be on the device all at once, and XLA may launch kernels that do not
    depend on each other side by side.
    """
    if not requests.supports(request, interpret=False).ok or not _is_on_one_device():
        return None
    size = math.prod(request.shape)
    # One pass. Of rows XLA's is as fast, and can be one with what makes x; with a transposed copy it is not. A given
    # amax may come from a pass just before (`axis_name`): then casting x from its end, as the kernels do, finds some
    # of it in the L2 cache.
    if request.given == "scale":
        streams = request.layout != "row" and size >= SMALLEST_OF_RESIDENT and _is_resident(request)
        return "resident" if streams else None
    if request.layout == "row" and size >= SMALLEST_OF_ATOMIC:
        return "atomic"
    return "reduction"


def _is_resident(request: Request) -> bool:
    # Mosaic GPU is imported where it may run, and not with all of tracing.
    from xla_fp8.backends.quantize.resident import Resident

    return Resident().supports(request).ok


def takes_dynamic(size: int, platform: str) -> bool:
    """Whether a quantization of so many elements, by its own amax, that a program spells out is left to kernels."""
    in_range = SMALLEST_OF_PROGRAMS <= size <= requests.LARGEST_SIZE
    return in_range and _runs_kernels(platform)


def takes_fused(platform: str) -> bool:
    """Whether casts are left to kernels that compute what is in front of them too (`xla_fp8.backends.fused_cast`)."""
    return _runs_kernels(platform)


def _runs_kernels(platform: str) -> bool:
    return requests.runs_on(platform).ok and _is_on_one_device()


def _is_on_one_device() -> bool:
    """Whether what is traced now cannot be a part of an array of several devices, or is one shard of it.

    XLA's partitioner cannot look into a kernel: it would copy all of the array to each device first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names))
