"""The equations of a group while it grows: what its kernel computes, reads and gives."""

from __future__ import annotations

import copy
import dataclasses
import heapq
from collections.abc import Iterator
from typing import Any

from xla_fp8.backends.fused_cast import problem as problems
from xla_fp8.backends.fused_cast.problem import Table
from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.equations import Equation
from xla_fp8.tracing.fused_casts.operations import NARROW, is_constant, is_maximum, is_view
from xla_fp8.tracing.fused_casts.program import Program
from xla_fp8.tracing.fused_casts.roots import Root
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import Groups, Rows, Spread, is_reshape, sums_groups


@dataclasses.dataclass
class Members:
    """A group that grows: an equation becomes a member when it is added, and its operands are decided on later.

        computed ─┬─ duplicated     computed outside too: others read a result that the kernel does not give
                  └─ the rest       what others read of these is in `results`
        wanted                      operands of those computed, each of which is one of these:
          ├─ made by one computed
          ├─ made by one pending    which is computed or read: not decided on yet; none when the group is whole
          ├─ read                   read by the kernel, element by element, or an input of the program
          └─ made by one of tables  fewer numbers, made outside and read

    Each equation is computed in one spread, and no group is made where two are asked for (`is_consistent`) or where one
    of `tables` is computed as well. An equation is pending or computed once `spread` has it.

    Attributes:
        rows: of its tensors; behind a concatenation of computed parts (`is_joined`) of one part.
        groups: where it makes sums over groups of columns, which; it makes nothing else then.
        computed: equations that its kernel computes.
        duplicated: those of `computed` that something outside computes too.
        results: variables that others get from its kernel, the root's first. A dict for its order.
        pending: equations to decide on, negated, as a heap: the last in program order is first, so that all that reads
            a result has been decided on before it.
        wanted: variables that it is computed of. Views of tensors want nothing: they are of what is in memory.
        read: those of them that its kernel reads.
        tables: equations whose results are read as tables.
        summed: those that sums over groups or rows are of.
        spread: of an equation, how its result is spread over the rows.
        stops: of an equation that was to be computed and is read instead, why.
    """

    program: Program
    rows: Rows
    groups: Groups | None
    computed: set[int] = dataclasses.field(default_factory=set)
    duplicated: set[int] = dataclasses.field(default_factory=set)
    results: dict[Any, None] = dataclasses.field(default_factory=dict)
    pending: list[int] = dataclasses.field(default_factory=list)
    wanted: set[Any] = dataclasses.field(default_factory=set)
    read: set[Any] = dataclasses.field(default_factory=set)
    tables: set[int] = dataclasses.field(default_factory=set)
    summed: set[int] = dataclasses.field(default_factory=set)
    spread: dict[int, Spread] = dataclasses.field(default_factory=dict)
    stops: dict[int, str] = dataclasses.field(default_factory=dict)
    is_consistent: bool = True
    is_joined: bool = False

    @staticmethod
    def of_root(program: Program, root: Root) -> Members:
        """A group of which only the root is a member."""
        equation, rows = program.flow.equations[root.equation], root.rows
        groups = None if rows.are_summed_by(equation) else rows.groups_of_sum(equation)
        members = Members(program, rows, groups, results=dict.fromkeys(equation.outvars))
        members.end_with(root.equation)
        return members

    def copy(self) -> Members:
        """A group that grows by itself."""
        own = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (set, dict, list)):
                setattr(own, name, value.copy())
        return own

    @property
    def flow(self) -> DataFlow:
        return self.program.flow

    def equation(self, index: int) -> Equation:
        return self.program.flow.equations[index]

    # Growing

    def end_with(self, index: int) -> None:
        """Adds an equation that nothing in the group reads: casts, sums and amaxes, which are results, and what leads
        to them."""
        equation = self.equation(index)
        if self.is_sum(equation):
            self.spread[index] = "column" if self.groups is None else "group"
        else:
            self.spread[index] = "one" if is_maximum(equation) else "all"
        if is_cast(equation) or self.spread[index] != "all":
            self.results.update(dict.fromkeys(equation.outvars))
        self.add(index)

    def add(self, index: int) -> None:
        """Adds an equation, which is spread as `spread` says, and wants its operands."""
        self.computed.add(index)
        equation = self.equation(index)
        is_summed = index in self.summed or sums_groups(equation, self.spread[index])
        for atom, spread in self.rows.spreads(equation, self.spread[index]):
            self._want(atom, spread, is_summed)

    def add_concatenation(self, index: int) -> None:
        """Adds what puts computed values beside each other. From here up, all is on the rows of one part."""
        equation = self.equation(index)
        self.computed.add(index)
        self.is_joined = True
        self.rows = Rows(self.rows.count, self.rows.columns // len(equation.invars))
        for atom in equation.invars:
            self._want(atom, "all")

    def read_results_of(self, index: int) -> None:
        """Lets the kernel read what an equation makes."""
        self.read.update(self.wanted.intersection(self.equation(index).outvars))

    def _want(self, atom: Any, spread: Spread | Table | None, is_summed: bool = False) -> None:
        self.wanted.add(atom)
        producer = self.flow.producer.get(atom)
        if producer is None:
            self.read.add(atom)
        elif spread in ("all", "row", "column", "group") or (spread == "one" and is_constant(self.equation(producer))):
            self.is_consistent &= self.spread.setdefault(producer, spread) == spread
            heapq.heappush(self.pending, -producer)
            if is_summed:
                self.summed.add(producer)
        else:
            self.tables.add(producer)

    # Those outside

    def readers_outside(self, index: int) -> list[int]:
        """Equations outside that read a result, or that read what is computed of it outside too."""
        return [
            reader
            for variable in self.equation(index).outvars
            for reader in self.flow.consumers.get(variable, ())
            if (reader not in self.computed or reader in self.duplicated)
            # Of a link only derivatives see the value.
            and self.equation(reader).primitive.name != "xla_fp8_link"
        ]

    def readers_of_results(self) -> Iterator[int]:
        """Equations outside that read results."""
        return (reader for result in self.results for reader in self.readers_outside(self.flow.producer[result]))

    def is_asked_for(self, result: Any) -> bool:
        """Whether somebody outside, or the caller of the program, reads a result."""
        return result in self.program.results or bool(self.readers_outside(self.flow.producer[result]))

    # What members are

    def tensors_read(self) -> set[Any]:
        """Of all elements, that is."""
        return set(filter(self.rows.hold, self.read))

    def is_sum(self, equation: Equation) -> bool:
        """Whether an equation adds up all rows, or where this is about groups of columns those."""
        if self.groups is None:
            return self.rows.are_summed_by(equation)
        return equation.primitive.name == "reduce_sum" and self.rows.groups_of_sum(equation) == self.groups

    def is_sum_of_row(self, index: int) -> bool:
        """Whether a member reduces each row to a number."""
        equation = self.equation(index)
        is_reduction = equation.primitive.name in problems.REDUCTIONS and not is_reshape(equation)
        return is_reduction and self.spread[index] == "row"

    def may_be_tensor(self, equation: Equation) -> bool:
        """Whether a result is of all elements, and of a type that programs have in memory."""
        [result, *others] = equation.outvars
        is_narrow = self.rows.hold(result) and result.aval.dtype in NARROW
        return not others and is_narrow and not is_reshape(equation) and not is_view(equation)
