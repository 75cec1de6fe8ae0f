"""Which GPUs benchmarks use."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_gpus_that_are_not_visible_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    gpus = importlib.import_module("benchmarks.gpus")
    for visible, expected in (("1", ("1",)), ("2,GPU-ab", ("2", "GPU-ab")), ("", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert gpus.gpus_here() == expected
