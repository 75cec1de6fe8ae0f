"""The cuDNN backend: graph calls as cuDNN graphs, called from XLA, and answers about them without a GPU."""

from __future__ import annotations

from xla_fp8.backends.cudnn.backend import CudnnBackend, Plan
from xla_fp8.backends.cudnn.errors import CudnnError, CudnnMissingError, CudnnUnsupportedError
from xla_fp8.backends.cudnn.support import Support, support, support_by_rules

__all__ = [
    "CudnnBackend",
    "CudnnError",
    "CudnnMissingError",
    "CudnnUnsupportedError",
    "Plan",
    "Support",
    "support",
    "support_by_rules",
]
