"""Function calls in a jaxpr, replaced by what they call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.tracing.equations import CALLS, DERIVATIVE_RULES, Equation, Jaxpr, bodies, is_literal, is_plain


def inline_calls(equations: Iterable[Equation], substitution: dict[Any, Any] | None = None) -> Iterator[Equation]:
    """Equations with each plain call (jnp.clip, jax.nn.relu, a user's jit) replaced by its body.

    Calls of anything that is not plain stay: their bodies are rewritten by themselves. custom_jvp and custom_vjp calls
    stay too, because they are needed when somebody differentiates.

    Args:
        substitution: variables of `equations` → what they are now; the outputs of calls are added.
    """
    yield from _inline(equations, {} if substitution is None else substitution, _is_plain_call)


def flat(jaxpr: Jaxpr) -> Jaxpr:
    """A closed jaxpr with every call inlined, custom derivative rules dropped: what is left to do is to evaluate."""
    inner = _jax_compat.open_jaxpr(jaxpr)
    if not any(_is_call(equation) for equation in inner.eqns):
        return jaxpr
    substitution: dict[Any, Any] = {}
    equations = list(_inline(inner.eqns, substitution, _is_call))
    outvars = substituted(inner.outvars, substitution)
    return _jax_compat.close_equations(inner.invars, outvars, equations, "xla_fp8_region")


def substituted(atoms: Iterable[Any], substitution: dict[Any, Any]) -> list[Any]:
    """`atoms` as they are called after inlining."""
    return [_replaced(atom, substitution) for atom in atoms]


def _is_call(equation: Equation) -> bool:
    return equation.primitive.name in CALLS or equation.primitive.name in DERIVATIVE_RULES


def _is_plain_call(equation: Equation) -> bool:
    return equation.primitive.name in CALLS and is_plain(equation)


def _inline(
    equations: Iterable[Equation],
    substitution: dict[Any, Any],
    wanted: Callable[[Equation], bool],
    within: Equation | None = None,
) -> Iterator[Equation]:
    for equation in equations:
        invars = substituted(equation.invars, substitution) if substitution else equation.invars
        info = equation.source_info if within is None else _jax_compat.equation_source_info(equation, within=within)
        body = next(bodies(equation), None) if wanted(equation) else None
        if body is not None and not getattr(body, "consts", ()):
            inner = _jax_compat.open_jaxpr(body)
            scope = dict(zip(inner.invars, invars, strict=True))
            yield from _inline(inner.eqns, scope, wanted, equation.replace(source_info=info))
            substitution.update(zip(equation.outvars, substituted(inner.outvars, scope), strict=True))
        elif within is None:
            yield equation if invars == equation.invars else equation.replace(invars=invars)
        else:
            # The same body may be called again: each call gets variables of its own.
            outvars = [_jax_compat.fresh_variable(variable.aval) for variable in equation.outvars]
            substitution.update(zip(equation.outvars, outvars, strict=True))
            yield equation.replace(invars=invars, outvars=outvars, source_info=info)


def _replaced(atom: Any, substitution: dict[Any, Any]) -> Any:
    return atom if is_literal(atom) else substitution.get(atom, atom)
