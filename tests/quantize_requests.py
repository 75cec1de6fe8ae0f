"""What tests of the quantization kernels ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from xla_fp8.quantization.algorithms import Request
from xla_fp8.quantization.numerics import ScaleRule


def request_for(x: Any, dtype: Any = ml_dtypes.float8_e4m3fn, **changes: Any) -> Request:
    """Rows of x (or its shape and type) with a dynamic scale and its amax, on a CUDA device; but for `changes`."""
    rule = ScaleRule(np.dtype(dtype))
    return dataclasses.replace(Request(x.shape, np.dtype(x.dtype), rule, (), "row", "", True, "cuda"), **changes)
