"""Equinox: layers become `Fp8Conv` and `Fp8Linear`, which are their layers with an operator, and its state, besides.

The leaves that were there stay, in their order. Layers of Equinox take one example and run under jax.vmap, so one scale
serves all examples of the innermost vmap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from xla_fp8 import _jax_compat
from xla_fp8.models.contraction import Conv, Dot
from xla_fp8.models.errors import MissingPackageError
from xla_fp8.models.operators import Operator, State, leaves_alone
from xla_fp8.models.plan import Layer
from xla_fp8.quantization.numerics import WIDE_DTYPES

try:
    import equinox as eqx
except ImportError as error:
    raise MissingPackageError("equinox") from error

# Reports then name the line of the user's that calls a layer, and not the line inside the layer.
_jax_compat.hide_from_sources(str(Path(eqx.__file__).parent))

across_vmap = True
"""Modules of Equinox take one example."""

is_traced = False
"""The layers of a module are there before it is called."""

is_ordered = True
"""Fields stay in their order."""


class Fp8Layer(eqx.Module):
    """What `Fp8Conv` and `Fp8Linear` have besides their layers.

    Attributes:
        operator: how.
        state: what it needs; None, an `xla_fp8.DelayedScaling`, or fixed scales.
    """

    operator: Operator = eqx.field(static=True)
    state: State

    def __init__(self, layer: eqx.nn.Conv | eqx.nn.Linear, operator: Operator, state: State) -> None:
        for field in dataclasses.fields(layer):
            setattr(self, field.name, getattr(layer, field.name))
        self.operator = operator
        self.state = state


class Fp8Conv(Fp8Layer, eqx.nn.Conv):
    """A convolution that is computed by an operator."""

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        if leaves_alone(self.operator):
            y: jax.Array = super().__call__(x, key=key)
            return y
        padding = self.padding
        if self.padding_mode != "ZEROS":
            x, padding = self._nonzero_pad(x), "VALID"
        x = jnp.expand_dims(x, 0)
        conv = Conv.of(
            x, self.weight, self.stride, padding, rhs_dilation=self.dilation, feature_group_count=self.groups
        )
        y = jnp.squeeze(self.operator(conv, x, self.weight, self.state), 0)
        return _with_bias(y, self.bias)


class Fp8Linear(Fp8Layer, eqx.nn.Linear):
    """A linear layer that is computed by an operator."""

    def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
        if leaves_alone(self.operator):
            y: jax.Array = super().__call__(x, key=key)
            return y
        dot = Dot.of(x, self.weight, (((0,), (1,)), ((), ())))
        y = self.operator(dot, x, self.weight, self.state)
        return _with_bias(y, self.bias)


def is_model(model: Any) -> bool:
    return isinstance(model, eqx.Module)


def layers(model: eqx.Module) -> list[Layer]:
    """The layers of a model in the order of its fields."""
    return [_described(name, layer) for name, layer in _contractions(model).items()]


def replaced(
    model: eqx.Module,
    operators: Mapping[str, Operator],
    states: Mapping[str, State],
    weights: Mapping[str, jax.Array],
) -> eqx.Module:
    """The model with these operators and states by layer, and weights that take the place of wide ones."""

    def replace(path: Any, layer: Any) -> Any:
        name = _name(path, layer)
        if not _is_contraction(layer) or name not in operators or _described(name, layer).kind not in ("conv", "dot"):
            return layer
        new = (Fp8Conv if isinstance(layer, eqx.nn.Conv) else Fp8Linear)(layer, operators[name], states.get(name))
        return eqx.tree_at(lambda layer: layer.weight, new, weights[name]) if name in weights else new

    result: eqx.Module = jax.tree_util.tree_map_with_path(replace, model, is_leaf=_is_contraction)
    return result


def operators(model: eqx.Module) -> dict[str, Operator]:
    """The operators of a converted model, by layer."""
    return {name: layer.operator for name, layer in _contractions(model).items() if isinstance(layer, Fp8Layer)}


def states(model: eqx.Module) -> dict[str, State]:
    """What the operators of a converted model keep, by layer."""
    return {name: layer.state for name, layer in _contractions(model).items() if isinstance(layer, Fp8Layer)}


def weight(model: eqx.Module, name: str) -> jax.Array:
    """The weight of a layer."""
    found: jax.Array = _contractions(model)[name].weight
    return found


def read_elsewhere(model: eqx.Module) -> set[str]:
    """Layers whose weight an `eqx.nn.Shared` hands to another layer too."""
    nodes = jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, eqx.nn.Shared))
    read = {id(leaf) for node in nodes if isinstance(node, eqx.nn.Shared) for leaf in _shared(node)}
    return {name for name, layer in _contractions(model).items() if id(layer.weight) in read}


def results(model: eqx.Module, weights: Mapping[str, jax.Array], call: Any, *batch: Any) -> tuple[Any, list[Any]]:
    """What a call returns with these weights of layers; it leaves nothing in the model."""

    def own(model: eqx.Module) -> list[jax.Array]:
        return [weight(model, name) for name in weights]

    return call(eqx.tree_at(own, model, list(weights.values())), *batch), []


def shapes(model: eqx.Module, call: Any, *batch: Any) -> None:
    """Traces a call without running it."""
    eqx.filter_eval_shape(call, model, *batch)


_PLAIN = (eqx.nn.Conv, eqx.nn.Conv1d, eqx.nn.Conv2d, eqx.nn.Conv3d, eqx.nn.Linear, Fp8Conv, Fp8Linear)


def _shared(node: eqx.nn.Shared) -> list[jax.Array]:
    """The arrays that a `get` reads: it may transpose them, so that to look at its results would not do."""
    arrays, rest = eqx.partition(node.pytree, eqx.is_array)
    leaves, tree = jax.tree.flatten(arrays)

    def get(leaves: Sequence[jax.Array]) -> Any:
        return eqx.filter(node.get(eqx.combine(jax.tree.unflatten(tree, leaves), rest)), eqx.is_array)

    jaxpr = jax.make_jaxpr(get)(leaves).jaxpr
    read = [*jaxpr.outvars, *(atom for equation in jaxpr.eqns for atom in equation.invars)]
    return [leaf for leaf, variable in zip(leaves, jaxpr.invars, strict=True) if any(variable is atom for atom in read)]


def _is_contraction(node: Any) -> bool:
    return isinstance(node, (eqx.nn.Conv, eqx.nn.ConvTranspose, eqx.nn.Linear))


def _contractions(model: eqx.Module) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_contraction)
    return {_name(path, leaf): leaf for path, leaf in leaves if _is_contraction(leaf)}


def _name(path: Sequence[Any], layer: Any) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/") or type(layer).__name__


def _described(name: str, layer: Any) -> Layer:
    kind = "conv" if isinstance(layer, eqx.nn.Conv) else "dot"
    shape = jnp.shape(layer.weight)
    if isinstance(layer, eqx.nn.ConvTranspose):
        return Layer(name, "ConvTranspose", shape, obstacle="eqx.nn.ConvTranspose is not converted")
    if type(layer) not in _PLAIN:
        obstacle = f"{type(layer).__name__} is a subclass with a __call__ of its own"
        return Layer(name, type(layer).__name__, shape, obstacle=obstacle)
    obstacle = ""
    if "scalar" in (getattr(layer, "in_features", None), getattr(layer, "out_features", None)):
        obstacle = "it takes or makes a scalar"
    elif not eqx.is_array_like(layer.weight):
        obstacle = "its weight is that of another layer (eqx.nn.Shared)"
    elif len(shape) != (layer.num_spatial_dims if kind == "conv" else 0) + 2:
        obstacle = "its weight is stacked: layers that were made under a vmap stay wide"
    elif layer.weight.dtype not in WIDE_DTYPES and not isinstance(layer, Fp8Layer):
        obstacle = f"its weight is {layer.weight.dtype.name}"
    return Layer(name, kind, shape, obstacle=obstacle)


def _with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + bias
