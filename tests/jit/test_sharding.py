"""Runs on_eight_devices.py in a process whose CPU is eight devices: how many there are is fixed when JAX starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.xla_options import environment


@pytest.mark.slow
def test_sharded_programs() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(Path(__file__).with_name("on_eight_devices.py")),
        ],
        env=environment(8),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
