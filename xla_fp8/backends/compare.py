"""How far apart two arrays are: differences, steps of their type, and the rule that says what is near enough."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from xla_fp8.hlo import HloInstruction, HloModule
from xla_fp8.hlo.opcodes import ELEMENTWISE_BINARY

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Two arrays of one shape and type, compared.

    Attributes:
        max_abs: largest |a - b|; infinite where only one side is NaN, or infinities differ.
        max_rel: largest |a - b| / |a|, over elements where a is finite and not 0.
        max_steps: largest number of values of the type between a and b (ulps); NaN to number counts as infinity.
        different: elements that differ. NaN equals NaN, and 0 equals -0.
        beyond_one_step: elements that differ by more than one step.
        size: elements.
        worst: index of the element with the largest |a - b|; None where none differs.
        largest: the largest finite |a|.
        norm: of the error, relative to that of a (both L2, over elements where a is finite); infinite like max_abs.
    """

    max_abs: float
    max_rel: float
    max_steps: float
    different: int
    beyond_one_step: int
    size: int
    worst: tuple[int, ...] | None
    largest: float
    norm: float

    @property
    def share(self) -> float:
        """Share of elements that differ."""
        return self.different / self.size if self.size else 0.0


FP8_STEP = 0.09
"""Of e4m3, relative to the value, on average; e5m2's is twice as large."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What is near enough for an array behind roundings to FP8: both hold.

    Attributes:
        share: that share of elements may differ, in FP8.
        norm: `Difference.norm` may be this.
    """

    share: float
    norm: float


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What is near enough. Any one of the two rules suffices for FP8 arrays; the first is the rule for others.

    Attributes:
        relative: |a - b| may be this times the largest |a| of the array.
        fp8_share: that share of FP8 elements may differ (two elements always may)...
        fp8_beyond_share: ... and that share by more than one step.
    """

    relative: float
    fp8_share: float = 0.0
    fp8_beyond_share: float = 0.0

    def accepts(self, difference: Difference, dtype: np.dtype[Any], roundings: float = 0) -> bool:
        """Whether two arrays of `dtype` are near enough.

        Args:
            roundings: to FP8, one behind the other, in front of them and their own (`xla_fp8.backends.roundings`).
                `behind` is the rule where there are others than their own.
        """
        if difference.max_abs <= self.relative * difference.largest:
            return True
        if difference.max_abs == np.inf:
            return False
        size = difference.size
        if is_fp8(dtype) and (
            difference.different <= max(2, self.fp8_share * size)
            and difference.beyond_one_step <= self.fp8_beyond_share * size
        ):
            return True
        if not _is_float(dtype) or roundings <= is_fp8(dtype):
            return False
        limits = self.behind(roundings, dtype)
        few = not is_fp8(dtype) or difference.different <= max(2, limits.share * size)
        return few and difference.norm <= limits.norm

    def behind(self, roundings: float, dtype: np.dtype[Any]) -> Limits:
        """The limits behind so many roundings, of which the first flips `fp8_share` of the elements.

        A step s for a share p of the elements is an error of e = s * sqrt(p) in the norm. An error of e in front of the
        next rounding flips e / s = sqrt(p) of its elements, and so on: all of them at last.
        """
        step = FP8_STEP * (2 if "e5m2" in dtype.name else 1)
        share = self.fp8_share ** (0.5 ** (roundings - 1)) if self.fp8_share else 0.0
        return Limits(share, step * share**0.5)


_ARITHMETIC = ELEMENTWISE_BINARY | {"convolution", "dot", "reduce"}

TOLERANCES = {
    "f32": Tolerance(1e-5, 0.005),
    "f16": Tolerance(0.02, 0.05, 0.03),
    "bf16": Tolerance(0.1, 0.2, 0.05),
}
"""By the type that the original convolves in; docs/numbers.md has the measurements behind the numbers."""


def working_type(module: HloModule) -> str:
    """The coarsest type in which a module computes, or to which it rounds an f32 tensor: bf16, f16 or else f32."""
    found = {
        instruction.shape.element_type
        for computation in module.computations
        for instruction in computation
        if instruction.has_shape and (instruction.opcode in _ARITHMETIC or _rounds(instruction))
    }
    return next((type for type in ("bf16", "f16") if type in found), "f32")


def _rounds(instruction: HloInstruction) -> bool:
    if instruction.opcode != "convert" or not instruction.operand(0).has_shape or instruction.shape.is_scalar:
        return False
    return instruction.operand(0).shape.element_type == "f32"


def is_fp8(dtype: np.dtype[Any]) -> bool:
    """Whether an element is an 8-bit float."""
    return dtype.itemsize == 1 and dtype.name.startswith("float8")


def compare(a: Array, b: Array) -> Difference:
    """Compares `b` with `a`, the reference; both of one shape and type, of any element type.

    Raises:
        ValueError: their shapes or types differ.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"cannot compare {a.dtype}{a.shape} with {b.dtype}{b.shape}")
    wide_a, wide_b = _wide(a), _wide(b)
    with np.errstate(all="ignore"):
        both_nan = np.isnan(wide_a) & np.isnan(wide_b)
        gap = np.where((wide_a == wide_b) | both_nan, 0.0, np.abs(wide_b - wide_a))
        gap = np.where(np.isnan(gap), np.inf, gap)
        magnitude = np.abs(wide_a)
        relative = np.where((magnitude > 0) & np.isfinite(magnitude), gap / magnitude, 0.0)
    steps = np.where(gap == 0, 0.0, _steps(a, b))
    is_finite = np.isfinite(magnitude)
    finite = magnitude[is_finite]
    error, norm = float(np.linalg.norm(gap[is_finite])), float(np.linalg.norm(finite))
    worst = np.unravel_index(int(np.argmax(gap)), a.shape) if gap.any() else None
    return Difference(
        max_abs=float(np.max(gap, initial=0.0)),
        max_rel=float(np.max(relative, initial=0.0)),
        max_steps=float(np.max(steps, initial=0.0)),
        different=int(np.count_nonzero(gap)),
        beyond_one_step=int(np.count_nonzero(steps > 1)),
        size=a.size,
        worst=None if worst is None else tuple(int(i) for i in worst),
        largest=float(np.max(finite, initial=0.0)),
        norm=np.inf if np.isinf(gap).any() else (error / norm if norm else (np.inf if error else 0.0)),
    )


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or (dtype.kind == "V" and not dtype.name.startswith(("int", "uint")))


def _wide(array: Array) -> Array:
    """The array in f64 (c128 for complex types), where every difference can be taken."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _steps(a: Array, b: Array) -> Array:
    """How many values of the type lie between: the difference of the bits, read as sign and magnitude."""
    if not _is_float(a.dtype):
        gap: Array = np.abs(_wide(b) - _wide(a))
        return gap
    bits = ml_dtypes.finfo(a.dtype).bits  # type: ignore[no-untyped-call]
    unsigned = np.dtype(f"uint{8 * a.dtype.itemsize}")

    def position(array: Array) -> Array:
        raw = np.ascontiguousarray(array).view(unsigned).astype(np.longdouble)  # f64 cannot hold the bits of an f64
        sign = np.longdouble(2) ** (bits - 1)
        return np.where(raw >= sign, sign - raw, raw)

    with np.errstate(all="ignore"):
        lost = np.isnan(_wide(a)) != np.isnan(_wide(b))
        return np.where(lost, np.inf, np.abs(position(b) - position(a)))
