"""The jaxprs inside an equation and what goes into each, those that are never rewritten too."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.tracing.equations import BODIES, Equation, Jaxpr, bodies

_KERNELS = frozenset({"pallas_call", "core_map", "mpmd_map"})
"""What holds a kernel of the user's own, which nobody expects to be rewritten."""


@dataclasses.dataclass(frozen=True)
class Body:
    """A jaxpr inside an equation.

    Attributes:
        jaxpr: open or closed.
        arguments: what the equation hands to its inputs; empty where that is not known.
        is_opaque: whether it is never rewritten.
    """

    jaxpr: Jaxpr
    arguments: Sequence[Any]
    is_opaque: bool


def nested(equation: Equation) -> Iterator[Body]:
    """The jaxprs inside an equation."""
    name = equation.primitive.name
    if name == "while":
        conditions, body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        carry = equation.invars[conditions + body :]
        yield Body(equation.params["cond_jaxpr"], [*equation.invars[:conditions], *carry], is_opaque=False)
        yield Body(equation.params["body_jaxpr"], equation.invars[conditions:], is_opaque=False)
    elif name == "cond":
        for branch in bodies(equation):
            yield Body(branch, equation.invars[1:], is_opaque=False)
    elif name not in _KERNELS:
        for jaxpr in bodies(equation) if name in BODIES else _jaxprs(equation):
            is_known = len(_jax_compat.open_jaxpr(jaxpr).invars) == len(equation.invars)
            yield Body(jaxpr, equation.invars if is_known else (), is_opaque=name not in BODIES)


def _jaxprs(equation: Equation) -> Iterator[Jaxpr]:
    for value in equation.params.values():
        for jaxpr in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(_jax_compat.open_jaxpr(jaxpr), "eqns"):
                yield jaxpr
