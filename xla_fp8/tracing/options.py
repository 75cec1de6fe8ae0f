"""What `rewrite` was asked for, as a value: part of every cache key."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from xla_fp8.backends.protocol import Backend
from xla_fp8.report import Report
from xla_fp8.target import Target

_REWRITER = "dynamic-quantize-rewriter"
_QUANTIZATIONS = ("call-inliner", "simplify", _REWRITER, "dce")


@dataclasses.dataclass(frozen=True)
class Options:
    """Attributes:
    passes: names of passes; None for the default pipeline.
    target: what to assume of the device; None for the local GPU, else an h200.
    backend: a backend, or the name of one; "auto" chooses by platform.
    strict: raise where an FP8 convolution or dot stays.
    tell: called with the report of each region that a transformation made (vmap, grad), when it is lowered; what the
        function itself became is told when it is traced.
    is_partitioned: whether XLA's partitioner will split the program over devices; known when a region is lowered.
    of_transformation: whether a transformation made the regions that have these options.
    of_quantization: whether the regions that have these options hold quantizations, and no convolution or dot.
    """

    passes: tuple[str, ...] | None = None
    target: Target | None = None
    backend: str | Backend = "auto"
    strict: bool = False
    tell: Callable[[Report], object] | None = dataclasses.field(default=None, compare=False, repr=False)
    is_partitioned: bool = False
    of_transformation: bool = dataclasses.field(default=False, compare=False, repr=False)
    of_quantization: bool = dataclasses.field(default=False, compare=False, repr=False)

    @property
    def for_passes(self) -> Options:
        """What of it decides how a region is rewritten."""
        return Options(self.passes, self.target, self.backend, is_partitioned=self.is_partitioned)

    @property
    def transformed(self) -> Options:
        """The options of what a transformation makes."""
        return dataclasses.replace(self, of_transformation=True)

    @property
    def takes_quantizations(self) -> bool:
        """Whether quantizations become regions: in the default pipeline, and where their pass is named."""
        return self.passes is None or _REWRITER in self.passes

    @property
    def takes_fused_casts(self) -> bool:
        """Whether casts to FP8 go to kernels with what is in front of them: by default, and not where all is XLA's."""
        return self.passes is None and self.backend not in ("reference", "xla")

    @property
    def of_quantizations(self) -> Options:
        """The options of regions of quantizations. That one of them stays as it is is nothing to be strict about."""
        passes = _QUANTIZATIONS if self.passes is None else self.passes
        return dataclasses.replace(self, passes=passes, strict=False, tell=None, of_quantization=True)
