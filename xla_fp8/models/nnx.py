"""Flax NNX: layers keep their class and parameters; their `conv_general_dilated` or `dot_general` becomes an operator.

Where the operator has a state, it stands there as a module with one variable of type `Fp8State`, so that `nnx.split`
and `nnx.state` tell it from parameters.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax import lax

from xla_fp8 import _jax_compat
from xla_fp8.models.contraction import Kind
from xla_fp8.models.errors import MissingPackageError
from xla_fp8.models.injection import Injected
from xla_fp8.models.operators import Operator, State
from xla_fp8.models.plan import Layer
from xla_fp8.quantization.numerics import WIDE_DTYPES

try:
    import flax
    from flax import nnx
except ImportError as error:
    raise MissingPackageError("flax") from error

# Reports then name the line of the user's that calls a layer, and not the line inside the layer.
_jax_compat.hide_from_sources(str(Path(flax.__file__).parent))

across_vmap = False
"""Modules of NNX take batches."""

is_traced = False
"""The layers of a module are there before it is called."""

is_ordered = False
"""`nnx.split` and `nnx.merge` sort attributes by name."""


class Fp8State(nnx.Variable):
    """What a layer keeps for FP8: an `xla_fp8.DelayedScaling`, or its fixed scales."""


class StatefulOperator(nnx.Module):
    """An operator with its state, in the place of `jax.lax.conv_general_dilated` or `jax.lax.dot_general`."""

    def __init__(self, injected: Injected, state: State) -> None:
        self.injected = injected
        self.state = Fp8State(state)

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return self.injected.with_state(self.state.get_value(), lhs, rhs, *args, **kwargs)


def is_model(model: Any) -> bool:
    return isinstance(model, nnx.Module)


def layers(model: nnx.Module) -> list[Layer]:
    """The layers of a model, in no order that would mean something."""
    return [_described(name, layer) for name, layer in _contractions(model)]


def replaced(
    model: nnx.Module,
    operators: Mapping[str, Operator],
    states: Mapping[str, State],
    weights: Mapping[str, jax.Array],
) -> nnx.Module:
    """A copy of a model with these operators and states by layer, and weights that take the place of wide ones."""
    copy = nnx.clone(model)
    for name, layer in _contractions(copy):
        # What cannot be converted stays as it is: it may be computed by a function of the user's.
        if name not in operators or _described(name, layer).obstacle:
            continue
        injected = Injected(_kind(layer), operators[name])
        state = states.get(name)
        # What NNX takes for static and what for data does not change by itself.
        value = nnx.static(injected) if state is None else nnx.data(StatefulOperator(injected, state))
        setattr(layer, _attribute(layer), value)
        if name in weights:
            layer.kernel.set_value(weights[name])
            layer.promote_dtype = _KeepFp8(layer.promote_dtype)
    return copy


def operators(model: nnx.Module) -> dict[str, Operator]:
    """The operators of a converted model, by layer."""
    found = {name: _injected(layer) for name, layer in _contractions(model)}
    return {name: injected.operator for name, injected in found.items() if injected is not None}


def states(model: nnx.Module) -> dict[str, State]:
    """What the operators of a converted model keep, by layer."""
    found = {name: getattr(layer, _attribute(layer) or "", None) for name, layer in _contractions(model)}
    return {name: own.state.get_value() for name, own in found.items() if isinstance(own, StatefulOperator)}


def weight(model: nnx.Module, name: str) -> jax.Array:
    """The weight of a layer."""
    kernel: jax.Array = dict(_contractions(model))[name].kernel.get_value()
    return kernel


def read_elsewhere(model: nnx.Module) -> set[str]:
    """Layers whose weight another node holds too: a head that is tied to an embedding."""
    held = [value for _, node in _nodes(model) for _, value in _children(node) if isinstance(value, nnx.Variable)]
    holders = collections.Counter(map(id, held))
    return {name for name, layer in _contractions(model) if holders[id(layer.kernel)] > 1}


def results(model: nnx.Module, weights: Mapping[str, jax.Array], call: Any, *batch: Any) -> tuple[Any, list[Any]]:
    """What a call returns with these weights of layers, and what it leaves in all other variables of a copy."""
    copy = nnx.clone(model)
    kernels = {name: layer.kernel for name, layer in _contractions(copy) if name in weights}
    for name, kernel in kernels.items():
        kernel.set_value(weights[name])
    returned = call(copy, *batch)
    own = {id(kernel) for kernel in kernels.values()}
    left = [node for _, node in _nodes(copy) if isinstance(node, nnx.Variable) and id(node) not in own]
    return returned, [variable.get_value() for variable in left]


def shapes(model: nnx.Module, call: Any, *batch: Any) -> None:
    """Traces a call without running it; the model stays as it is."""
    graph, state = nnx.split(model)
    jax.eval_shape(lambda state, batch: call(nnx.merge(graph, state), *batch), state, batch)


_ATTRIBUTES: Mapping[type, tuple[Kind, str]] = {
    nnx.Conv: ("conv", "conv_general_dilated"),
    nnx.Linear: ("dot", "dot_general"),
    nnx.LinearGeneral: ("dot", "dot_general"),
}
_OTHERS = (nnx.ConvTranspose, nnx.Einsum)


def _kind(layer: nnx.Module) -> Kind:
    return next(kind for cls, (kind, _) in _ATTRIBUTES.items() if isinstance(layer, cls))


def _attribute(layer: nnx.Module) -> Any:
    """The name of the attribute that computes; None for a layer without one."""
    return next((name for cls, (_, name) in _ATTRIBUTES.items() if isinstance(layer, cls)), None)


def _injected(layer: nnx.Module) -> Injected | None:
    found = getattr(layer, _attribute(layer), None) if _attribute(layer) else None
    if isinstance(found, StatefulOperator):
        return found.injected
    return found if isinstance(found, Injected) else None


def _described(name: str, layer: nnx.Module) -> Layer:
    kernel = layer.kernel.get_value()
    attribute = _attribute(layer)
    if attribute is None:
        return Layer(name, type(layer).__name__, kernel.shape, obstacle=f"nnx.{type(layer).__name__} is not converted")
    obstacle = ""
    own = getattr(layer, attribute)
    if _injected(layer) is None and own not in (None, lax.conv_general_dilated, lax.dot_general):
        obstacle = f"it has a {attribute} of its own"
    elif getattr(layer, "dot_general_cls", None) is not None:
        obstacle = "it has a dot_general_cls of its own"
    elif getattr(layer, "mask", None) is not None:
        obstacle = "its kernel is masked"
    elif kernel.ndim != _rank(layer):
        obstacle = f"its kernel has {kernel.ndim - _rank(layer)} dimensions more: layers that are stacked stay wide"
    elif kernel.dtype not in WIDE_DTYPES and _injected(layer) is None:
        obstacle = f"its kernel is {kernel.dtype.name}"
    return Layer(name, _kind(layer), kernel.shape, obstacle=obstacle)


def _rank(layer: nnx.Module) -> int:
    """Dimensions of a kernel that is not stacked."""
    if isinstance(layer, nnx.Conv):
        return len(layer.kernel_size) + 2
    if isinstance(layer, nnx.LinearGeneral):
        return len(layer.batch_axis) + len(layer.in_features) + len(layer.out_features)
    return 2


def _contractions(model: nnx.Module) -> Iterator[tuple[str, Any]]:
    """The layers below a module, each once."""
    for path, node in _nodes(model):
        if isinstance(node, (*_ATTRIBUTES, *_OTHERS)):
            yield "/".join(path) or type(node).__name__, node


def _nodes(model: nnx.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A module and what it is made of down to its layers and variables, each once, with its path."""
    seen: set[int] = set()

    def walk(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if id(node) in seen:
            return
        seen.add(id(node))
        yield path, node
        for key, value in _children(node):
            yield from walk(value, (*path, key))

    yield from walk(model, ())


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """The attributes or items of a node."""
    if isinstance(node, nnx.Variable):
        return
    if isinstance(node, nnx.Pytree):
        yield from vars(node).items()
    elif isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, (list, tuple)):
        yield from ((str(index), value) for index, value in enumerate(node))


class _KeepFp8:
    """A layer's promote_dtype that leaves an FP8 kernel as it is. Equal where what it wraps is."""

    def __init__(self, promote: Any) -> None:
        self.promote = promote

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _KeepFp8) and self.promote == other.promote

    def __hash__(self) -> int:
        return hash((_KeepFp8, self.promote))

    def __call__(self, values: Any, *, dtype: Any = None, **options: Any) -> Any:
        inputs, kernel, bias = values
        inputs, bias = self.promote((inputs, bias), dtype=dtype, **options)
        return inputs, kernel, bias
