"""What every test shares: hypothesis profiles, the markers `hopper` and `unoptimized`, the package from its wheel."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
NIGHTLY = os.environ.get("XLA_FP8_NIGHTLY") == "1"

# By default the same examples every time: a red run is about the change, never about luck. The nightly run explores.
settings.register_profile("default", derandomize=True, deadline=None, max_examples=50, print_blob=True)
settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("nightly" if NIGHTLY else "default")


@functools.cache
def why_not_hopper() -> str | None:
    """Returns why the tests marked `hopper` cannot run here, or None if they can."""
    import jax

    try:
        device = jax.devices("gpu")[0]
    except RuntimeError as error:
        return f"needs a Hopper GPU, and JAX sees no GPU: {str(error).splitlines()[0]}"
    if device.compute_capability != "9.0":
        return f"needs a Hopper GPU, and this is {device.device_kind} (compute capability {device.compute_capability})"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hopper") and (reason := why_not_hopper()):
            item.add_marker(pytest.mark.skip(reason=reason))


IS_UNOPTIMIZED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of a test, has XLA compile as the marker `unoptimized` says."""
    unoptimized = item.get_closest_marker("unoptimized") is not None
    if unoptimized == item.config.stash.get(IS_UNOPTIMIZED, False):
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", unoptimized)
    if not unoptimized:
        jax.clear_caches()  # JAX keeps what it compiled whatever the option was
    item.config.stash[IS_UNOPTIMIZED] = unoptimized


@pytest.fixture(scope="session")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation is built from, copied, so that nothing stale in build/ gets in and nothing here changes."""
    copy = tmp_path_factory.mktemp("source")
    for file in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    for folder in ("xla_fp8", "passes", "tests"):  # tests/ as a temptation: it must not be installed
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="session")
def pip_install() -> Callable[..., None]:
    """Returns a function that runs `pip install` without dependencies and without the network."""

    def install(*arguments: str, python: Path | str = sys.executable) -> None:
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install"]
        flags = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation"]  # builds with this setuptools
        done = subprocess.run([*pip, *flags, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return install


@pytest.fixture(scope="session")
def installed(source_copy: Path, pip_install: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel of this project was installed, without its dependencies."""
    target = tmp_path_factory.mktemp("installed")
    pip_install("--target", str(target), str(source_copy))
    return target
