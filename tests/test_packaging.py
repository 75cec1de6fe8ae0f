"""Installing the package: passes/ becomes xla_fp8.passes, in a wheel and in an editable install; nothing shadows it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("installed")  # one worker: the session fixtures build the package


@pytest.fixture(scope="module", params=["wheel", "editable"])
def environment(
    request: pytest.FixtureRequest,
    source_copy: Path,
    pip_install: Callable[..., None],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path]:
    """A new virtual environment with the package in it: its interpreter, and the folder that passes/ must come from."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    # The dependencies come from the environment that runs the tests. Python appends a folder named in a .pth file and
    # does not read that folder's own .pth files, so that environment's editable install of the project is not seen.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip_install(*(["--editable"] if request.param == "editable" else []), str(source_copy), python=python)
    return python, source_copy / "passes" if request.param == "editable" else site / "xla_fp8" / "passes"


@pytest.fixture
def stray(tmp_path: Path) -> Path:
    """A folder with a module `passes` of the user's own."""
    (tmp_path / "passes.py").write_text('WHOSE = "the user\'s"\n')
    return tmp_path


def evaluate(python: Path, path: Path, expression: str) -> str:
    """Evaluates a Python expression in a new process of `python`, with `path` as the first entry of sys.path."""
    program = f"import sys, passes, xla_fp8, xla_fp8.passes; assert sys.path[1] == {str(path)!r}; print({expression})"
    command = [str(python), "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, cwd=path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_stray_passes_module_shadows_nothing(environment: tuple[Path, Path], stray: Path) -> None:
    python, passes = environment
    assert evaluate(python, stray, "passes.WHOSE") == "the user's"
    assert Path(evaluate(python, stray, "xla_fp8.passes.__file__")) == passes / "__init__.py"


def test_the_version_is_that_of_the_distribution(environment: tuple[Path, Path], stray: Path) -> None:
    python, _ = environment
    version = "__import__('importlib.metadata').metadata.version('xla-fp8')"
    assert evaluate(python, stray, "xla_fp8.__version__") == evaluate(python, stray, version)


def test_the_wheel_holds_one_package(installed: Path) -> None:
    assert sorted(path.name for path in installed.iterdir() if path.suffix != ".dist-info") == ["bin", "xla_fp8"]
    assert (installed / "bin" / "xla-fp8").exists()


def test_the_wheel_holds_every_module_and_data_file(installed: Path, source_copy: Path) -> None:
    def files(folder: Path) -> set[str]:
        return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.suffix in {".py", ".json", ".typed"}}

    expected = files(source_copy / "xla_fp8") | {f"passes/{file}" for file in files(source_copy / "passes")}
    assert files(installed / "xla_fp8") == expected


def test_importing_the_package_does_not_import_jax() -> None:
    program = "import sys, xla_fp8; print(*sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
