"""Building and installing the package: what wheel and source distribution hold; nothing shadows xla_fp8.passes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts import ROOT

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


@pytest.mark.parametrize("environment", ["editable"], indirect=True)
def test_an_editable_install_is_whole_in_the_clone_too(environment: tuple[Path, Path], source_copy: Path) -> None:
    # Python takes the clone's xla_fp8/, in which there is no passes/; of an installed wheel nothing would be seen.
    python, passes = environment
    assert Path(evaluate(python, source_copy, "xla_fp8.__file__")) == source_copy / "xla_fp8" / "__init__.py"
    assert Path(evaluate(python, source_copy, "xla_fp8.passes.__file__")) == passes / "__init__.py"


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


@pytest.fixture(scope="module")
def sdist(source_copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, as a build frontend asks setuptools for it."""
    folder = tmp_path_factory.mktemp("sdist")
    program = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", program], cwd=source_copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.iterdir()
    return archive


def test_the_source_distribution_holds_the_package_and_no_tests(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames() if "/" in name}
    written = {"PKG-INFO", "setup.cfg", "xla_fp8.egg-info"}
    kept = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
    assert top == {"xla_fp8", "passes"} | kept | written


def test_the_source_distribution_installs_as_the_wheel(
    sdist: Path, installed: Path, pip_install: Callable[..., None], tmp_path: Path
) -> None:
    pip_install("--target", str(tmp_path), str(sdist))

    def files(folder: Path) -> set[str]:
        return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix != ".pyc"}

    assert files(tmp_path) == files(installed)


def test_the_metadata_is_that_of_a_typed_package(installed: Path) -> None:
    (distribution,) = importlib.metadata.distributions(path=[str(installed)])
    found = distribution.metadata
    assert "Typing :: Typed" in found.get_all("Classifier", [])
    assert found["License-Expression"] == "Apache-2.0"
    assert found["Description-Content-Type"] == "text/markdown"
    assert {"cuda13", "flax", "equinox", "plot", "docs", "test"} <= set(found.get_all("Provides-Extra", []))
    assert [entry.value for entry in distribution.entry_points] == ["xla_fp8.cli.main:main"]
    assert (installed / "xla_fp8" / "py.typed").exists()


def test_the_changelog_has_the_shape_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", version) for version in versions[1:])
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_importing_the_package_does_not_import_jax() -> None:
    program = "import sys, xla_fp8; print(*sorted({'jax', 'jaxlib', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
