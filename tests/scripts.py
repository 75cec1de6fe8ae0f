"""Scripts of the repository as modules: benchmarks, examples and the tools of docs/ are not installed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def load_script(path: str) -> ModuleType:
    """Makes a module of a script, whose path is given from the root of the repository."""
    name = Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def load_benchmark(name: str) -> ModuleType:
    """The module `benchmarks.<name>`, whose own imports are from the root of the repository."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return importlib.import_module(f"benchmarks.{name}")
