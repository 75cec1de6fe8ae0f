"""The dequantization behind an operand of a convolution or dot: its FP8 tensor, its scales, what moves its elements.

    convert(x8) * x_scale → transpose → reverse → convolution

Transposes, reshapes, broadcasts, reversals, slices and zero padding move elements and commute with a convert and a
scalar scale; so they can be applied to the FP8 tensor (a quarter of the bytes) and the scales can move behind the
convolution, which is linear in each operand.
"""

from __future__ import annotations

import dataclasses

from xla_fp8.graph import FP8_TYPES
from xla_fp8.hlo import ConvolutionDimensionNumbers, HloInstruction, Shape
from xla_fp8.passes.base import Refusal, described
from xla_fp8.passes.values import (
    WIDE_TYPES,
    ChannelVector,
    Scalar,
    channel_vector_of,
    constant_of,
    scalar_of,
    transpose,
)

_MAX_DEPTH = 64


@dataclasses.dataclass(frozen=True)
class Scale:
    """One scale on the way: multiplied, or divided by."""

    value: Scalar | ChannelVector
    inverse: bool
    instruction: HloInstruction


@dataclasses.dataclass(frozen=True)
class Dequantized:
    """An operand that is an FP8 tensor times scales.

    Attributes:
        source: the FP8 tensor.
        moves: transposes, reshapes, ... between it and the operand, the operand's nearest first.
        scales: nearest to the FP8 tensor first.
    """

    source: HloInstruction
    moves: tuple[HloInstruction, ...]
    scales: tuple[Scale, ...]

    def build_source(self) -> HloInstruction:
        """The FP8 tensor with the moves applied to it: the operand of the rewritten convolution."""
        value = self.source
        for move in reversed(self.moves):
            value = _apply_move(move, value)
        return value


def find_dequantized(
    operand: HloInstruction, channel: int | None = None, of: str = "convolution"
) -> Dequantized | Refusal:
    """Follows the chain from a convolution's operand up to its FP8 tensor.

    Args:
        channel: the operand's dimension along which a vector of scales may run (a filter's output features).
        of: what it is an operand of, in the words of a refusal.
    """
    moves: list[HloInstruction] = []
    scales: list[Scale] = []
    reordered_by: HloInstruction | None = None
    current = operand
    for _ in range(_MAX_DEPTH):
        shape = current.shape
        if not shape.is_array or shape.is_dynamic:
            return Refusal.of(
                "dynamic-shape", current, "has a dynamic shape", f"give the operands of the {of} static shapes"
            )
        if shape.element_type in FP8_TYPES:
            return Dequantized(current, tuple(moves), tuple(reversed(scales)))
        if shape.is_fp8:
            return Refusal.of(
                "fp8-type",
                current,
                f"is {shape.element_type}, which no FP8 {of} on the GPU takes",
                "quantize to float8_e4m3fn or float8_e5m2",
            )
        if shape.element_type not in WIDE_TYPES:
            return Refusal.of(
                "wide-type",
                current,
                f"computes in {shape.element_type}; the fused {of} computes in f32",
                "dequantize to float32, bfloat16 or float16",
            )
        if current.opcode == "convert":
            current = current.operand(0)
        elif current.opcode in ("multiply", "divide"):
            step = _scale_step(current, channel, of, reordered_by)
            if isinstance(step, Refusal):
                return step
            scale, current = step
            scales.append(scale)
        elif _is_move(current):
            if channel is not None and (channel := _source_dimension(current, channel)) is None:
                reordered_by = current
            moves.append(current)
            current = current.operand(0)
        elif current.opcode == "opt-barrier" or (
            current.opcode == "get-tuple-element" and current.operand(0).opcode == "opt-barrier"
        ):
            return Refusal.of(
                "optimization-barrier",
                current,
                "comes out of an optimization barrier: nothing is fused across it",
                "take lax.optimization_barrier away, or put it in front of the dequantization",
            )
        else:
            return Refusal.of(
                "not-dequantized",
                current,
                f"stands between the FP8 tensor and the {of} and is not part of a dequantization "
                "(convert, multiply or divide by a scale, transpose, reshape, broadcast, reverse, slice, zero padding)",
                f"apply it before quantizing, or after the {of}",
            )
    return Refusal.of("too-deep", operand, f"has more than {_MAX_DEPTH} steps to its FP8 tensor", "shorten the chain")


