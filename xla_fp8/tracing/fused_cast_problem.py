"""What the kernel of a fused cast computes: the equations of a group as operands, nodes and results of a problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import problem as problems
from xla_fp8.backends.fused_cast.problem import (
    Constant,
    FusedCast,
    Joined,
    Matrix,
    Node,
    Result,
    Statistics,
    Sums,
    Table,
)
from xla_fp8.tracing.equations import Equation, Jaxpr, is_fp8, is_literal, variables
from xla_fp8.tracing.errors import RegionError
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import Rows, Spread, columns_of, element_count, is_reshape, joins_values, sums_groups

Kind = Literal["tensor", "row", "amax", "column_sum"]

_TIGHTER = MappingProxyType({"max": max, "min": min})
"""Of two bounds, by the operation that clamps to them."""

Sources = tuple[tuple[int, tuple[int, ...]], ...]
"""For each array that a kernel takes, which input of the group it is, and in which shape."""


def problem_of(jaxpr: Jaxpr) -> tuple[FusedCast | Statistics, Sources] | None:
    """What the kernel of a group, as a closed jaxpr, computes; None where there is no such kernel.

    The first result is of all elements or a sum over all rows, or all are sums over groups of columns.
    """
    inner = _jax_compat.open_jaxpr(flat(jaxpr))
    first = inner.outvars[0]
    made_by = next(equation for equation in inner.eqns if first in equation.outvars)
    grouped = Rows.grouped_by(made_by)
    if grouped is not None:
        return _Translation(inner, grouped).sums_of_groups()
    rows = Rows.summed_by(made_by) or Rows.of(first.aval.shape)
    return None if rows is None else _Translation(inner, rows).problem()


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A result: what is stored of a value, which an equation makes or reads.

    Attributes:
        kind: None for sums of groups, which are no result of a fused cast.
        spread: of the result.
    """

    kind: Kind | None
    spread: Spread
    value: Any
    equation: Equation
    dtype: np.dtype[Any]


