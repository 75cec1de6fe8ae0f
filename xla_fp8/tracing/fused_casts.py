"""Casts to FP8 with the norms, activations and gates in front of them, which one kernel computes.

    x ─┬─ convert ─ sum ─ ... ─ rsqrt ─┐
       └─ convert ─ sub ──────────── mul ─ mul, add ─ silu ─ mul ─ clamp ─ convert to FP8

XLA's own kernels for this are bound by their instructions, of which there are 48 for each element of group norm, silu
and cast; and what reduces is a kernel of its own, which reads the tensor once more. What a graph of a convolution or
dot ends with belongs to that; and a bare cast is as fast as XLA makes it (docs/quantization.md, "Fused casts").
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from types import MappingProxyType
from typing import Any

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
from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.equations import Equation, Jaxpr, is_literal, variables
from xla_fp8.tracing.errors import RegionError
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import Rows, Spread, columns_of, element_count

_RESHAPES = frozenset({"reshape", "squeeze", "expand_dims"})
_MOVES = frozenset({"broadcast_in_dim", "concatenate", "dynamic_slice", "pad", "rev", "slice", "transpose"})
"""What XLA fuses with what reads it; for a kernel it would be written to memory first."""
_VIEWS = frozenset({"concatenate", "slice", "split"})
"""Of tensors that the kernel reads."""

_LEAST_ARITHMETIC = 5
"""Operations on every element, scale and clamp among them; with fewer XLA's kernel is as fast. A norm has 6."""

_TIGHTER = MappingProxyType({"max": max, "min": min})
"""Of two bounds, by the operation that clamps to them."""

_MOST_EQUATIONS, _MOST_TENSORS = 256, 4
"""Of a kernel. A residual stream in f32 would be added up from all layers before, in each of them again."""

_LEAST_SIZE = 2**16
_LEAST_SIZE_WITH_NUMBERS_OF_IMAGES = 2**22
"""Elements: of fewer a kernel's launch is most of its time."""
_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_FLOATS = (*_NARROW, jnp.dtype(jnp.float32))


# Which equations


def fused_casts(flow: DataFlow, outvars: Sequence[Any], taken: set[int]) -> list[list[int]]:
    """The groups of equations, each in program order and with the cast at its end, that a kernel computes.

    Groups may share equations, and others may read what is made in them: each kernel computes it again.

    Args:
        taken: equations that belong to a convolution or dot.
    """
    results = set(variables(outvars))
    found = []
    for index, equation in enumerate(flow.equations):
        if not is_cast(equation) or index in taken:
            continue
        rows = Rows.of(equation.outvars[0].aval.shape)
        if rows is not None and rows.size >= _LEAST_SIZE:
            group = _Walk(flow, index, rows, results, taken).group()
            if group is not None:
                found.append(group)
    return found


