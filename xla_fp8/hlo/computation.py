"""One HLO computation: its instructions in order, and every change that may be made to them.

Instructions are a linked list, so inserting next to one of 100,000 costs the same as anywhere. Order is kept as parsed;
a new instruction goes in before its first user, so that operands are always defined before they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from xla_fp8.hlo.attributes import AttributeMap
from xla_fp8.hlo.errors import HloAttributeError, HloMutationError
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.shape import Shape

if TYPE_CHECKING:
    from xla_fp8.hlo.module import HloModule


class HloComputation:
    """A named list of instructions with a root.

    Attributes:
        name: without the leading `%`.
        module: the module it is in.
        has_program_shape: whether it was written `name (p: f32[]) -> f32[] {`; kept for the printer.
        trailing_attributes: what follows the closing brace (`execution_thread="..."`).
    """

    __slots__ = (
        "_controlled",
        "_count",
        "_first",
        "_last",
        "_names",
        "_next_suffix",
        "_root",
        "has_program_shape",
        "module",
        "name",
        "trailing_attributes",
    )

    def __init__(self, name: str, module: HloModule, has_program_shape: bool = True) -> None:
        self.name = name
        self.module = module
        self.has_program_shape = has_program_shape
        self.trailing_attributes = AttributeMap()
        self._first: HloInstruction | None = None
        self._last: HloInstruction | None = None
        self._count = 0
        self._names: dict[str, HloInstruction] = {}
        self._root: HloInstruction | None = None
        self._next_suffix: dict[str, int] = {}
        # Predecessor -> the instructions that wait for it; None where it must be looked up again.
        self._controlled: dict[HloInstruction, list[HloInstruction]] | None = None

    # ---------------------------------------------------------------- reading

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[HloInstruction]:
        instruction = self._first
        while instruction is not None:
            following = instruction._next
            yield instruction
            instruction = following

    @property
    def instructions(self) -> list[HloInstruction]:
        """A snapshot in order: safe to walk while the computation changes."""
        return list(self)

    @property
    def root(self) -> HloInstruction:
        root = self._root or self._last
        if root is None:
            raise HloMutationError(f"computation {self.name} has no instructions, so no root")
        return root

    def set_root(self, instruction: HloInstruction) -> None:
        if instruction.parent is not self:
            raise HloMutationError(f"{instruction.name} is not in computation {self.name}, so cannot be its root")
        self._root = instruction

    @property
    def parameters(self) -> list[HloInstruction]:
        """Parameters in the order of their numbers."""
        return sorted((i for i in self if i.opcode == "parameter"), key=lambda i: i.parameter_number)

    def instruction(self, name: str) -> HloInstruction:
        """The instruction of that name, with or without `%`. Raises HloAttributeError."""
        found = self._names.get(name.lstrip("%"))
        if found is None:
            raise HloAttributeError(f"there is no instruction {name!r} in computation {self.name}")
        return found

    def __contains__(self, name: str) -> bool:
        return name.lstrip("%") in self._names

    @property
    def is_entry(self) -> bool:
        return self.module.entry is self

    @property
    def has_side_effect(self) -> bool:
        """Whether any instruction in it, or in what it calls, has a side effect."""
        seen = {self}
        pending = [self]
        while pending:
            for instruction in pending.pop():
                if instruction.opcode not in ("call", "while", "conditional", "fusion"):
                    if instruction.has_side_effect:
                        return True
                    continue
                for called in instruction.called_computations:
                    if called not in seen:
                        seen.add(called)
                        pending.append(called)
        return False

    def control_successors(self, instruction: HloInstruction) -> tuple[HloInstruction, ...]:
        """Instructions that name `instruction` in their control-predecessors."""
        if self._controlled is None:
            self._controlled = {}
            for candidate in self:
                for predecessor in candidate.control_predecessors:
                    self._controlled.setdefault(predecessor, []).append(candidate)
        return tuple(self._controlled.get(instruction, ()))

    def post_order(self) -> list[HloInstruction]:
        """All instructions, operands before users, otherwise as they stand. Iterative."""
        done: set[HloInstruction] = set()
        order: list[HloInstruction] = []
        for start in self:
            stack = [start]
            while stack:
                current = stack[-1]
                if current in done:
                    stack.pop()
                    continue
                waiting = [o for o in (*current.operands, *current.control_predecessors) if o not in done]
                if waiting:
                    stack.extend(reversed(waiting))
                else:
                    done.add(current)
                    order.append(current)
                    stack.pop()
        return order

    def reachable_from(self, sources: Sequence[HloInstruction]) -> set[HloInstruction]:
        """Every instruction that depends on one of `sources` through operands or control edges, sources included."""
        seen = set(sources)
        pending = list(sources)
        while pending:
            current = pending.pop()
            for user in (*current.users, *current.control_successors):
                if user not in seen:
                    seen.add(user)
                    pending.append(user)
        return seen

    # ---------------------------------------------------------------- changing

    def unique_name(self, prefix: str) -> str:
        """`prefix`, or `prefix.N` where that is taken."""
        if prefix not in self._names:
            return prefix
        base, dot, suffix = prefix.rpartition(".")
        if dot and suffix.isdigit():
            prefix = base
        number = self._next_suffix.get(prefix, 1)
        while f"{prefix}.{number}" in self._names:
            number += 1
        self._next_suffix[prefix] = number + 1
        return f"{prefix}.{number}"

    def create(
        self,
        opcode: str,
        shape: Shape,
        operands: Sequence[HloInstruction] = (),
        *,
        name: str | None = None,
        before: HloInstruction | None = None,
        payload: str = "",
        attributes: dict[str, str] | None = None,
        metadata_from: HloInstruction | None = None,
    ) -> HloInstruction:
        """Makes an instruction and adds it.

        Args:
            name: wished name; made unique. By default the opcode.
            before: where to put it; by default at the end.
            attributes: name → text.
            metadata_from: an instruction whose metadata the new one takes over.
        """
        for operand in operands:
            if operand.parent is not self:
                raise HloMutationError(f"operand {operand.name} of a new {opcode} is not in computation {self.name}")
        instruction = HloInstruction(
            self.unique_name(name or opcode), opcode, shape, tuple(operands), payload, "", None
        )
        instruction._attributes = AttributeMap(attributes or {})
        if metadata_from is not None and (metadata := metadata_from.attr("metadata")):
            instruction._attributes["metadata"] = metadata
        return self.add(instruction, before=before)

    def add(self, instruction: HloInstruction, before: HloInstruction | None = None) -> HloInstruction:
        """Adds an instruction that is in no computation yet, before `before` or at the end."""
        if instruction.parent is not None:
            raise HloMutationError(f"{instruction.name} is already in computation {instruction.parent.name}")
        if instruction.name in self._names:
            raise HloMutationError(f"computation {self.name} already has an instruction {instruction.name}")
        if before is not None and before.parent is not self:
            raise HloMutationError(f"{before.name} is not in computation {self.name}")
        if self._root is None:
            # What was the root by being last stays the root.
            self._root = self._last
        instruction.parent = self
        if instruction._users is None:
            instruction._users = {}
        self._names[instruction.name] = instruction
        previous = before._previous if before is not None else self._last
        instruction._previous, instruction._next = previous, before
        if previous is None:
            self._first = instruction
        else:
            previous._next = instruction
        if before is None:
            self._last = instruction
        else:
            before._previous = instruction
        self._count += 1
        if self._root is None:
            self._root = instruction
        self._forget_control(instruction)
        return instruction

    def _find_users(self) -> None:
        """Fills in the users of every instruction, in the order of the text."""
        for instruction in self:
            if instruction._users is None:
                instruction._users = {}
        for instruction in self:
            for operand in instruction._operands:
                operand._user_set()[instruction] = None

    def _append_parsed(self, instruction: HloInstruction) -> None:
        """What the parser and `extract` call for each instruction: `add` at the end, without the checks they make."""
        last = self._last
        if last is None:
            self._first = instruction
        else:
            last._next = instruction
            instruction._previous = last
        self._last = instruction
        self._count += 1

    def rename(self, instruction: HloInstruction, name: str) -> None:
        """Gives the instruction a free name; control predecessors that mention the old one follow."""
        if name in self._names:
            raise HloMutationError(f"computation {self.name} already has an instruction {name}")
        successors = [(s, s.control_predecessors) for s in self.control_successors(instruction)]
        del self._names[instruction.name]
        instruction.name = name
        self._names[name] = instruction
        for successor, predecessors in successors:
            successor.attributes["control-predecessors"] = "{" + ", ".join(f"%{p.name}" for p in predecessors) + "}"

    def remove(self, instruction: HloInstruction) -> None:
        """Removes an instruction without users. Raises HloMutationError where something still needs it."""
        if instruction.parent is not self:
            raise HloMutationError(f"{instruction.name} is not in computation {self.name}")
        if instruction._user_set():
            raise HloMutationError(
                f"{instruction.name} still has users: {', '.join(u.name for u in instruction.users)}"
            )
        if self.root is instruction:
            raise HloMutationError(f"{instruction.name} is the root of computation {self.name}")
        if successors := self.control_successors(instruction):
            raise HloMutationError(
                f"{instruction.name} is a control predecessor of {', '.join(s.name for s in successors)}"
            )
        for operand in instruction._operands:
            operand._user_set().pop(instruction, None)
        instruction._operands = ()
        previous, following = instruction._previous, instruction._next
        if previous is None:
            self._first = following
        else:
            previous._next = following
        if following is None:
            self._last = previous
        else:
            following._previous = previous
        del self._names[instruction.name]
        self._forget_control(instruction)
        instruction.parent = instruction._previous = instruction._next = None
        self._count -= 1

    def _forget_control(self, instruction: HloInstruction) -> None:
        """Most instructions have no control dependencies: removing 100,000 of them must not search each time."""
        if instruction.has_attribute("control-predecessors"):
            self._controlled = None

    def replace_all_uses_with(self, old: HloInstruction, new: HloInstruction) -> None:
        """Every user of `old`, and the root, use `new` from now on (`new` itself excepted).

        Raises HloMutationError where the shapes are not compatible.
        """
        if new.parent is not self:
            raise HloMutationError(f"{new.name} is not in computation {self.name}")
        if not old.shape.compatible(new.shape):
            raise HloMutationError(
                f"{old.name} of shape {old.shape} cannot be replaced by {new.name} of shape {new.shape}"
            )
        for user in old.users:
            if user is not new:
                user.set_operands([new if operand is old else operand for operand in user._operands])
        if self.root is old:
            self._root = new

    def replace(self, old: HloInstruction, new: HloInstruction) -> None:
        """`replace_all_uses_with`, then removes `old`.

        Raises HloMutationError where `old` has control dependencies: a rewrite must decide what becomes of them.
        """
        if old.has_control_dependencies:
            raise HloMutationError(f"{old.name} has control dependencies and cannot be replaced")
        self.replace_all_uses_with(old, new)
        self.remove(old)

    def transfer_control_dependencies(self, old: HloInstruction, new: HloInstruction) -> None:
        """Control predecessors and successors of `old` become those of `new`."""
        successors = self.control_successors(old)
        if text := old.attributes.pop("control-predecessors", None):
            new.attributes["control-predecessors"] = text
        for successor in successors:
            names = [new.name if p is old else p.name for p in successor.control_predecessors]
            successor.attributes["control-predecessors"] = "{" + ", ".join(f"%{name}" for name in names) + "}"
        if text or successors:
            self._controlled = None

    def restore_order(self) -> None:
        """Puts instructions back into an order where operands come before users, moving as little as `post_order` does.

        A pass that adds instructions wherever it stands calls this once at its end.
        """
        self._root = self.root
        order = self.post_order()
        self._first, self._last = order[0], order[-1]
        previous: HloInstruction | None = None
        for instruction in order:
            instruction._previous, instruction._next = previous, None
            if previous is not None:
                previous._next = instruction
            previous = instruction

    def remove_dead(self, among: Iterable[HloInstruction] | None = None) -> int:
        """Removes what nobody uses: not the root, parameters, side effects or control predecessors. Counts them.

        Args:
            among: looks only at these and at what they are computed from, so that the cost is what it removes.
        """
        removed = 0
        pending = self.instructions if among is None else list(among)
        while pending:
            instruction = pending.pop()
            if (
                instruction.parent is not self
                or instruction._user_set()
                or instruction is self.root
                or instruction.opcode == "parameter"
                or instruction.has_control_dependencies
                or instruction.has_side_effect
            ):
                continue
            operands = instruction._operands
            self.remove(instruction)
            removed += 1
            pending.extend(operands)
        return removed

    def __repr__(self) -> str:
        return f"<HloComputation {self.name}, {self._count} instructions>"
