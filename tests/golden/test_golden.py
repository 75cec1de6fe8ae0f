"""The golden tests: one pytest item for each .hlo file of hlo_fixtures/, run by lit and filecheck; and tests of that.

lit is used in this process, one file at a time, so `-k`, `-x` and pytest-xdist work on single files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lit import LitTestCase, Test

FIXTURES = Path(__file__).resolve().parents[2] / "hlo_fixtures"


def discover(folder: Path) -> list[LitTestCase.LitTestCase]:
    """Returns lit's tests below `folder`, which holds (or is below) a lit.cfg.py, in the order of their paths."""
    return sorted(LitTestCase.load_test_suite([str(folder)]), key=lambda case: case.id())


def run(case: LitTestCase.LitTestCase) -> Test.Result:
    """Runs one lit test. (lit's own `runTest` lets an unsupported test pass without a word.)"""
    return case._test.config.test_format.execute(case._test, case._lit_config)


def name(case: LitTestCase.LitTestCase) -> str:
    return "/".join(case._test.path_in_suite)


CASES = discover(FIXTURES)


def test_there_are_golden_files() -> None:
    assert CASES, f"lit finds no golden test below {FIXTURES}"


@pytest.fixture(scope="module")
def result_of(request: pytest.FixtureRequest) -> Iterator[Callable[[LitTestCase.LitTestCase], Test.Result]]:
    """Returns a function from a golden file to its result; all selected files run side by side from the first call on.

    They are processes that start Python, which is what takes the time. pytest-xdist spreads the files itself.
    """
    if hasattr(request.config, "workerinput"):
        yield run
        return
    selected = [item.callspec.params["case"] for item in request.session.items if item.name.startswith("test_golden[")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures = {name(case): pool.submit(run, case) for case in selected}
        yield lambda case: futures[name(case)].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", CASES, ids=name)
def test_golden(case: LitTestCase.LitTestCase, result_of: Callable[[LitTestCase.LitTestCase], Test.Result]) -> None:
    result = result_of(case)
    if result.code is Test.UNSUPPORTED:
        pytest.skip(result.output)
    if result.code is Test.XFAIL:
        pytest.xfail(result.output)
    assert result.code is Test.PASS, f"lit says {result.code.name}\n{result.output}"


@pytest.fixture
def sample(tmp_path: Path):
    """Returns a function that runs the given text as a golden file, under the project's own lit.cfg.py."""

    def run_sample(text: str, path: str = "pass-name/sample.hlo") -> Test.Result:
        suite = tmp_path / "xla-fp8" / "hlo_fixtures"  # the name of a clone must not be taken for the command
        file = suite / path
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(FIXTURES / "lit.cfg.py", suite)
        file.write_text(text)
        (case,) = discover(suite)
        return run(case)

    return run_sample


def test_harness_passes_a_matching_check(sample) -> None:
    result = sample("// RUN: cat %s | FileCheck %s\nHloModule m\n// CHECK: {{^}}HloModule m\n")
    assert result.code is Test.PASS, result.output


def test_harness_fails_on_a_check_that_does_not_match(sample) -> None:
    result = sample("// RUN: cat %s | FileCheck %s\nHloModule m\n// CHECK: {{^}}HloModule other\n")
    assert result.code is Test.FAIL
    assert "HloModule other" in result.output


def test_harness_fails_when_the_command_before_the_pipe_fails(sample) -> None:
    result = sample("// RUN: %python -c 'print(1); exit(3)' | FileCheck %s\n// CHECK: 1\n")
    assert result.code is Test.FAIL


@pytest.mark.parametrize(("status", "code"), [(1, Test.PASS), (0, Test.FAIL)], ids=["fails", "succeeds"])
def test_harness_inverts_the_status_with_not(sample, status: int, code: object) -> None:
    result = sample(f"// RUN: not %python -c 'print(1); exit({status})' | FileCheck %s\n// CHECK: 1\n")
    assert result.code is code, result.output


def test_harness_fails_on_a_file_without_run_lines(sample) -> None:
    result = sample("HloModule m\n// CHECK: HloModule\n")
    assert result.code is Test.UNRESOLVED
    assert "RUN:" in result.output


def test_harness_starts_this_project(sample) -> None:
    result = sample("// RUN: xla-fp8 --help | filecheck %s\n// CHECK: usage:\n// CHECK: opt\n// CHECK: explain\n")
    assert result.code is Test.PASS, result.output


@pytest.mark.parametrize("folder", ["dumps", "pass-name/Inputs"])
def test_harness_leaves_dumps_and_inputs_alone(sample, folder: str, tmp_path: Path) -> None:
    other = tmp_path / "xla-fp8" / "hlo_fixtures" / folder / "other.hlo"
    other.parent.mkdir(parents=True)
    other.write_text("HloModule other\n")
    result = sample("// RUN: cat %s | FileCheck %s\nHloModule m\n// CHECK: {{^}}HloModule m\n")  # finds just one
    assert result.code is Test.PASS, result.output
