"""What else reads a tensor of a group and ends there, so that the same kernel makes it: amaxes, sums, other casts.

    tensor ─┬─ abs ─ reduce_max
            ├─ convert ─ reduce_sum
            └─ mul ─ clamp ─ convert to FP8

Each is taken with all that is on the way to it, which nothing else may read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from xla_fp8.tracing.equations import is_plain, variables
from xla_fp8.tracing.fused_casts.cycles import groups_after, would_make_cycle
from xla_fp8.tracing.fused_casts.members import Members
from xla_fp8.tracing.fused_casts.operations import is_elementwise, is_maximum
from xla_fp8.tracing.fused_casts.worth import MOST_EQUATIONS
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import is_reshape


def siblings(members: Members, index: int) -> Iterator[int]:
    """Equations that read the result of one, and what reads these, up to where they end.

    Whether some would make a cycle depends on those before, which are added in between: a variance reads the mean.
    """
    [result, *others] = members.equation(index).outvars
    if others or not members.rows.hold(result):
        return
    for reader in members.flow.consumers.get(result, ()):
        ending = _up_to_ends(members, reader) if reader not in members.computed else None
        if ending and not would_make_cycle(members, ending):
            yield from ending


def sums_of(members: Members, tensors: Iterable[Any]) -> list[int]:
    """Sums of tensors, and of what is made of these element by element."""
    flow, rows = members.flow, members.rows
    found, pending, seen = set(), list(tensors), set(tensors)
    while pending and len(seen) < MOST_EQUATIONS:
        for index in flow.consumers.get(pending.pop(), ()):
            equation = flow.equations[index]
            result, *others = equation.outvars
            if members.is_sum(equation):
                found.add(index)
            is_of_elements = not others and rows.hold(result) and result not in seen
            if is_of_elements and (is_elementwise(equation) or is_reshape(equation)):
                seen.add(result)
                pending.append(result)
    return [i for i in sorted(found - members.computed) if not members.program.is_made(flow.equations[i])]


def _up_to_ends(members: Members, index: int) -> list[int] | None:
    """An equation with all that reads it, in program order; None where that ends in something else."""
    found: set[int] = set()
    pending = [index]
    while pending:
        index = pending.pop()
        if index not in found:
            readers = _readers(members, index)
            if readers is None or len(found) > MOST_EQUATIONS:
                return None
            found.add(index)
            pending += readers
    casts: set[int] = set()  # and what leads to one
    for index in sorted(found, reverse=True):
        equation = members.equation(index)
        if is_cast(equation):
            casts.add(index)
        elif not casts.isdisjoint(members.flow.consumers.get(equation.outvars[0], ())):
            casts.add(index)
            # Behind the tensor there are scalars, scale and bounds. Another tensor would make it another group.
            spreads = [members.rows.spread(atom, equation, "all") for atom in variables(equation.invars)]
            if not set(spreads) <= {"all", "one"} or spreads.count("all") != 1:
                return None
    return sorted(found)


def _readers(members: Members, index: int) -> list[int] | None:
    """What reads an equation's result; nothing where the group ends with it, None where it cannot take it."""
    program, equation = members.program, members.equation(index)
    if index in program.taken or len(equation.outvars) > 1 or program.is_made(equation) or not is_plain(equation):
        return None
    [result] = equation.outvars
    if members.is_sum(equation) or _is_amax(members, index):
        # Groups that read of it must be those that read of the others.
        return [] if groups_after(members, [result]) <= groups_after(members, members.results) else None
    if is_cast(equation):
        return [] if _is_clamped(members, equation.invars[0]) else None
    if not members.rows.hold(result) or not is_elementwise(equation) or result in program.results:
        return None
    return members.flow.consumers.get(result, []) or None


def _is_clamped(members: Members, atom: Any) -> bool:
    producer = members.flow.producer.get(atom)
    return producer is not None and members.equation(producer).primitive.name in ("clamp", "max", "min")


def _is_amax(members: Members, index: int) -> bool:
    """Whether an equation finds the largest of absolute values that are made for that alone."""
    equation, flow = members.equation(index), members.flow
    if not is_maximum(equation):
        return False
    [values] = equation.invars
    producer = flow.producer.get(values)
    if producer is None or flow.equations[producer].primitive.name != "abs":
        return False
    readers = flow.consumers[values]
    return values not in members.program.results and all(is_maximum(flow.equations[i]) for i in readers)
