"""xla_fp8: an FP8 compiler layer for JAX. This file names the public API and imports each part on first use.

`import xla_fp8` costs nothing: JAX is imported only by the parts that need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from xla_fp8.errors import XlaFp8Error

if TYPE_CHECKING:
    from xla_fp8.api.explain import explain
    from xla_fp8.api.jit import jit
    from xla_fp8.api.rewrite import rewrite
    from xla_fp8.tracing.errors import FallbackWarning, NotRewrittenError

__version__ = "0.1.0"

__all__ = [
    "FallbackWarning",
    "NotRewrittenError",
    "XlaFp8Error",
    "__version__",
    "explain",
    "jit",
    "rewrite",
]

_HOME = {
    "FallbackWarning": "xla_fp8.tracing.errors",
    "NotRewrittenError": "xla_fp8.tracing.errors",
    "explain": "xla_fp8.api.explain",
    "jit": "xla_fp8.api.jit",
    "rewrite": "xla_fp8.api.rewrite",
}
"""Where each public name lives."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
