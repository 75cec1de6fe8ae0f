"""What quantizing, and computing with FP8 arrays, may raise."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error


class QuantizationError(XlaFp8Error, TypeError):
    """Arguments that cannot be quantized, or an operation that an FP8 array with its scales cannot do."""


class DifferentiationError(XlaFp8Error, TypeError):
    """A derivative of something that has none: an FP8 array, or the cast that makes one.

    JAX would give it cotangents of FP8 type, unscaled: nearly everything in them is rounded to zero.
    """

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} has no derivative: its cotangent would be rounded to FP8 without a scale, which leaves nearly "
            "nothing of it. To train, use xla_fp8.fp8_dot or xla_fp8.fp8_conv, which quantize inside and have "
            "derivatives, or xla_fp8.fake_quantize, which passes the gradient through. If no gradient is meant to "
            "go this way, say so with jax.lax.stop_gradient."
        )
