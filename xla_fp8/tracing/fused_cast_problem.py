"""What the kernel of a fused cast computes: the equations of a group as operands, nodes and results of a problem.

The search for groups (`xla_fp8.tracing.fused_casts`) knew how values are spread, and it is worked out again here: what
lasts of a group is the jaxpr of its equation, which JAX traces, transforms and compares with others like any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import support
from xla_fp8.backends.fused_cast.problem import REDUCTIONS, FusedCast, Result, Statistics, Sums, Table
from xla_fp8.backends.protocol import No
from xla_fp8.tracing.equations import Equation, Jaxpr, is_fp8, variables
from xla_fp8.tracing.errors import RegionError
from xla_fp8.tracing.fused_cast_nodes import Nodes, Sources
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import Rows, Spread, element_count, is_reshape, joins_values, sums_groups

Kind = Literal["tensor", "row", "amax", "column_sum"]


def problem_of(jaxpr: Jaxpr) -> tuple[FusedCast | Statistics, Sources] | No:
    """What the kernel of a group, as a closed jaxpr, computes; or why there is no such kernel.

    The first result is of all elements or a sum over all rows, or all are sums over groups of columns.
    """
    try:
        problem, sources = _problem(_jax_compat.open_jaxpr(flat(jaxpr)))
    except RegionError as error:
        return No(str(error))
    supported = support.supports_sums(problem) if isinstance(problem, Statistics) else support.supports(problem)
    return supported if isinstance(supported, No) else (problem, sources)


def _problem(inner: Jaxpr) -> tuple[FusedCast | Statistics, Sources]:
    first = inner.outvars[0]
    made_by = next(equation for equation in inner.eqns if first in equation.outvars)
    grouped = Rows.grouped_by(made_by)
    if grouped is not None:
        return _Translation(inner, grouped).sums_of_groups()
    rows = Rows.summed_by(made_by) or Rows.of(first.aval.shape)
    if rows is None:
        raise RegionError(f"its shape is {list(first.aval.shape)}, and kernels are of rows")
    return _Translation(inner, rows).problem()


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
    """Equations to a problem. Where there is none for them RegionError is raised, and says why.

    Attributes:
        whole, rows: of the results, and of what is computed: where computed values are put beside each other (`join`)
            these are the rows of one of them.
        of_joined: variables behind `join`.
        stored: the results.
        spread: of each variable that is computed of, or is a result.
        groups: where a number for each group is, those tables that all elements read.
    """

    def __init__(self, jaxpr: Jaxpr, whole: Rows) -> None:
        self.jaxpr, self.whole, self.rows = jaxpr, whole, whole
        self.inputs = {variable: i for i, variable in enumerate(jaxpr.invars)}
        self.producer = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
        self.join: Equation | None = None
        self.of_joined: set[Any] = set()
        self._find_join()
        self.stored = list(map(self._stored, jaxpr.outvars))
        self.spread: dict[Any, Any] = {
            variable: stored.spread for variable, stored in zip(jaxpr.outvars, self.stored, strict=True)
        }
        self.groups: set[Table] = set()
        self._spread_operands()

    def _find_join(self) -> None:
        for equation in self.jaxpr.eqns:
            if self.join is None and self._joins_values(equation):
                self.join = equation
                self.rows = Rows(self.whole.count, self.whole.columns // len(equation.invars))
                self.of_joined.update(equation.outvars)
            elif not self.of_joined.isdisjoint(variables(equation.invars)):
                self.of_joined.update(equation.outvars)

    def _joins_values(self, equation: Equation) -> bool:
        return joins_values(equation, self.whole) and not self.inputs.keys() >= set(variables(equation.invars))

    def _spread_operands(self) -> None:
        """From the results up, as the search went."""
        for equation in reversed(self.jaxpr.eqns):
            if self.join is not None and equation is self.join:
                self.spread.update(dict.fromkeys(variables(equation.invars), "all"))
                continue
            of, rows = self.spread_of(equation), self._rows_of(equation)
            for atom, spread in rows.spreads(equation, of):
                self.spread[atom] = spread
                if spread == "group" and of in ("all", "column"):
                    table = rows.table_of(atom, equation)
                    if table is not None:
                        self.groups.add(table)

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

    def problem(self) -> tuple[FusedCast, Sources]:
        if len(self.groups) > 1:
            raise RegionError("it reads numbers for groups of several sizes")
        sums = [e for e in self.jaxpr.eqns if sums_groups(e, self.spread_of(e))]
        made = [e.outvars[0] for e in sums]
        statistics, sources = self._statistics(sums) if sums else (None, ())
        for equation in self._computing([stored.value for stored in self.stored], made):
            self._check_is_by_row(equation)
        nodes = self._nodes()
        if statistics is not None:
            for number, variable in enumerate(made):
                nodes.read(variable, Sums(statistics, number))
        results = []
        for stored, values in zip(self.stored, self._values(nodes, made), strict=True):
            if stored.kind is None:
                raise RegionError("it gives sums over groups of columns beside something else")
            if is_fp8(stored):
                values = tuple(_saturated(nodes, value, stored.dtype) for value in values)
            results.append((stored.kind, values, stored.dtype))
        problem = FusedCast(
            self.rows.count,
            self.rows.columns,
            nodes.operands,
            nodes.nodes,
            tuple(Result(kind, tuple(map(nodes.position, values)), dtype) for kind, values, dtype in results),
        )
        return problem, sources + nodes.sources

    def _check_is_by_row(self, equation: Equation) -> None:
        """An equation may reduce rows alone, as nodes do."""
        is_reduction = equation.primitive.name in REDUCTIONS and not is_reshape(equation)
        if is_reduction and not self._rows_of(equation).are_reduced_by(equation):
            raise RegionError(f"it computes a {equation.primitive.name} that is not of rows")

    def _nodes(self) -> Nodes:
        return Nodes(self.rows, self.inputs, self._table)

    def _values(self, nodes: Nodes, made: Iterable[Any]) -> list[tuple[Any, ...]]:
        """Of each result the value that is stored, or those beside each other."""
        equations = self._computing([stored.value for stored in self.stored], made)
        if self.join is None:
            nodes.add_all(equations)
            return [(nodes.value(stored.value, stored.equation),) for stored in self.stored]
        [joined] = self.join.outvars
        nodes.add_all(e for e in equations if self.of_joined.isdisjoint(e.outvars))
        behind = [e for e in equations if e is not self.join and not self.of_joined.isdisjoint(e.outvars)]
        found: list[tuple[Any, ...]] = [()] * len(self.stored)
        for part in self.join.invars:
            nodes.known[joined] = nodes.value(part, self.join)
            nodes.add_all(behind)
            values = [nodes.value(stored.value, stored.equation) for stored in self.stored]
            found = [
                (*parts, value) if stored.value in self.of_joined or not parts else parts
                for stored, parts, value in zip(self.stored, found, values, strict=True)
            ]
        return found

    def sums_of_groups(self) -> tuple[Statistics, Sources]:
        """Where nothing else is made."""
        return self._sums([self.producer[result] for result in self.jaxpr.outvars])

    def _statistics(self, sums: Sequence[Equation]) -> tuple[Statistics, Sources]:
        """Of sums of the same groups, which are those that are read."""
        statistics, sources = self._sums(sums)
        for table in self.groups:
            [(width, _, _)] = table.columns
            if (statistics.width, statistics.period) == (width, table.period or self.rows.count):
                return statistics, sources
        raise RegionError("the groups that it adds up are not those that its elements read")

    def _sums(self, sums: Sequence[Equation]) -> tuple[Statistics, Sources]:
        groups = {self.rows.groups_of_sum(equation) for equation in sums}
        found = groups.pop() if len(groups) == 1 else None
        if found is None:
            raise RegionError("the columns that it adds up are no groups of one size")
        summed = [equation.invars[0] for equation in sums]
        nodes = self._nodes()
        nodes.add_all(self._computing(summed, ()))
        results = [nodes.value(atom, equation) for atom, equation in zip(summed, sums, strict=True)]
        statistics = Statistics(
            self.rows.count,
            self.rows.columns,
            found.period,
            found.width,
            nodes.operands,
            nodes.nodes,
            tuple(map(nodes.position, results)),
        )
        return statistics, nodes.sources

    def _computing(self, results: Iterable[Any], known: Iterable[Any]) -> list[Equation]:
        """The equations that compute results of inputs and of what is known."""
        wanted, found, given = set(variables(results)), [], set(known)
        for equation in reversed(self.jaxpr.eqns):
            if not (wanted - given).isdisjoint(equation.outvars):
                found.append(equation)
                wanted.update(variables(equation.invars))
        return found[::-1]

    def _table_of_groups(self) -> Table | None:
        return next(iter(self.groups)) if len(self.groups) == 1 else None

    def _table(self, atom: Any, equation: Equation) -> Table:
        """An operand of an equation, of fewer numbers than a tensor, as a table."""
        dtype, spread = np.dtype(np.float32), self.spread_of(equation)
        if element_count(atom) == 1:
            return Table(dtype, 1)
        if spread == "row":
            return Table(dtype, self.rows.count, 1)
        if spread == "column" and element_count(atom) == element_count(equation.outvars[0]):
            return self.rows.table_by_column(element_count(atom))
        found = self._table_of_groups() if spread == "group" else self.rows.table_of(atom, equation)
        if found is None:
            raise RegionError(f"a {equation.primitive.name} reads numbers that are spread as in no table")
        return found


def _saturated(nodes: Nodes, value: Any, dtype: np.dtype[Any]) -> Any:
    """What a cast to FP8 is of, which saturates."""
    largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
    before = nodes.before_saturation(value, largest)
    if before is None:
        raise RegionError(f"it casts to {dtype.name} without a clamp to {largest:g}, where the kernel saturates")
    return before


def implementation(jaxpr: Jaxpr) -> Callable[..., list[jax.Array]]:
    """The function that computes a group with its kernel. Raises RegionError where there is none."""
    # Pallas takes longer to import than all of xla_fp8: only where a kernel is made.
    from xla_fp8.backends.fused_cast import kernel, statistics

    found = problem_of(jaxpr)
    if isinstance(found, No):
        raise RegionError(f"no kernel computes it: {found.reason}")
    problem, sources = found

    def fused_cast(*inputs: jax.Array) -> list[jax.Array]:
        operands = [inputs[i].reshape(shape) for i, shape in sources]
        results = (
            statistics.totals(problem, operands) if isinstance(problem, Statistics) else kernel.run(problem, operands)
        )
        return [x.reshape(aval.shape).astype(aval.dtype) for x, aval in zip(results, jaxpr.out_avals, strict=True)]

    return fused_cast
