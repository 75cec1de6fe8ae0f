"""How long launches take on the device, without what launching costs: in a CUDA graph, between two events."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator

from xla_fp8.backends.cudnn.device_context import CAPTURE_MODE_RELAXED, call

LAUNCHES = 8
"""In one graph, so that starting the graph does not show."""
_ROUNDS = 5
_ROUND_US = 1000.0  # that a round takes at least, where one graph is shorter
_MOST_RUNS = 20


def microseconds(stream: int, launch: Callable[[], None]) -> float:
    """Of one `launch` on the current device: the least of some rounds, as what disturbs makes a round longer.

    Args:
        stream: to which `launch` sends its work; idle.
        launch: waits for nothing, and sends the same work each time.

    Raises:
        CudnnError: the driver refused something, or the work failed.
    """
    launch()  # what it loads is no part of the graph
    call("cuStreamSynchronize", ctypes.c_void_p(stream))
    with _recorded(stream, launch) as graph, _event() as start, _event() as end:

        def once(runs: int) -> float:
            call("cuEventRecord", start, ctypes.c_void_p(stream))
            for _ in range(runs):
                call("cuGraphLaunch", graph, ctypes.c_void_p(stream))
            call("cuEventRecord", end, ctypes.c_void_p(stream))
            call("cuEventSynchronize", end)
            milliseconds = ctypes.c_float()
            call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
            return milliseconds.value * 1000 / runs

        once(1)
        runs = max(1, min(_MOST_RUNS, int(_ROUND_US / max(once(1), 1.0))))
        return min(once(runs) for _ in range(_ROUNDS)) / LAUNCHES


@contextlib.contextmanager
def _recorded(stream: int, launch: Callable[[], None]) -> Iterator[ctypes.c_void_p]:
    """Several launches as an executable graph."""
    graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuStreamBeginCapture_v2", ctypes.c_void_p(stream), CAPTURE_MODE_RELAXED)
    try:
        try:
            for _ in range(LAUNCHES):
                launch()
        finally:
            call("cuStreamEndCapture", ctypes.c_void_p(stream), ctypes.byref(graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        try:
            yield executable
        finally:
            call("cuGraphExecDestroy", executable)
    finally:
        call("cuGraphDestroy", graph)


@contextlib.contextmanager
def _event() -> Iterator[ctypes.c_void_p]:
    event = ctypes.c_void_p()
    call("cuEventCreate", ctypes.byref(event), 0)
    try:
        yield event
    finally:
        call("cuEventDestroy_v2", event)