class _Walk:
    """From a cast up to the tensors that are in memory anyway."""

    def __init__(self, flow: DataFlow, cast: int, rows: Rows, results: set[Any], taken: set[int]) -> None:
        self.flow, self.cast, self.rows, self.results, self.taken = flow, cast, rows, results, taken
        self.absorbed = {cast}
        # Those absorbed that are computed outside too, because others read their results.
        self.shared: set[int] = set()
        self.pending: list[int] = []
        self.read: set[Any] = set()
        # Results of equations that it is computed of, or reads.
        self.wanted: set[Any] = set()
        # Those whose results are read as tables.
        self.tables: set[int] = set()
        # Those that sums over the pixels of images are of.
        self.summed: set[int] = set()
        self.spread: dict[int, Spread] = {cast: "all"}
        self.is_consistent = True

    def group(self) -> list[int] | None:
        self._need(self.cast)
        while self.pending and self._is_small():  # the last in program order: all readers have been decided on
            index = -heapq.heappop(self.pending)
            if index in self.absorbed:
                continue
            if not self._is_computable(index):
                self.read.update(self.wanted.intersection(self.flow.equations[index].outvars))
                continue
            self.absorbed.add(index)
            if self._is_needed_outside(index):
                self.shared.add(index)
            self._need(index)
        return sorted(self.absorbed) if self._is_worth_it() else None

    def _need(self, index: int) -> None:
        equation = self.flow.equations[index]
        is_summed = index in self.summed or _sums_groups(equation, self.spread[index])
        for atom, spread in _spreads(equation, self.spread[index], self.rows):
            self.wanted.add(atom)
            producer = self.flow.producer.get(atom)
            if producer is None:
                self.read.add(atom)
            elif spread in ("all", "row", "column", "group") or (
                spread == "one" and _is_known(self.flow.equations[producer])
            ):
                self.is_consistent &= self.spread.setdefault(producer, spread) == spread
                heapq.heappush(self.pending, -producer)
                if is_summed:
                    self.summed.add(producer)
            else:
                self.tables.add(producer)

    def _is_computable(self, index: int) -> bool:
        """Whether the kernel computes an equation; else it reads its result."""
        equation, spread = self.flow.equations[index], self.spread[index]
        name = equation.primitive.name
        if equation.effects or _jax_compat.has_own_context(equation) or not _is_operand(equation.outvars[0]):
            return False
        if len(equation.outvars) > 1 and name != "split":  # a custom_jvp_call
            return False
        if name in ("split", "slice"):
            return equation.invars[0].aval.dtype in _NARROW and bool(columns_of(equation, self.rows))
        if name == "concatenate":
            return self._joins_tensors(equation)
        if name == "convert_element_type" and _is_known(equation):  # a bound of jnp.clip, which may be an integer
            return True
        if not all(map(_is_operand, equation.invars)):
            return False
        # Of statistics of statistics XLA makes the inner ones.
        if index in self.summed and spread in ("row", "column", "group"):
            return False
        if name in problems.REDUCTIONS:
            if spread == "group":
                return self.rows.groups_of_sum(equation) is not None and not self._is_needed_outside(index)
            return spread == "row" and self.rows.are_reduced_by(equation)
        if name not in _RESHAPES and name != "broadcast_in_dim" and not _is_elementwise(equation):
            return False
        if name == "reshape" and equation.params["dimensions"] is not None:  # which transposes first
            return False
        is_placed = all(self.rows.spread(a, equation, spread) is not None for a in variables(equation.invars))
        return is_placed and not self._is_in_memory(index)

    def _joins_tensors(self, equation: Equation) -> bool:
        """Whether a concatenation is of columns, and of tensors in memory."""
        shape = equation.outvars[0].aval.shape
        return (
            equation.params["dimension"] == len(shape) - 1
            and shape[-1] == self.rows.columns
            and self.rows.hold(equation.outvars[0])
            and all(not is_literal(atom) and self._is_tensor(atom) for atom in equation.invars)
        )

    def _is_in_memory(self, index: int) -> bool:
        """Whether a result is a tensor of 16 bits that the program writes to memory in any case.

        One that a graph makes is, or that is read elsewhere too. Numbers for each channel of each image no graph adds:
        XLA would read and write the tensor for that.
        """
        equation = self.flow.equations[index]
        [result] = equation.outvars
        if result.aval.dtype not in _NARROW or not self.rows.hold(result) or equation.primitive.name in _RESHAPES:
            return False
        is_made = index in self.taken and not self._has_numbers_of_images(equation)
        return is_made or self._is_needed_outside(index)

    def _has_numbers_of_images(self, equation: Equation) -> bool:
        """Whether an operand is a number for each column of each image, and the tensor large beside another launch."""
        if self.rows.size < _LEAST_SIZE_WITH_NUMBERS_OF_IMAGES:
            return False
        read = [(atom, equation) for atom in variables(equation.invars)]
        producers = [self.flow.equations[self.flow.producer[a]] for a, _ in read if a in self.flow.producer]
        read += [(e.invars[0], e) for e in producers if e.primitive.name == "broadcast_in_dim"]
        tables = [self.rows.table_of(atom, reader) for atom, reader in read if not self.rows.hold(atom)]
        return any(table is not None and table.period > 1 and bool(table.columns) for table in tables)

    def _is_small(self) -> bool:
        return len(self.absorbed) <= _MOST_EQUATIONS and sum(map(self.rows.hold, self.read)) <= _MOST_TENSORS

    def _is_needed_outside(self, index: int) -> bool:
        """Whether something outside reads a result, or what is computed with it."""
        made = self.flow.equations[index].outvars
        readers = {reader for variable in made for reader in self.flow.consumers.get(variable, ())}
        is_read = not self.results.isdisjoint(made) or not readers <= self.absorbed
        return is_read or not self.shared.isdisjoint(readers)

    def _is_worth_it(self) -> bool:
        arithmetic = [
            equation
            for equation in map(self.flow.equations.__getitem__, self.absorbed)
            if equation.primitive.name in problems.ELEMENTWISE and self.rows.hold(equation.outvars[0])
        ]
        if not self._is_small():
            return False
        if not self.is_consistent or not self.tables.isdisjoint(self.absorbed):  # by row here, by column there
            return False
        tensors = filter(self.rows.hold, self.read)
        return len(arithmetic) >= _LEAST_ARITHMETIC and all(map(self._is_tensor, tensors))

    def _is_tensor(self, atom: Any) -> bool:
        """Whether what the kernel reads is in memory in any case, and of 16 bits.

        XLA fuses other things with what reads them: moves, and operations that the kernel cannot do.
        """
        if atom.aval.dtype not in _NARROW:
            return False
        producer = self.flow.producer.get(atom)
        if producer is None or not self.flow.chain[producer]:
            return True
        if self.flow.equations[producer].primitive.name in _MOVES:
            return False
        return producer in self.taken or self._is_needed_outside(producer)


