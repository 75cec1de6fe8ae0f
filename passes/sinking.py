"""Transposes and reshapes of a convolution's result move behind its epilogue, which is pointwise and does not mind."""

from __future__ import annotations

from xla_fp8.hlo import HloComputation, HloInstruction, Shape
from xla_fp8.hlo.attributes import format_int_list
from xla_fp8.hlo.opcodes import ELEMENTWISE_BINARY, ELEMENTWISE_UNARY
from xla_fp8.passes.values import broadcast_scalar, inverse_permutation, scalar_of, transpose

MOVES = ("transpose", "reshape")
_SINKABLE = frozenset(ELEMENTWISE_UNARY | ELEMENTWISE_BINARY | {"select", "clamp"}) - {"copy", "bitcast-convert"}
_MAX_SUNK = 200


def sink_moves(value: HloInstruction) -> bool:
    """Sinks the moves among `value` and its users through pointwise instructions and full reductions.

        op(transpose(y), z) → transpose(op(y, transpose⁻¹(z)))

    It ends at an FP8 tensor: moving that costs the fewest bytes. Returns whether anything changed.
    """
    computation = value.parent
    assert computation is not None
    pending = [value, *value.users]
    sunk = 0
    while pending and sunk < _MAX_SUNK:
        move = pending.pop()
        if move.parent is not computation or move.opcode not in MOVES:
            continue
        for user in move.users:
            if user.opcode == "reshape" == move.opcode and not user.has_control_dependencies:
                pending.append(_fold_reshapes(computation, user))
                continue
            if move.shape.is_fp8:
                continue
            if user.parent is not computation or user.has_control_dependencies or user.sharding is not None:
                continue
            if user.opcode == "reduce" and user.shape.is_scalar and len(user.operands) == 2:
                _reduce_before(move, user)
            elif user.opcode in _SINKABLE and user.shape.same_dimensions(move.shape):
                pending.append(_sink_through(computation, move, user))
            else:
                if user.opcode in MOVES:
                    pending.append(user)
                continue
            sunk += 1
            # A move before this one has a new user now.
            pending.append(move.operand(0))
        if not move.users and not move.is_root:
            computation.remove_dead()
    return sunk > 0


def _fold_reshapes(computation: HloComputation, outer: HloInstruction) -> HloInstruction:
    """reshape(reshape(y)) → reshape(y), or y where that is its shape already; returns it."""
    source = outer.operand(0).operand(0)
    if source.shape.dimensions != outer.shape.dimensions:
        outer.set_operand(0, source)
        return outer
    computation.replace(outer, source)
    return source


def _reduce_before(move: HloInstruction, reduce: HloInstruction) -> None:
    """A reduction over every dimension does not see in which order they are."""
    reduce.set_operand(0, move.operand(0))
    reduce.dimensions = tuple(range(move.operand(0).shape.rank))


def _sink_through(computation: HloComputation, move: HloInstruction, user: HloInstruction) -> HloInstruction:
    """Returns the move of the new instruction, which stands in for `user`."""
    before = move.operand(0).shape
    operands = [_before_move(computation, operand, move) for operand in user.operands]
    attributes = {k: v for k, v in user.attributes.items() if k != "control-predecessors"}
    shape = before.with_element_type(user.shape.element_type)
    new = computation.create(user.opcode, shape.with_dimensions(before.dimensions), operands, attributes=attributes)
    if move.opcode == "transpose":
        result = transpose(new, move.dimensions)
    else:
        result = computation.create("reshape", user.shape, [new], metadata_from=move)
    name = user.name
    computation.replace(user, result)
    computation.rename(new, name)
    return result


def _before_move(computation: HloComputation, operand: HloInstruction, move: HloInstruction) -> HloInstruction:
    """What `operand` is before the move is applied: the instruction whose move it would be."""
    before = move.operand(0).shape.dimensions
    if operand is move:
        return move.operand(0)
    if not operand.shape.is_array or operand.shape.is_scalar:
        return operand
    if operand.opcode != "constant" and (scalar := scalar_of(operand)):
        return broadcast_scalar(computation, scalar.build(operand.shape.element_type), before)
    if move.opcode == "transpose":
        return transpose(operand, inverse_permutation(move.dimensions))
    if operand.opcode == "reshape" and operand.operand(0).shape.dimensions == before:
        return operand.operand(0)
    if rebuilt := _broadcast_before_reshape(computation, operand, before):
        return rebuilt
    shape = Shape.array(operand.shape.element_type, before)
    return computation.create("reshape", shape, [operand], metadata_from=operand)


def _broadcast_before_reshape(
    computation: HloComputation, operand: HloInstruction, before: tuple[int, ...]
) -> HloInstruction | None:
    """A broadcast along trailing dimensions that the reshape keeps (a bias, once vmap has split the batch)."""
    if operand.opcode != "broadcast":
        return None
    after = operand.shape.dimensions
    kept = 0
    while kept < min(len(after), len(before)) and after[-1 - kept] == before[-1 - kept]:
        kept += 1
    if any(dimension < len(after) - kept for dimension in operand.dimensions):
        return None
    dimensions = tuple(dimension - len(after) + len(before) for dimension in operand.dimensions)
    return computation.create(
        "broadcast",
        Shape.array(operand.shape.element_type, before),
        [operand.operand(0)],
        attributes={"dimensions": format_int_list(dimensions)},
        metadata_from=operand,
    )
