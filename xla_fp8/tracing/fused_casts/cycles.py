"""Whether a kernel would read what is made of its own results: it must have all that it reads before it starts.

A path of the data flow may leave a group and come back, as one does from an amax over the scale that is made of it to a
cast: as one kernel these would wait for each other. What is asked for that:

    would_read_own_results   of a group as it is
    would_make_cycle         of equations that are to be added to it
    reaches                  of equations outside that read what it is to give: the step that both of these take
    groups_after             of it and the groups found before: if one of them reads of this one's results, this one may
                             not read of that one's
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from xla_fp8.tracing.fused_casts.members import Members
from xla_fp8.tracing.rows import element_count


def reaches(members: Members, outside: Iterable[int]) -> bool:
    """Whether the group reads what is computed, directly or not, of the results of equations outside of it."""
    flow, computed, duplicated = members.flow, members.computed, members.duplicated
    pending, seen, last = list(outside), set(), max(computed)
    while pending:
        index = pending.pop()
        if index in seen or index > last:
            continue
        seen.add(index)
        for variable in flow.equations[index].outvars:
            for reader in flow.consumers.get(variable, ()):
                if reader in computed and index not in computed:
                    return True
                # What is duplicated is computed outside too, and others read that.
                if reader not in computed or reader in duplicated:
                    pending.append(reader)
    return False


def would_read_own_results(members: Members) -> bool:
    """Whether the group, as it is, reads its results or what others make of them.

    Of its own results a kernel reads tensors, and numbers of rows, of which each of its programs has what it needs.
    Sums and amaxes are of all rows: of them a program has only a part.
    """
    flow, rows = members.flow, members.rows
    of_all_rows = [
        result
        for result in members.results
        if element_count(result) < rows.size and not members.is_sum_of_row(flow.producer[result])
    ]
    readers = {reader for result in of_all_rows for reader in flow.consumers.get(result, ())}
    return not readers.isdisjoint(members.computed) or reaches(members, members.readers_of_results())


def would_make_cycle(members: Members, added: Sequence[int]) -> bool:
    """Whether with more equations the group would read what is made of theirs, or they what is made of the group's."""
    flow, own = members.flow, set(added)
    after = {r for index in added for v in flow.equations[index].outvars for r in flow.consumers.get(v, ())}
    if not members.computed.isdisjoint(after - own) or reaches(members, after - own):
        return True
    inside = members.computed | own  # a cast may read the scale that is made of an amax beside it
    first, seen = min(inside), set(own)
    pending = [p for index in added for p in flow.predecessors[index] if p not in own]
    while pending:
        index = pending.pop()
        if index in seen or index < first or index in members.computed:
            continue
        seen.add(index)
        pending += flow.predecessors[index]
    # What the group computes they may read; what is computed of its results outside they may not.
    return any(not inside.isdisjoint(flow.predecessors[index]) for index in seen - own)


def groups_after(members: Members, results: Iterable[Any]) -> set[int]:
    """Earlier groups that read results, or fewer numbers than a tensor has that are made of them.

    Where one reads of a sum and of no other result of this group, it may itself give what this group reads.
    """
    found: set[int] = set()
    pending = list(results)
    seen = set(pending)
    while pending:
        variable = pending.pop()
        found |= members.program.readers.get(variable, set())
        for index in members.flow.consumers.get(variable, ()):
            made = [v for v in members.equation(index).outvars if element_count(v) < members.rows.size]
            pending += set(made) - seen
            seen.update(made)
    return found
