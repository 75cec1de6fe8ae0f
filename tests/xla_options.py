"""Options of XLA that tests share."""

from __future__ import annotations

QUICKLY: dict[str, bool | int | str] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
"""Without LLVM's optimizations, which take most of the time of a small program: for tests of what a program means."""
