"""The layers of the package: import-linter's contracts in pyproject.toml hold, and are really checked."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PYPROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"

pytestmark = pytest.mark.xdist_group("installed")  # one worker: the session fixture `installed` takes seconds


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs import-linter on the package that lies in `folder`, wherever else xla_fp8 may be installed."""
    command = [str(Path(sys.executable).with_name("lint-imports")), str(PYPROJECT), "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_no_module_imports_from_a_layer_above_it(installed: Path) -> None:
    done = lint_imports(installed)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_import_from_above_is_found_in_passes_too(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(installed / "xla_fp8", tmp_path / "xla_fp8")
    with (tmp_path / "xla_fp8/passes/__init__.py").open("a") as file:
        file.write("\nimport xla_fp8.__main__\n")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "xla_fp8.passes -> xla_fp8.__main__" in done.stdout


def test_a_module_without_a_layer_is_found(installed: Path, tmp_path: Path) -> None:
    shutil.copytree(installed / "xla_fp8", tmp_path / "xla_fp8")
    (tmp_path / "xla_fp8/homeless.py").write_text("")
    done = lint_imports(tmp_path)
    assert done.returncode == 1
    assert "homeless" in done.stdout
