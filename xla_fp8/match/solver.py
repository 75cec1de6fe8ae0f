"""The search: which instructions a pattern's captures stand for, or what was in the way.

One table holds the outcome of each (pattern, instruction) pair, so a pair is looked at once however many ways lead to
it: any-order chains and `x + x` towers cost what their size is, not two to its power. What makes that sound is that an
outcome does not depend on the surroundings. It is the list of all bindings that differ in captures which also occur
elsewhere in the whole pattern (without such captures, at most one), and the surroundings join those lists. The first
binding of a list is the one that trying alternatives from left to right would find first.

A list grows with the number of instructions that a repeated capture can stand for, to the power of how many such
captures there are; no search avoids that in general (any-order matching with repeated variables is NP-complete).

Patterns and HLO may be deep, so the search is generators that ask for sub-results, and one loop that runs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TypeAlias

from xla_fp8.hlo import HloInstruction
from xla_fp8.match.pattern import AnyOf, Op, Pattern, Requirement, Through, counted

Bindings: TypeAlias = dict[str, HloInstruction]
Path: TypeAlias = "tuple[HloInstruction, int, Path] | None"


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a pattern does not match; put into words only when somebody asks (matching.py).

    Attributes:
        instruction: the one that is not as expected.
        expected: alternatives of what was expected.
        reason: the requirement that failed, or text for "found"; None where the instruction itself is what was found.
        path: the way down to it, as (user, operand index, rest of the way).
        depth: how many operands down it is, not counting what was looked through.
        progress: how much matched before, to compare failures of the same depth.
    """

    instruction: HloInstruction
    expected: tuple[str, ...]
    reason: Requirement | str | None = None
    path: Path = None
    depth: int = 0
    progress: int = 0

    @property
    def rank(self) -> tuple[int, int]:
        """How far the match got."""
        return self.depth, self.progress

    def below(self, user: HloInstruction, index: int, progress: int, depth: int = 1) -> Failure:
        """The same failure seen from a user."""
        return dataclasses.replace(
            self, path=(user, index, self.path), depth=self.depth + depth, progress=self.progress + progress
        )


Outcome: TypeAlias = "list[Bindings] | Failure"
Steps: TypeAlias = Generator[tuple[Pattern, HloInstruction], Outcome, Outcome]


def solve(pattern: Pattern, instruction: HloInstruction, explain: bool = False) -> Outcome:
    """All matches that differ in nothing but what is bound twice; the preferred one first; or the failure.

    Args:
        explain: take the time to find out which operand order was meant where neither matches.
    """
    shared = {name: count for name, count in pattern.captures.items() if count > 1}
    search = _Search(shared, explain)
    outcomes: dict[tuple[int, HloInstruction], Outcome] = {}
    stack = [((id(pattern), instruction), search.steps(pattern, instruction))]
    outcome: Outcome | None = None
    while stack:
        key, steps = stack[-1]
        try:
            # A generator is started with None, which the type of send() cannot say.
            wanted = steps.send(outcome)  # type: ignore[arg-type]
        except StopIteration as done:
            outcome = outcomes[key] = done.value
            stack.pop()
            continue
        key = (id(wanted[0]), wanted[1])
        outcome = outcomes.get(key)
        if outcome is None:
            stack.append((key, search.steps(*wanted)))
    assert outcome is not None
    return outcome


