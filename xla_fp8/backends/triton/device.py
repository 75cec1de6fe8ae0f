"""A Hopper GPU for Pallas to lower for, where this machine has none."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import jax
from jax.sharding import AbstractDevice, AbstractMesh, get_abstract_mesh, use_abstract_mesh


@contextlib.contextmanager
def hopper_gpu() -> Iterator[None]:
    """Within it Pallas lowers for this machine's GPU, or else for an H200, which is what `Target.default()` takes."""
    # A program that was traced here may be over a mesh of CPUs.
    device = get_abstract_mesh().abstract_device
    if _has_gpu() or (device is not None and "NVIDIA" in device.device_kind):
        yield
        return
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=_h200())):
        yield


@functools.cache
def _has_gpu() -> bool:
    try:
        return bool(jax.local_devices(backend="gpu"))
    except RuntimeError:
        return False


@functools.cache
def _h200() -> AbstractDevice:
    try:
        return AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    except TypeError:  # JAX 0.10.0 knows no platform
        return AbstractDevice(device_kind="NVIDIA H200", num_cores=132)  # type: ignore[call-arg]
