"""Flax Linen: a module around the user's, whose layers get an operator when they are called.

Parameters keep their paths. What an operator keeps is in the collection "fp8", at the layer's own path.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import lax

from xla_fp8 import _jax_compat
from xla_fp8.models.contraction import Contraction, Kind, abstract
from xla_fp8.models.errors import MissingPackageError, ModelError
from xla_fp8.models.injection import Injected
from xla_fp8.models.operators import Infer, Operator, State, StaticScales, Watch, call_size, leaves_alone
from xla_fp8.models.plan import Fixed, Layer, Planner
from xla_fp8.quantization.delayed import DelayedScale, DelayedScaling
from xla_fp8.quantization.numerics import WIDE_DTYPES

try:
    import flax
    import flax.linen as nn
    from flax import serialization
except ImportError as error:
    raise MissingPackageError("flax") from error

# Reports then name the line of the user's that calls a layer, and not the line inside the layer.
_jax_compat.hide_from_sources(str(Path(flax.__file__).parent))

across_vmap = False
"""Modules of Linen take batches."""

is_traced = True
"""The layers of a module are known when it is called."""

COLLECTION = "fp8"
"""Where the state is, in the variables of a model."""


@dataclasses.dataclass(frozen=True)
class Held:
    """A module in a field of another one, of which Flax then makes no submodule with a name in front of its layers'."""

    module: nn.Module


