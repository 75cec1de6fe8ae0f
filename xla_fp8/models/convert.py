"""convert: a model whose convolutions and dots are in FP8, where a recipe takes them."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from xla_fp8.models.contraction import Contraction
from xla_fp8.models.errors import ModelError, NothingConvertedWarning
from xla_fp8.models.framework import framework_of
from xla_fp8.models.functions import ConvertedFunction, StatefulFunction
from xla_fp8.models.operators import Infer, Operator, Watch, Wide, call_size
from xla_fp8.models.plan import Filter, Fixed, Layer, Plan, Planner, filter_of, not_run
from xla_fp8.models.recipe import Recipe

Call = Callable[..., Any]


def call_model(model: Any, *batch: Any) -> Any:
    """How a model is called where nobody says otherwise."""
    return model(*batch)


def call_with(variables: Mapping[str, Any] | None, framework: Any, call: Call | None, example: str) -> Call:
    """How a model is called, one of Linen with its variables.

    Args:
        call: as the user says.
        example: of how variables are handed over, for who left them out.

    Raises:
        ModelError: a Linen module without its variables.
    """
    if framework is not None and framework.is_traced and variables is None:
        raise ModelError(f"a Linen module does not hold its variables: {example}")
    if call is not None:
        return call
    return call_model if variables is None else functools.partial(_apply, variables)


def _apply(variables: Mapping[str, Any], model: Any, *batch: Any) -> Any:
    return model.apply(variables, *batch)


def arguments_of(batch: Any) -> tuple[Any, ...]:
    """A batch as arguments: a tuple is several."""
    return batch if isinstance(batch, tuple) else (batch,)


def convert(
    model: Any,
    recipe: Recipe | str = "dynamic",
    *,
    filter: Filter = None,
    example: Any = None,
    call: Call = call_model,
) -> Any:
    """The model, with its convolutions and dots in FP8 where the recipe and the filter take them.

    The model given stays as it is. What comes back, of

    - Flax NNX: a copy. Its layers keep their class and parameters; the state of delayed scaling is variables of type
      `xla_fp8.models.nnx.Fp8State`.
    - Flax Linen: a module around it, with the same parameters; the state is the collection "fp8".
    - Equinox: the module with `Fp8Conv` and `Fp8Linear` in it, whose field `state` holds the state.
    - a function of arrays: the function. With delayed scaling it takes and has its state: see `StatefulFunction`.

    Args:
        model: as above. One that was converted already is converted anew.
        recipe: a Recipe, or the scaling of one: "dynamic" or "delayed".
        filter: which layers, besides the recipe's rules: a function of an `xla_fp8.models.Layer`, or patterns of
            names, "decoder/*".
        example: arguments of a typical call, as a tuple if they are several; arrays or `jax.ShapeDtypeStruct`s. With
            it, layers are in the order in which they run, and their sizes known. NNX modules need it, because their
            attributes have no order that would last; Equinox modules have that of their fields. Linen modules and
            functions are traced whenever they are called.
        call: how the model is called on the example, where that is not model(*example):
            `lambda model, x: jax.vmap(model)(x)`.

    Raises:
        ModelError: a model of another kind, an NNX module without an example, or a static recipe, which needs
            `xla_fp8.calibrate`.
        MissingPackageError: a framework is not installed.

    Warns:
        NothingConvertedWarning: every layer stays wide, by rules that are known at this time.
    """
    recipe = Recipe.of(recipe)
    if recipe.scaling == "static":
        raise ModelError("static scales come from sample batches: xla_fp8.calibrate(model, batches) converts with them")
    framework = framework_of(model)
    if is_calibrated(model, framework):
        raise ModelError("the model was calibrated: its weights are FP8. Convert the one that it was made of")
    plan = Plan(recipe, filter_of(filter), framework is not None and framework.across_vmap)
    if framework is None or framework.is_traced:
        return planned(model, plan)
    if example is None and not framework.is_ordered and (recipe.keep_first or recipe.keep_last):
        raise ModelError(
            f"which layers of {type(model).__name__} are first and last shows when it runs: hand over arguments of "
            "a call as example=, or say Recipe(keep_first=0, keep_last=0) and leave them out with a filter"
        )
    order = None if example is None else traced_layers(model, call, *arguments_of(example))
    converted = planned(model, plan, order)
    _warn_of_nothing(framework.layers(converted), framework.operators(converted))
    return converted


def planned(model: Any, planner: Planner, order: Sequence[Layer] | None = None) -> Any:
    """A model of any kind with the operators of a plan.

    Args:
        order: the layers of an NNX or Equinox module, where more is known of them than it says by itself.
    """
    framework = framework_of(model)
    if framework is None:
        return _function(model, planner)
    if framework.is_traced:
        return framework.convert(model, planner)
    operators = planner(framework.layers(model) if order is None else order)
    states = {name: operator.initial_state() for name, operator in operators.items()}
    return framework.replaced(model, operators, states, {})


def watched(
    model: Any,
    watch: Callable[[str, Contraction, jax.Array, jax.Array], jax.Array],
    meet: Callable[[Sequence[Layer]], None] = lambda layers: None,
) -> Any:
    """A model of any kind whose contractions are computed by `watch`, as `xla_fp8.models.operators.Watch` has it.

    Args:
        meet: is told the layers, in front of each call of a Linen module or a function.
    """

    def planner(layers: Sequence[Layer]) -> dict[str, Operator]:
        meet(layers)
        return {layer.name: Watch(layer.name, watch) for layer in layers if not layer.obstacle}

    return planned(model, planner)


def with_operators(model: Any, operators: Sequence[Operator]) -> Any:
    """A model of any kind with these operators; layers without one are as they were."""
    return planned(model, Fixed(tuple(operators)))


def traced_layers(model: Any, call: Call, *batch: Any) -> list[Layer]:
    """The layers of an NNX or Equinox module: those that a call runs, in that order and with sizes; then all others."""
    framework = framework_of(model)
    assert framework is not None
    sizes: dict[str, Any] = {}

    def record(name: str, contraction: Contraction, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        size = call_size(contraction, lhs, rhs)
        if name not in sizes or size.flops > sizes[name].flops:
            sizes[name] = size
        return contraction.wide(lhs, rhs.astype(lhs.dtype))  # the weight of a calibrated model is FP8

    framework.shapes(watched(model, record), call, *batch)
    known = {layer.name: layer for layer in framework.layers(model)}
    ran = [dataclasses.replace(known[name], size=size) for name, size in sizes.items()]
    return [*ran, *not_run(known, sizes, "the example does not run it")]


def is_calibrated(model: Any, framework: Any) -> bool:
    """Whether `calibrate` made a model, as far as its operators are known before it is called."""
    if framework is not None and not framework.is_traced:
        operators: Iterable[Operator] = framework.operators(model).values()
    else:
        planner = getattr(model, "planner", None)
        operators = planner.operators if isinstance(planner, Fixed) else ()
    return any(isinstance(operator, Infer) for operator in operators)


def _function(model: Any, planner: Planner) -> ConvertedFunction | StatefulFunction:
    if isinstance(model, (ConvertedFunction, StatefulFunction)):
        model = model.function
    if isinstance(model, type):
        raise ModelError(f"{model.__name__} is a class: hand over a model that was made of it")
    if not callable(model):
        raise ModelError(
            f"{type(model).__name__} is no model: expected a module of flax.nnx, flax.linen or equinox, or a function "
            "of arrays"
        )
    if isinstance(planner, Plan) and planner.recipe.scaling == "delayed":
        return StatefulFunction(model, planner)
    return ConvertedFunction(model, planner)


def _warn_of_nothing(layers: Sequence[Layer], operators: Mapping[str, Operator]) -> None:
    if any(not isinstance(operator, Wide) for operator in operators.values()):
        return
    known = {layer.name: layer.obstacle for layer in layers}
    known |= {name: operator.reason for name, operator in operators.items() if isinstance(operator, Wide)}
    reasons = "; ".join(f"{name}: {reason}" for name, reason in known.items())
    warnings.warn(
        f"every layer stays wide. {reasons or 'The model has no convolution or linear layer.'}",
        NothingConvertedWarning,
        stacklevel=3,
    )
