"""What is known of the program in which groups are searched: its tensors in memory, and the groups found so far."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.equations import Equation, variables
from xla_fp8.tracing.fused_casts.found import Group
from xla_fp8.tracing.fused_casts.operations import NARROW
from xla_fp8.tracing.rows import element_count


@dataclasses.dataclass(frozen=True)
class Program:
    """The first four never change; the others grow with each group.

    Attributes:
        results: of the program.
        taken: equations that a graph of a convolution or dot computes.
        tensors: of each variable the tensors in memory that it is computed of, element by element; two of more.
        made: results of groups.
        fused: equations that only groups compute.
        readers: of a variable the groups that read it, by number.
    """

    flow: DataFlow
    results: frozenset[Any]
    taken: Collection[int]
    tensors: dict[Any, frozenset[Any]]
    made: set[Any] = dataclasses.field(default_factory=set)
    fused: set[int] = dataclasses.field(default_factory=set)
    readers: dict[Any, set[int]] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(flow: DataFlow, outvars: Iterable[Any], taken: Collection[int]) -> Program:
        return Program(flow, frozenset(variables(outvars)), taken, _tensors(flow, taken))

    def gives(self, equation: Equation) -> bool:
        """Whether a result is one of the program's."""
        return not self.results.isdisjoint(equation.outvars)

    def is_made(self, equation: Equation) -> bool:
        """Whether the kernel of a group gives a result."""
        return not self.made.isdisjoint(equation.outvars)

    def add(self, number: int, group: Group, duplicated: Collection[int]) -> None:
        """
        Args:
            duplicated: equations of the group that something else computes too.
        """
        self.made.update(group.results)
        self.fused.update(set(group.equations).difference(duplicated))
        for variable in self._read_by(group):
            self.readers.setdefault(variable, set()).add(number)

    def _read_by(self, group: Group) -> set[Any]:
        equations: Sequence[Equation] = [self.flow.equations[index] for index in group.equations]
        made = {variable for equation in equations for variable in equation.outvars}
        return {atom for equation in equations for atom in variables(equation.invars)} - made


def _tensors(flow: DataFlow, taken: Collection[int]) -> dict[Any, frozenset[Any]]:
    found: dict[Any, frozenset[Any]] = {}
    for index, equation in enumerate(flow.equations):
        for result in equation.outvars:
            is_in_memory = not flow.chain[index] or (index in taken and result.aval.dtype in NARROW)
            read = {result}
            if not is_in_memory:
                wide = [a for a in variables(equation.invars) if element_count(a) == element_count(result)]
                read = {tensor for atom in wide for tensor in found.get(atom, (atom,))}
            found[result] = frozenset(itertools.islice(read, 2))
    return found