def _spreads(equation: Equation, of: Spread, rows: Rows) -> list[tuple[Any, Spread | Table | None]]:
    """The operands that an equation is computed of, with how they are spread."""
    name = equation.primitive.name
    if name in _VIEWS:
        return []  # of what is in memory
    if name in problems.REDUCTIONS:
        return [(equation.invars[0], "all")]
    return [(atom, rows.spread(atom, equation, of)) for atom in variables(equation.invars)]


def _sums_groups(equation: Equation, of: Spread) -> bool:
    return of == "group" and equation.primitive.name in problems.REDUCTIONS


def _is_known(equation: Equation) -> bool:
    """Whether a result is a number of the program's."""
    return all(map(is_literal, equation.invars)) and element_count(equation.outvars[0]) == 1


def _is_float(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) in _FLOATS


def _is_operand(atom: Any) -> bool:
    return _is_float(atom) or getattr(atom.aval, "dtype", None) == np.dtype(bool)


def _is_elementwise(equation: Equation) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call":  # relu, and what refuses to be differentiated
        inner = _jax_compat.open_jaxpr(flat(equation.params["call_jaxpr"])).eqns
        return all(_is_elementwise(e) and _is_operand(e.outvars[0]) for e in inner)
    if name == "convert_element_type":
        return all(map(_is_float, (*equation.invars, *equation.outvars)))
    if name == "select_n":
        return len(equation.invars) == 3
    is_of_floats = name in problems.COMPARISONS or all(map(_is_float, equation.invars))
    return name in problems.ELEMENTWISE and is_of_floats


# What they compute


Sources = tuple[tuple[int, tuple[int, ...]], ...]
"""For each array that a kernel takes, which input of the group it is, and in which shape."""


def problem_of(jaxpr: Jaxpr) -> tuple[FusedCast, Sources] | None:
    """What the kernel of a group, as a closed jaxpr, computes; None where there is no such kernel."""
    inner = _jax_compat.open_jaxpr(flat(jaxpr))
    rows = Rows.of(inner.outvars[0].aval.shape)
    return None if rows is None else _Translation(inner, rows).problem()


