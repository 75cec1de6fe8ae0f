"""Where the chains of a region end although they go on: what follows them stays with JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from xla_fp8 import _jax_compat
from xla_fp8.tracing.equations import (
    CALLS,
    CARRIERS,
    CHAIN,
    CONTRACTIONS,
    DERIVATIVE_RULES,
    Equation,
    Variable,
    is_chain,
    is_fp8,
    is_literal,
    why_not_plain,
)
from xla_fp8.tracing.inline import flat


class Ends:
    """The readers of each variable of a jaxpr's equations."""

    def __init__(self, equations: Sequence[Equation]) -> None:
        self._readers: dict[Variable, list[Equation]] = {}
        for equation in equations:
            for atom in equation.invars:
                if not is_literal(atom):
                    self._readers.setdefault(atom, []).append(equation)

    def of(self, region: Equation) -> list[str]:
        """For each convolution and dot of a region, in program order, what outside of it ends its chain; else ""."""
        body = _jax_compat.open_jaxpr(flat(region.params["jaxpr"]))
        producers = {v: equation for equation in body.eqns for v in equation.outvars}
        found = {id(equation): "" for equation in body.eqns if equation.primitive.name in CONTRACTIONS}
        for inner, outer in zip(body.outvars, region.outvars, strict=True):
            why = next(filter(None, map(_why, self._readers.get(outer, ()))), "")
            if why and not is_fp8(outer.aval):
                for contraction in _contractions(inner, producers):
                    found[id(contraction)] = found[id(contraction)] or why
        return list(found.values())


def _contractions(variable: Variable, producers: dict[Variable, Equation]) -> Iterator[Equation]:
    """The convolutions and dots whose chains lead to a variable."""
    pending, seen = [variable], set()
    while pending:
        atom = pending.pop()
        equation = None if is_literal(atom) or atom in seen else producers.get(atom)
        if equation is None:
            continue
        seen.add(atom)
        if equation.primitive.name in CONTRACTIONS:
            yield equation
        else:
            pending.extend(operand for operand in equation.invars if is_literal(operand) or not is_fp8(operand.aval))


def _why(reader: Equation) -> str:
    """Why an equation that could have gone on with a chain did not; "" for one that no chain has."""
    name = reader.primitive.name
    source = _jax_compat.equation_source(reader)
    called = f"{name} of {reader.params['name']}" if name == "jit" else name
    where = f"{called} ({source})" if source else called
    if name in CARRIERS:
        return f"{where} follows, which must stay with JAX"
    if name not in CHAIN | CALLS | DERIVATIVE_RULES:
        return ""
    if is_chain(reader):
        return f"{where} follows, which also needs what JAX computes of the region"
    return f"{where} follows, and {why_not_plain(reader)}"
