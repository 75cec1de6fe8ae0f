"""Which framework a model is of. A framework's module is imported only where a model of it is at hand."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_FRAMEWORKS = {"nnx": "flax.nnx", "linen": "flax.linen", "equinox": "equinox"}
"""Our module for a framework → the framework's, which is imported already where there is a model of it."""


def framework_of(model: Any) -> Any | None:
    """Our module for the model's framework: `xla_fp8.models.nnx`, `.linen` or `.equinox`; None for a plain function."""
    for ours, theirs in _FRAMEWORKS.items():
        if theirs in sys.modules:
            module = importlib.import_module(f"xla_fp8.models.{ours}")
            if module.is_model(model):
                return module
    return None