class _Translation:
    """Equations to a problem."""

    def __init__(self, jaxpr: Jaxpr, rows: Rows) -> None:
        self.jaxpr, self.rows = jaxpr, rows
        self.inputs = {variable: i for i, variable in enumerate(jaxpr.invars)}
        self.spread: dict[Any, Any] = {jaxpr.outvars[0]: "all"}
        # Where a number for each group is, those tables that all elements read.
        self.groups: set[Table] = set()
        for equation in reversed(jaxpr.eqns):
            of = self.spread_of(equation)
            for atom, spread in _spreads(equation, of, rows):
                self.spread[atom] = spread
                if (
                    spread == "group"
                    and of in ("all", "column")
                    and (table := rows.table_of(atom, equation)) is not None
                ):
                    self.groups.add(table)

    def spread_of(self, equation: Equation) -> Spread:
        return next((self.spread[variable] for variable in equation.outvars if variable in self.spread), "one")

    def problem(self) -> tuple[FusedCast, Sources] | None:
        cast = self.jaxpr.eqns[-1]
        sums = [e for e in self.jaxpr.eqns if _sums_groups(e, self.spread_of(e))]
        made, found = [e.outvars[0] for e in sums], self._statistics(sums)
        if len(self.groups) > 1 or (sums and found is None):
            return None
        statistics, sources = found or (None, ())
        program = _Program(self)
        if statistics is not None:
            for number, variable in enumerate(made):
                program.read(variable, Sums(statistics, number))
        program.add_all(self._computing([cast.invars[0]], made))
        dtype = np.dtype(cast.outvars[0].aval.dtype)
        result = program.known.get(cast.invars[0])
        if not isinstance(result, int) or not program.saturates(result, float(jnp.finfo(dtype).max)):  # type: ignore[no-untyped-call]
            return None
        problem = FusedCast(
            self.rows.count,
            self.rows.columns,
            program.operands,
            program.numbered_nodes,
            (Result("tensor", program.position(result), dtype),),
        )
        return (problem, sources + program.sources) if problems.supports(problem).ok else None

    def _statistics(self, sums: Sequence[Equation]) -> tuple[Statistics, Sources] | None:
        """Of sums of the same groups, which are those that are read."""
        groups = {self.rows.groups_of_sum(equation) for equation in sums}
        if len(groups) != 1 or len(self.groups) != 1:
            return None
        [found], [table] = groups, self.groups
        [(width, _, _)] = table.columns
        if found is None or (found.width, found.period) != (width, table.period or self.rows.count):
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

    def saturates(self, result: int, largest: float) -> bool:
        """Whether a node is clamped to what the FP8 type holds. A clamp to all of that is left to the cast."""
        bounds: dict[str, float] = {}
        value: Any = result
        while isinstance(value, int) and len(bounds) < 2 and (clamped := _clamped(*self.nodes[value][:2])) is not None:
            value, found = clamped
            for op, bound in found.items():
                bounds[op] = _TIGHTER[op](bound, bounds.get(op, bound))
        if len(bounds) < 2 or max(map(abs, bounds.values())) > largest:
            return False
        if bounds == {"max": -largest, "min": largest}:
            self.nodes[result] = ("copy", [value], 1)
        return True

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
        if name in ("convert_element_type", "broadcast_in_dim") or name in _RESHAPES:
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
    from xla_fp8.backends.fused_cast import kernel

    found = problem_of(jaxpr)
    if found is None:
        raise RegionError("there is no kernel that computes it")
    problem, sources = found
    [aval] = jaxpr.out_avals

    def fused_cast(*inputs: jax.Array) -> list[jax.Array]:
        [result] = kernel.run(problem, [inputs[i].reshape(shape) for i, shape in sources])
        return [result.reshape(aval.shape)]

    return fused_cast
