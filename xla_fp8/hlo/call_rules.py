"""What an instruction and the computations it calls must agree on: parameters and results.

Each rule returns what is wrong, or None. Element types of scalar reducers may differ in floating precision, as XLA
allows; shapes that are not known (hand-written text) are not compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.shape import Shape
from xla_fp8.hlo.shape_rules import shapes_agree, types_agree

CallRule = Callable[[HloInstruction, tuple[HloComputation, ...]], "str | None"]


def broken_call_rule(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
    """What the call gets wrong, or None. `called` is not empty."""
    rule = CALL_RULES.get(instruction.opcode)
    return rule(instruction, called) if rule else None


def _signature(computation: HloComputation, arguments: Sequence[Shape], result: Shape) -> str | None:
    parameters = computation.parameters
    if len(parameters) != len(arguments):
        return f"{computation.name} has {len(parameters)} parameters, but is given {len(arguments)}"
    for parameter, argument in zip(parameters, arguments, strict=True):
        if not shapes_agree(parameter.shape, argument):
            return f"parameter {parameter.name} of {computation.name} is {parameter.shape}, but is given {argument}"
    if computation.root.has_shape and not shapes_agree(computation.root.shape, result):
        return f"{computation.name} returns {computation.root.shape}, expected {result}"
    return None


def _operand_shapes(instruction: HloInstruction) -> list[Shape]:
    return [operand.shape for operand in instruction.operands]


def _call(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
    return _signature(called[0], _operand_shapes(instruction), instruction.shape)


def _while(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
    body, condition = instruction.attr("body"), instruction.attr("condition")
    if body is None or condition is None or len(called) != 2:
        return "while needs a body and a condition"
    state = _operand_shapes(instruction)
    if len(state) != 1 or not shapes_agree(instruction.shape, state[0]):
        return f"the result is {instruction.shape}, but the initial state is {', '.join(map(str, state))}"
    module = instruction.module
    return _signature(module.computation(body), state, instruction.shape) or _signature(
        module.computation(condition), state, Shape("pred")
    )


def _conditional(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
    index, *arguments = _operand_shapes(instruction)
    if not index.is_scalar or index.element_type not in ("pred", "s32"):
        return f"the first operand is {index}, expected pred[] or s32[]"
    if len(called) != len(arguments) or (index.element_type == "pred" and len(called) != 2):
        return f"{len(called)} branches, {len(arguments)} branch operands and a {index.element_type} index do not agree"
    for computation, argument in zip(_branches(instruction, called), arguments, strict=True):
        if wrong := _signature(computation, [argument], instruction.shape):
            return wrong
    return None


def _branches(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> tuple[HloComputation, ...]:
    true, false = instruction.attr("true_computation"), instruction.attr("false_computation")
    if true is None or false is None:
        return called
    return instruction.module.computation(true), instruction.module.computation(false)


def _reducer(parameters_per_array: int) -> CallRule:
    """reduce and its like: `to_apply` takes scalars, as many as there are accumulators and values."""

    def rule(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
        arrays = len(instruction.operands) // 2
        return _scalars(called[0], parameters_per_array * arrays, [o.shape for o in instruction.operands[:arrays]])

    return rule


def _scalars(computation: HloComputation, count: int, arrays: Sequence[Shape]) -> str | None:
    """`computation` takes `count` scalars, whose types are those of `arrays`, over and over."""
    parameters = computation.parameters
    if len(parameters) != count:
        return f"{computation.name} has {len(parameters)} parameters, expected {count} scalars"
    for number, parameter in enumerate(parameters):
        expected = arrays[number % len(arrays)].element_type
        if not parameter.shape.is_scalar or not types_agree(parameter.shape.element_type, expected):
            return f"parameter {parameter.name} of {computation.name} is {parameter.shape}, expected {expected}[]"
    return None


def _all_reduce(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
    return (
        _scalars(called[0], 2, [called[0].parameters[0].shape]) if called[0].parameters else _scalars(called[0], 2, [])
    )


def _sort(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
    arrays = _operand_shapes(instruction)
    parameters = called[0].parameters
    if len(parameters) != 2 * len(arrays):
        return f"{called[0].name} has {len(parameters)} parameters, expected two for each of {len(arrays)} arrays"
    root = called[0].root
    if root.has_shape and not shapes_agree(root.shape, Shape("pred")):
        return f"{called[0].name} returns {root.shape}, expected pred[]"
    return None


def _map(instruction: HloInstruction, called: tuple[HloComputation, ...]) -> str | None:
    return _scalars(called[0], len(instruction.operands), _operand_shapes(instruction))


CALL_RULES: dict[str, CallRule] = {
    "all-reduce": _all_reduce,
    "call": _call,
    "conditional": _conditional,
    "fusion": _call,
    "map": _map,
    "reduce": _reducer(2),
    "reduce-scatter": _all_reduce,
    "reduce-window": _reducer(2),
    "sort": _sort,
    "while": _while,
}
"""Opcode → its rule; other instructions may call what they like."""
