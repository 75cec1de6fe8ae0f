"""The search: which instructions a pattern's captures stand for, or what was in the way.

One table holds the outcome of each (pattern, instruction) pair, so a pair is looked at once however many ways lead to
it: any-order chains and `x + x` towers cost what their size is, not two to its power. What makes that sound is that an
outcome does not depend on the surroundings. It is the list of all bindings that differ in captures which also occur
elsewhere in the whole pattern (without such captures, at most one), and the surroundings join those lists. The first
binding of a list is the one that trying alternatives from left to right would find first.

Patterns and HLO may be deep, so the search is generators that ask for sub-results, and one loop that runs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Iterable, Sequence
from typing import TypeAlias

from xla_fp8.hlo import HloInstruction
from xla_fp8.match.pattern import AnyOf, Op, Pattern, Requirement, Through, counted

Bindings: TypeAlias = dict[str, HloInstruction]
Path: TypeAlias = "tuple[HloInstruction, int, Path] | None"


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why a pattern does not match; put into words only when somebody asks (difference.py).

    Attributes:
        instruction: the one that is not as expected.
        expected: alternatives of what was expected.
        reason: the requirement that failed, or text for "found"; None where the instruction itself is what was found.
        path: the way down to it, as (user, operand index, rest of the way).
        depth: length of `path`.
        progress: how much matched before, to compare failures of the same depth.
    """

    instruction: HloInstruction
    expected: tuple[str, ...]
    reason: Requirement | str | None = None
    path: Path = None
    depth: int = 0
    progress: int = 0

    def below(self, user: HloInstruction, index: int, progress: int = 0) -> Failure:
        """The same failure seen from a user."""
        return dataclasses.replace(
            self, path=(user, index, self.path), depth=self.depth + 1, progress=self.progress + progress
        )


Outcome: TypeAlias = "list[Bindings] | Failure"
Steps: TypeAlias = Generator[tuple[Pattern, HloInstruction], Outcome, Outcome]


def solve(pattern: Pattern, instruction: HloInstruction) -> Outcome:
    """All matches that differ in nothing but what is bound twice; the preferred one first; or the failure."""
    outcomes: dict[tuple[int, HloInstruction], Outcome] = {}
    shared = {name: count for name, count in pattern.captures.items() if count > 1}
    key = (id(pattern), instruction)
    stack = [(key, _steps(pattern, instruction, shared))]
    outcome: Outcome | None = None
    while stack:
        key, steps = stack[-1]
        try:
            # The type of send() does not say that a generator is started with None.
            wanted = steps.send(outcome)  # type: ignore[arg-type]
        except StopIteration as done:
            outcome = outcomes[key] = done.value
            stack.pop()
            continue
        key = (id(wanted[0]), wanted[1])
        outcome = outcomes.get(key)
        if outcome is None:
            stack.append((key, _steps(*wanted, shared)))
    assert outcome is not None
    return outcome


def _steps(pattern: Pattern, instruction: HloInstruction, shared: dict[str, int]) -> Steps:
    """One pattern against one instruction."""
    # Only what also occurs outside this pattern can matter to the outside.
    outside = [name for name, count in shared.items() if 0 < pattern.captures.get(name, 0) < count]
    attempts: Iterable[Steps]
    if isinstance(pattern, Op):
        if pattern.opcodes and instruction.opcode not in pattern.opcodes:
            return Failure(instruction, pattern.opcodes)
        attempts = _orders(pattern, instruction)
    elif isinstance(pattern, AnyOf):
        attempts = (_ask(alternative, instruction) for alternative in pattern.alternatives)
    else:
        assert isinstance(pattern, Through)
        attempts = _layers(pattern, instruction)

    outcome = yield from _choose(attempts, first_only=not outside)
    if isinstance(outcome, Failure):
        return outcome
    progress = 1
    if pattern.extra_operands:
        outcome = yield from _operands(instruction, pattern.extra_operands, outcome, progress)
        if isinstance(outcome, Failure):
            return outcome
    for requirement in pattern.requirements:
        if not requirement.holds_for(instruction):
            return Failure(instruction, (requirement.expected,), requirement, progress=progress)
        progress += 1
    if pattern.names:
        outcome = _join(outcome, [dict.fromkeys(pattern.names, instruction)], instruction, progress)
        if isinstance(outcome, Failure):
            return outcome
    distinct: dict[tuple[HloInstruction | None, ...], Bindings] = {}
    for bindings in outcome:
        distinct.setdefault(tuple(bindings.get(name) for name in outside), bindings)
    return list(distinct.values())


def _orders(pattern: Op, instruction: HloInstruction) -> Iterable[Steps]:
    """The operands as written and, where either order will do, swapped."""
    if pattern.operands is None:
        return [_known([{}])]
    if len(instruction.operands) != len(pattern.operands):
        found = counted(len(instruction.operands), "operand")
        return [_known(Failure(instruction, (counted(len(pattern.operands), "operand"),), found, progress=1))]
    pairs = list(enumerate(pattern.operands))
    orders = [pairs]
    if pattern.any_order:
        # The first pattern is asked first in both orders, so that its failure counts as less progress than the other's.
        orders.append([(1 - index, operand) for index, operand in pairs])
    return [_operands(instruction, order, [{}], 1) for order in orders]


def _layers(pattern: Through, instruction: HloInstruction) -> Iterable[Steps]:
    """The inner pattern here, and below one more wrapper."""
    here = _ask(pattern.inner, instruction)
    if instruction.opcode not in pattern.opcodes or len(instruction.operands) != 1:
        return [here]
    below = _operands(instruction, [(0, pattern.rest)], [{}], 0)
    return [here, below] if pattern.nearest else [below, here]


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
    return solutions or failure or []


def _further(one: Failure, other: Failure) -> Failure:
    """The failure that is deeper, then the one before which more matched, then the first; equals are told together."""
    if (one.depth, one.progress) != (other.depth, other.progress):
        return max(one, other, key=lambda f: (f.depth, f.progress))
    if one.instruction is other.instruction and one.reason is None and other.reason is None:
        return dataclasses.replace(one, expected=one.expected + other.expected)
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


def _known(outcome: Outcome) -> Steps:
    yield from ()
    return outcome
