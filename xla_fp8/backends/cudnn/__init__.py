"""The cuDNN backend: graph calls as cuDNN graphs, called from XLA, and answers about them without a GPU.

What stands here does not import JAX; the backend itself is `xla_fp8.backends.cudnn.backend`.
"""

from __future__ import annotations

from xla_fp8.backends.cudnn.errors import CudnnError, CudnnMissingError, CudnnUnsupportedError
from xla_fp8.backends.cudnn.support import Support, in_xla, support, support_by_rules

__all__ = [
    "CudnnError",
    "CudnnMissingError",
    "CudnnUnsupportedError",
    "Support",
    "in_xla",
    "support",
    "support_by_rules",
]
