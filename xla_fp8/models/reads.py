"""Which weights a model reads by itself, besides the layers that they belong to: those cannot become FP8 data."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from xla_fp8 import _jax_compat
from xla_fp8.models.contraction import Contraction
from xla_fp8.models.convert import Call, arguments_of, watched

READ_ELSEWHERE = "something else reads its weight too, and would read FP8 without a scale"


class Samples:
    """Hands batches on, and keeps one of each kind: of a structure, and of flags that a call may branch on."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._kept: dict[Any, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            leaves, tree = jax.tree.flatten(batch)
            flags = tuple(leaf if isinstance(leaf, (bool, str)) else None for leaf in leaves)
            self._kept.setdefault((tree, flags), batch)
            yield batch

    @property
    def kept(self) -> Collection[Any]:
        """One batch of each kind that was handed on."""
        return self._kept.values()


def read_by_calls(
    model: Any, names: Collection[str], batches: Iterable[Any], call: Call, framework: Any
) -> dict[str, str]:
    """The layers whose weight a call reads other than as the operand of their own contraction, each with the reason.

    Each call is traced with the weights as inputs, and without them as those operands. Whichever weight its results
    still depend on is read elsewhere. Where that cannot be told, every layer is returned.

    Args:
        model: an NNX or Equinox module.
        names: layers that multiply with their weight as it is. Of others the operand may be made of weights that are
            not theirs, so it counts as a read.
        batches: of calls that ran.
        call: (model, *batch) → anything.
    """
    weights = {name: framework.weight(model, name) for name in names}

    def without_weight(name: str, contraction: Contraction, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return contraction.wide(lhs, jnp.zeros(rhs.shape, rhs.dtype) if name in weights else rhs)

    bare = watched(model, without_weight)
    read: set[str] = set()
    for batch in batches if weights else ():
        returns_arrays = False

        def results(weights: Mapping[str, jax.Array], batch: Any = batch) -> Any:
            nonlocal returns_arrays
            returned, left = framework.results(bare, weights, call, *arguments_of(batch))
            returned = _arrays(returned)
            returns_arrays = bool(returned)
            return returned, _arrays(left)

        try:
            jaxpr = jax.make_jaxpr(results)(weights)
        except Exception as error:  # the call ran before, so whatever this is comes of tracing it
            return dict.fromkeys(names, _unknown(f"the call cannot be traced ({type(error).__name__})"))
        if not returns_arrays:
            return dict.fromkeys(names, _unknown("the call returns no array"))
        in_use = _jax_compat.inputs_in_use(jaxpr)
        read |= {name for name, is_used in zip(sorted(weights), in_use, strict=True) if is_used}  # as pytrees sort
    return dict.fromkeys(read, READ_ELSEWHERE)


def _arrays(tree: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]


def _unknown(why: str) -> str:
    return f"whether something else reads its weight too is not known, because {why}"
