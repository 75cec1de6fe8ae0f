"""The training curves: the table of final losses, and that every kind of arithmetic trains the same network."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import pytest


@pytest.fixture(scope="module")
def accuracy() -> Any:
    """The script, which is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).resolve().parents[2]))
        return importlib.import_module("benchmarks.accuracy")


def test_final_losses_are_means_of_the_last_tenth_and_differences_those_from_bf16(accuracy: Any) -> None:
    wide = np.linspace(2.0, 1.0, 40)[None] + np.array([[0.0], [0.2]])
    curves = {"bf16": wide, "FP8 dynamic": wide + np.repeat([0.0, 0.1, 0.2, 0.3], 10)}
    np.testing.assert_allclose(accuracy.final(wide), wide[:, -4:].mean(1))
    head, _, bf16, fp8 = accuracy.table("task", curves).splitlines()
    assert head == "task: 40 steps, mean loss of the last tenth; standard deviation of bf16 over the starts 0.1414"
    assert bf16.split()[1:] == ["1.0385", "1.2385", "1.1385", "+0.0000", *["+0.0000"] * 4]
    assert fp8.split()[2:] == ["1.3385", "1.5385", "1.4385", "+0.3000", "+0.0000", "+0.1000", "+0.2000", "+0.3000"]


def test_from_one_start_kinds_differ_by_rounding_alone(accuracy: Any) -> None:
    layers = [nn.Dense(16), nn.relu, nn.Dense(16), lambda x: x.mean((1, 2)), nn.Dense(10)]  # compiles fast
    task = dataclasses.replace(accuracy.digits(), steps=2, model=nn.Sequential(layers))
    wide, fp8 = (accuracy.trainer(task, accuracy.RECIPES[kind])(0) for kind in ("bf16", "FP8 delayed"))
    assert fp8[0] != wide[0]
    np.testing.assert_allclose(fp8, wide, rtol=0.1)