@dataclasses.dataclass(frozen=True)
class _Search:
    """The steps, and what all of them must know.

    Attributes:
        shared: captures that occur more than once → how often.
    """

    shared: dict[str, int]
    explain: bool

    def steps(self, pattern: Pattern, instruction: HloInstruction) -> Steps:
        """One pattern against one instruction."""
        # The own names and the extra operands may rule out what the parts found first, and so may the surroundings.
        first_only = not (self.shared and self._occur_outside(pattern.captures_of_parts()))
        outcome = yield from self._kind(pattern, instruction, first_only)
        if isinstance(outcome, Failure):
            return outcome
        progress = 1
        if pattern.extra_operands:
            outcome = yield from _operands(instruction, pattern.extra_operands, outcome, progress)
            if isinstance(outcome, Failure):
                return outcome
            progress += len(pattern.extra_operands)
        for requirement in pattern.requirements:
            if not requirement.holds_for(instruction):
                return Failure(instruction, (requirement.expected,), requirement, progress=progress)
            progress += 1
        if pattern.names:
            outcome = _join(outcome, [dict.fromkeys(pattern.names, instruction)], instruction, progress)
            if isinstance(outcome, Failure):
                return outcome
        outside = self._occur_outside(pattern.captures)
        distinct: dict[tuple[HloInstruction | None, ...], Bindings] = {}
        for bindings in outcome:
            distinct.setdefault(tuple(bindings.get(name) for name in outside), bindings)
        return list(distinct.values())

    def _occur_outside(self, captures: Mapping[str, int]) -> list[str]:
        """Those of `captures` that the whole pattern binds more often: only they can matter to the surroundings."""
        return [name for name, count in self.shared.items() if 0 < captures.get(name, 0) < count]

    def _kind(self, pattern: Pattern, instruction: HloInstruction, first_only: bool) -> Steps:
        """What is particular to each kind of pattern."""
        if isinstance(pattern, AnyOf):
            return (yield from _choose((_ask(a, instruction) for a in pattern.alternatives), first_only))
        if isinstance(pattern, Through):
            here = _ask(pattern.inner, instruction)
            if instruction.opcode not in pattern.opcodes or len(instruction.operands) != 1:
                return (yield from here)
            below = _look_through(pattern, instruction)
            return (yield from _choose([here, below] if pattern.nearest else [below, here], first_only))
        assert isinstance(pattern, Op)
        operands = pattern.operands
        if pattern.opcodes and instruction.opcode not in pattern.opcodes:
            return Failure(instruction, pattern.opcodes)
        if operands is None:
            return [{}]
        if len(instruction.operands) != len(operands):
            found = counted(len(instruction.operands), "operand")
            return Failure(instruction, (counted(len(operands), "operand"),), found, progress=1)
        as_written = list(enumerate(operands))
        if not pattern.any_order:
            return (yield from _operands(instruction, as_written, [{}], 1))
        orders = [as_written, [(1 - index, operand) for index, operand in as_written]]
        outcome = yield from _choose((_operands(instruction, order, [{}], 1) for order in orders), first_only)
        if isinstance(outcome, Failure) and self.explain:
            return (yield from _intended(instruction, orders))
        return outcome


def _intended(instruction: HloInstruction, orders: Iterable[Sequence[tuple[int, Pattern]]]) -> Steps:
    """The failure of the order in which more operands match by themselves; of equals, the one that got further."""
    best: tuple[int, Failure] | None = None
    for order in orders:
        matched = 0
        for index, pattern in order:
            alone = yield pattern, instruction.operands[index]
            matched += not isinstance(alone, Failure)
        failure = yield from _operands(instruction, order, [{}], 1)
        assert isinstance(failure, Failure)
        if best is None or matched > best[0]:
            best = matched, failure
        elif matched == best[0]:
            best = matched, _further(best[1], failure)
    assert best is not None
    return best[1]


def _look_through(pattern: Through, instruction: HloInstruction) -> Steps:
    outcome = yield pattern.rest, instruction.operands[0]
    return outcome.below(instruction, 0, progress=1, depth=0) if isinstance(outcome, Failure) else outcome


def _choose(attempts: Iterable[Steps], first_only: bool) -> Steps:
    """What all attempts find (or the first that finds something); if nothing, the failure that got furthest."""
    solutions: list[Bindings] = []
    failure: Failure | None = None
    for attempt in attempts:
        outcome = yield from attempt
        if isinstance(outcome, Failure):
            failure = outcome if failure is None else _further(failure, outcome)
            continue
        solutions += outcome
        if first_only:
            break
    return solutions or failure or solutions


def _further(one: Failure, other: Failure) -> Failure:
    """The failure of higher rank, else the first; two that found the same instruction wrong are told together."""
    if one.rank != other.rank:
        return max(one, other, key=lambda failure: failure.rank)
    if one.instruction is other.instruction and one.reason is None and other.reason is None:
        return dataclasses.replace(one, expected=tuple(dict.fromkeys(one.expected + other.expected)))
    return one


def _operands(
    instruction: HloInstruction, patterns: Sequence[tuple[int, Pattern]], solutions: list[Bindings], progress: int
) -> Steps:
    """Operands that must all match, joined to `solutions`."""
    for index, pattern in patterns:
        if index >= len(instruction.operands):
            found = counted(len(instruction.operands), "operand")
            return Failure(instruction, (f"an operand {index}",), found, progress=progress)
        outcome = yield pattern, instruction.operands[index]
        if isinstance(outcome, Failure):
            return outcome.below(instruction, index, progress)
        joined = _join(solutions, outcome, instruction, progress)
        if isinstance(joined, Failure):
            return joined
        solutions = joined
        progress += 1
    return solutions


def _join(ones: list[Bindings], others: list[Bindings], instruction: HloInstruction, progress: int) -> Outcome:
    """Every pair that agrees on what both bind."""
    joined = [
        {**one, **other}
        for one in ones
        for other in others
        if all(one.get(name, bound) is bound for name, bound in other.items())
    ]
    if joined:
        return joined
    one, other = ones[0], others[0]
    name = next(name for name, bound in other.items() if one.get(name, bound) is not bound)
    expected = f"every {name!r} to be the same instruction"
    return Failure(instruction, (expected,), f"{one[name].name} and {other[name].name}", progress=progress)


def _ask(pattern: Pattern, instruction: HloInstruction) -> Steps:
    return (yield pattern, instruction)
