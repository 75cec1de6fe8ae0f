"""The report of a function: those of its regions, and the convolutions and dots that are in none."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from xla_fp8 import _jax_compat
from xla_fp8.backends.protocol import platforms_of
from xla_fp8.backends.registry import backends_for, platform_name
from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import FP8_TYPES, Graph, GraphError
from xla_fp8.report import Entry, PassTiming, Report
from xla_fp8.target import Target
from xla_fp8.tracing import implementation
from xla_fp8.tracing.cast_reporting import casts_of
from xla_fp8.tracing.ends import Ends
from xla_fp8.tracing.equations import (
    CARRIERS,
    CHAIN,
    CONTRACTIONS,
    Equation,
    Jaxpr,
    Variable,
    is_fp8,
    is_literal,
    is_plain,
    why_not_plain,
)
from xla_fp8.tracing.errors import NotRewrittenError
from xla_fp8.tracing.nested import Body, nested
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import is_region
from xla_fp8.tracing.rewriting import Rewritten, rewritten

_OPS = {"conv_general_dilated": "convolution", "dot_general": "dot"}
_BUG = "this is a bug of xla_fp8 or of the backend: the region runs as plain JAX"
_OTHER_PASSES = "run the default pipeline: the passes that were named do not go together, or one has a bug"
_DEQUANTIZE_BESIDE = (
    "dequantize next to the convolution: in the same body (of a scan, cond, shard_map, checkpoint, ...), and behind "
    "sharding constraints and barriers"
)


def report_of(
    jaxpr: Jaxpr, options: Options, platform: str | None = None, *, only_contractions: bool = False
) -> Report:
    """What becomes of each convolution, dot and cast to FP8 of a jaxpr that has been cut, in program order.

    Args:
        platform: what to lower for; JAX's default where None.
        only_contractions: leaves casts out.
    """
    platform = platform or jax.default_backend()
    walk = _Walk(
        Report(target=str(options.target or Target.default())),
        platform_name(platform),
        None if only_contractions else options,
    )
    walk.collect(jaxpr, {}, "")
    return walk.report


def strict_platform(options: Options) -> str:
    """The platform to ask about strict when a function is traced: JAX's default, or where the named backend runs.

    What the function is lowered for in the end is asked then.
    """
    default = platform_name(jax.default_backend())
    platforms = [platforms_of(b) or (default,) for b in backends_for(options.backend, default)]
    return default if any(default in names for names in platforms) else platforms[0][0]


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


class _Walk:
    """A walk over the equations of a jaxpr, which adds to a report.

    Names count over the whole report: each region has a conv_general_dilated.1 of its own. `casts` are the options that
    casts were looked for with; None leaves them out.
    """

    def __init__(self, report: Report, platform: str, casts: Options | None) -> None:
        self.report = report
        self.platform = platform
        self.casts = casts
        self.names: Counter[str] = Counter()

    def collect(self, jaxpr: Jaxpr, fed: Mapping[Variable, str], inside: str) -> list[str | None]:
        """Reports a jaxpr.

        Args:
            fed: inputs that are dequantized FP8 tensors → where they are dequantized, e.g. "outside of the scan".
            inside: the primitive that keeps the jaxpr from being rewritten; "" where it is.

        Returns:
            For each output that is a dequantized FP8 tensor, where it is dequantized.
        """
        inner = _jax_compat.open_jaxpr(jaxpr)
        if self.casts is not None and not inside:
            self.report.casts += casts_of(jaxpr, self.casts, self.platform)
        ends = Ends(inner.eqns)
        origins = {**dict.fromkeys(filter(_is_fp8, (*inner.constvars, *inner.invars)), ""), **fed}
        for equation in inner.eqns:
            name = equation.primitive.name
            found = [origins[atom] for atom in equation.invars if _is_in(atom, origins)]
            origin = max(found, key=bool, default=None)  # what is beside the convolution is not what hinders
            if is_region(equation):
                is_fed_from_outside = any(_is_in(a, origins) and not _is_fp8(a) for a in equation.invars)
                self._region(equation, is_fed_from_outside, ends.of(equation))
                origins.update(dict.fromkeys(filter(_is_fp8, equation.outvars), ""))
                continue
            if name in CONTRACTIONS:
                self._add([self._outside(equation, origin, inside)])
            if name in CHAIN | CARRIERS and origin is not None:
                reached = origin if name in CHAIN else f"before the {name} that it goes through"
                origins.update(dict.fromkeys(equation.outvars, reached))
            for body in nested(equation):
                results = self.collect(
                    body.jaxpr, _into(body, origins, name), inside or (name if body.is_opaque else "")
                )
                if len(results) == len(equation.outvars):
                    pairs = zip(equation.outvars, results, strict=True)
                    origins.update({v: f"inside of the {name}" for v, result in pairs if result is not None})
            origins.update(dict.fromkeys(filter(_is_fp8, equation.outvars), ""))
        return [origins[atom] if _is_in(atom, origins) else None for atom in inner.outvars]

    def _region(self, equation: Equation, is_fed_from_outside: bool, ends: Sequence[str]) -> None:
        """Reports a region.

        Args:
            ends: of each convolution and dot of it, what outside of it ends its chain.
        """
        jaxpr, options, family = (equation.params[name] for name in ("jaxpr", "options", "family"))
        try:
            rewrite = rewritten(jaxpr, options, self.platform, family=family)
        except Exception as error:  # nor does lowering stop at it
            if options.of_quantization:
                return
            entry = self._outside(equation, "", "")
            why = error if isinstance(error, XlaFp8Error) else implementation.told(error)
            advice = _BUG if options.passes is None else _OTHER_PASSES
            self._add([dataclasses.replace(entry, reason=f"the passes failed: {why}", advice=advice, rule="failed")])
            return
        region = rewrite.report
        undone = self._undone(rewrite)
        rewritten_entries = region.rewritten if undone else _ended(region, ends)
        entries = [*(dataclasses.replace(entry, **undone) for entry in rewritten_entries), *region.refused]
        if is_fed_from_outside:
            entries = [
                dataclasses.replace(e, advice=_DEQUANTIZE_BESIDE) if e.rule == "operand-not-fp8" else e for e in entries
            ]
        if options.of_quantization:  # one that stays costs what it did
            entries = [entry for entry in entries if entry.graph is not None]
        self._add(entries)
        self.report.changed |= region.changed and not undone
        self.report.timings = _added(self.report.timings, region.timings)

    def _undone(self, region: Rewritten) -> dict[str, Any]:
        """What makes refusals of the rewritten entries of a region that cannot be lowered; nothing where it can."""
        if why := implementation.wrong_platform(region, self.platform):
            return {"graph": None, "rule": "backend", "reason": why, "advice": ""}
        if why := implementation.failure(region):
            return {"graph": None, "rule": "failed", "reason": f"lowering it failed: {why}", "advice": _BUG}
        return {}

    def _add(self, entries: list[Entry]) -> None:
        """Adds entries whose names are those of one module."""
        names = {}
        for entry in sorted(entries, key=lambda entry: _number(entry.instruction)):
            base = entry.instruction.partition(".")[0]
            self.names[base] += 1
            names[entry.instruction] = f"{base}.{self.names[base]}"
        local = re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, names))})(?![\w-]|\.\d)")
        for entry in entries:
            reason = local.sub(lambda match: names[match[0]], entry.reason)
            renamed = dataclasses.replace(entry, instruction=names[entry.instruction], reason=reason)
            (self.report.rewritten if entry.graph is not None else self.report.refused).append(renamed)

    def _outside(self, equation: Equation, origin: str | None, inside: str) -> Entry:
        """The entry of a convolution or dot that no region has, or of a region that failed.

        Args:
            origin: where what feeds it is dequantized; None where nothing is.
            inside: as of `collect`.
        """
        name = equation.primitive.name
        entry = Entry(
            instruction=name,
            op=_OPS.get(name, "convolution"),
            source=_jax_compat.equation_source(equation),
            is_fp8=origin is not None,
        )
        if origin is None:
            return dataclasses.replace(entry, rule="not-fp8", reason="no FP8 tensor feeds it")
        if inside:
            reason, advice = f"it stands inside of a {inside}, which is left as it is", f"move it out of the {inside}"
            return dataclasses.replace(entry, rule="not-plain", reason=reason, advice=advice)
        if not is_plain(equation):
            reason, advice = why_not_plain(equation), "keep it free of these"
            return dataclasses.replace(entry, rule="not-plain", reason=reason, advice=advice)
        reason = f"what feeds it is dequantized {origin}"
        return dataclasses.replace(entry, rule="dequantized-elsewhere", reason=reason, advice=_DEQUANTIZE_BESIDE)


def _ended(region: Report, ends: Sequence[str]) -> list[Entry]:
    """The rewritten entries of a region, with why their chains end where what follows stands outside of it."""
    every = sorted((*region.rewritten, *region.refused), key=lambda entry: _number(entry.instruction))
    if len(every) != len(ends):
        ends = [next(filter(None, ends), "")] * len(every)
    reasons = {entry.instruction: end for entry, end in zip(every, ends, strict=True)}
    return [
        dataclasses.replace(entry, reason=entry.reason or ("" if _is_whole(entry) else reasons[entry.instruction]))
        for entry in region.rewritten
    ]


def _is_whole(entry: Entry) -> bool:
    """Whether the chain of a rewritten entry ends where chains end: in an FP8 tensor, or as a matmul call."""
    try:
        return Graph.parse(entry.graph or "").output.type in FP8_TYPES
    except GraphError:
        return True


def _into(body: Body, origins: Mapping[Variable, str], name: str) -> dict[Variable, str]:
    """The inputs of a body that are dequantized outside of it."""
    pairs = zip(_jax_compat.open_jaxpr(body.jaxpr).invars, body.arguments, strict=False)
    return {v: f"outside of the {name}" for v, atom in pairs if _is_in(atom, origins) and not _is_fp8(atom)}


def _is_in(atom: Any, origins: Mapping[Variable, str]) -> bool:
    return not is_literal(atom) and atom in origins


def _is_fp8(variable: Variable) -> bool:
    return is_fp8(variable.aval)


def _number(name: str) -> int:
    """Of "conv_general_dilated.3" the 3: JAX numbers in program order."""
    suffix = name.rpartition(".")[2]
    return int(suffix) if suffix.isdigit() else 0


def _added(timings: list[PassTiming], more: list[PassTiming]) -> list[PassTiming]:
    """Timings pass by pass, those of one name summed."""
    sums: dict[str, PassTiming] = {timing.name: timing for timing in timings}
    for timing in more:
        old = sums.get(timing.name, PassTiming(timing.name, 0.0, 0))
        sums[timing.name] = PassTiming(timing.name, old.seconds + timing.seconds, old.rewrites + timing.rewrites)
    return list(sums.values())
