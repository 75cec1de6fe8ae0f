"""`xla-fp8 update-checks`: CHECK lines from real output, which FileCheck then accepts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xla_fp8.cli import golden_file
from xla_fp8.cli.errors import CliError

HLO = """
HloModule m

ENTRY main {
  x = s32[2,2] parameter(0)
  table = s32[2,2] constant({{1, 2}, {3, 4}})
  ROOT y = s32[2,2] add(x, table), metadata={op_name="f/add" source_file="/home/me/model.py" source_line=3}
}
"""

GOLDEN = (
    """\
// What this test is about.
// RUN: xla-fp8 opt %s --passes= | filecheck %s
// CHECK: what was there
// CHECK-NEXT: before
"""
    + HLO
)


def filecheck(golden: Path, printed: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "filecheck", str(golden), *options]
    return subprocess.run(command, input=printed, capture_output=True, text=True, check=False)


def test_check_lines_are_what_is_printed(cli, tmp_path: Path) -> None:
    path = tmp_path / "golden.hlo"
    path.write_text(GOLDEN)
    done = cli("update-checks", path)
    assert (done.status, done.out) == (0, f"{path}: updated\n")
    assert (
        path.read_text()
        == """\
// What this test is about.
// RUN: xla-fp8 opt %s --passes= | filecheck %s

// CHECK-LABEL: ENTRY main {
// CHECK-NEXT: x = s32[2,2] parameter(0)
// CHECK-NEXT{LITERAL}: table = s32[2,2] constant({{1, 2}, {3, 4}})
// CHECK-NEXT: ROOT y = s32[2,2] add(x, table)
// CHECK-NEXT: }
"""
        + HLO
    )


def test_filecheck_accepts_the_new_lines_and_rejects_another_output(cli, tmp_path: Path) -> None:
    path = tmp_path / "golden.hlo"
    path.write_text(GOLDEN)
    assert cli("update-checks", path).status == 0
    printed = cli("opt", path, "--passes=").out
    done = filecheck(path, printed)
    assert done.returncode == 0, done.stdout + done.stderr
    assert filecheck(path, printed.replace("{3, 4}", "{3, 5}")).returncode == 1
    assert filecheck(path, printed.replace("add(", "multiply(")).returncode == 1


def test_twice_is_once(cli, tmp_path: Path) -> None:
    path = tmp_path / "golden.hlo"
    path.write_text(GOLDEN)
    assert cli("update-checks", path).status == 0
    once = path.read_text(), os.stat(path).st_ino
    done = cli("update-checks", path)
    assert done.out == f"{path}: up to date\n"
    assert (path.read_text(), os.stat(path).st_ino) == once


def test_a_graph_and_a_report_under_two_prefixes(cli, scaled_conv: Path, tmp_path: Path) -> None:
    hlo = scaled_conv.read_text()
    path = tmp_path / "golden.hlo"
    path.write_text(
        "// RUN: xla-fp8 opt %s --target=h200 | filecheck %s\n"
        "// RUN: xla-fp8 explain %s --target=h200 | filecheck %s --check-prefix=WHY\n" + hlo[hlo.index("HloModule") :]
    )
    assert cli("update-checks", path).status == 0
    text = path.read_text()
    assert "// CHECK-NEXT: conv = (f8e4m3fn[8,28,28,128]{3,2,1,0}, u8[" in text
    assert "// WHY: rewritten  conv  1:[f32]conv();" in text
    assert "// WHY-EMPTY:" in text
    assert filecheck(path, cli("opt", path, "--target=h200").out).returncode == 0
    done = filecheck(path, cli("explain", path, "--target=h200").out, "--check-prefix=WHY")
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_command_that_must_fail(cli, tmp_path: Path) -> None:
    path = tmp_path / "golden.hlo"
    path.write_text(
        "// RUN: not xla-fp8 opt %s 2>&1 | filecheck %s\nHloModule m\n\nENTRY e {\n  x = f32[] nothing()\n}\n"
    )
    assert cli("update-checks", path).status == 0
    assert "error: " in path.read_text()
    assert str(tmp_path) not in path.read_text()  # the next clone is elsewhere
    path.write_text("// RUN: not xla-fp8 opt %s | filecheck %s\n" + HLO)
    done = cli("update-checks", path)
    assert done.status == 1
    assert "succeeds, but the RUN line says `not`" in done.err


def test_a_file_that_is_no_text_is_an_error_with_a_place(cli, tmp_path: Path) -> None:
    path = tmp_path / "golden.hlo"
    path.write_bytes(b"// RUN: \xff")
    done = cli("update-checks", path)
    assert done.status == 1
    assert f"{path}:1:9: error: byte 0xff is not valid UTF-8" in done.err


def test_a_failing_command_leaves_the_file_alone(cli, tmp_path: Path) -> None:
    path = tmp_path / "golden.hlo"
    text = GOLDEN.replace("ROOT y", "ROOT ROOT y")
    path.write_text(text)
    done = cli("update-checks", path)
    assert done.status == 1
    assert "fails (status 1)" in done.err
    assert path.read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        "xla-fp8 opt %s -o %t && FileCheck %s --input-file %t",
        "xla-fp8 opt %s",
        "cat %s | filecheck %s",
        "xla-fp8 opt %s | tee x | filecheck %s",
        "xla-fp8 opt %s | filecheck %s --strict-whitespace",
        "xla-fp8 opt '%s | filecheck %s",
    ],
)
def test_another_kind_of_run_line_is_refused(line: str) -> None:
    with pytest.raises(CliError, match="write these checks by hand"):
        golden_file.runs(f"// RUN: {line}\n")


def test_run_lines_are_read_as_lit_reads_them() -> None:
    text = "// RUN: not xla-fp8 opt %s \\\n// RUN:   --passes='a,b' 2>&1 | FileCheck %s -check-prefix=OTHER\n"
    assert golden_file.runs(text) == [golden_file.Run((("opt", "%s", "--passes=a,b"),), "OTHER", True, True)]
    with pytest.raises(CliError, match="no RUN: line"):
        golden_file.runs("HloModule m\n")


def test_one_prefix_cannot_mean_two_outputs() -> None:
    with pytest.raises(CliError, match="own --check-prefix"):
        golden_file.updated("HloModule m\n", [("CHECK", "a\n"), ("CHECK", "b\n")])


def test_metadata_inside_a_line_is_skipped() -> None:
    printed = 'ENTRY e {\n  x = f32[] custom-call(), metadata={op_name="a{b}\\"c"}, backend_config={"k":"v"}\n}\n'
    assert list(golden_file.checks("CHECK", printed)) == [
        "// CHECK-LABEL: ENTRY e {",
        "// CHECK-NEXT: x = f32[] custom-call()",
        '// CHECK-SAME: , backend_config={"k":"v"}',
        "// CHECK-NEXT: }",
    ]