class Fp8Module(nn.Module):
    """A Linen module whose layers are computed as a plan says.

    The plan is made anew each time that it is called, for the shapes at hand, which costs a second trace.

    Attributes:
        held: the user's module.
        planner: layers → operators.
    """

    held: Held
    planner: Planner

    def setup(self) -> None:
        model = self.held.module
        # Its parameters are where they would be without this module; where it is part of a model already, they are.
        self.bound = Held(model.clone(parent=self.scope) if model.scope is None else model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("__call__", *args, **kwargs)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Another method: `model.apply(variables, "encode", x, method="call")`."""
        if self.scope is None:
            raise ModelError("a Linen module is called by model.apply(variables, ...), this one too")
        is_fixed = isinstance(self.planner, Fixed)
        operators = self.planner([] if is_fixed else layers(self.held.module, method, *args, **kwargs))
        model: Any = self.bound.module
        key = tuple(operators.values())
        interceptor = _Interceptor(lambda _, name: operators.get(name), len(model.scope.path), key)
        with nn.intercept_methods(interceptor), _TRACED_FOR((key, model.scope.path)):
            return getattr(model, method)(*args, **kwargs)


def is_model(model: Any) -> bool:
    return isinstance(model, nn.Module)


def convert(model: nn.Module, planner: Planner) -> Fp8Module:
    """The model with the operators of a plan."""
    return Fp8Module(model.held if isinstance(model, Fp8Module) else Held(model), planner)


def replaced(
    model: nn.Module,
    operators: Mapping[str, Operator],
    states: Mapping[str, State],
    weights: Mapping[str, jax.Array],
    variables: Mapping[str, Any],
) -> tuple[Fp8Module, dict[str, Any]]:
    """The model with these operators, and its variables with their states and weights."""
    found: dict[str, Any] = jax.tree.map(lambda leaf: leaf, dict(variables))
    found = {**found, "params": _unfrozen(found["params"]), COLLECTION: {}}
    for name, state in states.items():
        path = _path(found["params"], name)
        _at(found["params"], path)["kernel"] = weights[name]
        _at(found[COLLECTION], path)[_STATE] = state
    return convert(model, Fixed(tuple(operators.values()))), found


def weight(variables: Mapping[str, Any], name: str) -> jax.Array:
    """The kernel of a layer."""
    params = _unfrozen(variables["params"])
    kernel: jax.Array = _at(params, _path(params, name))["kernel"]
    return kernel


def read_elsewhere(variables: Mapping[str, Any]) -> set[str]:
    """Layers whose weight something else reads too: variables do not say."""
    return set()


def _unfrozen(tree: Any) -> Any:
    """Nested mappings as dicts that may be changed."""
    return {key: _unfrozen(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


def _path(params: Mapping[str, Any], name: str) -> list[str]:
    """Where a layer's parameters are; the model itself may be the layer."""
    parts = name.split("/")
    return parts if parts[0] in params else []


def _at(tree: dict[str, Any], path: Sequence[str]) -> dict[str, Any]:
    """The dict at a path, made where there is none."""
    for part in path:
        tree = tree.setdefault(part, {})
    return tree


def layers(model: nn.Module, method: str, *args: Any, **kwargs: Any) -> list[Layer]:
    """The layers of a model that a call runs, in its order, without running them."""
    found: list[Layer] = []

    def record(name: str, contraction: Contraction, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        obstacle = "" if rhs.dtype in WIDE_DTYPES else f"its kernel is {rhs.dtype.name}"
        size = call_size(contraction, lhs, rhs)
        found.append(Layer(name, contraction.kind, rhs.shape, size, obstacle=obstacle, inside=inside.get(name, "")))
        return contraction.wide(lhs, rhs)

    inside: dict[str, str] = {}

    def watch(layer: nn.Module, name: str) -> Operator | None:
        obstacle = _obstacle(layer)
        if obstacle:
            found.append(Layer(name, type(layer).__name__, (), obstacle=obstacle))
            return None
        # Every collection can be written while variables are made, but those that a transformation does not hand on.
        if layer.scope is not None and not layer.scope.is_mutable_collection(COLLECTION):
            inside[name] = f"a transformation (nn.scan, nn.vmap) without the collection {COLLECTION!r}"
        return Watch(name, record)

    leaves, tree = jax.tree.flatten((args, kwargs))
    arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def run(values: Sequence[jax.Array]) -> Any:
        traced = list(leaves)
        for i, value in zip(arrays, values, strict=True):
            traced[i] = value
        args, kwargs = jax.tree.unflatten(tree, traced)
        key = object()
        with nn.intercept_methods(_Interceptor(watch, depth=0, key=key)), _TRACED_FOR((key, ())):
            bare = model.clone(parent=None, name=None)
            return bare.init_with_output(jax.random.key(0), *args, **kwargs, method=method)[0]

    jax.eval_shape(run, [abstract(leaves[i].shape, leaves[i].dtype) for i in arrays])
    return found


def _register_with_flax(state: type) -> None:
    """Lets `flax.serialization` write what a layer keeps, and read it back into a state of its kind."""
    names = [field.name for field in dataclasses.fields(state) if not field.metadata.get("static")]

    def to_dict(value: Any) -> dict[str, Any]:
        return {name: serialization.to_state_dict(getattr(value, name)) for name in names}

    def from_dict(value: Any, read: Mapping[str, Any]) -> Any:
        parts = {name: serialization.from_state_dict(getattr(value, name), read[name], name) for name in names}
        return dataclasses.replace(value, **parts)

    serialization.register_serialization_state(state, to_dict, from_dict, override=True)


for _kind in (DelayedScaling, DelayedScale, StaticScales):
    _register_with_flax(_kind)


_TRACED_FOR = jax.make_user_context()  # type: ignore[no-untyped-call]
"""Part of the key of jit's cache: nn.jit would call what it traced for other operators."""


class _Interceptor:
    """Calls each layer, as flax's interceptors do, with an operator in it.

    Args:
        operator_of: (layer, name) → its operator; None leaves the layer alone.
        depth: how much of a layer's path is that of the model.
        key: equal where the operators are.
    """

    def __init__(self, operator_of: Callable[[nn.Module, str], Operator | None], depth: int, key: Hashable) -> None:
        self.operator_of = operator_of
        self.depth = depth
        self.key = key

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        scope = context.module.scope
        with _TRACED_FOR((self.key, None if scope is None else scope.path)):
            return self._call(next_fun, args, kwargs, context)

    def _call(self, next_fun: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer: Any = context.module
        if context.method_name != "__call__" or not _is_wide_layer(layer):
            return next_fun(*args, **kwargs)
        operator = self.operator_of(layer, "/".join(layer.path[self.depth :]) or type(layer).__name__)
        # What stays wide may be computed by a function of the user's, or have no attribute for ours.
        if operator is None or leaves_alone(operator):
            return next_fun(*args, **kwargs)
        kind, attribute = _attribute(layer)
        injected = Injected(kind, operator)
        state = _state(layer.scope, operator)
        changes: dict[str, Any] = {attribute: injected if state is None else _WithState(injected, state)}
        if isinstance(operator, Infer):
            changes["promote_dtype"] = functools.partial(_keep_fp8, layer.promote_dtype)
        # On the same scope: the copy finds the layer's parameters.
        return layer.clone(parent=layer.scope, **changes)(*args, **kwargs)


_ATTRIBUTES: Mapping[type, tuple[Kind, str]] = {
    nn.Conv: ("conv", "conv_general_dilated"),
    nn.Dense: ("dot", "dot_general"),
    nn.DenseGeneral: ("dot", "dot_general"),
}
_OTHERS = (nn.ConvTranspose, nn.ConvLocal, nn.Einsum)


def _attribute(layer: nn.Module) -> tuple[Kind, str]:
    return next(found for cls, found in _ATTRIBUTES.items() if isinstance(layer, cls))


def _is_wide_layer(module: nn.Module) -> bool:
    """Whether a module is a layer that none of our operators computes yet."""
    if not isinstance(module, tuple(_ATTRIBUTES)):
        return isinstance(module, _OTHERS)
    return not isinstance(getattr(module, _attribute(module)[1]), (Injected, _WithState))


@dataclasses.dataclass(frozen=True, eq=False)
class _WithState:
    """An operator together with its state."""

    injected: Injected
    state: State

    def __call__(self, lhs: jax.Array, rhs: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return self.injected.with_state(self.state, lhs, rhs, *args, **kwargs)


def _state(scope: Any, operator: Operator) -> State:
    """What the layer keeps; made here where the variables are being made."""
    if not scope.has_variable(COLLECTION, _STATE):
        initial = operator.initial_state()
        if initial is None:
            return None
        if not scope.is_mutable_collection(COLLECTION):
            raise ModelError(
                f"{operator.name} has no state in the collection {COLLECTION!r} of the variables: make it with "
                f"model.init(...), and hand it to apply: {{'params': ..., {COLLECTION!r}: variables[{COLLECTION!r}]}}. "
                "Hand init arguments of the sizes that are trained with (jax.ShapeDtypeStruct, with model.lazy_init): "
                "a layer that is too small for FP8 there has no state"
            )
        scope.put_variable(COLLECTION, _STATE, initial)
    state: State = scope.get_variable(COLLECTION, _STATE)
    return state


_STATE = "state"


def _obstacle(layer: nn.Module) -> str:
    """Why a layer cannot be converted."""
    if isinstance(layer, _OTHERS):
        return f"nn.{type(layer).__name__} is not converted"
    attribute = _attribute(layer)[1]
    for name in (attribute, f"{attribute}_cls"):
        if getattr(layer, name) not in (None, lax.conv_general_dilated, lax.dot_general):
            return f"it has a {name} of its own"
    return "its kernel is masked" if getattr(layer, "mask", None) is not None else ""


def _keep_fp8(promote: Any, inputs: Any, kernel: Any, bias: Any, **options: Any) -> Any:
    """promote_dtype that leaves the kernel, which is FP8, as it is."""
    inputs, bias = promote(inputs, bias, **options)
    return inputs, kernel, bias
