"""The report of a validation: the newest result counts, the worst number is shown, no failure is left out."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.scripts import load_script

PATH = Path(__file__).resolve().parents[2] / "benchmarks/validation_report.py"


@pytest.fixture(scope="module")
def report() -> ModuleType:
    return load_script("benchmarks/validation_report.py")


def line(test: str, outcome: str, day: int, reason: str = "", **more: Any) -> str:
    return json.dumps({"test": test, "outcome": outcome, "date": f"2026-12-{day:02}", "reason": reason, **more})


def measured(error: float, share: float, steps: float, bound: float | None = None) -> dict[str, Any]:
    return {
        "types": ["float8_e4m3fn", "float32"],
        "max_abs": [error, 0.5],
        "largest": [100.0, 50.0],
        "share_equal": [share, 1.0],
        "max_steps": [steps, 2],
        "of_bound": [None, bound],
    }


LINES = [
    json.dumps({"environment": {"device": "1 x NVIDIA H200", "cuDNN": "9.19.0"}, "date": "2026-12-01"}),
    json.dumps({"environment": {"device": "1 x NVIDIA H200", "cuDNN": "9.19.0"}, "date": "2026-12-02"}),
    line("test_cudnn.py::test_op[relu]", "failed", 1, "it was wrong"),
    line("test_cudnn.py::test_op[relu]", "passed", 2, **measured(8.0, 0.99, 1, 0.25)),
    line("test_cudnn.py::test_op[tanh]", "passed", 1, **measured(4.0, 0.97, 3, 0.5)),
    line("test_cudnn.py::test_shape[a|b]", "failed", 2, "result 0 of a|b: 3 elements"),
    line("test_running.py::test_threads", "passed", 2),
    line("test_running.py::test_more", "skipped", 2, "Skipped: needs two GPUs"),
    line("test_running.py::test_threads", "skipped", 3, "over"),
]


def test_the_page(report: ModuleType) -> None:
    page = report.render(report.load(reversed(LINES)), "python3 session.py --seconds 5")
    assert "4 tests ran, 1 failed, 1 were skipped; 2026-12-01 to 2026-12-02." in page
    assert "    python3 session.py --seconds 5\n" in page
    assert page.count("- 1 x NVIDIA H200: cuDNN 9.19.0\n") == 1
    assert "| op | float8_e4m3fn | 2 | 0 | 0.08 | - | 97.00% | 3 |\n" in page
    assert "| op | float32 | 2 | 0 | 0.01 | 0.5 | - | - |\n" in page
    assert "| shape | - | 1 | 1 | - | - | - | - |\n" in page
    assert "- `test_cudnn.py::test_shape[a|b]`: result 0 of a|b: 3 elements\n" in page
    assert "## Failed in an earlier run and passed at last\n\n- `test_cudnn.py::test_op[relu]`: it was wrong\n" in page
    assert "- `test_running.py::test_more`: needs two GPUs\n" in page
    assert "test_threads`: over" not in page, "a test that ran is not listed as skipped"


def test_what_is_known_of_a_failure_follows_it(report: ModuleType) -> None:
    page = report.render(report.load(LINES), "x", notes={"shape[": "The test was wrong."})
    assert "- `test_cudnn.py::test_shape[a|b]`: result 0 of a|b: 3 elements\n\n  The test was wrong.\n" in page


def test_whole_programs_are_a_table(report: ModuleType) -> None:
    fp8 = {"type": "float8_e4m3fn", "ok": True, "equal": 0.998, "norm": 0.003}
    wide = {"type": "float32", "ok": False, "equal": 0.0, "norm": 0.04}
    programs = {
        "two results": {"ok": False, "kernels": 2, "results": [fp8, wide]},
        "timed": {"ok": True, "us": 12.34},
        "gone": {"ok": False, "error": "RuntimeError: no"},
    }
    earlier = {"timed": {"ok": False, "us": 1.0}}
    page = report.render(report.load(LINES), "x\ny", [earlier, programs], {"two": "Why."})
    assert "\n\n    x\n    y\n\n" in page
    assert "| two results | **failed** | 2 | 99.80% | 4.0e-02 | - |\n" in page
    assert "| timed | ok | - | - | - | 12.3 us |\n" in page
    assert "| gone | **failed**: RuntimeError: no | - | - | - | - |\n" in page
    assert "- `timed`: passed, and failed in an earlier run\n" in page
    assert page.endswith("- `two results`: failed\n\n  Why.\n\n- `gone`: failed\n")


def test_the_notes_are_of_tests_and_programs_that_exist(report: ModuleType) -> None:
    sources = [*PATH.parents[1].glob("tests/hopper/*.py"), PATH.with_name("hopper_jit.py")]
    text = "".join(path.read_text() for path in sources)
    for name, note in json.loads(report.NOTES.read_text()).items():
        assert name.partition("[")[0] in text
        assert note.endswith(".")


def test_without_failures_it_says_none(report: ModuleType) -> None:
    page = report.render(report.load([line("a.py::b", "passed", 1)]), "x")
    assert "## Failures\n\nNone.\n" in page
    assert "Skipped" not in page


def test_without_results_it_says_so(report: ModuleType) -> None:
    assert "No results." in report.render(report.load([]), "x")
