"""One GPU as the current one of a thread, and memory and a stream on it, through the driver that is there with it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from xla_fp8.backends.cudnn.errors import CudnnError

CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_STREAM_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


@functools.cache
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudnnError(f"there is no NVIDIA driver: {error}") from error
    _check(driver.cuInit(0), "cuInit")
    return driver


def _check(status: int, what: str) -> None:
    if status:
        raise CudnnError(f"the CUDA driver's {what} failed with status {status}")


def call(function: str, *arguments: Any) -> None:
    """Calls a function of the driver; other threads of Python run meanwhile. Raises CudnnError if it fails."""
    _check(getattr(_driver(), function)(*arguments), function)


@contextlib.contextmanager
def current(ordinal: int) -> Iterator[None]:
    """Within it, what asks CUDA for the current device gets number `ordinal`, in the context that XLA uses too.

    XLA may be recording a CUDA graph on this thread, when a plan is first needed on a device. CUDA then refuses what
    building takes (memory, modules), unless the thread says that it is no part of the graph: it does so here.

    Raises CudnnError where there is no driver or no such device.
    """
    driver = _driver()
    device, context, popped = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuDeviceGet(ctypes.byref(device), ordinal), f"cuDeviceGet({ordinal})")
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    try:
        _check(driver.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent")
        mode = ctypes.c_int(CAPTURE_MODE_RELAXED)
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))  # swaps it with the thread's
        try:
            yield
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
            driver.cuCtxPopCurrent_v2(ctypes.byref(popped))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(device)


@contextlib.contextmanager
def memory(size: int) -> Iterator[int]:
    """The address of `size` bytes on the current device; 0 where it has no room for them. Raises CudnnError.

    Freeing waits for the device; other threads of Python run meanwhile.
    """
    driver, address = _driver(), ctypes.c_uint64()
    status = driver.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(max(size, 1)))
    if status == _OUT_OF_MEMORY:
        yield 0
        return
    _check(status, f"cuMemAlloc({size})")
    try:
        yield address.value
    finally:
        driver.cuMemFree_v2(address)


def new_stream() -> int:
    """A stream on the current device that waits for no other. Raises CudnnError."""
    handle = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(handle), _STREAM_NON_BLOCKING)
    return handle.value or 0


def wait(stream: int) -> None:
    """Returns when a stream is done; other threads of Python run meanwhile. Raises CudnnError if its work failed."""
    call("cuStreamSynchronize", ctypes.c_void_p(stream))


def upload(address: int, array: np.ndarray[Any, Any]) -> None:
    """Copies an array to the device. Raises CudnnError."""
    contiguous = np.ascontiguousarray(array)
    size = ctypes.c_size_t(contiguous.nbytes)
    call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(contiguous.ctypes.data), size)