def fed_by_fp8(instruction: HloInstruction, limit: int = 200) -> bool:
    """Whether an FP8 tensor is among what `instruction` is computed from, up to other convolutions and dots.

    This is what makes a refusal worth reporting.
    """
    seen = {instruction}
    pending = [instruction]
    while pending and len(seen) < limit:
        current = pending.pop(0)
        if current.has_shape and current.shape.is_fp8:
            return True
        if current is not instruction and current.opcode in ("convolution", "dot", "custom-call", "while", "call"):
            continue
        for operand in current.operands:
            if operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return False


def _scale_step(
    instruction: HloInstruction, channel: int | None, of: str, reordered_by: HloInstruction | None
) -> tuple[Scale, HloInstruction] | Refusal:
    """The scale of a multiply or divide, and the operand that is scaled.

    Args:
        reordered_by: the move behind it that makes other channels of the filter's; None where there is none.
    """
    inverse = instruction.opcode == "divide"
    left, right = instruction.operands
    sides = [(left, right)] if inverse else [(left, right), (right, left)]
    for tensor, scale in sides:
        if scalar := scalar_of(scale):
            return Scale(scalar, inverse, instruction), tensor
    for tensor, scale in sides:
        vector = channel_vector_of(scale)
        if vector and channel is not None and vector.dimension == channel and not inverse:
            return Scale(vector, inverse, instruction), tensor
    vectors = [v for _, scale in sides if (v := channel_vector_of(scale))]
    if vectors and reordered_by is not None:
        return Refusal.of(
            "scale-not-scalar",
            instruction,
            f"scales by a vector along dimension {vectors[0].dimension}, and {described(reordered_by)} behind it may "
            "change which channel is which",
            "scale behind that, one number for each output channel" + (" of the filter" if of == "convolution" else ""),
        )
    if vectors:
        return Refusal.of(
            "scale-not-scalar",
            instruction,
            f"scales by a vector along dimension {vectors[0].dimension}",
            "use one scale for the whole tensor; a filter may have one scale for each output channel, multiplied"
            if of == "convolution"
            else f"use one scale for the whole tensor; one for each row or column can be applied after the {of}",
        )
    return Refusal.of(
        "scale-not-scalar",
        instruction,
        "scales by a tensor, not by one number",
        "use one scale for the whole tensor: a scalar, or a broadcast of one",
    )


_PLAIN_MOVES = ("transpose", "reshape", "broadcast", "reverse", "copy", "slice", "dynamic-slice", "bitcast")


def _is_move(instruction: HloInstruction) -> bool:
    if instruction.opcode in _PLAIN_MOVES:
        source = instruction.operand(0).shape
        return source.element_type == instruction.shape.element_type
    # Zero times any finite scale is zero, so padding may move before the scale.
    return instruction.opcode == "pad" and constant_of(instruction.operand(1)) == 0.0


def _source_dimension(move: HloInstruction, dimension: int) -> int | None:
    """Where `dimension` of a move's result is in its operand, with every index what it was; None where it is not."""
    if move.opcode == "transpose":
        return move.dimensions[dimension]
    if move.opcode == "copy":
        return dimension
    if move.opcode == "reverse":
        return None if dimension in move.dimensions else dimension
    if move.opcode == "slice":
        same = move.shape.dimensions[dimension] == move.operand(0).shape.dimensions[dimension]
        return dimension if same else None
    if move.opcode == "pad":  # of the same size it may still have moved the elements: 1_-1
        padding = (move.attr("padding") or "").split("x")[dimension]
        return dimension if set(padding.split("_")) == {"0"} else None
    return None


def _apply_move(move: HloInstruction, value: HloInstruction) -> HloInstruction:
    """The same move on an FP8 tensor."""
    computation = value.parent
    assert computation is not None
    if move.opcode == "transpose":
        return transpose(value, move.dimensions)
    if move.opcode == "copy":
        return value
    if move.opcode in ("reshape", "bitcast") and move.shape.dimensions == value.shape.dimensions:
        return value
    shape = move.shape.with_element_type(value.shape.element_type)
    operands = [value, *move.operands[1:]] if move.opcode == "dynamic-slice" else [value]
    if move.opcode == "pad":
        operands.append(computation.create("constant", Shape(value.shape.element_type), payload="0"))
    attributes = {k: v for k, v in move.attributes.items() if k not in ("metadata", "backend_config")}
    opcode = "reshape" if move.opcode == "bitcast" else move.opcode
    return computation.create(opcode, shape, operands, name=move.name, attributes=attributes, metadata_from=move)


def filter_channel(labels: ConvolutionDimensionNumbers) -> int:
    """The filter's dimension along which a vector of scales may run."""
    return labels.kernel_output_feature_dimension
