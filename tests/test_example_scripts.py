"""The examples that are scripts run as their docstrings say, and tell what they claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.scripts import ROOT


def run(name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_own_pass_makes_a_convolution_fp8_and_changes_no_value(tmp_path: Path) -> None:
    done = run("own_pass.py", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    first, second, compared = done.stdout.split("== ")[1:]
    assert "0 rewritten, 1 refused" in first
    assert "1 rewritten, 0 refused" in second
    row = compared.splitlines()[-1].split()
    assert (row[2], row[-1]) == ("0", "ok"), "equal to the last bit"
    assert "convForwardGraph" in (tmp_path / "after.hlo").read_text()


def test_the_check_for_ci_fails_where_a_convolution_is_lost(tmp_path: Path) -> None:
    baseline, out = tmp_path / "fp8.json", tmp_path / "out"
    missing = run("rewrite_dump_in_ci.py", "--baseline", baseline, "--out", out)
    assert missing.returncode == 1
    assert missing.stderr == f"{baseline} is not there: run once with --update, and commit it\n"

    written = run("rewrite_dump_in_ci.py", "--baseline", baseline, "--out", out, "--update")
    assert written.returncode == 0, written.stderr
    assert sum(json.loads(baseline.read_text())["graphs"].values()) == 3
    assert "convForwardGraph" in (out / "rewritten.hlo").read_text()
    assert (out / "report.html").read_text().count("<article") == 3
    assert (out / "summary.md").read_text().startswith("**3 rewritten")

    again = run("rewrite_dump_in_ci.py", "--baseline", baseline, "--out", out)
    assert (again.returncode, again.stderr) == (0, "")

    broken = run("rewrite_dump_in_ci.py", "--baseline", baseline, "--out", out, "--break-it")
    assert broken.returncode == 1
    assert "0 of 3 left" in broken.stderr
    assert "--update" in broken.stderr
