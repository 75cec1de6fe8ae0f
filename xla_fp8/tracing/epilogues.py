"""What of a region a graph can compute: how far the epilogue of its convolution or dot goes.

A region has all elementwise operations behind its convolution or dot. A graph has fewer: of other tensors it only adds
some, or takes the smaller or larger (`xla_fp8.graph.ops`), and what is inside an activation it gives to nobody. So the
backward pass of an activation is no epilogue, nor is the forward pass of one whose steps that reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.equations import CONTRACTIONS, variables
from xla_fp8.tracing.rows import element_count

_OF_TWO_TENSORS = frozenset({"add", "add_any", "max", "min", "sub"})

_STEPS = frozenset(
    ["exp", "exp2", "expm1", "erf", "erfc", "integer_pow", "log", "log1p", "one_minus_square", "pow", "sqrt", "square"]
)
"""What stands inside of activations and is none."""


def within_graph(flow: DataFlow, outvars: Sequence[Any], region: Iterable[int]) -> set[int]:
    """Those equations of a region that graphs can compute.

    Args:
        region: convolutions and dots, and all of their epilogues.
    """
    results, members = set(variables(outvars)), set(region)
    kept: set[int] = set()
    found = members
    while kept != found:  # what is not kept reads what was kept so far
        kept, found = found, set()
        for index in sorted(kept):
            is_given = _is_read_outside(flow, index, results, kept)
            if _continues(flow, index, members, found) and _may_be(flow, index, members, is_given):
                found.add(index)
    return kept


def _continues(flow: DataFlow, index: int, members: set[int], before: set[int]) -> bool:
    """Whether a graph that computes those before can go on with an equation."""
    equation = flow.equations[index]
    if _is_contraction(flow, index):
        return True
    operands = variables(equation.invars)
    if any(flow.producer.get(atom) in members - before for atom in operands):
        return False
    size = max(map(element_count, equation.outvars))
    others = [a for a in operands if flow.producer.get(a) not in before and element_count(a) == size > 1]
    return equation.primitive.name in _OF_TWO_TENSORS or all(_is_broadcast(flow, atom) for atom in others)


def _may_be(flow: DataFlow, index: int, members: set[int], is_given: bool) -> bool:
    """Whether a graph may compute a result, which it gives to others or not."""
    equation = flow.equations[index]
    is_square = equation.primitive.name == "mul" and equation.invars[0] is equation.invars[1]
    is_only_a_step = is_square or equation.primitive.name in _STEPS
    if not (is_given or is_only_a_step):
        return True
    return not is_given if _is_step(flow, index, members) else not is_only_a_step


def _is_contraction(flow: DataFlow, index: int) -> bool:
    return flow.equations[index].primitive.name in CONTRACTIONS or flow.is_seed(index)


def _is_read_outside(flow: DataFlow, index: int, results: set[Any], kept: set[int]) -> bool:
    made = flow.equations[index].outvars
    readers = (reader for variable in made for reader in flow.consumers.get(variable, ()))
    return not results.isdisjoint(made) or any(reader not in kept for reader in readers)


def _is_step(flow: DataFlow, index: int, members: set[int]) -> bool:
    """Whether what is computed of a result is computed of what that is made of as well: x * sigmoid(x)."""
    if _is_contraction(flow, index):
        return False
    after, pending = {index}, [index]
    while pending:
        for variable in flow.equations[pending.pop()].outvars:
            readers = [
                reader for reader in flow.consumers.get(variable, ()) if reader in members and reader not in after
            ]
            after.update(readers)
            pending += readers
    before, pending = {index}, [index]
    while pending:
        made = [p for p in flow.predecessors[pending.pop()] if p in members and p not in before]
        before.update(made)
        pending += made
    beside = {p for reader in after - {index} for p in flow.predecessors[reader] if p in members} - after
    while beside and beside.isdisjoint(before):
        beside = {p for reader in beside for p in flow.predecessors[reader] if p in members}
    return bool(beside)


def _is_broadcast(flow: DataFlow, atom: Any) -> bool:
    """Whether a tensor is fewer numbers, spread."""
    producer = flow.producer.get(atom)
    if producer is None:
        return False
    equation = flow.equations[producer]
    if equation.primitive.name == "convert_element_type":
        return _is_broadcast(flow, equation.invars[0])
    if equation.primitive.name != "broadcast_in_dim":
        return False
    return element_count(equation.invars[0]) < element_count(atom)
