"""Equations as operands and nodes of a problem: a number for each, and constants in place of what is no operand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from xla_fp8.backends.fused_cast.problem import Constant, Joined, Matrix, Node, Sums, Table
from xla_fp8.tracing.equations import Equation, is_literal
from xla_fp8.tracing.rows import Rows, columns_of, is_reshape

_TIGHTER = MappingProxyType({"max": max, "min": min})
"""Of two bounds, by the operation that clamps to them."""

Sources = tuple[tuple[int, tuple[int, ...]], ...]
"""For each array that a kernel takes, which input of the group it is, and in which shape."""


class Nodes:
    """Operands and nodes, in the order in which equations are added."""

    def __init__(self, rows: Rows, inputs: Mapping[Any, int], table_of: Callable[[Any, Equation], Table]) -> None:
        """
        Args:
            inputs: of the group, with their positions.
            table_of: an input that an equation reads, and that is of fewer numbers than a tensor, as a table.
        """
        self.rows, self.inputs, self._table_of = rows, inputs, table_of
        self._operands: dict[Any, tuple[Any, Sources]] = {}
        # Variables → the key of an operand, the index of a node, or a constant.
        self.known: dict[Any, Any] = {}
        self._nodes: list[tuple[str, list[Any], int]] = []

    @property
    def operands(self) -> tuple[Any, ...]:
        return tuple(operand for operand, _ in self._operands.values())

    @property
    def sources(self) -> Sources:
        return tuple(source for _, sources in self._operands.values() for source in sources)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(
            Node(op, tuple(o if isinstance(o, Constant) else self.position(o) for o in operands), exponent)
            for op, operands, exponent in self._nodes
        )

    def position(self, value: Any) -> int:
        """Of a value among operands and nodes."""
        return len(self._operands) + value if isinstance(value, int) else list(self._operands).index(value)

    def before_saturation(self, result: Any, largest: float) -> Any:
        """What a cast to FP8 is of: a value that is clamped to what the type holds, or where it is clamped to all of
        that, which the cast does itself, the value before. None where it is not clamped."""
        bounds: dict[str, float] = {}
        value: Any = result
        while isinstance(value, int) and len(bounds) < 2 and (clamped := _clamped(*self._nodes[value][:2])) is not None:
            value, found = clamped
            for op, bound in found.items():
                bounds[op] = _TIGHTER[op](bound, bounds.get(op, bound))
        if len(bounds) < 2 or max(map(abs, bounds.values())) > largest:
            return None
        return value if bounds == {"max": -largest, "min": largest} else result

    def add_all(self, equations: Iterable[Equation]) -> None:
        for equation in equations:
            self.add(equation)

    def read(self, variable: Any, sums: Sums) -> None:
        """Lets a variable be one of the sums that are there."""
        self.known[variable] = key = (variable, sums)
        self._operands[key] = sums, ()

    def add(self, equation: Equation) -> None:
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
            inputs = [self.inputs[atom] for atom in equation.invars]
            self.known[result] = key = (result, joined)
            self._operands[key] = joined, tuple(zip(inputs, shapes, strict=True))
            return
        operands = [self.value(atom, equation) for atom in equation.invars]
        if name in ("convert_element_type", "broadcast_in_dim") or is_reshape(equation):
            self.known[result] = operands[0]
        elif name == "neg" and isinstance(operands[0], Constant):
            self.known[result] = Constant(-operands[0].value)
        else:
            self.known[result] = len(self._nodes)
            self._nodes.append((name, operands, equation.params["y"] if name == "integer_pow" else 1))

    def value(self, atom: Any, equation: Equation) -> Any:
        if is_literal(atom):
            return Constant(float(atom.val))
        if atom in self.known:
            return self.known[atom]
        dtype, count = atom.aval.dtype, self.rows.count
        if self.rows.hold(atom):
            return self._operand(atom, Matrix(dtype, self.rows.columns), (count, self.rows.columns))
        table = self._table_of(atom, equation)
        return self._operand(atom, dataclasses.replace(table, dtype=dtype), (table.size,))

    def _operand(self, atom: Any, operand: Matrix | Table, shape: tuple[int, ...]) -> Any:
        key = (atom, operand)
        self._operands.setdefault(key, (operand, ((self.inputs[atom], shape),)))
        return key


def _clamped(op: str, operands: Sequence[Any]) -> tuple[Any, dict[str, float]] | None:
    """What a node clamps, and to which constants, by the operation that clamps to each; None where it does not."""
    names = ("max", None, "min") if op == "clamp" else (op, op)
    clamped = [operand for operand in operands if not isinstance(operand, Constant)]
    if op not in ("clamp", "max", "min") or len(clamped) != 1 or (op == "clamp" and clamped[0] is not operands[1]):
        return None
    pairs = zip(names, operands, strict=True)
    return clamped[0], {name: operand.value for name, operand in pairs if name and isinstance(operand, Constant)}
