"""Which convolutions and dots feed which: the network behind a module, without what stands between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from xla_fp8.hlo import HloComputation, HloInstruction, HloModule

_Sources = frozenset[HloInstruction]
_Value = tuple[_Sources, ...]
"""Where a value comes from: one set for an array, one for each element of a tuple."""

_NOWHERE: _Sources = frozenset()


def edges(module: HloModule, points: Collection[HloInstruction]) -> list[tuple[HloInstruction, HloInstruction]]:
    """Pairs of `points` of which the first reaches the second without passing another, in the order they are met.

    Calls, fusions, branches and one round of a loop are followed.
    """
    trace = _Trace(frozenset(points))
    trace.computation(module.entry, ())
    return list(trace.found)


class _Trace:
    def __init__(self, points: frozenset[HloInstruction]) -> None:
        self.points = points
        self.found: dict[tuple[HloInstruction, HloInstruction], None] = {}
        self._results: dict[tuple[HloComputation, tuple[_Value, ...]], _Value] = {}

    def computation(self, computation: HloComputation, arguments: tuple[_Value, ...]) -> _Value:
        """The points that the result of a computation comes from, given those that its arguments come from."""
        key = (computation, arguments)
        if key not in self._results:
            values: dict[HloInstruction, _Value] = {}
            result: _Value = (_NOWHERE,)
            for instruction in computation:
                operands = [values[operand] for operand in instruction.operands]
                values[instruction] = self._value(instruction, operands, arguments)
                result = values[instruction] if instruction.is_root else result
            self._results[key] = result
        return self._results[key]

    def _value(self, instruction: HloInstruction, operands: list[_Value], arguments: tuple[_Value, ...]) -> _Value:
        if instruction in self.points:
            for source in _all(operands):
                self.found.setdefault((source, instruction))
            return (frozenset((instruction,)),)
        match instruction.opcode:
            case "parameter":
                number = int(instruction.payload) if instruction.payload.isdigit() else len(arguments)
                return arguments[number] if number < len(arguments) else (_NOWHERE,)
            case "tuple":
                return tuple(_all([operand]) for operand in operands)
            case "get-tuple-element" if instruction.tuple_index < len(operands[0]):
                return (operands[0][instruction.tuple_index],)
            case "call" | "fusion":
                return self.computation(instruction.to_apply, tuple(operands))
            case "while":
                results = [self.computation(called, tuple(operands)) for called in instruction.called_computations]
                return _joined([*operands, *(r for r in results if len(r) == len(operands[0]))])
            case "conditional":
                branches = zip(instruction.called_computations, operands[1:], strict=False)
                return _joined([self.computation(branch, (operand,)) for branch, operand in branches])
        return (_all(operands),)


def _all(values: Sequence[_Value]) -> _Sources:
    return _NOWHERE.union(*(sources for value in values for sources in value))


def _joined(values: Sequence[_Value]) -> _Value:
    """Several values of one shape, as one."""
    if len({len(value) for value in values}) != 1:
        return (_all(values),)
    return tuple(_NOWHERE.union(*elements) for elements in zip(*values, strict=True))
