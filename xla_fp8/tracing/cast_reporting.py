"""What became of the casts to FP8 of a jaxpr: what kernels compute with them, and why XLA computes the others."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.backends.quantize import choice
from xla_fp8.report import Cast
from xla_fp8.tracing.cut import READS_ITS_RESULTS, with_fused_casts
from xla_fp8.tracing.equations import Equation, Jaxpr
from xla_fp8.tracing.fused_casts.computable import type_of
from xla_fp8.tracing.hlo_of_region import Family
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.region import fused_cast_p, make_fused_cast

Left = tuple[str, Equation | None]
"""Why XLA computes a cast, in words, and the equation that is to blame where there is one."""


def casts_of(jaxpr: Jaxpr, options: Options, platform: str) -> Iterator[Cast]:
    """The casts of a jaxpr that has been cut, in program order, without those in bodies of its equations.

    None where casts get no kernels: elsewhere than on one Hopper GPU, or with `passes=`.
    """
    if not options.takes_fused_casts or not choice.takes_fused(platform):
        return
    left = left_casts(jaxpr, options)
    for equation in _jax_compat.open_jaxpr(jaxpr).eqns:
        source = _jax_compat.equation_source(equation)
        if equation.primitive is fused_cast_p:
            yield Cast(_types(equation), source, operations=len(_jax_compat.open_jaxpr(equation.params["jaxpr"]).eqns))
        elif is_cast(equation):
            yield Cast(_types(equation), source, reason=_told(*left[equation.outvars[0]], source))


def left_casts(jaxpr: Jaxpr, options: Options) -> dict[Any, Left]:
    """The results of casts that XLA computes in a jaxpr that has been cut, in program order.

    What has a kernel is one equation there, so that the search for kernels, made again, finds the others' reasons.
    """
    inner = _jax_compat.open_jaxpr(jaxpr)
    # Where one is found again, it was not made with those beside it.
    left: dict[Any, Left] = {e.outvars[0]: (READS_ITS_RESULTS, None) for e in inner.eqns if is_cast(e)}

    def leave(cast: Equation, reason: str, blame: Equation | None) -> None:
        left[cast.outvars[0]] = reason, blame

    with_fused_casts(list(inner.eqns), inner.outvars, functools.partial(make_fused_cast, options, Family()), leave)
    return left


def _told(reason: str, blame: Equation | None, source: str | None) -> str:
    """A reason, with what is to blame where that stands on another line than the cast."""
    place = None if blame is None else _jax_compat.equation_source(blame)
    return (
        f"{reason} ({blame.primitive.name}, {place})" if blame is not None and place not in (None, source) else reason
    )


def _types(equation: Equation) -> tuple[str, ...]:
    return tuple(type_of(variable).replace("f8_", "f8") for variable in equation.outvars)  # as HLO has it
