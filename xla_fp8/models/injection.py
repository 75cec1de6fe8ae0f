"""An operator as a function to hand to a layer: `conv_general_dilated=Fp8Conv()`, `dot_general=Fp8Dot()`.

Whoever writes it by hand means that layer: the rules of the recipe that leave layers wide do not count.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from xla_fp8.models.contraction import Contraction, Conv, Dot, Kind
from xla_fp8.models.errors import ModelError
from xla_fp8.models.operators import Operator, State, Train
from xla_fp8.models.recipe import Recipe


@dataclasses.dataclass(frozen=True)
class Injected:
    """An operator in the place of `jax.lax.conv_general_dilated` ("conv") or `jax.lax.dot_general` ("dot")."""

    kind: Kind
    operator: Operator

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return self.operator(contraction_of(self.kind, lhs, rhs, *args, **kwargs), lhs, rhs)

    def with_state(self, state: State, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """The same, with what the framework keeps for the layer."""
        return self.operator(contraction_of(self.kind, lhs, rhs, *args, **kwargs), lhs, rhs, state)


def contraction_of(kind: Kind, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> Contraction:
    """The contraction that a layer asks for in the words of `jax.lax`."""
    return (Conv if kind == "conv" else Dot).of(lhs, rhs, *args, **kwargs)


def Fp8Conv(recipe: Recipe | str = "dynamic", *, name: str = "conv") -> Injected:  # named like what it stands for
    """What to hand to a layer as `conv_general_dilated=`: every call is in FP8, with dynamic scales.

    Args:
        recipe: of dynamic scaling.
        name: as profiles have it.

    Raises:
        ModelError: a recipe with state, which only `xla_fp8.convert` and `xla_fp8.calibrate` can keep.
    """
    return Injected("conv", _by_hand(recipe, name))


def Fp8Dot(recipe: Recipe | str = "dynamic", *, name: str = "dot") -> Injected:
    """What to hand to a layer as `dot_general=`; as `Fp8Conv`."""
    return Injected("dot", _by_hand(recipe, name))


def _by_hand(recipe: Recipe | str, name: str) -> Train:
    recipe = Recipe.of(recipe)
    if recipe.scaling != "dynamic":
        raise ModelError(
            f"a layer cannot keep the state of {recipe.scaling} scaling in a function: convert the model with "
            f"xla_fp8.{'convert' if recipe.scaling == 'delayed' else 'calibrate'}, or use dynamic scales"
        )
    return Train(name, recipe, by_hand=True)
