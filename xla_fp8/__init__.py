"""xla_fp8: an FP8 compiler layer for JAX. This file names the public API and imports each part on first use.

`import xla_fp8` costs nothing: JAX is imported only by the parts that need it.
"""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error

__version__ = "0.1.0"

__all__ = ["XlaFp8Error", "__version__"]
