"""The report of a conversion: for each layer whether it is in FP8, and if not, why."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from xla_fp8.models.convert import Call, call_model, traced_layers
from xla_fp8.models.errors import ModelError
from xla_fp8.models.framework import framework_of
from xla_fp8.models.functions import ConvertedFunction, StatefulFunction
from xla_fp8.models.operators import Infer, Operator, Train, Wide, why_small
from xla_fp8.models.plan import Layer


@dataclasses.dataclass(frozen=True)
class Entry:
    """What became of a layer.

    Attributes:
        layer: its name, kind, weight and, where it was traced, size.
        is_fp8: whether it is computed in FP8.
        reason: why not; or on what it still depends.
    """

    layer: Layer
    is_fp8: bool
    reason: str


@dataclasses.dataclass(frozen=True)
class ConversionReport:
    """What became of the layers of a model, in their order. Prints as a table."""

    entries: tuple[Entry, ...]

    @property
    def converted(self) -> list[Layer]:
        """The layers in FP8."""
        return [entry.layer for entry in self.entries if entry.is_fp8]

    @property
    def kept(self) -> list[tuple[Layer, str]]:
        """The layers that stay wide, with the reason."""
        return [(entry.layer, entry.reason) for entry in self.entries if not entry.is_fp8]

    @property
    def fp8_share(self) -> float | None:
        """The share of the arithmetic that is in FP8, of the layers whose size is known; None where none is."""
        flops = [(entry.layer.size.flops, entry.is_fp8) for entry in self.entries if entry.layer.size]
        total = sum(count for count, _ in flops)
        return sum(count for count, is_fp8 in flops if is_fp8) / total if total else None

    @property
    def summary(self) -> str:
        counts = f"{len(self.converted)} in FP8, {len(self.kept)} wide"
        if self.fp8_share is None:
            return counts
        unknown = sum(entry.layer.size is None for entry in self.entries)
        but = f", {unknown} of unknown size left out" if unknown else ""
        return f"{counts}; {self.fp8_share:.1%} of the arithmetic is in FP8{but}"

    def __str__(self) -> str:
        rows = [
            (
                "FP8" if entry.is_fp8 else "wide",
                entry.layer.name,
                entry.layer.kind,
                "x".join(map(str, entry.layer.weight)),
                f"{entry.layer.size.flops / 1e9:.3g} GFLOP" if entry.layer.size else "",
                entry.reason or entry.layer.source,
            )
            for entry in self.entries
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
        lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return "\n".join((*lines, "" if rows else "no layers", self.summary))


def conversion_report(model: Any, *batch: Any, call: Call = call_model, **options: Any) -> ConversionReport:
    """What became of each layer of a model that `convert` or `calibrate` returned. Nothing is run.

    Args:
        model: the converted model.
        batch: arguments of a call; arrays or `jax.ShapeDtypeStruct`s. Of NNX and Equinox modules they may be left out:
            then sizes are not known, and the order is that of definition. Of a function with state, without it.
        call: how the model is called, as `convert` has it.
        options: keyword arguments of the call.

    Raises:
        ModelError: a model that was not converted; a Linen module or a function without a batch.
    """
    framework = framework_of(model)
    if framework is None or framework.is_traced:
        layers, operators = _traced(model, batch, options)
    else:
        operators = framework.operators(model)
        layers = traced_layers(model, functools.partial(call, **options), *batch) if batch else framework.layers(model)
    if not operators and any(not layer.obstacle for layer in layers):
        raise ModelError(f"{type(model).__name__} was not converted: hand over what xla_fp8.convert returned")
    return ConversionReport(tuple(_entry(layer, operators.get(layer.name)) for layer in layers))


def _traced(model: Any, batch: tuple[Any, ...], options: dict[str, Any]) -> tuple[list[Layer], dict[str, Operator]]:
    """Of a Linen module or a function."""
    if isinstance(model, (ConvertedFunction, StatefulFunction)):
        if not batch:
            raise ModelError("the layers of a function are known when it is traced: hand over arguments of a call")
        layers = model.layers(*batch, **options)
    else:
        from xla_fp8.models import linen

        if not isinstance(model, linen.Fp8Module):
            raise ModelError(f"{type(model).__name__} was not converted: hand over what xla_fp8.convert returned")
        if not batch:
            raise ModelError("the layers of a Linen module are known when it is traced: hand over arguments of a call")
        layers = linen.layers(model.held.module, "__call__", *batch, **options)
    return layers, dict(model.planner(layers))


def _entry(layer: Layer, operator: Operator | None) -> Entry:
    if operator is None:
        return Entry(layer, False, layer.obstacle or "it has no operator")
    if isinstance(operator, Wide):
        return Entry(layer, False, operator.reason + _by_kernel(layer, operator.by_kernel))
    if isinstance(operator, Train) and not operator.by_hand:
        if layer.size is None:
            channels = f"channels that are multiples of {operator.recipe.channel_multiple}"
            return Entry(layer, True, f"where a call has {operator.recipe.least_size}, {channels} and no groups")
        small = why_small(operator.recipe, layer.size)
        return Entry(layer, not small, small and small + _by_kernel(layer, operator.recipe.depthwise))
    return Entry(layer, isinstance(operator, (Train, Infer)), "")


def _by_kernel(layer: Layer, is_wanted: bool) -> str:
    """What a reason to stay wide is followed by, of a depthwise convolution."""
    if not is_wanted or layer.size is None or not layer.size.depthwise:
        return ""
    return f"; on a Hopper GPU by this project's depthwise kernel in {layer.size.depthwise}"
