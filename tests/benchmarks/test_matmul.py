"""The benchmark of matmuls: who compiles which program, and a row on a CPU from end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import load_benchmark


@pytest.fixture(scope="module")
def matmul() -> Any:
    """The module, which is not installed."""
    return load_benchmark("matmul")


def test_programs_with_mosaic_kernels_are_compiled_where_they_are_measured(matmul: Any) -> None:
    """Another process cannot load them."""
    for row in matmul.TINY:
        for name in matmul.CONTESTANTS:
            text = matmul.lowered(row, name, "cuda").as_text()
            assert ("mosaic_gpu" in text) == (name in matmul.HERE), (row.name, name)


def test_a_row_is_measured_without_what_cannot_be_compiled(matmul: Any, tmp_path: Path) -> None:
    """As mosaic's kernel cannot on a CPU; those that other processes compile are loaded and timed."""
    row = matmul.TINY[0]
    matmul.run([row], 200, 2, tmp_path, ["--tiny"])
    (entry,) = json.loads((tmp_path / "results.json").read_text())["rows"]
    found = entry["contestants"]
    assert list(found) == list(matmul.CONTESTANTS)
    assert {name for name in found if "us" in found[name]} == {"bf16", "xla", "ours"}
    assert found["mosaic"]["error"]
    assert found["xla"]["norm"] < 1e-2
    assert not list(tmp_path.glob("3.program")), "mosaic's is no other process's"
