"""The tensor part of a quantization: x → converts, multiplied or divided by scales → clamp → convert to FP8."""

from __future__ import annotations

import dataclasses

from xla_fp8.graph import FP8_MAX, FP8_TYPES
from xla_fp8.hlo import HloInstruction
from xla_fp8.passes.base import Refusal
from xla_fp8.passes.values import WIDE_TYPES, bounded, constant_of, scalar_of

_MAX_STEPS = 16


@dataclasses.dataclass(frozen=True)
class Step:
    """One instruction on the way: a convert, or a multiply or divide by a scale.

    Attributes:
        instruction: whose value it makes.
        source: the tensor that it reads.
        scale: the broadcast of the one number that it multiplies with or divides by; None for a convert.
    """

    instruction: HloInstruction
    source: HloInstruction
    scale: HloInstruction | None = None


@dataclasses.dataclass(frozen=True)
class Chain:
    """A quantization without what its scale is made of.

    Attributes:
        cast: the convert to FP8.
        steps: from x on; converts between clamp and cast count as in front of the clamp, since they commute with it.
    """

    cast: HloInstruction
    steps: tuple[Step, ...]

    @property
    def x(self) -> HloInstruction:
        return self.steps[0].source

    @property
    def unscaled(self) -> tuple[HloInstruction, ...]:
        """x, and its converts in front of the first scale."""
        found = [self.x]
        for step in self.steps:
            if step.scale is not None:
                break
            found.append(step.instruction)
        return tuple(found)

    @property
    def scales(self) -> tuple[HloInstruction, ...]:
        return tuple(step.scale for step in self.steps if step.scale is not None)

    @property
    def tensors(self) -> tuple[HloInstruction, ...]:
        """What the chain may begin at: the source of every step."""
        return tuple(step.source for step in self.steps)

    def starts(self) -> tuple[Chain, ...]:
        """This chain, begun at each tensor in front of a scale, the last first. All compute the same."""
        last = max(i for i, step in enumerate(self.steps) if step.scale is not None)
        return tuple(Chain(self.cast, self.steps[i:]) for i in range(last, -1, -1))

    def widened(self, start: Chain) -> Chain:
        """`start` begun in front of the converts to a wider type that its x comes from: fewer bytes to read."""
        first = len(self.steps) - len(start.steps)
        while first > 0 and _widens(self.steps[first - 1]):
            first -= 1
        return Chain(self.cast, self.steps[first:])


def find_chain(cast: HloInstruction) -> Chain | Refusal | None:
    """The longest chain that ends in a convert to FP8; None where nothing scales it, so that it is a bare cast."""
    tail: list[Step] = []
    value = cast.operand(0)
    while _is_wide_convert(value) and len(tail) < _MAX_STEPS:
        tail.append(Step(value, value.operand(0)))
        value = value.operand(0)
    bounds = _clamp(value)
    inside = bounds.value if bounds else _inside_bounds(value)
    steps = _steps(inside)
    if not any(step.scale is not None for step in steps):
        return _unusual_scale(inside) if bounds else None
    type_ = cast.shape.element_type
    if type_ not in FP8_TYPES:
        return Refusal.of("fp8-type", cast, f"converts to {type_}, which the call does not store",
                          "quantize to float8_e4m3fn or float8_e5m2")  # fmt: skip
    largest = FP8_MAX[type_]
    if bounds is None:
        if value is not inside:
            return _unusual_bounds(value, largest)
        return Refusal.of(
            "missing-clamp",
            cast,
            f"converts to {type_} without a clamp: values beyond {largest:g} become NaN or infinity, where the call "
            "saturates",
            f"clamp first: jnp.clip(y, -{largest:g}, {largest:g}).astype(...)",
        )
    if (bounds.low, bounds.high) != (-largest, largest):
        shown = " and ".join("a computed value" if b is None else f"{b:g}" for b in (bounds.low, bounds.high))
        return Refusal.of(
            "wrong-clamp-bounds",
            value,
            f"clamps to {shown}, not to the bounds of {type_}, -{largest:g} and {largest:g}",
            f"clamp to the type's own bounds: jnp.clip(y, -{largest:g}, {largest:g})",
        )
    if tail:  # in front of the clamp, the first of them reads what is clamped
        tail[-1] = dataclasses.replace(tail[-1], source=inside)
    return Chain(cast, (*steps, *reversed(tail)))


