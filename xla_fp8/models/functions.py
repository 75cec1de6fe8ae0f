"""Plain functions: traced at each call, and evaluated equation by equation with an operator at each contraction."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax

from xla_fp8 import _jax_compat
from xla_fp8.models.contraction import Contraction, Kind
from xla_fp8.models.errors import ModelError
from xla_fp8.models.injection import contraction_of
from xla_fp8.models.operators import Operator, State, Wide, leaves_alone, why_small
from xla_fp8.models.plan import Layer, Plan, Planner
from xla_fp8.quantization.delayed import DelayedScaling
from xla_fp8.quantization.numerics import WIDE_DTYPES
from xla_fp8.tracing.equations import BODIES, CALLS, CONTRACTIONS, DERIVATIVE_RULES, bodies, is_literal

Jaxpr = Any
Equation = Any
Path = tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ConvertedFunction:
    """A function whose convolutions and dots are computed as a plan says. It composes with JAX's transformations.

    Layers are the conv_general_dilated and dot_general that tracing shows, named by their scopes (`jax.named_scope`)
    and primitive, numbered where names repeat. The second operand counts as the weight. What a function does in scan,
    while, cond and checkpoint is converted too; what has a derivative rule of its own around it stays.

    Attributes:
        function: the user's.
        planner: layers → operators.
        states: what operators need that is fixed, by layer.
        calibrated: the layers that ran when `states` were made → whether in every call; None where none were.
    """

    function: Callable[..., Any]
    planner: Planner
    states: Mapping[str, State] = dataclasses.field(default_factory=dict)
    calibrated: Mapping[str, bool] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result.

        Raises:
            ModelError: layers that are numbered are more, or fewer, than with the batches of `calibrate`.
        """
        traced = _Traced.of(self.function, args, kwargs)
        layers = list(traced.sites.values())
        if self.calibrated is not None:
            _refuse(
                _gone([name for name, always in self.calibrated.items() if always], layers),
                _new(self.calibrated, layers),
                "calibrate the function with batches and arguments of this call",
            )
        return traced.run(self.planner(layers), self.states)

    def layers(self, *args: Any, **kwargs: Any) -> list[Layer]:
        """The layers of a call, in its order."""
        return list(_Traced.of(self.function, args, kwargs).sites.values())


