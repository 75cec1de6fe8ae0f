"""The golden tests: one pytest item for each .hlo file of hlo_fixtures/, found by lit; and tests of how they are run.

What needs no shell runs in this process (in_process.py), the rest under lit, one file at a time; so `-k`, `-x` and
pytest-xdist work on single files.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from lit import LitTestCase, Test

from tests.golden import in_process

FIXTURES = Path(__file__).resolve().parents[2] / "hlo_fixtures"


def discover(folder: Path) -> list[LitTestCase.LitTestCase]:
    """Returns lit's tests below `folder`, which holds (or is below) a lit.cfg.py, in the order of their paths."""
    return sorted(LitTestCase.load_test_suite([str(folder)]), key=lambda case: case.id())


def run(case: LitTestCase.LitTestCase) -> Test.Result:
    """Runs one golden file. (lit's own `runTest` lets an unsupported test pass without a word.)"""
    path = Path(case._test.getSourcePath())
    if in_process.runs(path):
        return in_process.result(path)
    return run_by_lit(case)


def run_by_lit(case: LitTestCase.LitTestCase) -> Test.Result:
    return case._test.config.test_format.execute(case._test, case._lit_config)


def name(case: LitTestCase.LitTestCase) -> str:
    return "/".join(case._test.path_in_suite)


CASES = discover(FIXTURES)


def test_there_are_golden_files() -> None:
    assert CASES, f"lit finds no golden test below {FIXTURES}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_golden(case: LitTestCase.LitTestCase) -> None:
    result = run(case)
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


# A line that needs a shell is lit's; a pipe of xla-fp8 runs in this process.
PIPES = {"shell": "xla-fp8 opt %s --passes= 2>&1", "process": "xla-fp8 opt %s --passes="}
MODULE = "HloModule m\n\nENTRY main {\n  ROOT a = f32[] parameter(0)\n}\n"


@pytest.mark.parametrize("pipe", PIPES.values(), ids=PIPES)
def test_harness_starts_this_project(sample, pipe: str) -> None:
    result = sample(f"// RUN: {pipe} | filecheck %s\n{MODULE}// CHECK: {{{{^}}}}HloModule m\n// CHECK: ROOT a\n")
    assert result.code is Test.PASS, result.output
    again = pipe.replace("%s", "-")
    result = sample(
        f"// RUN: xla-fp8 opt %s --passes= | {again} | filecheck %s --check-prefix=P\n{MODULE}// P: ROOT a\n"
    )
    assert result.code is Test.PASS, result.output


@pytest.mark.parametrize("pipe", PIPES.values(), ids=PIPES)
@pytest.mark.parametrize("check", ["// CHECK: ROOT b\n", "", "// CHECK-NOT: ROOT a\n"])
def test_harness_fails_on_a_check_of_this_project_that_does_not_match(sample, pipe: str, check: str) -> None:
    result = sample(f"// RUN: {pipe} | filecheck %s\n{MODULE}{check}")
    assert result.code is Test.FAIL
    assert "CHECK" in result.output or "check" in result.output


@pytest.mark.parametrize("line", ["xla-fp8 opt {0}", "xla-fp8 opt %s | xla-fp8 opt - {0}", "xla-fp8 opt {0} 2>&1"])
def test_harness_fails_when_this_project_does(sample, line: str) -> None:
    result = sample(f"// RUN: {line.format('--passes=nonesuch')} | filecheck %s\n{MODULE}// CHECK-NOT: other\n")
    assert result.code is Test.FAIL
    assert "nonesuch" in result.output


def test_harness_checks_every_run_line(sample) -> None:
    lines = [f"// RUN: xla-fp8 opt %s --passes= | filecheck %s --check-prefix={prefix}\n" for prefix in ("A", "B")]
    assert sample("".join([*lines, MODULE, "// A: ROOT a\n// B: ROOT a\n"])).code is Test.PASS
    assert sample("".join([*lines, MODULE, "// A: ROOT a\n// B: ROOT b\n"])).code is Test.FAIL
    assert sample("".join([*lines, MODULE, "// A: ROOT b\n// B: ROOT a\n"])).code is Test.FAIL


def test_most_golden_files_run_in_this_process() -> None:
    """What took minutes takes seconds there; a form of RUN line that every file begins to use belongs into it."""
    by_lit = [name(case) for case in CASES if not in_process.runs(Path(case._test.getSourcePath()))]
    assert len(by_lit) < len(CASES) / 10, by_lit


@pytest.mark.parametrize("folder", ["dumps", "pass-name/Inputs"])
def test_harness_leaves_dumps_and_inputs_alone(sample, folder: str, tmp_path: Path) -> None:
    other = tmp_path / "xla-fp8" / "hlo_fixtures" / folder / "other.hlo"
    other.parent.mkdir(parents=True)
    other.write_text("HloModule other\n")
    result = sample("// RUN: cat %s | FileCheck %s\nHloModule m\n// CHECK: {{^}}HloModule m\n")  # finds just one
    assert result.code is Test.PASS, result.output