@dataclasses.dataclass(frozen=True)
class _Clamp:
    value: HloInstruction
    low: float | None
    high: float | None


def _clamp(instruction: HloInstruction) -> _Clamp | None:
    """A clamp, or a minimum and a maximum in either order, that keep NaN."""
    if instruction.opcode == "clamp":
        lower, value, upper = instruction.operands
        return _Clamp(value, constant_of(lower), constant_of(upper))
    outer = bounded(instruction)
    inner = bounded(outer.value) if outer is not None and outer.keeps_nan else None
    if outer is None or inner is None or not inner.keeps_nan or outer.opcode == inner.opcode:
        return None
    low, high = (inner.bound, outer.bound) if outer.opcode == "minimum" else (outer.bound, inner.bound)
    return _Clamp(inner.value, low, high) if low <= high else None


def _inside_bounds(value: HloInstruction) -> HloInstruction:
    """What is behind a maximum or a minimum, or both, that are no clamp: NaN is lost, or one side is open."""
    for _ in range(2):
        if (found := bounded(value)) is None:
            break
        value = found.value
    return value


def _unusual_bounds(value: HloInstruction, largest: float) -> Refusal:
    """Why these bounds are no clamp."""
    advice = f"write jnp.clip(y, -{largest:g}, {largest:g})"
    outer = bounded(value)
    assert outer is not None
    for found in (outer, bounded(outer.value)):
        if found is not None and not found.keeps_nan:
            what = f"makes {found.bound:g} of NaN, which a saturating cast keeps"
            return Refusal.of("nan-to-number", value, what, advice)
    return Refusal.of("wrong-clamp-bounds", value, "leaves one side without a bound, or bounds one twice", advice)


def _steps(value: HloInstruction) -> tuple[Step, ...]:
    """What `value` is made by, as far up as it is converts and scales."""
    steps: list[Step] = []
    while len(steps) < _MAX_STEPS and (step := _step(value)) is not None:
        steps.append(step)
        value = step.source
    return tuple(reversed(steps))


def _step(value: HloInstruction) -> Step | None:
    if _is_wide_convert(value):
        return Step(value, value.operand(0))
    if value.opcode not in ("multiply", "divide") or value.shape.element_type not in WIDE_TYPES:
        return None
    left, right = value.operands
    for tensor, scale in [(left, right)] if value.opcode == "divide" else [(left, right), (right, left)]:
        if scalar_of(scale) is not None and scalar_of(tensor) is None:
            return Step(value, tensor, scale)
    return None


def _widens(step: Step) -> bool:
    types = step.source.shape.element_type, step.instruction.shape.element_type
    return step.scale is None and types in (("bf16", "f32"), ("f16", "f32"))


def _is_wide_convert(value: HloInstruction) -> bool:
    return (
        value.opcode == "convert"
        and value.shape.element_type in WIDE_TYPES
        and value.operand(0).shape.element_type in WIDE_TYPES
    )


def _unusual_scale(scaled: HloInstruction) -> Refusal | None:
    """Why a saturating cast of a product is refused: another type, or several scales. None where it is a bare cast."""
    while scaled.opcode == "convert":
        scaled = scaled.operand(0)
    if scaled.opcode not in ("multiply", "divide"):
        return None
    if scaled.shape.is_dynamic:
        return Refusal.of("dynamic-shape", scaled, "has a dynamic shape", "give it a static shape")
    type_ = scaled.shape.element_type
    if type_ not in WIDE_TYPES and any(scalar_of(operand) for operand in scaled.operands):
        return Refusal.of("wide-type", scaled, f"computes in {type_}; the call computes in f32, bf16 or f16",
                          "scale in float32, bfloat16 or float16")  # fmt: skip
    if any(_repeats(operand) for operand in scaled.operands[scaled.opcode == "divide" :]):
        return Refusal.of("scale-not-scalar", scaled, "scales by a tensor, not by one number",
                          "use one scale for the whole tensor: a scalar, or a broadcast of one")  # fmt: skip
    return None


def _repeats(operand: HloInstruction) -> bool:
    """Whether the elements of a smaller tensor are repeated: a scale for each row, channel or block."""
    while operand.opcode in ("convert", "reshape", "bitcast", "transpose"):
        operand = operand.operand(0)
    return operand.opcode == "broadcast" and operand.operand(0).shape.element_count < operand.shape.element_count
