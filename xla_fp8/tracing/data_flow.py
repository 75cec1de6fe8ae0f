"""Who makes and who reads what in a list of equations, and which of it was FP8."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.tracing.equations import (
    CHAIN,
    CONTRACTIONS,
    DERIVATIVE_RULES,
    Equation,
    Jaxpr,
    bodies,
    has_contraction,
    is_chain,
    is_fp8,
    is_literal,
    mentions_fp8,
    variables,
)
from xla_fp8.tracing.inline import inline_calls


class DataFlow:
    """Who makes and who reads each variable of a list of equations, by index."""

    def __init__(self, equations: Sequence[Equation]) -> None:
        self.equations = equations
        self.producer: dict[Any, int] = {v: i for i, e in enumerate(equations) for v in e.outvars}
        self.consumers: dict[Any, list[int]] = {}
        for i, equation in enumerate(equations):
            for variable in dict.fromkeys(variables(equation.invars)):
                self.consumers.setdefault(variable, []).append(i)
        self.chain = [is_chain(equation) for equation in equations]
        self.predecessors: list[list[int]] = [
            sorted({self.producer[a] for a in variables(e.invars) if a in self.producer}) for e in equations
        ]
        # Effects keep their order: each depends on the one before it.
        effectful = [i for i, equation in enumerate(equations) if equation.effects]
        for before, after in itertools.pairwise(effectful):
            self.predecessors[after].append(before)
        self.dequantized = self._dequantized()

    def _dequantized(self) -> set[Any]:
        """Variables that hold an FP8 tensor, or what a chain made of one."""
        found: set[Any] = set()
        for i, equation in enumerate(self.equations):
            # By name: a chain of symbolic shapes, which no region takes, is one all the same.
            passes_on = self.chain[i] or equation.primitive.name in CHAIN
            if passes_on and any(self.holds_fp8(atom, found) for atom in equation.invars):
                found.update(equation.outvars)
                continue
            found.update([v for v in equation.outvars if is_fp8(v.aval)])
            # A call that quantizes and dequantizes within itself ("fake quantization").
            if self.chain[i] and any(mentions_fp8(body) for body in bodies(equation)):
                found.update(equation.outvars)
        return found

    @staticmethod
    def holds_fp8(atom: Any, dequantized: set[Any]) -> bool:
        return not is_literal(atom) and (is_fp8(atom.aval) or atom in dequantized)

    def is_seed(self, index: int) -> bool:
        """Whether an equation is a convolution or dot of something that was FP8, or a call with one inside."""
        equation = self.equations[index]
        if equation.primitive.name in CONTRACTIONS:
            return any(self.holds_fp8(atom, self.dequantized) for atom in equation.invars)
        if equation.primitive.name not in DERIVATIVE_RULES:
            return False
        return any(_has_seed(body) for body in bodies(equation))


def _has_seed(jaxpr: Jaxpr) -> bool:
    if not has_contraction(jaxpr):
        return False
    flow = DataFlow(list(inline_calls(_jax_compat.open_jaxpr(jaxpr).eqns)))
    return any(flow.is_seed(i) for i in range(len(flow.equations)))
