"""The outcome of `compare`: the error of each layer, as a table, Markdown, HTML, JSON and a plot."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from xla_fp8.models.errors import MissingPackageError
from xla_fp8.report import style

_HEADER = ("layer", "kind", "SNR", "input saturates", "underflows", "weight saturates", "underflows")
_GRADIENT = ("gradient saturates", "underflows")


@dataclasses.dataclass(frozen=True)
class TensorError:
    """What quantizing a tensor loses at its ends.

    Attributes:
        saturated: share of the values that are too large for FP8 at the tensor's scale, and become its largest value.
        underflowed: share of the values other than zero that become zero.
    """

    saturated: float
    underflowed: float


@dataclasses.dataclass(frozen=True)
class LayerError:
    """The error that FP8 makes in one layer, fed with what the wide model feeds it.

    Attributes:
        name, kind: as the layer has them ("blocks/0/conv1"; "conv" or "dot").
        snr: signal-to-noise ratio of its output in dB: 10 log10(sum of y² / sum of (y_fp8 - y)²); infinite where both
            are equal, NaN where something is not finite.
        input, weight: of the tensors that are quantized.
        is_fp8: whether the recipe takes the layer; the numbers are those of the layer in FP8 all the same.
        reason: why not.
        gradient: of the output's gradient, where a loss was given.
    """

    name: str
    kind: str
    snr: float
    input: TensorError
    weight: TensorError
    is_fp8: bool
    reason: str
    gradient: TensorError | None = None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The error of each layer, in the order in which they run. Prints as a table.

    Attributes:
        layers: those that could be in FP8.
        output_snr: signal-to-noise ratio in dB of the converted model's output against the wide one's.
        recipe: how tensors were scaled, in words.
    """

    layers: tuple[LayerError, ...]
    output_snr: float
    recipe: str

    def worst(self, count: int = 5) -> list[LayerError]:
        """The layers in FP8 with the lowest signal-to-noise ratios, lowest first: those to leave out."""
        return sorted((layer for layer in self.layers if layer.is_fp8), key=_badness)[:count]

    @property
    def summary(self) -> str:
        taken = sum(layer.is_fp8 for layer in self.layers)
        worst = "".join(f"; the lowest of a layer is {_db(each.snr)} ({each.name})" for each in self.worst(1))
        return f"output {_db(self.output_snr)} with {taken} of {len(self.layers)} layers in FP8{worst}. {self.recipe}"

    def _rows(self) -> list[tuple[str, ...]]:
        """The header, then a row for each layer."""
        has_gradient = any(layer.gradient is not None for layer in self.layers)
        header = (*_HEADER, *(_GRADIENT if has_gradient else ()), "")
        return [header, *(_cells(layer, has_gradient) for layer in self.layers)]

    def to_dict(self) -> dict[str, Any]:
        """The fields; what is not finite is None, which JSON can say."""
        layers = [dataclasses.asdict(layer) | {"snr": _finite(layer.snr)} for layer in self.layers]
        return {"layers": layers, "output_snr": _finite(self.output_snr), "recipe": self.recipe}

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
        return f"{table}\n\n{self.summary}"

    def to_markdown(self) -> str:
        """The table for a pull request or an issue."""
        header, *cells = self._rows()
        rows = [header, ("---",) * len(header), *cells]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows) + "\n"

    def _repr_html_(self) -> str:
        """What a notebook shows: the table, a bar for each ratio."""
        header, *cells = self._rows()
        head = "".join(f"<th>{cell}</th>" for cell in header)
        largest = max((layer.snr for layer in self.layers if math.isfinite(layer.snr)), default=0.0)
        rows = "".join(_html_row(layer, row, largest) for layer, row in zip(self.layers, cells, strict=True))
        return (
            f'<div class="xla-fp8">\n<style>{style.STYLE}</style>\n<p class="summary">{html.escape(self.summary)}</p>\n'
            f"<table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table>\n</div>\n"
        )

    def plot(self, ax: Any = None) -> Any:
        """Draws the ratio of each layer as a bar, with its shares of underflow and saturation below.

        Args:
            ax: two matplotlib Axes, one above the other; new ones if None.

        Returns:
            The Figure.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        try:
            from matplotlib import pyplot
        except ImportError as error:
            raise MissingPackageError("matplotlib", "plot", "Comparison.plot") from error
        if ax is None:
            size = (max(6.0, 0.3 * len(self.layers) + 2), 6)
            _, ax = pyplot.subplots(2, 1, sharex=True, figsize=size, layout="constrained")
        upper, lower = ax
        places = list(range(len(self.layers)))
        colors = ["#1a7f4b" if layer.is_fp8 else "#c3c8d0" for layer in self.layers]
        upper.bar(places, [_finite(layer.snr) or 0.0 for layer in self.layers], color=colors)
        upper.set_ylabel("SNR of the layer (dB)")
        upper.set_title(f"output {_db(self.output_snr)}; grey stays wide")
        series: Sequence[tuple[str, Callable[[LayerError], float]]] = (
            ("input underflows", lambda layer: layer.input.underflowed),
            ("weight underflows", lambda layer: layer.weight.underflowed),
            ("input saturates", lambda layer: layer.input.saturated),
            ("weight saturates", lambda layer: layer.weight.saturated),
        )
        for label, share in series:
            lower.plot(places, [100 * share(layer) for layer in self.layers], marker=_MARKERS[label], label=label)
        lower.set_ylim(bottom=0, top=max(1.0, lower.get_ylim()[1]))
        lower.set_ylabel("share (%)")
        lower.legend()
        lower.set_xticks(places, [layer.name for layer in self.layers], rotation=90)
        return upper.figure


_MARKERS = {"input underflows": "v", "weight underflows": "<", "input saturates": "^", "weight saturates": ">"}


def _badness(layer: LayerError) -> float:
    return -math.inf if math.isnan(layer.snr) else layer.snr


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _db(value: float) -> str:
    return "not finite" if math.isnan(value) else "equal" if value == math.inf else f"{value:.1f} dB"


_NOT_SEEN = (math.nan, math.nan)


def _share(value: float) -> str:
    return "-" if math.isnan(value) else "0" if value == 0 else f"{100 * value:.2g}%"


def _cells(layer: LayerError, has_gradient: bool) -> tuple[str, ...]:
    tensors = (layer.input, layer.weight, *((layer.gradient,) if has_gradient else ()))
    return (
        layer.name,
        layer.kind,
        _db(layer.snr),
        *(_share(share) for each in tensors for share in (_NOT_SEEN if each is None else dataclasses.astuple(each))),
        "FP8" if layer.is_fp8 else f"wide: {layer.reason}",
    )


def _html_row(layer: LayerError, cells: Sequence[str], largest: float) -> str:
    name, kind, ratio, *rest = map(html.escape, cells)
    width = 100 * max(layer.snr, 0) / largest if largest and math.isfinite(layer.snr) else 0
    bar = f'<span class="bar" style="width: {width:.0f}px"></span>'
    others = "".join(f"<td>{cell}</td>" for cell in rest)
    status = "rewritten" if layer.is_fp8 else "other"
    return f'<tr class="{status}"><td><code>{name}</code></td><td>{kind}</td><td>{bar} {ratio}</td>{others}</tr>\n'
