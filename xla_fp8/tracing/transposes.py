"""Transposes of FP8 tensors in a rewritten module that a kernel makes: found, and given a call of their own.

The passes put them there, mostly of the filters of input gradients: the forward convolution's with its output and input
features exchanged, and its window reversed.
"""

from __future__ import annotations

import dataclasses

from xla_fp8.backends.transpose.exchange import kernel_exchange
from xla_fp8.hlo import HloInstruction, HloModule, Shape
from xla_fp8.hlo.attributes import quote
from xla_fp8.hlo.literal import numpy_dtype


@dataclasses.dataclass(frozen=True)
class TransposeCall:
    """`transpose(reverse(x))`.

    Attributes:
        mirrored: the dimensions of x that are reversed.
    """

    operand: Shape
    result: Shape
    permutation: tuple[int, ...]
    mirrored: tuple[int, ...]

    @property
    def operand_shapes(self) -> tuple[Shape, ...]:
        return (self.operand,)

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        return (self.result,)


def call_transposes(module: HloModule, mark: str, first: int) -> tuple[TransposeCall, ...]:
    """Puts a custom call in the place of each transpose that a kernel makes.

    Args:
        mark: how the targets start; numbers follow, from `first`.
    """
    calls: list[TransposeCall] = []
    for computation in module.computations:
        for instruction in computation.instructions:
            if instruction.opcode != "transpose" or not instruction.shape.is_fp8:
                continue
            found = _behind_reversal(instruction) or _call(instruction, instruction.operands[0], ())
            if found is None:
                continue
            source, call = found
            attributes = {"custom_call_target": quote(f"{mark}{first + len(calls)}")}
            placed = computation.create(
                "custom-call",
                instruction.shape,
                [source],
                before=instruction,
                attributes=attributes,
                metadata_from=instruction,
            )
            computation.transfer_control_dependencies(instruction, placed)
            read = instruction.operands
            computation.replace(instruction, placed)
            computation.remove_dead(among=read)
            calls.append(call)
    return tuple(calls)


def _behind_reversal(transpose: HloInstruction) -> tuple[HloInstruction, TransposeCall] | None:
    """The call of a transpose with the reversal in front of it, which XLA would make with the transpose."""
    reverse = transpose.operands[0]
    if reverse.opcode != "reverse":
        return None
    return _call(transpose, reverse.operands[0], reverse.dimensions)


def _call(
    transpose: HloInstruction, source: HloInstruction, mirrored: tuple[int, ...]
) -> tuple[HloInstruction, TransposeCall] | None:
    shape, permutation = source.shape, transpose.dimensions
    if kernel_exchange(shape.dimensions, permutation, numpy_dtype(shape.element_type), mirrored) is None:
        return None
    return source, TransposeCall(shape, transpose.shape, permutation, mirrored)
