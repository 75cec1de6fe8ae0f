"""RUN: lines as `xla-fp8 update-checks` reads them: one command, a pipe of several, and what it cannot follow."""

from __future__ import annotations

import pytest

from xla_fp8.cli import golden_file
from xla_fp8.cli.errors import CliError


def test_reads_one_command() -> None:
    (run,) = golden_file.runs("// RUN: xla-fp8 opt %s --passes=dce | filecheck %s --check-prefix=DCE\n")
    assert run == golden_file.Run((("opt", "%s", "--passes=dce"),), prefix="DCE")


def test_reads_a_pipe_of_commands() -> None:
    (run,) = golden_file.runs("// RUN: xla-fp8 opt %s | not xla-fp8 opt - --fail-if-unchanged 2>&1 | filecheck %s\n")
    assert run.commands == (("opt", "%s"), ("opt", "-", "--fail-if-unchanged"))
    assert run.fails
    assert run.merges_stderr


@pytest.mark.parametrize(
    "line",
    [
        "filecheck %s",
        "cat %s | filecheck %s",
        "xla-fp8 opt %s | sort | filecheck %s",
        "not xla-fp8 opt %s | xla-fp8 opt - | filecheck %s",
        "xla-fp8 opt %s 2>&1 | xla-fp8 opt - | filecheck %s",
        "xla-fp8 opt %s -o %t && filecheck %s --input-file %t",
    ],
)
def test_refuses_what_it_cannot_follow(line: str) -> None:
    with pytest.raises(CliError, match="cannot follow"):
        golden_file.runs(f"// RUN: {line}\n")


def test_skips_the_folder_of_the_file() -> None:
    output = f'"file": "{golden_file.FOLDER}a.hlo"\n{golden_file.FOLDER}a.hlo: warning'
    assert list(golden_file.checks("CHECK", output)) == [
        '// CHECK: "file": "',
        '// CHECK-SAME: a.hlo"',
        "// CHECK-NEXT: a.hlo: warning",
    ]
