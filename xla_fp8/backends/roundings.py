"""How many roundings to FP8 lie one behind the other in front of each result of a module."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from xla_fp8.hlo import HloComputation, HloInstruction, HloModule, Shape

_Value = float | tuple["_Value", ...]
"""Roundings in front of an array, `_EXACT` where no convolution is; of each element for a tuple."""
_EXACT = -1.0


def fp8_roundings(module: HloModule) -> list[float]:
    """For each array of the result, in order: the most roundings to FP8 on a way from a convolution or dot to it.

    The result's own is among them: 1 is an FP8 convolution by itself, or what f32 operations make of its output.
    What is rounded to FP8 in front of the first convolution or dot does not count, as it is the same in every program.
    Infinite where a loop feeds its results back.
    """
    entry = module.entry
    result = _results(entry, [_filled(parameter.shape, _EXACT) for parameter in entry.parameters])
    return [max(found, 0.0) for found in _flat(result)]


def _results(computation: HloComputation, arguments: Sequence[_Value]) -> _Value:
    values: dict[HloInstruction, _Value] = {}
    for instruction in computation.post_order():
        operands = [values[operand] for operand in instruction.operands]
        values[instruction] = _value(instruction, operands, arguments)
    return values[computation.root]


def _value(instruction: HloInstruction, operands: Sequence[_Value], arguments: Sequence[_Value]) -> _Value:
    most = max((found for operand in operands for found in _flat(operand)), default=_EXACT)
    match instruction.opcode:
        case "parameter":
            return arguments[instruction.parameter_number]
        case "tuple":
            return tuple(operands)
        case "get-tuple-element" if isinstance(operands[0], tuple):
            return operands[0][instruction.tuple_index]
        case "call" | "fusion":
            return _results(instruction.to_apply, operands)
        case "while":
            return _after_loop(instruction, operands[0])
        case "conditional":
            branches = instruction.called_computations
            first, *others = (_results(branch, [operands[1 + i]]) for i, branch in enumerate(branches))
            for other in others:
                first = _joined(first, other)
            return first
        case "convolution" | "dot":
            return max(most, 0.0)
        case "custom-call":  # it rounds where it stores FP8; those of the passes and of XLA hold a convolution or dot
            library = instruction.custom_call_target.startswith(("__cudnn$", "__cublas$"))
            return _stored(instruction.shape, max(most, 0.0) if library else most)
        case "convert" if most >= 0 and instruction.shape.is_fp8:
            return most + 1
        case _:
            return _filled(instruction.shape, most)


def _after_loop(loop: HloInstruction, state: _Value) -> _Value:
    """What one turn of the loop makes deeper, any number of turns make endlessly deep."""
    body = next(c for c in loop.called_computations if c.name == (loop.attr("body") or "").lstrip("%"))
    while (after := _joined(state, _results(body, [state]))) != state:
        state = _endless_where_deeper(state, after)
    return state


def _endless_where_deeper(before: _Value, after: _Value) -> _Value:
    if isinstance(before, tuple) and isinstance(after, tuple):
        return tuple(map(_endless_where_deeper, before, after))
    return math.inf if after != before else before


def _joined(a: _Value, b: _Value) -> _Value:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(map(_joined, a, b))
    return max((*_flat(a), *_flat(b)))


def _filled(shape: Shape, value: float) -> _Value:
    return tuple(_filled(inner, value) for inner in shape.tuple_shapes) if shape.is_tuple else value


def _stored(shape: Shape, value: float) -> _Value:
    if shape.is_tuple:
        return tuple(_stored(inner, value) for inner in shape.tuple_shapes)
    return value + (value >= 0 and shape.is_fp8)


def _flat(value: _Value) -> Iterator[float]:
    if isinstance(value, tuple):
        for inner in value:
            yield from _flat(inner)
    else:
        yield value
