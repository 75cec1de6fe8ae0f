"""examples/train_fp8.py: FP8 trains to the loss of f32, on both tasks."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

from tests.scripts import load_script

pytestmark = pytest.mark.unoptimized

pytest.importorskip("sklearn", reason="needs scikit-learn, which ships the digits: pip install '.[test]'")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load_script("examples/train_fp8.py")


@pytest.mark.parametrize("task", ["digits", pytest.param("teacher", marks=pytest.mark.slow)])
def test_fp8_trains_to_the_loss_of_f32(example: ModuleType, task: str) -> None:
    losses = example.curves(getattr(example, task)(), steps=100, seeds=1)
    ends = {kind: example.final(of_kind)[0] for kind, of_kind in losses.items()}
    fallen = losses["f32"][0, 0] - ends["f32"]
    assert fallen > 0.5
    for kind in ("bf16", "FP8 dynamic", "FP8 delayed"):
        assert abs(ends[kind] - ends["f32"]) < 0.05 * fallen, ends
        assert np.isfinite(losses[kind]).all()
        assert (losses[kind] != losses["f32"]).any()
