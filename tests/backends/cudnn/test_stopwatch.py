"""How a launch is timed, with a driver that only notes what it is asked."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from xla_fp8.backends.cudnn import CudnnError, stopwatch


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The driver's functions, in the order of calls; two events are 0.4 ms apart."""
    asked: list[str] = []

    def call(function: str, *arguments: Any) -> None:
        asked.append(function)
        if function == "cuEventElapsedTime":
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_float))[0] = 0.4

    monkeypatch.setattr(stopwatch, "call", call)
    return asked


def test_launches_are_recorded_once_and_the_graph_is_timed(asked: list[str]) -> None:
    launches: list[int] = []
    us = stopwatch.microseconds(7, lambda: launches.append(len(asked)))
    assert len(launches) == 1 + stopwatch.LAUNCHES
    recorded = asked.index("cuStreamBeginCapture_v2"), asked.index("cuStreamEndCapture")
    assert [recorded[0] < when <= recorded[1] for when in launches] == [False] + [True] * stopwatch.LAUNCHES
    # A graph of 400 us is run twice a round, so 0.4 ms are 200 us of eight launches.
    assert us == pytest.approx(25.0)
    assert asked.count("cuGraphLaunch") == 1 + 1 + 5 * 2
    assert asked[-4:] == ["cuEventDestroy_v2"] * 2 + ["cuGraphExecDestroy", "cuGraphDestroy"]


def test_a_launch_that_fails_ends_the_recording(asked: list[str]) -> None:
    launches: list[None] = []

    def launch() -> None:
        launches.append(None)
        if len(launches) == 3:
            raise CudnnError("no")

    with pytest.raises(CudnnError, match="no"):
        stopwatch.microseconds(7, launch)
    assert asked[-2:] == ["cuStreamEndCapture", "cuGraphDestroy"]
