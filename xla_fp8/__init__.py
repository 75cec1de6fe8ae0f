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
    from xla_fp8.quantization.delayed import DelayedScale, DelayedScaling
    from xla_fp8.quantization.dot import dot_general
    from xla_fp8.quantization.errors import DifferentiationError, QuantizationError
    from xla_fp8.quantization.fake_quantize import fake_quantize
    from xla_fp8.quantization.float8 import Float8
    from xla_fp8.quantization.quantize import quantize
    from xla_fp8.quantization.training import fp8_conv, fp8_dot
    from xla_fp8.tracing.errors import DumpWarning, FallbackWarning, NotRewrittenError, UntraceableError

__version__ = "0.1.0"

__all__ = [
    "DelayedScale",
    "DelayedScaling",
    "DifferentiationError",
    "DumpWarning",
    "FallbackWarning",
    "Float8",
    "NotRewrittenError",
    "QuantizationError",
    "UntraceableError",
    "XlaFp8Error",
    "__version__",
    "conv_general_dilated",
    "dot_general",
    "explain",
    "fake_quantize",
    "fp8_conv",
    "fp8_dot",
    "jit",
    "quantize",
    "rewrite",
    "saturating_cast",
]

_HOME = {
    "DelayedScale": "xla_fp8.quantization.delayed",
    "DelayedScaling": "xla_fp8.quantization.delayed",
    "DifferentiationError": "xla_fp8.quantization.errors",
    "DumpWarning": "xla_fp8.tracing.errors",
    "FallbackWarning": "xla_fp8.tracing.errors",
    "Float8": "xla_fp8.quantization.float8",
    "NotRewrittenError": "xla_fp8.tracing.errors",
    "QuantizationError": "xla_fp8.quantization.errors",
    "UntraceableError": "xla_fp8.tracing.errors",
    "conv_general_dilated": "xla_fp8.functions",
    "dot_general": "xla_fp8.quantization.dot",
    "explain": "xla_fp8.api.explain",
    "fake_quantize": "xla_fp8.quantization.fake_quantize",
    "fp8_conv": "xla_fp8.quantization.training",
    "fp8_dot": "xla_fp8.quantization.training",
    "jit": "xla_fp8.api.jit",
    "quantize": "xla_fp8.quantization.quantize",
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
