"""What `rewrite` was asked for, as a value: part of every cache key."""

from __future__ import annotations

import dataclasses

from xla_fp8.backends.protocol import Backend
from xla_fp8.target import Target


@dataclasses.dataclass(frozen=True)
class Options:
    """Attributes:
    passes: names of passes; None for the default pipeline.
    target: what to assume of the device; None for the local GPU, else an h200.
    backend: a backend, or the name of one; "auto" chooses by platform.
    strict: raise where an FP8 convolution or dot stays.
    """

    passes: tuple[str, ...] | None = None
    target: Target | None = None
    backend: str | Backend = "auto"
    strict: bool = False
