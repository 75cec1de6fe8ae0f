"""From a traced function to a rewritten one: jaxprs are cut into FP8 regions, which lower through the passes."""

from __future__ import annotations

from pathlib import Path

from xla_fp8 import _jax_compat

# What we trace anew (a batched region, a transposed one) has the line that the user asked for it on, not ours.
_jax_compat.hide_from_sources(str(Path(__file__).parent.parent))
