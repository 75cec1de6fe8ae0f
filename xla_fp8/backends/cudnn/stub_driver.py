"""A libcuda.so.1 that knows no device, for machines without a driver: cuDNN is linked against it and must load."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from xla_fp8.backends.cudnn.errors import CudnnMissingError

_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_SYMBOLS = (
    "cuCtxGetCurrent",
    "cuCtxGetLimit",
    "cuCtxPopCurrent",
    "cuCtxPushCurrent",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDriverGetVersion",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuInit",
    "cuKernelGetAttribute",
    "cuKernelGetFunction",
    "cuKernelSetAttribute",
    "cuLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuLibraryGetKernel",
    "cuLibraryLoadData",
    "cuLibraryLoadFromFile",
    "cuLibraryUnload",
    "cuLinkAddData",
    "cuLinkComplete",
    "cuLinkCreate",
    "cuLinkDestroy",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuOccupancyMaxPotentialClusterSize",
    "cuStreamGetCtx",
    "cuTensorMapEncodeIm2col",
    "cuTensorMapEncodeTiled",
)
"""What cuDNN 9's libraries import."""


def load_if_missing() -> bool:
    """Makes `libcuda.so.1` loadable in this process. Returns whether it is a stub.

    Only for a process that does nothing else: everything in it that looks for CUDA finds a driver without devices.

    Raises:
        CudnnMissingError: there is no driver, and no C compiler to build a stub with.
    """
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        return False
    except OSError:
        pass
    compiler = next((path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if (path := _which(name))), None)
    if compiler is None:
        raise CudnnMissingError(
            "there is no NVIDIA driver, and no C compiler (cc, gcc, clang) to build a stand-in for it"
        )
    with tempfile.TemporaryDirectory(prefix="xla_fp8_") as folder:
        library = Path(folder, "libcuda.so.1")
        source = "".join(f"int {symbol}(void) {{ return {_NO_DEVICE}; }}\n" for symbol in _SYMBOLS)
        # Once loaded, a library is found again by its soname, so the file may go.
        command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(library)]
        done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CudnnMissingError(f"there is no NVIDIA driver, and {compiler} fails: {done.stderr.strip()}")
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return True


def _which(name: str | None) -> str | None:
    return shutil.which(name) if name else None
