"""Options of XLA that tests share."""

from __future__ import annotations

import os

QUICKLY: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Without LLVM's optimizations, which take most of the time of a small program: for tests of what a program means."""


def environment(devices: int) -> dict[str, str]:
    """Of a process with that many CPU devices, in which XLA compiles quickly."""
    options = {"xla_force_host_platform_device_count": devices, **QUICKLY}
    flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
