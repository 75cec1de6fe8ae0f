"""The benchmark of depthwise convolutions: its rows, and one of them on a CPU from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_benchmark


@pytest.fixture(scope="module")
def bench() -> Any:
    """The module, which is not installed."""
    return load_benchmark("depthwise")


def test_rows_begin_with_convnext_and_have_kernels(bench: Any) -> None:
    assert len({row.name for row in bench.ROWS}) == len(bench.ROWS)
    assert bench.ROWS[0].name == "ConvNeXt-T 256x56x56x96 7x7, forward"
    assert {row.name for row in bench.ROWS if row.problem is None} == {
        f"{row.layer.name}, input gradient" for row in bench.ROWS if row.layer.stride == 2
    }
    assert all(row.convolution.supported.ok for row in bench.ROWS)
    # 256 images of 56x56x96, twice, and 49 products each.
    assert bench.ROWS[0].flops == 2 * 49 * 256 * 56 * 56 * 96
    assert bench.ROWS[0].bytes == 2 * (2 * 256 * 56 * 56 * 96 + 49 * 96)


def test_a_layer_is_measured(bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [bench.Row(bench.TINY[1], part) for part in bench.PARTS]
    bench.run(rows, 1, 300, 2, True, tmp_path)
    found = json.loads((tmp_path / "results.json").read_text())["rows"]
    by_part = {entry["part"]: entry["contestants"] for entry in found.values()}
    for part in ("forward", "filter gradient"):
        assert len(by_part[part]) == 2
        for facts in by_part[part].values():
            assert facts["us"] > 0
            assert facts["error"] < 4e-3
    assert list(by_part["input gradient"]) == ["xla"]
    assert "no kernel" in capsys.readouterr().out


def test_a_wrong_result_has_no_time(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    row = bench.Row(bench.TINY[1], "output")
    wrong = bench.compiled(row, lambda x, w: 1.5 * row.by_xla(x, w))
    entry = bench.measure(row, {"xla": bench.compiled(row, row.by_xla), "wrong": wrong})
    assert "us" in entry["contestants"]["xla"]
    assert "us" not in entry["contestants"]["wrong"]
    assert "off by 0.5" in bench.summary(row.name, entry)
