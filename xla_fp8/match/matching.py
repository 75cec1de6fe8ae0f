"""What passes call: match, find_all, and explain where there is no match."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from xla_fp8.hlo import HloAttributeError, HloComputation, HloInstruction, HloModule
from xla_fp8.match.constants import describe
from xla_fp8.match.pattern import Op, PatternLike, Requirement, as_pattern, either
from xla_fp8.match.solver import Failure, solve

_MAX_PATH = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Match(Mapping[str, HloInstruction]):
    """Capture name → instruction. `instruction` is the one that the whole pattern matched."""

    instruction: HloInstruction
    captures: Mapping[str, HloInstruction]

    def __getitem__(self, name: str) -> HloInstruction:
        if name not in self.captures:
            raise KeyError(f"nothing is captured as {name!r}; captured: {', '.join(self.captures) or 'nothing'}")
        return self.captures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.captures)

    def __len__(self) -> int:
        return len(self.captures)

    def __bool__(self) -> bool:
        """A match without captures is a match all the same."""
        return True

    def __str__(self) -> str:
        captures = "".join(f", {name}={instruction.name}" for name, instruction in self.captures.items())
        return f"{self.instruction.name}{captures}"


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first thing that keeps an instruction from matching.

    Attributes:
        instruction: the one that is not as expected.
        path: the way to it from the instruction asked about: (user, operand index) pairs.
        expected: what the pattern wants there, e.g. "convert or bitcast".
        found: what is there, e.g. "negate.2 (negate)" or "element type f16".
    """

    instruction: HloInstruction
    path: tuple[tuple[HloInstruction, int], ...]
    expected: str
    found: str

    @property
    def depth(self) -> int:
        return len(self.path)

    def __str__(self) -> str:
        name = self.instruction.name
        where = f"operand {self.path[-1][1]} of {self.path[-1][0].name}" if self.path else name
        if self.path and not self.found.startswith(f"{name} "):
            where = f"{name}, {where}"
        text = f"{where}: expected {self.expected}, found {self.found}"
        if len(self.path) < 2:
            return text
        names = [user.name for user, _ in self.path] + [name]
        if len(names) > _MAX_PATH:
            names[_MAX_PATH // 2 : -_MAX_PATH // 2 + 1] = ["..."]
        return f"{text} [{' > '.join(names)}]"


def match(instruction: HloInstruction, pattern: PatternLike) -> Match | None:
    """Matches `pattern` with `instruction` as its root. Where several ways match, the leftmost alternatives win."""
    pattern = as_pattern(pattern)
    if isinstance(pattern, Op) and pattern.opcodes and instruction.opcode not in pattern.opcodes:
        return None  # as nearly every instruction of a module: not worth setting up a search
    outcome = solve(pattern, instruction)
    return None if isinstance(outcome, Failure) else Match(instruction, outcome[0])


def find_all(where: HloComputation | HloModule, pattern: PatternLike) -> Iterator[Match]:
    """Every match, in program order. The caller may rewrite between two: what was removed meanwhile is left out."""
    pattern = as_pattern(pattern)
    for computation in where.computations if isinstance(where, HloModule) else [where]:
        for instruction in computation.instructions:
            if instruction.parent is computation and (found := match(instruction, pattern)) is not None:
                yield found


def difference(instruction: HloInstruction, pattern: PatternLike) -> Difference | None:
    """The first thing that differs; None where the pattern matches.

    Of several alternatives, the one that got deepest is told; of two operand orders, the one in which more matches.
    """
    outcome = solve(as_pattern(pattern), instruction, explain=True)
    if not isinstance(outcome, Failure):
        return None
    path: list[tuple[HloInstruction, int]] = []
    step = outcome.path
    while step is not None:
        path.append(step[:2])
        step = step[2]
    return Difference(outcome.instruction, tuple(path), either(outcome.expected), _found(outcome))


def explain(instruction: HloInstruction, pattern: PatternLike) -> str | None:
    """`difference` as a sentence: `operand 0 of multiply.3: expected convert, found negate.2 (negate)`."""
    found = difference(instruction, pattern)
    return None if found is None else str(found)


def _found(failure: Failure) -> str:
    if isinstance(failure.reason, str):
        return failure.reason
    if isinstance(failure.reason, Requirement) and failure.reason.found is not None:
        try:
            return failure.reason.found(failure.instruction)
        except HloAttributeError as error:
            return str(error)
    return describe(failure.instruction)
