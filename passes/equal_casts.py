"""Equal casts to FP8 become one: a tensor that several convolutions read is quantized once for each in a program."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from xla_fp8.hlo import HloComputation, HloInstruction

_FOLLOWED = frozenset({"convert", "clamp", "multiply", "divide", "broadcast", "reshape", "transpose", "constant"})
"""What stands between a tensor or a scale and the cast; behind anything else values are equal if they are the same."""
_IGNORED = ("metadata", "sharding")


def equal_casts(computation: HloComputation) -> Iterator[tuple[HloInstruction, HloInstruction]]:
    """(cast to FP8, an earlier one of the same values), in the order of the computation."""
    casts = [i for i in computation if i.opcode == "convert" and i.shape.is_fp8]
    numbers: dict[HloInstruction, int] = {}
    known: dict[Hashable, int] = {}
    firsts: dict[int, HloInstruction] = {}
    for cast in casts if len(casts) > 1 else ():
        first = firsts.setdefault(_number(cast, numbers, known), cast)
        if first is not cast and cast.sharding == first.sharding:
            yield cast, first


def _number(instruction: HloInstruction, numbers: dict[HloInstruction, int], known: dict[Hashable, int]) -> int:
    """The same number for what computes the same value in the same way."""
    pending = [instruction]
    while pending:
        current = pending[-1]
        is_followed = current.opcode in _FOLLOWED and not current.has_control_dependencies
        if current.opcode == "constant" and current.is_elided_constant:
            is_followed = False  # its text is the same whatever its value is
        unknown = [o for o in current.operands if o not in numbers] if is_followed else []
        if current in numbers:
            pending.pop()
        elif unknown:
            pending.extend(unknown)
        else:
            key: Hashable = current
            if is_followed:
                attributes = tuple(sorted((k, v) for k, v in current.attributes.items() if k not in _IGNORED))
                operands = tuple(numbers[operand] for operand in current.operands)
                key = current.opcode, str(current.shape), current.payload, attributes, operands
            numbers[pending.pop()] = known.setdefault(key, len(known))
    return numbers[instruction]
