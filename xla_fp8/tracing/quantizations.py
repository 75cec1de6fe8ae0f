"""Dynamic quantizations in a jaxpr: casts to FP8 with all between them and the tensor whose amax scales them.

x ─┬─ (convert) ─ multiply or divide ─ clamp ─ convert to FP8      wide: as many elements as x
   └─ abs ─ reduce_max ─ scalars ─ broadcast ─┘
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.equations import Equation, is_fp8, is_literal, variables

_PATH = frozenset({"convert_element_type", "clamp", "max", "min", "mul", "div", "select_n", "copy", "stop_gradient"})
_MOST = 64  # equations: a scale that is made of more comes from something else than this tensor


def is_cast(equation: Equation) -> bool:
    """Whether an equation makes an FP8 tensor of one of another type."""
    return equation.primitive.name == "convert_element_type" and is_fp8(equation.outvars[0].aval)


def quantizations(
    flow: DataFlow, outvars: Iterable[Any], is_wanted: Callable[[Equation], bool]
) -> list[tuple[int, list[int]]]:
    """The casts, each with its quantization in program order, of those tensors that are in memory anyway.

    A kernel reads its tensor from memory. One that elementwise operations have just made for the quantization alone
    would have to be written there first; XLA instead makes it twice, in its reduction and in its cast, and is faster.

    Args:
        is_wanted: whether a cast is worth it, by its result.
    """
    results = set(variables(outvars))
    found = []
    for index, equation in enumerate(flow.equations):
        if (
            is_cast(equation)
            and flow.chain[index]
            and is_wanted(equation)
            and (group := _quantization(flow, index, results))
        ):
            found.append((index, group))
    return found


def _quantization(flow: DataFlow, cast: int, results: set[Any]) -> list[int] | None:
    """The equations from the nearest tensor on the way to a cast whose amax scales it; None where there is none."""
    tensor = flow.equations[cast].invars[0]
    while not is_literal(tensor):
        group = _between(flow, tensor, cast)
        if group is not None:
            return group if _is_in_memory(flow, tensor, group, results) else None
        producer = flow.producer.get(tensor)
        if producer is None or not flow.chain[producer] or flow.equations[producer].primitive.name not in _PATH:
            return None
        wide = [a for a in flow.equations[producer].invars if _size(a) == _size(tensor) and not _is_scalar(flow, a)]
        if len(wide) != 1:
            return None
        [tensor] = wide
    return None


def _between(flow: DataFlow, tensor: Any, cast: int) -> list[int] | None:
    """All that a cast is made of behind `tensor`, if a maximum over all of it is among that, and else only scalars."""
    taken, pending = {cast}, [cast]
    has_amax = False
    while pending:
        equation = flow.equations[pending.pop()]
        has_amax |= equation.primitive.name == "reduce_max" and _size(equation.outvars[0]) == 1 < _size(tensor)
        for atom in equation.invars:
            if is_literal(atom) or atom is tensor:
                continue
            producer = flow.producer.get(atom)
            if producer is None or not flow.chain[producer] or is_fp8(atom.aval):
                if _size(atom) > 1:
                    return None
            elif producer not in taken:
                taken.add(producer)
                pending.append(producer)
        if len(taken) > _MOST:
            return None
    return sorted(taken) if has_amax else None


def _is_in_memory(flow: DataFlow, tensor: Any, group: Iterable[int], results: set[Any]) -> bool:
    """Whether a tensor is written whether it is quantized or not."""
    producer = flow.producer.get(tensor)
    own = set(group)
    readers = (i for i in flow.consumers.get(tensor, ()) if i not in own)
    return producer is None or not flow.chain[producer] or tensor in results or any(not flow.chain[i] for i in readers)


def _is_scalar(flow: DataFlow, atom: Any) -> bool:
    """Whether all elements are the same number."""
    if is_literal(atom):
        return True
    producer = flow.producer.get(atom)
    if producer is None:
        return False
    equation = flow.equations[producer]
    return equation.primitive.name == "broadcast_in_dim" and _size(equation.invars[0]) == 1


def _size(atom: Any) -> int:
    return math.prod(atom.aval.shape)
