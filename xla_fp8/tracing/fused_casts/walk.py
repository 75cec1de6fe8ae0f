"""From a root up to the tensors that are in memory anyway: the equations of one group.

Equations are decided on from the last in program order to the first, each when all that reads its result has been. If
the kernel can compute one it does; where others read its result too, it gives it to them or they compute it again. Else
the kernel reads the result. At each tensor on the way siblings are added.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Any

from xla_fp8.tracing.equations import Equation, variables
from xla_fp8.tracing.fused_casts.computable import joins_tensors, why_not_computed
from xla_fp8.tracing.fused_casts.cycles import groups_after, reaches, would_read_own_results
from xla_fp8.tracing.fused_casts.found import Group, Reason
from xla_fp8.tracing.fused_casts.members import Members
from xla_fp8.tracing.fused_casts.program import Program
from xla_fp8.tracing.fused_casts.roots import Root
from xla_fp8.tracing.fused_casts.siblings import siblings, sums_of
from xla_fp8.tracing.fused_casts.worth import is_small, why_not_worth_it
from xla_fp8.tracing.rows import element_count, joins_values

_LEAST_SIZE_WITH_NUMBERS_OF_IMAGES = 2**22
"""Elements: of fewer another launch is most of the time that the sum with such numbers takes."""


def group_of(program: Program, root: Root) -> tuple[Group, Collection[int]] | Reason:
    """The group of a root, with those of its equations that something else computes too; or why it is none."""
    members = Members.of_root(program, root)
    _go_up(members)
    reason = why_not_worth_it(members)
    if reason is not None:
        return reason
    members = _with_other_sums(members)
    [first, *others] = members.results
    if not members.is_asked_for(first):
        return Reason("nothing reads it but what its own kernel would compute")
    given = filter(members.is_asked_for, others)
    tensors_first = sorted(given, key=lambda result: element_count(result) < members.rows.size)
    return Group(tuple(sorted(members.computed)), (first, *tensors_first)), members.duplicated


def _go_up(members: Members) -> None:
    """Decides on all that is pending."""
    while members.pending and is_small(members):
        index = -heapq.heappop(members.pending)
        if index in members.computed:
            continue
        if _joins_values(members, index):
            _add_siblings(members, index)
            members.add_concatenation(index)
            continue
        why_not = why_not_computed(members, index)
        if (why_not is None or members.spread[index] == "all") and members.groups is None:
            _add_siblings(members, index)
        if why_not is not None:
            members.stops[index] = why_not
        elif _is_kept(members, index):
            members.add(index)
            continue
        members.read_results_of(index)


def _add_siblings(members: Members, index: int) -> None:
    for sibling in siblings(members, index):
        members.end_with(sibling)


def _with_other_sums(members: Members) -> Members:
    """The group with the other sums over rows of the tensors that it reads, if no more tensors have to be."""
    read = members.tensors_read()
    for index in sums_of(members, read):
        made = members.equation(index).outvars
        if not groups_after(members, made) <= groups_after(members, members.results):
            continue  # of which this one may read
        more = members.copy()
        more.end_with(index)
        _go_up(more)
        if why_not_worth_it(more) is None and more.tensors_read() <= read and not would_read_own_results(more):
            members = more
    return members


def _is_kept(members: Members, index: int) -> bool:
    """Whether the kernel computes what it can compute; and for whom, which is noted."""
    program, equation = members.program, members.equation(index)
    if program.is_made(equation):
        return False
    outside, is_given = members.readers_outside(index), program.gives(equation)
    if members.may_be_tensor(equation):
        [result] = equation.outvars
        if index in program.taken and not _has_numbers_of_images(members, equation):
            return False  # a graph writes it
        if not outside and not is_given:
            return True
        is_written = is_given or not all(program.flow.chain[reader] for reader in outside)
        if is_written or len(program.tensors[result]) > 1:
            return _gives(members, result, outside)
        # Of one tensor it takes no longer to compute it again than to read it.
    elif members.is_sum_of_row(index) and outside:
        [result] = equation.outvars
        if not is_given and _gives(members, result, outside):
            return True
    if outside or is_given:
        members.duplicated.add(index)
    return True


def _gives(members: Members, result: Any, outside: Collection[int]) -> bool:
    """Lets others have a result from the kernel; not where what they make of it comes back."""
    if reaches(members, outside):
        return False
    members.results[result] = None
    return True


def _has_numbers_of_images(members: Members, equation: Equation) -> bool:
    """Whether an operand is a number for each column of each image, and the tensor large beside another launch.

    No graph adds these: XLA would read and write the tensor for that.
    """
    flow, rows = members.flow, members.rows
    if rows.size < _LEAST_SIZE_WITH_NUMBERS_OF_IMAGES:
        return False
    read = [(atom, equation) for atom in variables(equation.invars)]
    producers = [flow.equations[flow.producer[atom]] for atom, _ in read if atom in flow.producer]
    read += [(e.invars[0], e) for e in producers if e.primitive.name == "broadcast_in_dim"]
    tables = [rows.table_of(atom, reader) for atom, reader in read if not rows.hold(atom)]
    return any(table is not None and table.period > 1 and bool(table.columns) for table in tables)


def _joins_values(members: Members, index: int) -> bool:
    """Whether the parts of a tensor are beside each other that all so far is computed of, and are computed too."""
    equation = members.equation(index)
    if members.is_joined or not joins_values(equation, members.rows) or joins_tensors(members, index):
        return False
    # Behind it all is computed of that tensor and of scalars.
    elsewhere = {*members.tables, *(-i for i in members.pending)}
    others = [result for i in elsewhere for result in members.equation(i).outvars]
    others = [other for other in (*others, *members.read) if other not in equation.outvars]
    is_of_elements = {members.spread[i] for i in members.computed} <= {"all", "one", "column"}
    if any(element_count(other) > 1 for other in others) or not is_of_elements:
        return False
    outside = set(members.readers_outside(index)).difference(siblings(members, index))
    return not outside and not members.program.gives(equation)
