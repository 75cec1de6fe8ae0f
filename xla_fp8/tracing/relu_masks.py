"""Masks of relu, from its results.

    x ─┬─ max 0 ─ y                  x ─ max 0 ─ y ─┬─
       └─ > 0 (the derivative)   →                  └─ > 0

It is the same mask, NaN's too, and y is in memory for what is computed of it. An x that is a sum of several tensors (a
residual connection) would be written for the derivative alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.equations import Equation, is_literal, variables
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.rows import element_count


def of_results(equations: Sequence[Equation]) -> list[Equation]:
    """The equations, with comparisons of y in place of x where x is computed of several tensors."""
    flow = DataFlow(equations)
    relus: dict[Any, Any] = {}
    changed = []
    for equation in equations:
        if _is_relu(equation):
            [x] = variables(equation.invars)
            if _is_of_several(flow, x):
                relus.setdefault(x, equation.outvars[0])
        if equation.primitive.name == "gt" and equation.invars[0] in relus and _is_zero(equation.invars[1]):
            equation = equation.replace(invars=[relus[equation.invars[0]], equation.invars[1]])
        changed.append(equation)
    return changed


def _is_relu(equation: Equation) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call":
        body = _jax_compat.open_jaxpr(flat(equation.params["call_jaxpr"])).eqns
        return len(body) == len(equation.invars) == len(equation.outvars) == 1 and _is_relu(body[0])
    return name == "max" and len(variables(equation.invars)) == 1 and any(map(_is_zero, equation.invars))


def _is_zero(atom: Any) -> bool:
    return is_literal(atom) and not atom.val


def _is_of_several(flow: DataFlow, atom: Any) -> bool:
    """Whether elementwise operations make a value of several tensors, as far as a few steps up show."""
    size, several = element_count(atom), {atom}
    for _ in range(4):
        producers = [flow.producer[a] for a in several if a in flow.producer and flow.chain[flow.producer[a]]]
        if not producers:
            return False
        several = {a for i in producers for a in variables(flow.equations[i].invars) if element_count(a) == size}
        if len(several) > 1:
            return True
    return False
