"""Shapes of instructions whose text leaves them out (`x = add(a, b)`), for the opcodes where operands decide.

XLA infers more of them (shape_inference.cc); where this module does not, the shape stays unknown, the text is carried
through as it is, and no pass touches the instruction.
"""

from __future__ import annotations

import dataclasses

from xla_fp8.hlo.errors import HloError
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.opcodes import ELEMENTWISE_BINARY, ELEMENTWISE_UNARY
from xla_fp8.hlo.shape import Layout, Shape


def infer_shape(instruction: HloInstruction) -> Shape | None:
    """The result's shape, or None where this module does not know how to tell."""
    operands = instruction.operands
    opcode = instruction.opcode
    if not all(operand.has_shape for operand in operands):
        return None
    shapes = [operand.shape for operand in operands]
    if opcode == "tuple":
        return Shape.tuple(shapes)
    if opcode == "after-all":
        return Shape("token")
    if not shapes:
        return None
    if opcode == "compare":
        return shapes[0].with_element_type("pred")
    if opcode == "is-finite":
        return shapes[0].with_element_type("pred")
    if opcode in ("real", "imag", "complex", "convert", "bitcast-convert", "abs"):
        # The element type changes, or may.
        return shapes[0] if opcode == "abs" and not shapes[0].element_type.startswith("c") else None
    if opcode in ELEMENTWISE_UNARY or opcode in ELEMENTWISE_BINARY or opcode in ("while", "opt-barrier"):
        return shapes[0]
    if opcode in ("select", "clamp") and len(shapes) == 3:
        return shapes[1]
    try:
        if opcode == "get-tuple-element" and shapes[0].is_tuple:
            return shapes[0].tuple_shapes[instruction.tuple_index]
        if opcode == "transpose":
            return _transposed(shapes[0], instruction.dimensions)
    except (HloError, IndexError, ValueError):
        return None
    return None


def _transposed(shape: Shape, permutation: tuple[int, ...]) -> Shape:
    """As ShapeUtil::PermuteDimensions does it: the layout is permuted too, so that no element moves."""
    return dataclasses.replace(
        shape,
        dimensions=tuple(shape.dimensions[d] for d in permutation),
        dynamic=tuple(shape.dynamic[d] for d in permutation),
        layout=Layout(tuple(permutation.index(d) for d in shape.minor_to_major)),
    )