@dataclasses.dataclass(frozen=True, eq=False)
class StatefulFunction:
    """A function with delayed scaling: its state comes first.

    state = converted.init(x, w)
    y = converted(state, x, w)
    observed = jax.grad(loss)(state, ...)          the "gradient" of the state
    state = xla_fp8.update_scaling(state, observed)
    """

    function: Callable[..., Any]
    planner: Plan

    def init(self, *args: Any, **kwargs: Any) -> dict[str, State]:
        """The state before the first step, by layer; args may be `jax.ShapeDtypeStruct`s."""
        operators = self.planner(self.layers(*args, **kwargs))
        states = {name: operator.initial_state() for name, operator in operators.items()}
        return {name: state for name, state in states.items() if state is not None}

    def __call__(self, state: Mapping[str, State], *args: Any, **kwargs: Any) -> Any:
        """The function's result.

        Raises:
            ModelError: the first argument is no state, or one of a call with other layers.
        """
        if not isinstance(state, Mapping) or not all(isinstance(each, DelayedScaling) for each in state.values()):
            raise ModelError(
                "a function with delayed scaling takes its state first: state = converted.init(x, w), then "
                f"converted(state, x, w). The first argument is {type(state).__name__} without that"
            )
        traced = _Traced.of(self.function, args, kwargs)
        layers = list(traced.sites.values())
        operators = self.planner(layers)
        gone = _gone(state, layers) or self._left_out(state, layers, operators)
        _refuse(gone, [], "make a state with init for arguments of this call")
        return traced.run(operators, state)

    def _left_out(
        self, state: Mapping[str, State], layers: Sequence[Layer], operators: Mapping[str, Operator]
    ) -> list[str]:
        """Layers with a state that this call leaves wide by their place, as the last one for instance.

        A layer that is too small in this call, the rest of the data, may well have its state.
        """
        labels = [_label(layer.name) for layer in layers]
        return [
            layer.name
            for layer in layers
            if layer.name in state
            and isinstance(operators[layer.name], Wide)
            and labels.count(_label(layer.name)) > 1
            and not layer.obstacle
            and self.planner.accepts(layer)
            and not (layer.size and why_small(self.planner.recipe, layer.size))
        ]

    def layers(self, *args: Any, **kwargs: Any) -> list[Layer]:
        """The layers of a call, in its order."""
        return ConvertedFunction(self.function, self.planner).layers(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function's jaxpr for arguments at hand, with its contractions by their places."""

    jaxpr: Jaxpr
    arguments: Sequence[Any]
    result: Any
    sites: Mapping[Path, Layer]

    @staticmethod
    def of(function: Callable[..., Any], args: Any, kwargs: Any) -> _Traced:
        leaves, tree = jax.tree.flatten((args, kwargs))
        is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
        arrays = [leaf for leaf, traced in zip(leaves, is_array, strict=True) if traced]

        def run(*values: Any) -> Any:
            remaining = iter(values)
            merged = [next(remaining) if traced else leaf for leaf, traced in zip(leaves, is_array, strict=True)]
            args, kwargs = jax.tree.unflatten(tree, merged)
            return function(*args, **kwargs)

        jaxpr, shape = jax.make_jaxpr(functools.wraps(function)(run), return_shape=True)(*arrays)
        return _Traced(jaxpr, arrays, jax.tree.structure(shape), dict(_sites(jaxpr)))

    def run(self, operators: Mapping[str, Operator], states: Mapping[str, State]) -> Any:
        at = {
            path: (operators[layer.name], states.get(layer.name))
            for path, layer in self.sites.items()
            if layer.name in operators and not leaves_alone(operators[layer.name])
        }
        results = _Evaluation(at).of(self.jaxpr, self.arguments, ())
        return jax.tree.unflatten(self.result, results)


def _label(name: str) -> str:
    """The scopes and primitive in a layer's name, without its number."""
    return re.sub(r"_\d+$", "", name)


def _gone(known: Collection[str], layers: Sequence[Layer]) -> list[str]:
    """Names that have scales and that no layer has, though others of their label have numbers: which, nobody knows.

    A label that is gone as a whole takes no scales from others: a part of the function does not run.
    """
    names = {layer.name for layer in layers}
    labels = {_label(name) for name in names}
    return sorted(name for name in known if name not in names and _label(name) in labels)


def _new(known: Collection[str], layers: Sequence[Layer]) -> list[str]:
    """Layers that might have scales and have none, though others of their label do."""
    labels = {_label(name) for name in known}
    return [
        layer.name
        for layer in layers
        if layer.name not in known and not layer.obstacle and _label(layer.name) in labels
    ]


def _refuse(gone: Sequence[str], new: Sequence[str], remedy: str) -> None:
    if not gone and not new:
        return
    differences = [f"{', '.join(gone)} with scales that this call does not use"] if gone else []
    differences += [f"{', '.join(new)} without scales"] if new else []
    raise ModelError(
        f"the layers of this call are not those that the scales were made for: there is {' and '.join(differences)}. "
        "Layers of one name are numbered in the order of the call, so that some would take the scales of others: "
        f"{remedy}, or tell the layers that not every call has from the others with jax.named_scope"
    )


def _sites(jaxpr: Jaxpr) -> Iterator[tuple[Path, Layer]]:
    seen: dict[str, int] = {}

    def walk(jaxpr: Jaxpr, path: Path, scope: str, inside: str, obstacle: str) -> Iterator[tuple[Path, Layer]]:
        for index, equation in enumerate(_jax_compat.open_jaxpr(jaxpr).eqns):
            name = equation.primitive.name
            here = "/".join(part for part in (scope, str(equation.source_info.name_stack)) if part)
            if name in CONTRACTIONS:
                label = f"{here}/{name}" if here else name
                seen[label] = seen.get(label, -1) + 1
                unique = f"{label}_{seen[label]}" if seen[label] else label
                yield (*path, index), _layer(equation, unique, obstacle, inside)
                continue
            for number, body in enumerate(bodies(equation)):
                yield from walk(
                    body,
                    (*path, index, number),
                    here,
                    inside or ("" if _is_inlined(equation) else name),
                    obstacle or _KEPT.get(name, ""),
                )

    yield from walk(jaxpr, (), "", "", "")


_KEPT = {name: f"it stands in a function with a derivative rule of its own ({name})" for name in DERIVATIVE_RULES} | {
    "custom_vmap_call": "it stands in a function with a batching rule of its own (custom_vmap_call)",
    "shard_map": "it stands in a shard_map, whose shards would be scaled apart: convert the function inside",
}
"""Equations whose bodies stay as they are → why: rules of the user's would no longer fit them."""


def _is_inlined(equation: Equation) -> bool:
    name = equation.primitive.name
    return name in CALLS and (name != "jit" or _jax_compat.is_plain_jit(equation))


def _layer(equation: Equation, name: str, obstacle: str, inside: str) -> Layer:
    lhs, rhs = (atom.aval for atom in equation.invars)
    contraction = _contraction(equation)
    for dtype in (lhs.dtype, rhs.dtype):
        if dtype not in WIDE_DTYPES:
            obstacle = obstacle or f"its operands are {dtype.name}"
    size = contraction.size(lhs, rhs)
    source = _jax_compat.equation_source(equation) or ""
    return Layer(name, contraction.kind, rhs.shape, size, source, obstacle, inside)


def _contraction(equation: Equation) -> Contraction:
    lhs, rhs = (atom.aval for atom in equation.invars)
    kind: Kind = "conv" if equation.primitive.name == "conv_general_dilated" else "dot"
    parameters = {name: value for name, value in equation.params.items() if name in _PARAMETERS[kind]}
    return contraction_of(kind, lhs, rhs, **parameters)


_SHARED = frozenset({"dimension_numbers", "precision", "preferred_element_type", "out_sharding"})
_PARAMETERS: Mapping[Kind, frozenset[str]] = {
    "dot": _SHARED,
    "conv": _SHARED
    | {"window_strides", "padding", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count"},
}
"""What an equation has of the arguments of `jax.lax`."""


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs with operators at some of their contractions."""

    at: Mapping[Path, tuple[Operator, State]]

    def of(self, jaxpr: Jaxpr, arguments: Sequence[Any], path: Path, call: Equation | None = None) -> list[Any]:
        """The results of a jaxpr that stands at `path`, as the body of `call` where it is one."""
        inner = _jax_compat.open_jaxpr(jaxpr)
        values: dict[Any, Any] = dict(zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=True))
        values.update(zip(inner.invars, arguments, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if is_literal(atom) else values[atom]

        for index, equation in enumerate(inner.eqns):
            if call is not None:
                equation = equation.replace(source_info=_jax_compat.equation_source_info(equation, within=call))
            results = self._results(equation, [read(atom) for atom in equation.invars], (*path, index))
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in inner.outvars]

    def _results(self, equation: Equation, operands: list[Any], path: Path) -> list[Any]:
        if path in self.at:
            operator, state = self.at[path]
            lhs, rhs = operands
            with _jax_compat.context_of(equation):
                y = operator(_contraction(equation), lhs, rhs, state)
            return [y.astype(equation.outvars[0].aval.dtype)]
        if not any(place[: len(path)] == path for place in self.at):
            return _jax_compat.bind_equation(equation, operands)
        if _is_inlined(equation):
            (body,) = bodies(equation)
            return self.of(body, operands, (*path, 0), equation)
        numbers = iter(range(len(list(bodies(equation)))))
        parameters = {
            name: self._converted(equation.params[name], path, numbers)
            for name in BODIES[equation.primitive.name]
            if equation.params[name] is not None
        }
        return _jax_compat.bind_equation(equation.replace(params=equation.params | parameters), operands)

    def _converted(self, body: Any, path: Path, numbers: Iterator[int]) -> Any:
        """A body, or a tuple of bodies, with operators in it; of the same signature."""
        if isinstance(body, (tuple, list)):
            return type(body)(self._converted(one, path, numbers) for one in body)
        here = (*path, next(numbers))
        # As they are: with sharding, the mesh axes over which they vary, and those of references.
        avals = [variable.aval for variable in _jax_compat.open_jaxpr(body).invars]
        made = _jax_compat.trace(lambda *values: self.of(body, values, here), avals, "converted")
        return _jax_compat.like_jaxpr(made, body)
