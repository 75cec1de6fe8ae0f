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
    from xla_fp8.depthwise import depthwise_conv
    from xla_fp8.functions import conv_general_dilated, saturating_cast
    from xla_fp8.models.calibrate import calibrate
    from xla_fp8.models.compare import compare
    from xla_fp8.models.convert import convert
    from xla_fp8.models.errors import MissingPackageError, ModelError, NothingConvertedWarning
    from xla_fp8.models.recipe import Recipe
    from xla_fp8.models.report import conversion_report
    from xla_fp8.models.scaling import split_scaling, update_scaling
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
    "MissingPackageError",
    "ModelError",
    "NotRewrittenError",
    "NothingConvertedWarning",
    "QuantizationError",
    "Recipe",
    "UntraceableError",
    "XlaFp8Error",
    "__version__",
    "calibrate",
    "compare",
    "conv_general_dilated",
    "conversion_report",
    "convert",
    "depthwise_conv",
    "dot_general",
    "explain",
    "fake_quantize",
    "fp8_conv",
    "fp8_dot",
    "jit",
    "quantize",
    "rewrite",
    "saturating_cast",
    "split_scaling",
    "update_scaling",
]

_HOME = {
    "DelayedScale": "xla_fp8.quantization.delayed",
    "DelayedScaling": "xla_fp8.quantization.delayed",
    "DifferentiationError": "xla_fp8.quantization.errors",
    "DumpWarning": "xla_fp8.tracing.errors",
    "FallbackWarning": "xla_fp8.tracing.errors",
    "Float8": "xla_fp8.quantization.float8",
    "MissingPackageError": "xla_fp8.models.errors",
    "ModelError": "xla_fp8.models.errors",
    "NotRewrittenError": "xla_fp8.tracing.errors",
    "NothingConvertedWarning": "xla_fp8.models.errors",
    "QuantizationError": "xla_fp8.quantization.errors",
    "Recipe": "xla_fp8.models.recipe",
    "UntraceableError": "xla_fp8.tracing.errors",
    "calibrate": "xla_fp8.models.calibrate",
    "compare": "xla_fp8.models.compare",
    "conv_general_dilated": "xla_fp8.functions",
    "conversion_report": "xla_fp8.models.report",
    "convert": "xla_fp8.models.convert",
    "depthwise_conv": "xla_fp8.depthwise",
    "dot_general": "xla_fp8.quantization.dot",
    "explain": "xla_fp8.api.explain",
    "fake_quantize": "xla_fp8.quantization.fake_quantize",
    "fp8_conv": "xla_fp8.quantization.training",
    "fp8_dot": "xla_fp8.quantization.training",
    "jit": "xla_fp8.api.jit",
    "quantize": "xla_fp8.quantization.quantize",
    "rewrite": "xla_fp8.api.rewrite",
    "saturating_cast": "xla_fp8.functions",
    "split_scaling": "xla_fp8.models.scaling",
    "update_scaling": "xla_fp8.models.scaling",
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
