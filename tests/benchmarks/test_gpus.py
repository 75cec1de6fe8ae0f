"""Which GPUs benchmarks use."""

from __future__ import annotations

import pytest

from tests.scripts import load_benchmark


def test_gpus_that_are_not_visible_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = load_benchmark("gpus")
    for visible, expected in (("1", ("1",)), ("2,GPU-ab", ("2", "GPU-ab")), ("", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus.gpus_here() == expected
