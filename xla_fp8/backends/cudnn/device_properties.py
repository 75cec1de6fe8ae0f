"""Reads the properties of a GPU in cuDNN's own JSON, which then stands for that GPU on a machine without it."""

from __future__ import annotations

import ctypes

from xla_fp8.backends.cudnn import device_context, library
from xla_fp8.backends.cudnn.errors import CudnnError

# cudnn_graph.h
_DESCRIPTOR = 38  # CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR
_DEVICE_ID = 2700  # CUDNN_ATTR_DEVICEPROP_DEVICE_ID
_JSON = 2702  # CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION
_TYPE_INT32 = 23  # CUDNN_TYPE_INT32
_TYPE_CHAR = 24  # CUDNN_TYPE_CHAR


def read(ordinal: int) -> str:
    """The properties of GPU number `ordinal`.

    Raises:
        CudnnMissingError: cuDNN is not installed.
        CudnnError: there is no such GPU, or cuDNN is older than 9.11 and knows no such JSON.
    """
    library.cudnn()  # loads libcudnn
    cudnn = ctypes.CDLL("libcudnn.so.9")

    def check(status: int, what: str) -> None:
        if status:
            raise CudnnError(f"cuDNN {library.version()} cannot read the properties of GPU {ordinal}: {what}: {status}")

    descriptor = ctypes.c_void_p()
    with device_context.current(ordinal):
        check(cudnn.cudnnBackendCreateDescriptor(_DESCRIPTOR, ctypes.byref(descriptor)), "create")
        try:
            device = ctypes.c_int32(ordinal)
            one = ctypes.c_int64(1)
            check(
                cudnn.cudnnBackendSetAttribute(descriptor, _DEVICE_ID, _TYPE_INT32, one, ctypes.byref(device)),
                "set device",
            )
            check(cudnn.cudnnBackendFinalize(descriptor), "finalize")
            size = ctypes.c_int64()
            zero = ctypes.c_int64(0)
            check(
                cudnn.cudnnBackendGetAttribute(descriptor, _JSON, _TYPE_CHAR, zero, ctypes.byref(size), None),
                "get size",
            )
            text = ctypes.create_string_buffer(size.value)
            check(
                cudnn.cudnnBackendGetAttribute(descriptor, _JSON, _TYPE_CHAR, size, ctypes.byref(size), text),
                "get JSON",
            )
        finally:
            cudnn.cudnnBackendDestroyDescriptor(descriptor)
    return text.value.decode()
