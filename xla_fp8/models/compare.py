"""compare: what FP8 costs each layer of a model in accuracy, so that a user finds the layer to leave out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from xla_fp8.functions import saturating_cast
from xla_fp8.models.calibrate import Seen, seen_by_layers
from xla_fp8.models.comparison import Comparison, LayerError, TensorError
from xla_fp8.models.contraction import Contraction
from xla_fp8.models.convert import Call, arguments_of, call_with, is_calibrated, with_operators
from xla_fp8.models.errors import ModelError
from xla_fp8.models.framework import framework_of
from xla_fp8.models.functions import ConvertedFunction, StatefulFunction
from xla_fp8.models.operators import (
    Infer,
    Operator,
    State,
    StaticScales,
    Train,
    Wide,
    channel_factors,
    quantized_weight,
    why_small,
)
from xla_fp8.models.plan import Filter, Layer, Plan, filter_of, not_run
from xla_fp8.models.recipe import Recipe
from xla_fp8.quantization.delayed import DelayedScale, DelayedScaling
from xla_fp8.quantization.numerics import ScaleRule, amax_of, with_margin
from xla_fp8.quantization.training import amax_of_all_examples


def compare(
    model: Any,
    batch: Any,
    recipe: Recipe | str | None = None,
    *,
    filter: Filter = None,
    call: Call | None = None,
    variables: Mapping[str, Any] | None = None,
    state: Mapping[str, State] | None = None,
    calibration: Iterable[Any] | None = None,
    loss: Callable[[Any], jax.Array] | None = None,
) -> Comparison:
    """Runs a model wide, and beside each of its layers the same layer in FP8, on the same operands.

    The model may be converted or not. Layers that a recipe keeps wide are computed in FP8 too, and said to be kept. The
    model then runs once more, with the layers in FP8 that the recipe takes, for the error of its output.

    Args:
        model: an NNX, Linen or Equinox module, or a function of arrays. It stays as it is.
        batch: arguments of a call; a tuple where they are several.
        recipe: how a layer would be in FP8; that of the model if None, "dynamic" for one that is not converted.
        filter: with a recipe, as `xla_fp8.convert` has it.
        call: (model, *batch) → output, which may be jitted; model(*batch) if None, of a Linen module
            model.apply(variables, *batch).
        variables: of a Linen module, with the collection "fp8" where it has delayed scaling.
        state: of a function with delayed scaling.
        calibration: batches from which static scales come, and delayed ones where the model has no state yet; the batch
            itself if None, in which then nothing saturates.
        loss: output → a number. With it, the gradients of the layers' outputs are looked at too, as FP8 training
            quantizes them.

    Raises:
        ModelError: a calibrated module, whose weights are FP8 already; a Linen module without variables; no layer that
            could be in FP8.
    """
    subject = _Subject.of(model, call, variables, state)
    seen = seen_by_layers(subject.model, [batch] if calibration is None else calibration, subject.call)
    if not seen:
        raise ModelError("the call runs no convolution and no dot that could be in FP8")
    plan, recipe = subject.plan(seen, recipe, filter)
    kept = {name: _why_wide(plan.get(name), each.layer) for name, each in seen.items()}
    if loss is not None and recipe.scaling == "static":
        raise ModelError("loss= is about gradients, and a model with static scales is not trained: leave it out")
    in_fp8 = {name: _InFp8(_operator(plan.get(name), name, recipe), each.lhs) for name, each in seen.items()}
    sums = {name: np.zeros(_FORWARD + _BACKWARD) for name in seen}
    arguments = arguments_of(batch)

    leaves, tree = jax.tree.flatten(arguments)
    is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.floating) for leaf in leaves]

    def measured(zero: ArrayLike, floats: Sequence[jax.Array]) -> tuple[Any, Any]:
        remaining = iter(floats)
        batch = jax.tree.unflatten(tree, [next(remaining) if f else x for x, f in zip(leaves, is_float, strict=True)])
        compared = [_Compared(operator, _Sums(sums[name]), zero) for name, operator in in_fp8.items()]
        output = subject.run(compared, batch)
        return output if loss is None else loss(output), output

    if loss is not None:
        # A module's weights are not at hand. A function's are arguments, and its loops take nothing else.
        measured = jax.grad(measured, argnums=1 if subject.framework is None else 0, has_aux=True)
    # NumPy's zero is a literal: the bodies of some equations (checkpoint) may have no constants.
    _, wide = measured(np.float32(0), [leaf for leaf, f in zip(leaves, is_float, strict=True) if f])
    narrow = subject.run([operator for name, operator in in_fp8.items() if not kept[name]], arguments)
    jax.effects_barrier()  # type: ignore[no-untyped-call]
    layers = tuple(_layer_error(each.layer, sums[name], kept[name], loss is not None) for name, each in seen.items())
    return Comparison(layers, _output_snr(wide, narrow), str(recipe))


@dataclasses.dataclass(frozen=True)
class _Subject:
    """A model to be run with operators of ours, whatever it is made of.

    Attributes:
        framework: as of `framework_of`.
        model: without the state that a function takes first.
        states: of a function's layers, which it does not hold.
    """

    framework: Any
    model: Any
    call: Call
    states: Mapping[str, State]

    @staticmethod
    def of(
        model: Any, call: Call | None, variables: Mapping[str, Any] | None, state: Mapping[str, State] | None
    ) -> _Subject:
        framework = framework_of(model)
        call = call_with(variables, framework, call, "compare(model, batch, variables=variables)")
        # A function's weights are its arguments, so they are wide.
        if framework is not None and is_calibrated(model, framework):
            raise ModelError(
                "the model was calibrated: its weights are FP8 already, and there is nothing to compare with. Hand "
                "over the one that it was made of: compare(model, batch, 'static', calibration=batches)"
            )
        states = dict(state or {})
        if isinstance(model, StatefulFunction):
            model = ConvertedFunction(model.function, model.planner)
        elif isinstance(model, ConvertedFunction):
            states = dict(model.states)
        return _Subject(framework, model, call, states)

    def plan(
        self, seen: Mapping[str, Seen], recipe: Recipe | str | None, filter: Filter
    ) -> tuple[Mapping[str, Operator], Recipe]:
        """The operator of each layer that was seen, the model's own where there is no recipe; and the recipe."""
        holds_layers = self.framework is not None and not self.framework.is_traced
        known = {layer.name: layer for layer in self.framework.layers(self.model)} if holds_layers else {}
        layers = [each.of(known.get(name)) for name, each in seen.items()]
        own: Mapping[str, Operator] = {}
        if holds_layers:
            own = self.framework.operators(self.model)
        elif (planner := getattr(self.model, "planner", None)) is not None:
            own = planner(layers)
        if own and recipe is None:
            found = (operator.recipe for operator in own.values() if isinstance(operator, (Train, Infer)))
            return own, next(found, Recipe())
        recipe = Recipe.of(recipe or "dynamic")
        across_vmap = self.framework is not None and self.framework.across_vmap
        rest = not_run(known, seen, "the batch does not run it")
        return Plan(recipe, filter_of(filter), across_vmap)([*layers, *rest]), recipe

    def run(self, operators: Sequence[Operator], batch: tuple[Any, ...]) -> Any:
        """The output with these operators, and the states that the model has; other layers are wide."""
        if self.framework is None:
            model = dataclasses.replace(with_operators(self.model, operators), states=self.states)
        elif self.framework.is_traced:
            model = with_operators(self.model, operators)
        else:
            # The model's own operators go, so that what has none of these is wide.
            every: dict[str, Operator] = {
                layer.name: Wide(layer.name, "") for layer in self.framework.layers(self.model)
            }
            every |= {operator.name: operator for operator in operators}
            model = self.framework.replaced(self.model, every, self.framework.states(self.model), {})
        return self.call(model, *batch)


