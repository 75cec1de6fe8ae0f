"""What running a rewritten function may raise or warn of."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error


class NotRewrittenError(XlaFp8Error):
    """With `strict=True`: an FP8 convolution or dot stays as it was. The message lists each, with line and reason."""


class UntraceableError(XlaFp8Error):
    """A function of which there is no report, because it needs the values of its arguments. The message says where."""


class RegionError(XlaFp8Error):
    """A part of a function that cannot go through HLO text; it runs as plain JAX, with a `FallbackWarning`."""


class FallbackWarning(UserWarning):
    """A function, or a part of one, runs as plain JAX: what the user wrote, not rewritten. The message says why."""


class DumpWarning(UserWarning):
    """HLO was not written, because `XLA_FP8_DUMP_DIR` names no folder that can be. Nothing else is affected."""
