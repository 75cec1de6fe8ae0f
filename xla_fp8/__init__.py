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
    from xla_fp8.functions import conv_general_dilated, saturating_cast
    from xla_fp8.tracing.errors import FallbackWarning, NotRewrittenError

__version__ = "0.1.0"

__all__ = [
    "FallbackWarning",
    "NotRewrittenError",
    "XlaFp8Error",
    "__version__",
    "conv_general_dilated",
    "explain",
    "jit",
    "rewrite",
    "saturating_cast",
]

_HOME = {
    "FallbackWarning": "xla_fp8.tracing.errors",
    "NotRewrittenError": "xla_fp8.tracing.errors",
    "conv_general_dilated": "xla_fp8.functions",
    "explain": "xla_fp8.api.explain",
    "jit": "xla_fp8.api.jit",
    "rewrite": "xla_fp8.api.rewrite",
    "saturating_cast": "xla_fp8.functions",
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