def _why_wide(operator: Operator | None, layer: Layer) -> str:
    if isinstance(operator, Wide):
        return operator.reason
    if isinstance(operator, Train) and not operator.by_hand and layer.size is not None:
        return why_small(operator.recipe, layer.size)
    return "" if operator is not None else "it has no operator"


def _operator(operator: Operator | None, name: str, recipe: Recipe) -> Train | Infer:
    """What computes a layer in FP8, also where the plan keeps it wide."""
    if recipe.scaling == "static":
        return Infer(name, recipe)
    across_vmap = isinstance(operator, Train) and operator.across_vmap
    return Train(name, recipe, across_vmap, by_hand=True)


@dataclasses.dataclass(frozen=True)
class _InFp8:
    """A layer in FP8, with scales of its own where the model has no state for it.

    Attributes:
        amax: of its inputs so far, for these scales.
    """

    operator: Train | Infer
    amax: float

    @property
    def name(self) -> str:
        return self.operator.name

    def initial_state(self) -> State:
        return None

    def __call__(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, state: State = None) -> jax.Array:
        def computed(lhs: jax.Array, rhs: jax.Array, state: State) -> jax.Array:
            return self.operator(contraction, lhs, rhs, self.state(contraction, rhs, state))

        y: jax.Array = jax.jit(computed)(lhs, rhs, state)
        return y

    def state(self, contraction: Contraction, rhs: jax.Array, given: State) -> State:
        """What the operator needs: the state given, or one that was made for what was seen."""
        recipe = self.operator.recipe
        if given is not None or recipe.scaling == "dynamic":
            return given
        amax = jnp.float32(self.amax)
        if recipe.scaling == "static":
            room = with_margin(amax, recipe.margin)
            _, scale = ScaleRule(jnp.dtype(recipe.dtype), recipe.power_of_two).of_amax(room)
            return StaticScales(scale, quantized_weight(rhs, contraction, recipe).scale)
        make = functools.partial(DelayedScale.create, margin=recipe.margin, power_of_two=recipe.power_of_two)
        weight = amax_of(rhs / self.factors(contraction, rhs))
        return DelayedScaling(
            make(recipe.dtype, amax=amax), make(recipe.dtype, amax=weight), make(recipe.gradient_dtype)
        )

    def factors(self, contraction: Contraction, rhs: jax.Array) -> Any:
        """What the weight is divided by in front of its quantization, beside its scale."""
        is_divided = isinstance(self.operator, Train) and self.operator.recipe.weights == "channel"
        return channel_factors(contraction, rhs) if is_divided else 1

    def shares(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, given: State) -> Sequence[jax.Array]:
        """The counts of `_counts` of the input, then of the weight."""
        recipe, state = self.operator.recipe, self.state(contraction, rhs, given)
        rhs = rhs / self.factors(contraction, rhs)
        if isinstance(state, DelayedScaling):
            scales: tuple[Any, Any] = state.lhs.scale, state.rhs.scale
        elif isinstance(state, StaticScales):
            scales = state.lhs, state.rhs
        else:
            amax = _amax(self.operator)
            rule = ScaleRule(jnp.dtype(recipe.dtype), recipe.power_of_two)
            scales = rule.of_amax(amax(lhs))[1], rule.of_amax(amax(rhs))[1]
        return [*_counts(lhs, scales[0], recipe.dtype), *_counts(rhs, scales[1], recipe.dtype)]


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Adds what callbacks bring to the sums of a layer: `_FORWARD` of its call, then `_BACKWARD` of its gradient."""

    sums: Any

    def forward(self, found: Any) -> None:
        self.sums[:_FORWARD] += np.asarray(found, np.float64)

    def backward(self, found: Any) -> None:
        self.sums[_FORWARD:] += np.asarray(found, np.float64)


_FORWARD, _BACKWARD = 2 + 2 * 4, 4


@dataclasses.dataclass(frozen=True, eq=False)
class _Compared:
    """A layer as the wide model has it, which notes how far it is from the same in FP8.

    Attributes:
        zero: whoever differentiates with respect to it has the gradient of the output noted too.
    """

    in_fp8: _InFp8
    note: _Sums
    zero: ArrayLike

    @property
    def name(self) -> str:
        return self.in_fp8.name

    def initial_state(self) -> State:
        return None

    def __call__(self, contraction: Contraction, lhs: jax.Array, rhs: jax.Array, state: State = None) -> jax.Array:
        def compared(lhs: jax.Array, rhs: jax.Array, state: State) -> jax.Array:
            wide = contraction.wide(lhs, rhs).astype(jnp.float32)
            narrow = self.in_fp8(contraction, lhs, rhs, state).astype(jnp.float32)
            found = [jnp.sum(wide**2), jnp.sum((narrow - wide) ** 2), *self.in_fp8.shares(contraction, lhs, rhs, state)]
            return jnp.stack([jnp.float32(value) for value in found])

        # jit, because a model that is called as it stands would compile each of these operations.
        found: jax.Array = jax.jit(compared)(*jax.lax.stop_gradient((lhs, rhs, state)))
        # A callback, because what a transformation inside the model traces could not leave it otherwise.
        jax.debug.callback(self.note.forward, found)
        scale = state.gradient.scale if isinstance(state, DelayedScaling) else None
        return _noted(self, contraction.wide(lhs, rhs), self.zero, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _noted(layer: _Compared, y: jax.Array, zero: ArrayLike, scale: jax.Array | None) -> jax.Array:
    """y, whose gradient is noted on its way back; with a scale of its own where scaling is delayed."""
    return y


def _noted_forward(
    layer: _Compared, y: jax.Array, zero: ArrayLike, scale: jax.Array | None
) -> tuple[jax.Array, tuple[ArrayLike, jax.Array | None]]:
    return y, (zero, scale)


def _noted_backward(
    layer: _Compared, residuals: tuple[ArrayLike, jax.Array | None], g: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    zero, scale = residuals
    operator, recipe = layer.in_fp8.operator, layer.in_fp8.operator.recipe
    if scale is None:
        _, used = ScaleRule(jnp.dtype(recipe.gradient_dtype), recipe.power_of_two).of_amax(_amax(operator)(g))
    else:
        used = scale
    counts = _counts(g, used, recipe.gradient_dtype)
    jax.debug.callback(layer.note.backward, jnp.stack([jnp.float32(value) for value in counts]))
    return g, jnp.zeros_like(zero), None if scale is None else jnp.zeros_like(scale)


_noted.defvjp(_noted_forward, _noted_backward)


def _amax(operator: Train | Infer) -> Callable[[jax.Array], jax.Array]:
    return amax_of_all_examples if isinstance(operator, Train) and operator.across_vmap else amax_of


def _counts(x: jax.Array, scale: Any, dtype: DTypeLike) -> Sequence[jax.Array]:
    """Of a tensor that is quantized: values that saturate, all values, those that become zero, those that are not zero.

    A value saturates beyond half a step above the largest, where rounding alone would not bring it back.
    """
    info = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    largest = float(info.max)
    scaled = x.astype(jnp.float32) / scale
    limit = largest + 2.0 ** math.floor(math.log2(largest)) * float(info.eps) / 2
    becomes_zero = (x != 0) & (saturating_cast(scaled, dtype).astype(jnp.float32) == 0)
    counted = (jnp.abs(scaled) > limit, jnp.ones_like(x, bool), becomes_zero, x != 0)
    return [jnp.count_nonzero(each) for each in counted]


def _layer_error(layer: Layer, sums: Any, kept: str, has_gradient: bool) -> LayerError:
    signal, noise, *counts = (float(value) for value in sums)
    of_input, of_weight, of_gradient = (
        TensorError(saturated / max(every, 1), zeros / max(others, 1))
        for saturated, every, zeros, others in (counts[:4], counts[4:8], counts[8:])
    )
    gradient = of_gradient if has_gradient else None
    return LayerError(layer.name, layer.kind, _snr(signal, noise), of_input, of_weight, not kept, kept, gradient)


def _output_snr(wide: Any, narrow: Any) -> float:
    """Of all arrays of floats in two trees of one structure."""
    signal = noise = 0.0
    for a, b in zip(jax.tree.leaves(wide), jax.tree.leaves(narrow), strict=True):
        if jnp.issubdtype(jnp.result_type(a), jnp.floating):
            a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
            signal, noise = signal + float(np.sum(a**2)), noise + float(np.sum((b - a) ** 2))
    return _snr(signal, noise)


def _snr(signal: float, noise: float) -> float:
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf
