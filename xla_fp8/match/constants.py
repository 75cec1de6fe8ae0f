"""What value a constant has, and whether it is the one that a pattern names."""

from __future__ import annotations

import math
import re
from typing import Any

from xla_fp8.hlo import HloInstruction
from xla_fp8.hlo.literal import numpy_dtype

UNIFORM = frozenset(("bitcast", "broadcast", "convert", "copy", "reshape", "transpose"))
"""Opcodes that give all elements the same value where those of the operand are all the same."""

_EXACT_RE = re.compile(r"pred|[su]\d+")


def uniform_value(instruction: HloInstruction) -> Any:
    """The one value that every element has, as a numpy scalar of the element type; None where that is not known.

    Looks through broadcast, reshape, transpose, copy, bitcast and convert (rounding as the converts do). What is at the
    bottom must be a constant with all elements equal, and not an elided one.
    """
    import numpy as np

    types: list[str] = []
    while instruction.opcode in UNIFORM and len(instruction.operands) == 1:
        element_type = instruction.shape.element_type
        if instruction.opcode == "convert":
            types.append(element_type)
        elif element_type != instruction.operand(0).shape.element_type:
            return None  # a bitcast that reads the bits as another type
        instruction = instruction.operand(0)
    if instruction.opcode == "constant" and _starts_mixed(instruction):
        return None
    values = instruction.constant_value()
    if values is None or not values.size:
        return None
    value = values.flat[0]
    if not np.all(values != values if value != value else values == value):
        return None
    with np.errstate(all="ignore"):
        for element_type in reversed(types):
            value = np.asarray(value).astype(numpy_dtype(element_type))[()]
    return value


def _starts_mixed(instruction: HloInstruction) -> bool:
    """Whether a long literal's first numbers already differ: spares reading megabytes of weights to learn as much."""
    if len(instruction.payload) < 1000 or instruction.shape.element_type.startswith("c"):
        return False
    try:
        # The last word may be cut off.
        numbers = {float(word) for word in re.findall(r"[^\s{},]+", instruction.payload[:200])[:-1]}
    except ValueError:
        return False
    return len(numbers) > 1 and not any(math.isnan(number) for number in numbers)


def is_value(found: Any, value: float, element_type: str) -> bool:
    """Whether `value`, rounded to `element_type`, is the numpy scalar `found`.

    Integers are compared exactly (0.5 is no s32). A NaN is equal to any NaN; a finite value that overflows the type is
    equal to nothing.
    """
    import numpy as np

    if _EXACT_RE.fullmatch(element_type):
        return bool(int(found) == value)
    if element_type.startswith("c"):
        return bool(found == found.dtype.type(value))
    try:
        with np.errstate(all="ignore"):
            rounded = float(found.dtype.type(float(value)))
    except OverflowError:
        return False
    if math.isnan(value):
        return math.isnan(float(found))
    return math.isinf(rounded) == math.isinf(value) and rounded == float(found)


def format_value(value: Any) -> str:
    """A numpy scalar as short as it can be read: `0`, `0.5`, `448`, `true`."""
    if isinstance(value.item(), bool):
        return str(bool(value)).lower()
    return f"{float(value):g}" if isinstance(value.item(), float) else str(value)


def describe(instruction: HloInstruction) -> str:
    """An instruction as messages name it: `multiply.3 (multiply)`, `constant.2 (constant 0.5)`."""
    detail = instruction.opcode
    if detail == "constant" and len(instruction.payload) <= 20:
        detail = f"constant {instruction.payload}"
        if instruction.has_shape and instruction.shape.dimensions:
            detail = f"constant {instruction.shape.element_type}[{','.join(map(str, instruction.shape.dimensions))}]"
    elif detail == "custom-call":
        detail = f"custom-call to {instruction.custom_call_target}"
    return f"{instruction.name} ({detail})"
