"""Dots as passes see them: is it FP8, and has it a form that a fused call may have at all."""

from __future__ import annotations

from xla_fp8.hlo import HloInstruction
from xla_fp8.passes.base import Context, Refusal
from xla_fp8.passes.dequantization import Dequantized, fed_by_fp8, find_dequantized
from xla_fp8.passes.values import WIDE_TYPES


def is_fp8_dot(instruction: HloInstruction) -> bool:
    """Whether it is a dot with an FP8 tensor somewhere behind one of its operands."""
    return instruction.opcode == "dot" and any(fed_by_fp8(operand) for operand in instruction.operands)


def dequantized_dot_operands(
    dot: HloInstruction, context: Context, channel: int | None = None
) -> tuple[Dequantized, Dequantized] | Refusal:
    """The FP8 tensors and scales behind both operands, or the first thing that is not one.

    Args:
        channel: the right operand's dimension along which a vector of scales may run, if any.
    """
    left = _dequantized("left", dot.operand(0), context, None)
    if isinstance(left, Refusal):
        return left
    right = _dequantized("right", dot.operand(1), context, channel)
    return right if isinstance(right, Refusal) else (left, right)


def _dequantized(side: str, operand: HloInstruction, context: Context, channel: int | None) -> Dequantized | Refusal:
    found = find_dequantized(operand, channel, of="dot")
    if not isinstance(found, Refusal):
        return found
    if not fed_by_fp8(operand):
        return Refusal(
            "operand-not-fp8",
            f"the {side} operand comes from {context.described(found.instruction)} and from no FP8 tensor",
            f"quantize the {side} operand too: to float8_e4m3fn or float8_e5m2, with a scale",
            found.instruction,
        )
    return Refusal(found.rule, f"the {side} operand: {found.reason}", found.advice, found.instruction)


def unsupported_dot(dot: HloInstruction, context: Context) -> Refusal | None:
    """Why a dot has no FP8 call of any kind, whatever its operands are; None where it may have one."""

    def refuse(rule: str, what: str, advice: str) -> Refusal:
        return context.refusal(rule, dot, what, advice)

    shapes = [dot.shape, *(operand.shape for operand in dot.operands)]
    if len(dot.operands) != 2 or dot.has_attribute("sparsity") or dot.has_attribute("algorithm"):
        what = "is sparse, or asks for an algorithm by name"
        return refuse("dot-algorithm", what, "leave the algorithm to XLA (precision=None in JAX)")
    if any(shape.is_dynamic for shape in shapes):
        return refuse("dynamic-shape", "has a dynamic shape", "give it static shapes")
    if any(0 in shape.dimensions for shape in shapes):
        what = "has an operand or result without elements"
        return refuse("empty", what, "nothing to gain: there is no work in it")
    if dot.shape.is_fp8:
        return refuse(
            "fp8-result",
            f"accumulates in {dot.shape.element_type}: its result is FP8 with neither scale nor clamp",
            "ask for a wide result (preferred_element_type=jnp.float32), then scale, clamp and convert",
        )
    if dot.shape.element_type not in WIDE_TYPES:
        what = f"computes in {dot.shape.element_type}; the call computes in f32"
        return refuse("wide-type", what, "compute it in float32, bfloat16 or float16")
    if dot.shape != dot.shape.with_default_layout() and dot.shape.layout is not None:
        what = f"has the layout {dot.shape.layout}"
        return refuse("layout", what, "read the module from before layout assignment")
    return None
