"""What benchmarks read off a GPU meanwhile."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_benchmark

SMI = """#!/bin/sh
case "$*" in
*-lms*)
    echo "2026/11/30 10:00:00.000, 1980, 650.5, 50, 0x0"
    echo "2026/11/30 10:00:00.020, 1755, 700.1, 51, 0x4"
    echo "2026/11/30 10:00:00.040, 1800, [N/A], 51, 0x4"
    echo "an error"
    touch "$0.printed"
    exec sleep 60 ;;
esac
"""


@pytest.fixture
def gpu_readings() -> Any:
    return load_benchmark("gpu_readings")


def test_clock_and_power_are_summed_up(gpu_readings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    with gpu_readings.watched("0") as readings:
        while not (tmp_path / "nvidia-smi.printed").exists():
            time.sleep(0.01)
    assert gpu_readings.summary(readings) == {
        "MHz_least": 1755.0,
        "MHz": 1800.0,
        "W": pytest.approx(675.3),
        "W_most": 700.1,
        "reasons": ["0x0", "0x4"],
        "readings": 3,
    }


def test_without_the_program_there_is_nothing(
    gpu_readings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with gpu_readings.watched("0") as readings:
        pass
    assert gpu_readings.summary(readings) == {}
