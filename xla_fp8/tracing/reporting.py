"""The report of a function: those of its regions, and the convolutions and dots that are in none."""

from __future__ import annotations

import dataclasses

import jax

from xla_fp8 import _jax_compat
from xla_fp8.backends.registry import platform_name
from xla_fp8.errors import XlaFp8Error
from xla_fp8.report import Entry, PassTiming, Report
from xla_fp8.target import Target
from xla_fp8.tracing.cut import DataFlow
from xla_fp8.tracing.equations import CONTRACTIONS, Equation, Jaxpr, bodies, why_not_plain
from xla_fp8.tracing.errors import NotRewrittenError
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import is_region
from xla_fp8.tracing.rewriting import rewritten

_OPS = {"conv_general_dilated": "convolution", "dot_general": "dot"}


def report_of(jaxpr: Jaxpr, options: Options, platform: str | None = None) -> Report:
    """What becomes of each convolution and dot of a jaxpr that has been cut, in program order.

    Args:
        platform: what to lower for; JAX's default where None.
    """
    platform = platform or jax.default_backend()
    report = Report(target=str(options.target or Target.default()))
    _collect(jaxpr, options, platform_name(platform), report)
    return report


def check_strict(report: Report) -> None:
    """Raises NotRewrittenError where the report has an FP8 convolution or dot that was refused."""
    if not report.refused_fp8:
        return
    lines = [f"  {entry.source or entry.instruction}: {entry.reason}" for entry in report.refused_fp8]
    raise NotRewrittenError(
        "strict=True, and these FP8 convolutions and dots stay as they are:\n"
        + "\n".join(lines)
        + "\nChange them as the report (xla_fp8.explain) advises, or leave strict out."
    )


def _collect(jaxpr: Jaxpr, options: Options, platform: str, report: Report) -> None:
    equations = _jax_compat.open_jaxpr(jaxpr).eqns
    flow = DataFlow(equations)
    for i, equation in enumerate(equations):
        if is_region(equation):
            _collect_region(equation, platform, report)
        elif equation.primitive.name in CONTRACTIONS:
            report.refused.append(_outside(equation, flow.is_seed(i)))
        for body in bodies(equation):
            _collect(body, options, platform, report)


def _collect_region(equation: Equation, platform: str, report: Report) -> None:
    jaxpr, options, family = (equation.params[name] for name in ("jaxpr", "options", "family"))
    try:
        region = rewritten(jaxpr, options, platform, family=family).report
    except XlaFp8Error as error:
        report.refused.append(
            dataclasses.replace(
                _outside(equation, True),
                reason=f"the passes failed: {error}",
                advice="this is a bug of xla_fp8: the region runs as plain JAX",
                rule="failed",
            )
        )
        return
    report.rewritten += region.rewritten
    report.refused += region.refused
    report.changed |= region.changed
    report.timings = _added(report.timings, region.timings)


def _added(timings: list[PassTiming], more: list[PassTiming]) -> list[PassTiming]:
    """Timings pass by pass, those of one name summed."""
    sums: dict[str, PassTiming] = {timing.name: timing for timing in timings}
    for timing in more:
        old = sums.get(timing.name, PassTiming(timing.name, 0.0, 0))
        sums[timing.name] = PassTiming(timing.name, old.seconds + timing.seconds, old.rewrites + timing.rewrites)
    return list(sums.values())


def _outside(equation: Equation, fed: bool) -> Entry:
    """The entry of a convolution or dot that no region has, or of a region that failed."""
    return Entry(
        instruction=equation.primitive.name,
        op=_OPS.get(equation.primitive.name, "convolution"),
        source=_jax_compat.equation_source(equation),
        reason=why_not_plain(equation) if fed else "no FP8 tensor feeds it",
        advice="keep it free of these" if fed else "",
        is_fp8=fed,
        rule="not-fp8" if not fed else "not-plain",
    )
