"""The largest absolute value of a tensor, in the forms that programs write, and where a graph call knows it already."""

from __future__ import annotations

import dataclasses
import math

from xla_fp8.graph import graph_of
from xla_fp8.hlo import HloInstruction, Shape
from xla_fp8.passes.values import MOVES, WIDE_TYPES, constant_of, reduces_with

_MAX_EXPLORED = 64


@dataclasses.dataclass(frozen=True)
class Reduction:
    """A tensor reduced to one number.

    Attributes:
        instruction: the last reduce.
        op: "amax", "reduce_max" or "reduce_min", as the quantize string has them.
        tensor: what is reduced, in its own type: widening converts do not change which element is largest.
        floor: where the reduction starts from a number above zero, that constant.
    """

    instruction: HloInstruction
    op: str
    tensor: HloInstruction
    floor: HloInstruction | None = None


def reductions_of(tensor: HloInstruction) -> list[Reduction]:
    """Every reduction of all of `tensor`: reduce-max of abs, and of the tensor itself reduce-max and reduce-min.

    Elements may be moved in front of it, and dimensions be reduced one after the other.
    """
    found: list[Reduction] = []
    seen = {tensor}
    pending: list[tuple[HloInstruction, str, HloInstruction | None]] = [(tensor, "", None)]
    while pending and len(seen) < _MAX_EXPLORED:
        value, op, floor = pending.pop()
        for user in value.users:
            if user in seen or user.has_control_dependencies:
                continue
            step = _step(user, value, op, floor)
            if step is None:
                continue
            seen.add(user)
            if user.opcode == "reduce" and user.shape.is_scalar:
                found.append(Reduction(user, step[0], tensor, step[1]))
            else:
                pending.append((user, *step))
    return found


def _step(
    user: HloInstruction, value: HloInstruction, op: str, floor: HloInstruction | None
) -> tuple[str, HloInstruction | None] | None:
    """(op, floor) behind `user`; None where it is no part of a reduction."""
    if user.opcode in MOVES and user.shape.element_type == value.shape.element_type:
        return op, floor
    if user.opcode == "convert" and _is_wider(user.shape.element_type, value.shape.element_type):
        return op, floor
    if user.opcode == "abs":
        return ("amax", floor) if op in ("", "amax") else None
    if user.opcode != "reduce" or len(user.operands) != 2 or user.operand(0) is not value:
        return None
    start = constant_of(user.operand(1))
    if start is None:
        return None
    for opcode, name, neutral in (("maximum", "reduce_max", float("-inf")), ("minimum", "reduce_min", float("inf"))):
        if not reduces_with(user, opcode):
            continue
        if op == "amax" and opcode == "maximum":
            if start <= 0:
                # Of -0 and the +0 of abs either may come out, and its reciprocal is another.
                return None if start == 0 and math.copysign(1, start) < 0 else (op, floor)
            return (op, user.operand(1)) if floor is None else None
        if op in ("", name) and start == neutral:
            return name, None
    return None


def _is_wider(type_: str, than: str) -> bool:
    return type_ == than or (type_ == "f32" and than in WIDE_TYPES)


def known_amax(tensor: HloInstruction) -> HloInstruction | None:
    """The f32 amax of a tensor that a graph call makes beside it, made where the module does not have it; else None."""
    if tensor.opcode != "get-tuple-element" or tensor.shape.element_type != "f32":
        return None
    call = tensor.operand(0)
    graph = graph_of(call)
    computation = tensor.parent
    if graph is None or computation is None:
        return None
    outputs = (graph.output, *graph.aux_outputs)
    if tensor.tuple_index >= len(outputs):
        return None
    node = outputs[tensor.tuple_index]
    uid = node.operands[0] if node.op == "copy" else node.uid
    for index, aux in enumerate(outputs):
        if aux.op != "amax" or aux.operands != (uid,) or aux.type != "f32":
            continue
        for user in call.users:
            if user.opcode == "get-tuple-element" and user.tuple_index == index:
                return user
        return computation.create("get-tuple-element", Shape("f32"), [call], attributes={"index": str(index)})
    return None
