"""Which layers of a model become FP8: the recipe's rules and the user's filter, applied to a list of layers."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from xla_fp8.models.contraction import Size
from xla_fp8.models.errors import ModelError
from xla_fp8.models.operators import Operator, Train, Wide, why_small
from xla_fp8.models.recipe import Recipe

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layer:
    """A contraction of a model.

    Attributes:
        name: its path in the model, "blocks/0/conv1"; of a plain function the scopes and primitive.
        kind: "conv", "dot", or the name of a layer that is never converted.
        weight: shape of the weight; of a plain function, of the second operand.
        size: of the call that was traced; None where none was.
        source: "file.py:42" where it is known.
        obstacle: why it cannot be converted.
        inside: the loop or branch that it stands in, of a plain function; it has no state there.
    """

    name: str
    kind: str
    weight: Shape
    size: Size | None = None
    source: str = ""
    obstacle: str = ""
    inside: str = ""


Filter = Callable[[Layer], bool] | str | Iterable[str] | None
"""A function of a layer; or patterns of names as in a shell ("decoder/*"), of which one must match; None takes all."""

Planner = Callable[[Sequence[Layer]], Mapping[str, Operator]]
"""From the layers of a model, in their order, to how each is computed."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A recipe's plan for a model.

    Attributes:
        accepts: the user's filter.
        across_vmap: as `Train` has it.
    """

    recipe: Recipe
    accepts: Callable[[Layer], bool]
    across_vmap: bool = False

    def __call__(self, layers: Sequence[Layer]) -> dict[str, Operator]:
        """An operator for each layer; layers are in the order in which the model runs them, or defines them."""
        names = list(dict.fromkeys(layer.name for layer in layers if not layer.obstacle))
        first = set(names[: self.recipe.keep_first])
        last = set(names[max(0, len(names) - self.recipe.keep_last) :])
        operators: dict[str, Operator] = {}
        for layer in layers:
            reason = (
                layer.obstacle
                or self._without_state(layer)
                or (f"among the first {self.recipe.keep_first} (keep_first)" if layer.name in first else "")
                or (f"among the last {self.recipe.keep_last} (keep_last)" if layer.name in last else "")
                or ("" if self.accepts(layer) else "the filter leaves it out")
                or ("" if layer.size is None else why_small(self.recipe, layer.size))
            )
            known = operators.get(layer.name)
            if known is None or isinstance(known, Wide):  # of a layer that is called twice the larger call counts
                train = Train(layer.name, self.recipe, self.across_vmap)
                operators[layer.name] = Wide(layer.name, reason, self._by_kernel(layer)) if reason else train
        return operators

    def _by_kernel(self, layer: Layer) -> bool:
        """Whether a layer that stays wide may be a depthwise convolution for the kernel."""
        is_depthwise = layer.kind == "conv" if layer.size is None else bool(layer.size.depthwise)
        return self.recipe.depthwise and is_depthwise and not layer.obstacle

    def _without_state(self, layer: Layer) -> str:
        if not layer.inside or self.recipe.scaling == "dynamic":
            return ""
        return f"inside {layer.inside} it has no state of its own, which {self.recipe.scaling} scaling needs"


@dataclasses.dataclass(frozen=True)
class Fixed:
    """The plan that was made before."""

    operators: tuple[Operator, ...]

    def __call__(self, layers: Sequence[Layer]) -> dict[str, Operator]:
        return {operator.name: operator for operator in self.operators}


def not_run(known: Mapping[str, Layer], seen: Container[str], why: str) -> list[Layer]:
    """The layers that no call reached, which therefore stay wide."""
    rest = (layer for name, layer in known.items() if name not in seen)
    return [dataclasses.replace(layer, obstacle=layer.obstacle or why) for layer in rest]


def filter_of(accepts: Filter) -> Callable[[Layer], bool]:
    """A filter as a function.

    Raises:
        ModelError: neither a function nor patterns.
    """
    if accepts is None:
        return _accepts_all
    if callable(accepts):
        return accepts
    patterns = (accepts,) if isinstance(accepts, str) else tuple(accepts) if isinstance(accepts, Iterable) else None
    if patterns is None or not all(isinstance(pattern, str) for pattern in patterns):
        raise ModelError(f"filter={accepts!r}: expected a function of a Layer, or patterns of names: 'decoder/*'")
    return _Patterns(patterns)


def _accepts_all(layer: Layer) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class _Patterns:
    patterns: tuple[str, ...]

    def __call__(self, layer: Layer) -> bool:
        return any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in self.patterns)