class _Translation:
    """Equations to a problem."""

    def __init__(self, jaxpr: Jaxpr, whole: Rows) -> None:
        self.jaxpr, self.whole, self.rows = jaxpr, whole, whole
        self.inputs = {variable: i for i, variable in enumerate(jaxpr.invars)}
        self.producer = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
        # What puts computed values beside each other; the kernel is on the rows of one of these.
        self.join: Equation | None = None
        self.of_joined: set[Any] = set()
        for equation in jaxpr.eqns:
            if self.join is None and self._joins_values(equation):
                self.join = equation
                self.rows = Rows(whole.count, whole.columns // len(equation.invars))
                self.of_joined.update(equation.outvars)
            elif not self.of_joined.isdisjoint(variables(equation.invars)):
                self.of_joined.update(equation.outvars)
        self.stored = list(map(self._stored, jaxpr.outvars))
        self.spread: dict[Any, Any] = {
            variable: stored.spread for variable, stored in zip(jaxpr.outvars, self.stored, strict=True)
        }
        # Where a number for each group is, those tables that all elements read.
        self.groups: set[Table] = set()
        for equation in reversed(jaxpr.eqns):
            of = self.spread_of(equation)
            if self.join is not None and equation is self.join:
                self.spread.update(dict.fromkeys(variables(equation.invars), "all"))
                continue
            rows = self._rows_of(equation)
            for atom, spread in rows.spreads(equation, of):
                self.spread[atom] = spread
                if (
                    spread == "group"
                    and of in ("all", "column")
                    and (table := rows.table_of(atom, equation)) is not None
                ):
                    self.groups.add(table)

    def _joins_values(self, equation: Equation) -> bool:
        return joins_values(equation, self.whole) and not self.inputs.keys() >= set(variables(equation.invars))

    def _rows_of(self, equation: Equation) -> Rows:
        return self.rows if self.of_joined.isdisjoint(variables(equation.invars)) else self.whole

    def spread_of(self, equation: Equation) -> Spread:
        return next((self.spread[variable] for variable in equation.outvars if variable in self.spread), "one")

    def _stored(self, result: Any) -> _Stored:
        equation, f32 = self.producer[result], np.dtype(np.float32)
        if is_cast(equation):
            return _Stored("tensor", "all", equation.invars[0], equation, np.dtype(result.aval.dtype))
        if equation.primitive.name == "reduce_max" and element_count(result) == 1:
            absolute = self.producer[equation.invars[0]]
            return _Stored("amax", "one", absolute.invars[0], absolute, f32)
        if self._rows_of(equation).are_summed_by(equation):
            return _Stored("column_sum", "column", equation.invars[0], equation, f32)
        if self.rows.groups_of_sum(equation) is not None:
            return _Stored(None, "group", equation.invars[0], equation, f32)
        if self.rows.hold(result) or result in self.of_joined:
            return _Stored("tensor", "all", result, equation, np.dtype(result.aval.dtype))
        return _Stored("row", "row", result, equation, f32)

    def problem(self) -> tuple[FusedCast, Sources] | None:
        sums = [e for e in self.jaxpr.eqns if sums_groups(e, self.spread_of(e))]
        made, found = [e.outvars[0] for e in sums], self._statistics(sums)
        if len(self.groups) > 1 or (sums and found is None):
            return None
        statistics, sources = found or (None, ())
        if not all(map(self._is_by_row, self._computing([stored.value for stored in self.stored], made))):
            return None
        program = _Program(self)
        if statistics is not None:
            for number, variable in enumerate(made):
                program.read(variable, Sums(statistics, number))
        results = []
        for stored, values in zip(self.stored, self._values(program, made), strict=True):
            if is_fp8(stored):
                largest = float(jnp.finfo(stored.dtype).max)  # type: ignore[no-untyped-call]
                values = tuple(program.before_saturation(value, largest) for value in values)
                if None in values:
                    return None
            if stored.kind is None:
                return None
            results.append((stored.kind, values, stored.dtype))
        problem = FusedCast(
            self.rows.count,
            self.rows.columns,
            program.operands,
            program.numbered_nodes,
            tuple(Result(kind, tuple(map(program.position, values)), dtype) for kind, values, dtype in results),
        )
        return (problem, sources + program.sources) if problems.supports(problem).ok else None

    def _is_by_row(self, equation: Equation) -> bool:
        """Whether an equation reduces nothing but rows, as nodes do."""
        is_reduction = equation.primitive.name in problems.REDUCTIONS and not is_reshape(equation)
        return not is_reduction or self._rows_of(equation).are_reduced_by(equation)

    def _values(self, program: _Program, made: Iterable[Any]) -> list[tuple[Any, ...]]:
        """Of each result the value that is stored, or those beside each other."""
        equations = self._computing([stored.value for stored in self.stored], made)
        if self.join is None:
            program.add_all(equations)
            return [(program.value(stored.value, stored.equation),) for stored in self.stored]
        [joined] = self.join.outvars
        program.add_all(e for e in equations if self.of_joined.isdisjoint(e.outvars))
        behind = [e for e in equations if e is not self.join and not self.of_joined.isdisjoint(e.outvars)]
        found: list[tuple[Any, ...]] = [()] * len(self.stored)
        for part in self.join.invars:
            program.known[joined] = program.value(part, self.join)
            program.add_all(behind)
            values = [program.value(stored.value, stored.equation) for stored in self.stored]
            found = [
                (*parts, value) if stored.value in self.of_joined or not parts else parts
                for stored, parts, value in zip(self.stored, found, values, strict=True)
            ]
        return found

    def sums_of_groups(self) -> tuple[Statistics, Sources] | None:
        """Where nothing else is made."""
        found = self._sums([self.producer[result] for result in self.jaxpr.outvars])
        return found if found is not None and problems.supports_sums(found[0]).ok else None

    def _statistics(self, sums: Sequence[Equation]) -> tuple[Statistics, Sources] | None:
        """Of sums of the same groups, which are those that are read."""
        found = self._sums(sums) if len(self.groups) == 1 else None
        if found is None:
            return None
        [table], statistics = self.groups, found[0]
        [(width, _, _)] = table.columns
        return found if (statistics.width, statistics.period) == (width, table.period or self.rows.count) else None

    def _sums(self, sums: Sequence[Equation]) -> tuple[Statistics, Sources] | None:
        groups = {self.rows.groups_of_sum(equation) for equation in sums}
        found = groups.pop() if len(groups) == 1 else None
        if found is None:
            return None
        summed = [equation.invars[0] for equation in sums]
        program = _Program(self)
        program.add_all(self._computing(summed, ()))
        results = [program.value(atom, equation) for atom, equation in zip(summed, sums, strict=True)]
        statistics = Statistics(
            self.rows.count,
            self.rows.columns,
            found.period,
            found.width,
            program.operands,
            program.numbered_nodes,
            tuple(map(program.position, results)),
        )
        return statistics, program.sources

    def _computing(self, results: Iterable[Any], known: Iterable[Any]) -> list[Equation]:
        """The equations that compute results of inputs and of what is known."""
        wanted, found, given = set(variables(results)), [], set(known)
        for equation in reversed(self.jaxpr.eqns):
            if not (wanted - given).isdisjoint(equation.outvars):
                found.append(equation)
                wanted.update(variables(equation.invars))
        return found[::-1]


class _Program:
    """Equations to operands and nodes."""

    def __init__(self, translation: _Translation) -> None:
        self.translation, self.rows = translation, translation.rows
        self._operands: dict[Any, tuple[Any, Sources]] = {}
        # Variables → the key of an operand, the index of a node, or a constant.
        self.known: dict[Any, Any] = {}
        self.nodes: list[tuple[str, list[Any], int]] = []

    @property
    def operands(self) -> tuple[Any, ...]:
        return tuple(operand for operand, _ in self._operands.values())

    @property
    def sources(self) -> Sources:
        return tuple(source for _, sources in self._operands.values() for source in sources)

    @property
    def numbered_nodes(self) -> tuple[Node, ...]:
        return tuple(
            Node(op, tuple(o if isinstance(o, Constant) else self.position(o) for o in operands), exponent)
            for op, operands, exponent in self.nodes
        )

    def position(self, value: Any) -> int:
        """Of a value among operands and nodes."""
        return len(self._operands) + value if isinstance(value, int) else list(self._operands).index(value)

    def before_saturation(self, result: Any, largest: float) -> Any:
        """What a cast to FP8 is of: a value that is clamped to what the type holds, or where it is clamped to all of
        that, which the cast does itself, the value before. None where it is not clamped."""
        bounds: dict[str, float] = {}
        value: Any = result
        while isinstance(value, int) and len(bounds) < 2 and (clamped := _clamped(*self.nodes[value][:2])) is not None:
            value, found = clamped
            for op, bound in found.items():
                bounds[op] = _TIGHTER[op](bound, bounds.get(op, bound))
        if len(bounds) < 2 or max(map(abs, bounds.values())) > largest:
            return None
        return value if bounds == {"max": -largest, "min": largest} else result

    def add_all(self, equations: Iterable[Equation]) -> None:
        for equation in equations:
            self._add(equation)

    def read(self, variable: Any, sums: Sums) -> None:
        """Lets a variable be one of the sums that are there."""
        self.known[variable] = key = (variable, sums)
        self._operands[key] = sums, ()

    def _add(self, equation: Equation) -> None:
        name = equation.primitive.name
        if name in ("split", "slice"):
            [tensor] = equation.invars
            width = tensor.aval.shape[-1]
            for variable, first in zip(equation.outvars, columns_of(equation, self.rows), strict=True):
                matrix = Matrix(tensor.aval.dtype, width, first)
                self.known[variable] = self._operand(tensor, matrix, (self.rows.count, width))
            return
        [result] = equation.outvars
        if name == "concatenate":
            joined = Joined(tuple(Matrix(atom.aval.dtype, atom.aval.shape[-1]) for atom in equation.invars))
            shapes = [(self.rows.count, part.width) for part in joined.parts]
            inputs = [self.translation.inputs[atom] for atom in equation.invars]
            self.known[result] = key = (result, joined)
            self._operands[key] = joined, tuple(zip(inputs, shapes, strict=True))
            return
        operands = [self.value(atom, equation) for atom in equation.invars]
        if name in ("convert_element_type", "broadcast_in_dim") or is_reshape(equation):
            self.known[result] = operands[0]
        elif name == "neg" and isinstance(operands[0], Constant):
            self.known[result] = Constant(-operands[0].value)
        else:
            self.known[result] = len(self.nodes)
            self.nodes.append((name, operands, equation.params["y"] if name == "integer_pow" else 1))

    def value(self, atom: Any, equation: Equation) -> Any:
        if is_literal(atom):
            return Constant(float(atom.val))
        if atom in self.known:
            return self.known[atom]
        dtype, count = atom.aval.dtype, self.rows.count
        if self.rows.hold(atom):
            return self._operand(atom, Matrix(dtype, self.rows.columns), (count, self.rows.columns))
        table = self._table(atom, equation)
        return self._operand(atom, dataclasses.replace(table, dtype=dtype), (table.size,))

    def _table(self, atom: Any, equation: Equation) -> Table:
        dtype = np.dtype(np.float32)
        if element_count(atom) == 1:
            return Table(dtype, 1)
        spread = self.translation.spread_of(equation)
        if spread == "row":
            return Table(dtype, self.rows.count, 1)
        if spread == "column" and element_count(atom) == element_count(equation.outvars[0]):
            return self.rows.table_by_column(element_count(atom))
        [found] = self.translation.groups if spread == "group" else [self.rows.table_of(atom, equation)]
        assert found is not None, "such an equation is not computed"
        return found

    def _operand(self, atom: Any, operand: Matrix | Table, shape: tuple[int, ...]) -> Any:
        key = (atom, operand)
        self._operands.setdefault(key, (operand, ((self.translation.inputs[atom], shape),)))
        return key


def _clamped(op: str, operands: Sequence[Any]) -> tuple[Any, dict[str, float]] | None:
    """What a node clamps, and to which constants, by the operation that clamps to each; None where it does not."""
    names = ("max", None, "min") if op == "clamp" else (op, op)
    clamped = [operand for operand in operands if not isinstance(operand, Constant)]
    if op not in ("clamp", "max", "min") or len(clamped) != 1 or (op == "clamp" and clamped[0] is not operands[1]):
        return None
    pairs = zip(names, operands, strict=True)
    return clamped[0], {name: operand.value for name, operand in pairs if name and isinstance(operand, Constant)}


def implementation(jaxpr: Jaxpr) -> Callable[..., list[jax.Array]]:
    """The function that computes a group with its kernel. Raises RegionError where there is none."""
    # Pallas takes longer to import than all of xla_fp8: only where a kernel is made.
    from xla_fp8.backends.fused_cast import kernel, statistics

    found = problem_of(jaxpr)
    if found is None:
        raise RegionError("there is no kernel that computes it")
    problem, sources = found

    def fused_cast(*inputs: jax.Array) -> list[jax.Array]:
        operands = [inputs[i].reshape(shape) for i, shape in sources]
        results = (
            statistics.totals(problem, operands) if isinstance(problem, Statistics) else kernel.run(problem, operands)
        )
        return [x.reshape(aval.shape).astype(aval.dtype) for x, aval in zip(results, jaxpr.out_avals, strict=True)]

    return fused_cast
