"""The programme that judges the kernel on a GPU, tried without one: it finds what it is there to find, and resumes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.hopper import mosaic_check, mosaic_run
from tests.hopper.mosaic_cases import FULL, NAMED, MosaicCase, random_case
from xla_fp8.backends import reference
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.mosaic.configs import fits
from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of

pytestmark = pytest.mark.unoptimized

Array = np.ndarray[Any, Any]
Outputs = list[Array]
ROOT = Path(__file__).resolve().parents[3]

CALL = graph_call(FULL, image=(5, 6), channels=48, features=80, window="{size=3x3 pad=1_2x1_1 lhs_dilate=2x2}")


class Kernel:
    """Stands where the compiled kernel does: the reference's results, changed by a fault."""

    def __init__(self, case: MosaicCase, fault: Callable[[int, Outputs], None]) -> None:
        call = case.call
        types = [shape.element_type for shape in call.output_shapes]
        arrays = [jnp.asarray(array) for array in case.arrays()]
        outputs = reference.run(call.graph, call.window, call.dim_labels, 1, arrays, types)
        self.outputs = [np.asarray(output) for output in outputs]
        self.fault, self.runs = fault, 0

    def memory_analysis(self) -> Any:
        return types.SimpleNamespace(temp_size_in_bytes=1000)

    def __call__(self, *_: jax.Array) -> list[jax.Array]:
        outputs = [output.copy() for output in self.outputs]
        self.fault(self.runs, outputs)
        self.runs += 1
        return [jax.device_put(output) for output in outputs]


def nothing(run: int, outputs: Outputs) -> None: ...


def an_element_is_not_written(run: int, outputs: Outputs) -> None:
    outputs[0][1, 2, 3, 4] = np.nan


def neighbours_change_places(run: int, outputs: Outputs) -> None:
    outputs[2][:, :, [2, 3]] = outputs[2][:, :, [3, 2]]


def the_amax_is_of_a_part(run: int, outputs: Outputs) -> None:
    outputs[1][...] = np.abs(outputs[2][:, :, :-1].astype(np.float32)).max() * np.float32(0.98)


def the_ninth_run_differs(run: int, outputs: Outputs) -> None:
    if run == 8:
        outputs[2][0, 0, 0, 0] *= 2


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (nothing, ""),
        (an_element_is_not_written, "1 beyond the bound; f8e4m3fn result: nan at (1, 2, 3, 4)"),
        (neighbours_change_places, "beyond the bound; bf16 result"),
        (the_amax_is_of_a_part, "1 beyond the bound; f32 result"),
        (the_ninth_run_differs, "1 repeats that differ"),
    ],
)
@pytest.mark.parametrize("operands", ["exact", "random"])
def test_a_fault_is_found(fault: Callable[[int, Outputs], None], message: str, operands: Any) -> None:
    case = MosaicCase("case", CALL, operands=operands)
    config = case.chosen_config
    arrays = case.arrays()
    wanted = mosaic_check.reference(case, config, arrays)
    prepared = mosaic_check.Prepared(case, config, Kernel(case, fault), arrays, wanted, {})
    result = mosaic_check.verify(prepared, repeats=20)
    assert result["outcome"] == ("failed" if message else "passed")
    assert message in result["message"]


def test_a_guard_that_changes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = MosaicCase("case", CALL)
    kernel = Kernel(case, nothing)
    prepared = mosaic_check.Prepared(case, case.chosen_config, kernel, case.arrays(), [], {})
    monkeypatch.setattr(mosaic_check, "GUARD", np.full(100, 0x5B, np.uint8))
    _, found = mosaic_check.run_surrounded(prepared, [])
    assert found["guards_overwritten"] == 100 * 5  # around three results and one temporary


def test_random_cases_are_of_every_kind() -> None:
    cases = [random_case(seed) for seed in range(200)]
    assert all(case == again for case, again in zip(cases[:5], map(random_case, range(5)), strict=True))
    windows = [list(case.call.window) for case in cases]
    assert {len(window) for window in windows} == {1, 2, 3}
    for seen in (
        [any(d.base_dilation > 1 for d in window) for window in windows],
        [any(d.stride > 1 for d in window) for window in windows],
        [any(d.window_dilation > 1 for d in window) for window in windows],
        [any(d.padding_low < 0 for d in window) for window in windows],
        [any(d.reversal for d in window) for window in windows],
    ):
        assert sum(seen) >= 5
    assert {case.operands for case in cases} == {"exact", "random", "special"}
    assert sum(case.config is not None and case.config.splits > 1 for case in cases) >= 5


def test_configs_that_no_heuristic_chose_fit_the_machine() -> None:
    for case in NAMED.values():
        epilogue = epilogue_of(case.call)
        assert isinstance(epilogue, Epilogue)
        assert fits(case.chosen_config, epilogue.footprint), case.name


def test_special_operands_have_special_values() -> None:
    for name in ("plain-special", "gradient-2-special"):
        input, filter, *_ = NAMED[name].arrays()
        assert np.isnan(input).any()
        assert np.isinf(input.astype(np.float32)).any()
        assert np.isnan(filter).any() == (name == "plain-special")


def test_chosen_cases() -> None:
    arguments = argparse.Namespace(seeds="0:30", names="random-1?,lone-row*,odd", only="")
    names = mosaic_run.all_names(arguments)
    assert names == [
        "odd",
        "lone-row",
        "lone-row-promoted",
        "lone-row-of-a-phase",
        *(f"random-{i}" for i in range(10, 20)),
    ]


@pytest.mark.slow
def test_the_runner_resumes(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    command = [sys.executable, "-m", "tests.hopper.mosaic_run", "--out", str(out), "--dry-run", "--processes", "2"]
    done = {"name": "random-1", "outcome": "passed"}
    out.write_text(json.dumps(done) + "\n" + json.dumps({"name": "random-2", "outcome": "error"}) + "\n")
    ended = subprocess.run(
        [*command, "--seeds", "0:4", "--only", "random"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 cases to run, 2 done before" in ended.stdout
    names = [json.loads(line)["name"] for line in out.read_text().splitlines()]
    assert sorted(names) == ["random-0", "random-1", "random-2", "random-2", "random-3"]
