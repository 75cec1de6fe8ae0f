"""The errors of the cuDNN backend."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error


class CudnnError(XlaFp8Error):
    """cuDNN refused a graph, or failed while it ran one. Says what cuDNN said, and of which graph."""


class CudnnMissingError(CudnnError):
    """A library of the extra `cuda13` is not installed or does not load; the message names it and the pip line."""


class CudnnUnsupportedError(CudnnError):
    """cuDNN has no plan for a graph; `reason` is what it said.

    Attributes:
        reason: cuDNN's own words, in one line.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(reason)
