"""The benchmark of convolutions: its rows, its report, and both of its phases on small shapes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from tests.scripts import load_benchmark
from tests.xla_options import environment
from xla_fp8.backends.mosaic.backend import MosaicBackend
from xla_fp8.target import Target

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Any:
    """The modules of the package, which is not installed."""
    names = ("shapes", "programs", "report", "delay")
    return SimpleNamespace(**{name: load_benchmark(f"conv.{name}") for name in names})


def test_every_shape_is_there_once_and_every_network_comes_early(bench: Any) -> None:
    found = bench.shapes.in_order(bench.shapes.TIERS)
    networks = {name for tier in bench.shapes.TIERS for name in tier}
    assert networks == {name for names in found.values() for name in names}
    assert set(bench.shapes.resnet50(64)) <= set(found)
    of_networks = [names for names in found.values() if "common" not in names]
    assert {name for names in of_networks[:8] for name in names} >= set(bench.shapes.TIERS[1])
    rows = bench.programs.cases()
    assert len({row.name for row in rows}) == len(rows)
    assert {row.shape for row in rows if row.epilogue == "amax"} == set(found)


def test_resnet50_has_22_kinds_of_convolutions_behind_its_first(bench: Any) -> None:
    """Of each stage a 3x3 and two 1x1; before all but the first stage three more on the larger image; one 1x1 first."""
    found = list(bench.shapes.resnet50(64))
    assert len(set(found)) == len(found) == 4 * 3 + 3 * 3 + 1
    assert {shape.out for shape in found if shape.stride == 2} == {(28, 28), (14, 14), (7, 7)}
    one = bench.shapes.Shape(1, 56, 56, 128, 3, 128, 2)
    assert one.product == (28 * 28, 128, 9 * 128)
    assert one.flops == 2 * 28 * 28 * 128 * 9 * 128


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_the_kernel_runs_every_row(bench: Any, precision: Any) -> None:
    backend, target = MosaicBackend(precision), Target.parse("h200")
    refused = [row.name for row in bench.programs.cases() if not backend.supports(row.call, target).ok]
    assert refused == []


def test_the_delay_is_one_kernel_that_looks_at_the_timer(bench: Any) -> None:
    text = jax.jit(bench.delay.wait).trace().lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("globaltimer") == 2


def row(shape: str, epilogue: str, **us: float | None) -> dict[str, Any]:
    contestants = {name: {"problem": "died"} if t is None else {"us": t, "host_bound": False} for name, t in us.items()}
    return {
        "shape": shape,
        "epilogue": epilogue,
        "networks": ["net"],
        "product": [1 << 16, 256, 2304],
        "flops": 2e9,
        "bytes": 1e7,
        "process": "p",
        "contestants": contestants,
    }


def test_the_summary_names_what_is_slower(bench: Any) -> None:
    rows = [
        row("a", "amax", mosaic=10.0, xla_fp8=20.0, xla_bf16=30.0, gemm=9.5),
        row("b", "amax", mosaic=10.0, xla_fp8=8.0, xla_bf16=40.0, gemm=9.0),
        row("c", "amax", mosaic=10.0, xla_fp8=None, xla_bf16=20.0),
        row("a", "scale", mosaic=9.9, xla_fp8=20.0),
    ]
    content = {"about": {}, "ceilings": {}, "rows": {f"{r['shape']} {r['epilogue']}": r for r in rows}}
    text = bench.report.summary(content)
    assert "mosaic vs XLA FP8: geometric mean 1.26 over 2, least 0.80 (b), 1 below 1 ['b']" in text
    assert "mosaic vs the faster of the two: geometric mean 1.47 over 3, least 0.80 (b)" in text
    assert "of cuBLASLt, where the grid fills the GPU: geometric mean 0.92 over 2, least 0.90 (b)" in text
    assert "mosaic, amax / scale (time): geometric mean 1.01 over 1" in text
    table = bench.report.table(map(bench.report.Row, rows))
    assert table.count("| 2.00x |") == 2
    assert "XLA bf16" in table
    assert "cudnn" not in table  # which nobody has measured
    main = [bench.report.Row(one) for one in rows if one["epilogue"] == "amax"]
    assert "| net | 3 | 1.26x | 0.80x | 2.88x | 2.00x | 1.47x | 0.80x |" in bench.report.by_network(main)


def test_the_bytes_of_an_epilogue_are_told_apart(bench: Any) -> None:
    epilogues = {"scale": {"us": 10.0, "bytes": 8e6}, "bias": {"us": 15.0, "bytes": 16e6}}
    content = {"ceilings": {"copy_bytes_per_s": 4e12}, "epilogues": {"a": epilogues}}
    assert "| convolution | scale | bias |" in bench.report.in_turn(content)
    assert "| `a` | 10.0 | 1.50x +5.0 (2.0) |" in bench.report.in_turn(content)


def run(out: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "benchmarks.conv", *arguments, "--tiny", "--out", str(out), "--seconds", "300"]
    command += ["--workers", "1", "--kernel-workers", "1"]
    done = subprocess.run(command, cwd=ROOT, env=environment(1), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_variants_on_the_cpu(tmp_path: Path) -> None:
    run(
        tmp_path,
        "variants",
        "--only",
        "/2 scale;/2 amax",
        "--alone",
        "tiny",
        "--clocks",
        "/2 scale",
        "--in-turn",
        "tiny",
    )
    content = json.loads((tmp_path / "results.json").read_text())
    rows = content["rows"]
    assert set(rows) == {"1,8,8,16,3x3,16/2 scale", "1,8,8,16,3x3,16/2 amax", "2,8,8,16,1x1,32 amax"}
    everyone = {"mosaic", "highest", "xla_fp8", "xla_bf16", "gemm"}
    assert set(rows["1,8,8,16,3x3,16/2 amax"]["contestants"]) == everyone
    assert "xla_fp8" not in rows["2,8,8,16,1x1,32 amax"]["contestants"]
    windows = content["clocks"]["1,8,8,16,3x3,16/2 scale"]["xla_fp8"]["windows"]
    assert all(window["us_least"] <= window["us"] <= window["us_most"] for window in windows)
    assert content["ceilings"]["copy_bytes_per_s"] > 0
    assert all(facts["us"] > 0 for facts in content["epilogues"]["2,8,8,16,1x1,32"].values())
    assert "| bias+silu+residual |" in (tmp_path / "table.md").read_text()


@pytest.mark.slow
def test_tuning_and_measuring_on_the_cpu(tmp_path: Path) -> None:
    for phase in ("tune", "measure"):
        run(tmp_path, phase)
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["epilogue"] for row in rows.values()} >= {"amax", "scale", "bias+silu+residual"}
    every = [facts for row in rows.values() for facts in row["contestants"].values()]
    # A busy machine may lose a time of some microseconds.
    noise = "shorter than what the delay varies by"
    assert all(not facts["problem"] or noise in facts["problem"] for facts in every)
    assert all(facts["us"] > 0 for facts in every if not facts["problem"])
    assert min(facts["equal"] for facts in every if "equal" in facts) > 0.99
