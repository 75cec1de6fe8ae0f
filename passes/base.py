"""What every pass is made of: the Pass class, the walk of those that rewrite instructions one by one, what a pipeline
hands to its passes, and their errors."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable

from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import Graph
from xla_fp8.hlo import HloComputation, HloError, HloInstruction, HloModule
from xla_fp8.matmul import MatmulCall
from xla_fp8.quantize_call import QuantizeCall
from xla_fp8.report import Entry
from xla_fp8.target import Target


class PassError(XlaFp8Error):
    """A pass that broke the module, or was asked for something it does not have."""


class UnknownPassError(PassError):
    """A pass name that is none; the message lists those there are."""


@dataclasses.dataclass(frozen=True)
class Refusal:
    """Why something was not rewritten.

    Attributes:
        rule: a short, stable name, e.g. "missing-clamp".
        reason: what differed, naming the instruction.
        advice: what would make it match.
        instruction: the instruction at fault.
    """

    rule: str
    reason: str
    advice: str
    instruction: HloInstruction

    @staticmethod
    def of(rule: str, instruction: HloInstruction, what: str, advice: str) -> Refusal:
        """A refusal whose reason is the instruction and what it does."""
        return Refusal(rule, f"{described(instruction)} {what}", advice, instruction)


class Context:
    """What a pipeline run carries from pass to pass.

    Attributes:
        dialect: "xla" (ops that XLA's reader of the graph string knows) or "extended".
        fuel: rewrites left, None for no limit.
        only_fp8: leave convolutions alone that no FP8 tensor feeds (the default pipeline).
        entries: what became of each convolution and dot, in the order decided.
        unrunnable: why the backend cannot run a convolution in FP8, by its `origin`; conv-fp8-fallback acts on these.
        fell_back: whether conv-fp8-fallback rewrote any.
    """

    def __init__(self, dialect: str = "xla", fuel: int | None = None, only_fp8: bool = False) -> None:
        if dialect not in ("xla", "extended"):
            raise PassError(f"unknown dialect {dialect!r}: expected xla or extended")
        self.dialect = dialect
        self.fuel = fuel
        self.rewrites = 0
        self.only_fp8 = only_fp8
        self.entries: list[Entry] = []
        self.unrunnable: dict[tuple[str, str], str] = {}
        self.fell_back = False
        self._origins: dict[tuple[str, str], tuple[str, str]] = {}

    @property
    def extended(self) -> bool:
        return self.dialect == "extended"

    def consume_fuel(self) -> bool:
        """Whether one more rewrite may be made; counts it."""
        if self.fuel is not None:
            if self.fuel <= 0:
                return False
            self.fuel -= 1
        self.rewrites += 1
        return True

    def moved(self, instruction: HloInstruction, computation: str, name: str) -> None:
        """Notes that `instruction` is what the input calls `name` in `computation`; follows earlier moves."""
        assert instruction.parent is not None
        origin = self._origins.get((computation, name), (computation, name))
        self._origins[(instruction.parent.name, instruction.name)] = origin

    def origin(self, instruction: HloInstruction) -> tuple[str, str]:
        """Computation and name of `instruction` in the module that was read."""
        assert instruction.parent is not None
        key = (instruction.parent.name, instruction.name)
        return self._origins.get(key, key)

    def described(self, instruction: HloInstruction, op: str | None = None) -> str:
        """`described`, under the name that the input has for it and, given `op`, as what it was there."""
        shown, what = _shown(instruction, op)
        return _described(self.origin(shown)[1], what, shown)

    def refusal(self, rule: str, instruction: HloInstruction, what: str, advice: str) -> Refusal:
        """`Refusal.of`, with the instruction under the name that the input has for it."""
        return Refusal(rule, f"{self.described(instruction)} {what}", advice, instruction)

    def record(
        self,
        instruction: HloInstruction,
        op: str,
        *,
        is_fp8: bool,
        refusal: Refusal | None = None,
        graph: Graph | MatmulCall | QuantizeCall | None = None,
        saved_bytes: int = 0,
    ) -> None:
        """Adds the report's entry for a convolution, dot or quantization, rewritten (`graph`) or not."""
        computation, name = self.origin(instruction)
        self.entries.append(
            Entry(
                instruction=name,
                op=op,
                source=source_of(instruction),
                reason=refusal.reason if refusal else "",
                advice=refusal.advice if refusal else "",
                graph=str(graph) if graph is not None else None,
                computation=computation,
                is_fp8=is_fp8,
                rule=refusal.rule if refusal else "",
                saved_bytes=saved_bytes,
            )
        )


def rewritable_computations(module: HloModule) -> list[HloComputation]:
    """The computations whose instructions run one by one: the entry, and bodies of calls, loops and conditionals.

    Not the insides of fusions, which are one kernel, nor what reductions and sorts apply to scalars
    (HloModule::MakeNonfusionComputations).
    """
    sequential = ("call", "while", "conditional", "async-start")
    found = {module.entry}
    pending = [module.entry]
    while pending:
        for instruction in pending.pop():
            if instruction.opcode in sequential:
                for called in instruction.called_computations:
                    if called not in found:
                        found.add(called)
                        pending.append(called)
    return [computation for computation in module.computations if computation in found]


def source_of(instruction: HloInstruction) -> str | None:
    """The user's "file.py:42" for an instruction, None where the dump does not say."""
    try:
        location = instruction.module.source_location(instruction)
    except HloError:
        return None
    return str(location) if location else None


def described(instruction: HloInstruction, op: str | None = None) -> str:
    """An instruction in a message: its name and opcode (or `op`), and the source line where there is one."""
    shown, what = _shown(instruction, op)
    return _described(shown.name, what, shown)


def _shown(instruction: HloInstruction, op: str | None) -> tuple[HloInstruction, str]:
    """What a message shows: for a result of a convolution's custom call the convolution, whose name the call bears.

    The get-tuple-element is the pipeline's own; the module that was read has none.
    """
    if instruction.opcode == "get-tuple-element":
        call = instruction.operand(0)
        if call.opcode == "custom-call" and call.custom_call_target.startswith("__cudnn$conv"):
            return call, "convolution"
    return instruction, op or instruction.opcode


def _described(name: str, what: str, instruction: HloInstruction) -> str:
    source = source_of(instruction)
    return f"{name} ({what}{f', {source}' if source else ''})"


class Pass(abc.ABC):
    """A transformation of a module. Its docstring opens with one line and shows HLO before and after."""

    name: str

    def __init__(self, context: Context) -> None:
        self.context = context

    @abc.abstractmethod
    def run(self, module: HloModule, target: Target) -> bool:
        """Changes `module` in place; returns whether it did. Leaves a verified module."""


Position = tuple[int, int]


class Walk:
    """A computation while a pass rewrites its instructions, one after the other.

    It keeps from rewrite to rewrite what would else be found anew for the whole computation: an order of the
    instructions, and that none is dead. So a pass is linear in the module, however many rewrites it makes.
    """

    def __init__(self, computation: HloComputation) -> None:
        self.computation = computation
        self.is_changed = False
        self._positions: dict[HloInstruction, Position] = {}

    def position(self, instruction: HloInstruction) -> Position:
        """Where an instruction stands in an order in which operands come before users.

        What a rewrite has made stands right behind its operands: its users stood behind them already.
        """
        if not self._positions:
            self._positions = {member: (i, 0) for i, member in enumerate(self.computation.post_order())}
        pending = [instruction]
        while pending:
            current = pending[-1]
            needed = [o for o in _inputs(current) if o not in self._positions]
            if current in self._positions:
                pending.pop()
            elif needed:
                pending.extend(needed)
            else:
                last = max((self._positions[o] for o in _inputs(current)), default=(-1, 0))
                self._positions[pending.pop()] = _behind(last)
        return self._positions[instruction]

    def dependents(self, sources: Iterable[HloInstruction], end: HloInstruction) -> set[HloInstruction]:
        """What depends on one of `sources` and stands in front of `end`, sources included."""
        found = set(sources)
        pending = list(found)
        while pending:
            current = pending.pop()
            for user in (*current.users, *current.control_successors):
                if user not in found and self.position(user) < self.position(end):
                    found.add(user)
                    pending.append(user)
        return found

    def rewritten(self, made: HloInstruction, replaced: Iterable[HloInstruction]) -> None:
        """Brings order and computation up to date, now that `made` and what reads it stand where others did.

        Args:
            replaced: what nobody may need any more: those others, with their operands (`with_operands`).
        """
        self.computation.remove_dead(replaced if self.is_changed else None)
        self.is_changed = True
        if self._positions:
            self._move_users_behind(made)

    def _move_users_behind(self, made: HloInstruction) -> None:
        """Where a result of `made` was there before another of its operands was, users of it may now be too early."""
        pending = [made]
        while pending:
            current = pending.pop()
            position = self.position(current)
            for user in (*current.users, *current.control_successors):
                is_new = user not in self._positions
                if is_new or self._positions[user] <= position:
                    self._positions[user] = self.position(user) if is_new else _behind(position)
                    pending.append(user)

    def restart(self) -> None:
        """Forgets what it keeps: the computation was changed other than by a rewrite that was told."""
        self.computation.remove_dead()
        self._positions.clear()
        self.is_changed = True

    def finish(self) -> bool:
        """Puts the instructions into an order that the text may have; returns whether anything was rewritten."""
        if self.is_changed:
            self.computation.restore_order()
        return self.is_changed


def with_operands(instructions: Iterable[HloInstruction]) -> list[HloInstruction]:
    """The instructions and what they read: an instruction that is removed no longer says what that was."""
    return [i for instruction in instructions for i in (*instruction.operands, instruction)]


def _inputs(instruction: HloInstruction) -> tuple[HloInstruction, ...]:
    return (*instruction.operands, *instruction.control_predecessors)


def _behind(position: Position) -> Position:
    """A position between this one and that of the next instruction of the computation as it was."""
    return position[0], position[1] + 1


class RewritePass(Pass):
    """A pass that looks at instructions one by one and rewrites those it can, once through each computation.

    Attributes:
        op: what the report calls the instructions that it looks at.
    """

    op: str

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for computation in rewritable_computations(module):
            walk = Walk(computation)
            for instruction in computation.instructions:
                if instruction.parent is computation and self.matches(instruction):
                    refusal = self.rewrite(walk, instruction, target)
                    if refusal is not None:
                        self.refuse(instruction, refusal)
            changed |= walk.finish()
        return changed

    @abc.abstractmethod
    def matches(self, instruction: HloInstruction) -> bool:
        """Whether it is one to look at."""

    @abc.abstractmethod
    def rewrite(self, walk: Walk, instruction: HloInstruction, target: Target) -> Refusal | None:
        """Rewrites an instruction and tells the walk; returns why not, where that is to be reported."""

    def refuse(self, instruction: HloInstruction, refusal: Refusal) -> None:
        """Reports an instruction that was not rewritten."""
        self.context.record(instruction, self.op, is_fp8=True, refusal=refusal)
