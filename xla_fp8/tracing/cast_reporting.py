"""What became of the casts to FP8 of a jaxpr: what kernels compute with them, and why XLA computes the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.backends.quantize import choice
from xla_fp8.report import Cast
from xla_fp8.tracing.cut import with_fused_casts
from xla_fp8.tracing.equations import Equation, Jaxpr
from xla_fp8.tracing.fused_casts.computable import type_of
from xla_fp8.tracing.hlo_of_region import Family
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.region import fused_cast_p, make_fused_cast

_GONE = "its kernel, with those beside it, would read what is made of its own results"


def casts_of(jaxpr: Jaxpr, options: Options, platform: str) -> Iterator[Cast]:
    """The casts of a jaxpr that has been cut, in program order, without those in bodies of its equations.

    None where casts get no kernels: elsewhere than on one Hopper GPU, or with `passes=`.
    """
    if not options.takes_fused_casts or not choice.takes_fused(platform):
        return
    inner = _jax_compat.open_jaxpr(jaxpr)
    reasons: dict[Any, str] = {}

    def leave(cast: Equation, reason: str, blame: Equation | None) -> None:
        source = None if blame is None else _jax_compat.equation_source(blame)
        if blame is not None and source and source != _jax_compat.equation_source(cast):
            reason = f"{reason} ({blame.primitive.name}, {source})"
        reasons[cast.outvars[0]] = reason

    # What has a kernel is one equation by now, so that this finds the reasons of the others.
    family = Family()

    def make(*arguments: Any) -> Any:
        return make_fused_cast(options, family, *arguments)

    with_fused_casts(list(inner.eqns), inner.outvars, make, leave)
    for equation in inner.eqns:
        source = _jax_compat.equation_source(equation)
        if equation.primitive is fused_cast_p:
            yield Cast(_types(equation), source, operations=len(_jax_compat.open_jaxpr(equation.params["jaxpr"]).eqns))
        elif is_cast(equation):
            yield Cast(_types(equation), source, reason=reasons.get(equation.outvars[0], _GONE))


def _types(equation: Equation) -> tuple[str, ...]:
    return tuple(type_of(variable).replace("f8_", "f8") for variable in equation.outvars)  # as HLO has it
