"""calibrate: a model with fixed scales from sample batches, its weights in FP8, for inference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8.models.contraction import Contraction
from xla_fp8.models.convert import Call, arguments_of, call_with, is_calibrated, watched, with_operators
from xla_fp8.models.errors import ModelError
from xla_fp8.models.framework import framework_of
from xla_fp8.models.functions import ConvertedFunction
from xla_fp8.models.operators import Infer, Operator, State, StaticScales, Wide, call_size, quantized_weight
from xla_fp8.models.plan import Filter, Layer, Plan, filter_of, not_run
from xla_fp8.models.reads import READ_ELSEWHERE, Samples, read_by_calls
from xla_fp8.models.recipe import Recipe
from xla_fp8.quantization.numerics import WIDE_DTYPES, ScaleRule, amax_of, with_margin


def calibrate(
    model: Any,
    batches: Iterable[Any],
    recipe: Recipe | str = "static",
    *,
    filter: Filter = None,
    call: Call | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Any:
    """Runs sample batches through a model, and returns it with the scales that they ask for, fixed, for inference.

    The weights of its FP8 layers are quantized once and kept in FP8: a quarter of the bytes of float32. It has no
    derivative with respect to what flows through them.

    Args:
        model: an NNX, Linen or Equinox module, or a function; converted (after training in FP8) or not. It stays.
        batches: arguments of calls, each an array, or a tuple where they are several. All are run, in float32 or
            whatever the model computes in; how it is called is up to `call`, which may be jitted.
        recipe: its scaling counts as "static".
        filter: as `convert` has it.
        call: (model, *batch) → anything; model(*batch) if None, of a Linen module model.apply(variables, *batch).
        variables: of a Linen module.

    Returns:
        The model; of a Linen module (model, variables), and of a plain function, whose weights are arguments that it
        cannot keep, a function that quantizes them with fixed scales.

    Raises:
        ModelError: no batches, a tensor that is not finite, a module that was calibrated already, or a Linen module
            without its variables.
    """
    recipe = dataclasses.replace(Recipe.of(recipe), scaling="static")
    framework = framework_of(model)
    is_linen = framework is not None and framework.is_traced
    call = call_with(variables, framework, call, "calibrate(model, batches, variables=variables)")
    if framework is not None and is_calibrated(model, framework):
        raise ModelError("the model was calibrated: its weights are FP8. Calibrate the one that it was made of")
    samples = Samples(batches)
    seen = seen_by_layers(model, samples, call)
    known = {} if framework is None or is_linen else {layer.name: layer for layer in framework.layers(model)}
    holder = variables if is_linen else model
    layers = [layer.of(known.get(name)) for name, layer in seen.items()]
    if framework is not None:
        read_elsewhere = framework.read_elsewhere(holder)
        layers = [_kept_in_fp8(layer, seen[layer.name], framework, holder, read_elsewhere) for layer in layers]
    if framework is not None and not is_linen:
        free = [layer.name for layer in layers if not layer.obstacle]
        reasons = read_by_calls(model, free, samples.kept, call, framework)
        layers = [
            dataclasses.replace(layer, obstacle=layer.obstacle or reasons.get(layer.name, "")) for layer in layers
        ]
    plan = Plan(recipe, filter_of(filter))([*layers, *not_run(known, seen, "the batches do not run it")])
    operators: dict[str, Operator] = {
        name: operator if isinstance(operator, Wide) else Infer(name, recipe) for name, operator in plan.items()
    }
    chosen = {name: seen[name] for name, operator in operators.items() if isinstance(operator, Infer)}
    if framework is None:
        found = with_operators(model, list(operators.values()))
        assert isinstance(found, ConvertedFunction)
        states = {name: layer.scales(recipe) for name, layer in chosen.items()}
        return dataclasses.replace(found, states=states, calibrated={name: each.always for name, each in seen.items()})
    fixed = _fixed(chosen, recipe, framework, holder)
    return framework.replaced(model, operators, *fixed, *([variables] if is_linen else []))


@dataclasses.dataclass
class Seen:
    """What a layer was called with.

    Attributes:
        inside: what the layer of a Linen module stands in that hands on no fixed scales.
        lhs, rhs: the largest values of input and weight.
        weights: type and `_bits` of each.
        always: whether it ran in every call, of a function.
    """

    contraction: Contraction
    layer: Layer
    inside: str = ""
    lhs: float = 0.0
    rhs: float = 0.0
    weights: set[tuple[np.dtype[Any], int]] = dataclasses.field(default_factory=set)
    always: bool = True

    def of(self, known: Layer | None) -> Layer:
        """The layer, with what its framework knows."""
        return self.layer if known is None else dataclasses.replace(known, size=self.layer.size)

    def scales(self, recipe: Recipe) -> StaticScales:
        """Of tensors; Python's numbers, which may stand in any jaxpr."""
        name = self.layer.name
        fixed = dataclasses.replace(recipe, margin=0.0)  # what does not change needs no room
        return StaticScales(_scale(name, self.lhs, recipe), _scale(name, self.rhs, fixed))


def seen_by_layers(model: Any, batches: Iterable[Any], call: Call) -> dict[str, Seen]:
    """What each layer was called with, in the order of the first calls."""
    seen: dict[str, Seen] = {}
    inside: dict[str, str] = {}
    calls: list[set[str]] = []

    def meet(layers: Sequence[Layer]) -> None:
        inside.update({layer.name: layer.inside for layer in layers})
        calls.append({layer.name for layer in layers})

    def note(name: str, dtype: np.dtype[Any], lhs: Any, rhs: Any, bits: Any) -> None:
        layer = seen[name]
        layer.lhs = float(np.maximum(layer.lhs, lhs))  # a NaN stays
        layer.rhs = float(np.maximum(layer.rhs, rhs))
        layer.weights.add((dtype, int(bits)))

    def watch(name: str, contraction: Contraction, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        size = call_size(contraction, lhs, rhs)
        before = seen.get(name)
        if before is None or before.layer.size is None or size.flops > before.layer.size.flops:
            layer = Layer(name, contraction.kind, rhs.shape, size)
            noted = (before.lhs, before.rhs, before.weights) if before else ()
            seen[name] = Seen(contraction, layer, inside.get(name, ""), *noted)
        # A callback, because what a transformation inside the model traces could not leave it otherwise.
        jax.debug.callback(functools.partial(note, name, rhs.dtype), amax_of(lhs), amax_of(rhs), _bits(rhs))
        return contraction.wide(lhs, rhs)

    spied = watched(model, watch, meet)
    ran = False
    for batch in batches:
        try:
            call(spied, *arguments_of(batch))
        except ValueError as error:
            if "data dependency on the scan body" not in str(error):
                raise
            raise ModelError(
                "this version of Flax lets no callback stand in the body of nn.scan, and callbacks are what notes what "
                "layers are called with: write the layers as a loop, or use Flax 0.12.8"
            ) from error
        ran = True
    jax.effects_barrier()  # type: ignore[no-untyped-call]
    if not ran:
        raise ModelError("there are no batches: scales come from what flows through the model, so hand over a few")
    for name, layer in seen.items():
        layer.always = all(name in names for names in calls)
    return seen


def _kept_in_fp8(layer: Layer, seen: Seen, framework: Any, holder: Any, read_elsewhere: Container[str]) -> Layer:
    """The layer, with what keeps an FP8 weight from taking the place of its own."""
    weight = framework.weight(holder, layer.name)
    obstacle = ""
    if dimensions := weight.ndim - len(layer.weight):
        obstacle = f"its kernel has {dimensions} dimensions more: layers that are stacked stay wide"
    elif seen.inside:
        obstacle = f"fixed scales do not reach into {seen.inside}"
    elif layer.name in read_elsewhere:
        obstacle = READ_ELSEWHERE
    elif any(bits != int(_bits(weight.astype(dtype))) for dtype, bits in seen.weights):
        obstacle = "something (WeightNorm, SpectralNorm) changes its weight before it is multiplied with"
    return dataclasses.replace(layer, obstacle=layer.obstacle or obstacle)


def _bits(weight: jax.Array) -> jax.Array:
    """A number that tells a weight from one with other values, or in other places: transposed, it has other channels.

    A sum of integers, so that fusion and the order in which they are added do not matter.
    """
    if weight.dtype not in WIDE_DTYPES:
        return jnp.zeros((), jnp.uint32)
    bits = lax.bitcast_convert_type(weight, jnp.dtype(f"uint{8 * weight.dtype.itemsize}"))
    place = jnp.arange(weight.size, dtype=jnp.uint32).reshape(weight.shape)
    total: jax.Array = jnp.sum(bits.astype(jnp.uint32) * (2 * place + 1), dtype=jnp.uint32)
    return total


def _fixed(
    chosen: Mapping[str, Seen], recipe: Recipe, framework: Any, holder: Any
) -> tuple[dict[str, State], dict[str, jax.Array]]:
    """The states and the FP8 weights of the layers; `holder` has the wide ones."""
    states: dict[str, State] = {}
    weights: dict[str, jax.Array] = {}
    for name, layer in chosen.items():
        if not np.isfinite(layer.rhs):
            raise ModelError(f"{name}: its weight has values that are not finite")
        quantized = quantized_weight(framework.weight(holder, name), layer.contraction, recipe)
        states[name] = StaticScales(jnp.float32(_scale(name, layer.lhs, recipe)), quantized.scale)
        weights[name] = quantized.row_major()
    return states, weights


def _scale(name: str, amax: float, recipe: Recipe) -> Any:
    if not np.isfinite(amax):
        raise ModelError(f"{name}: a batch brought values that are not finite; leave such batches out")
    room = with_margin(jnp.float32(amax), recipe.margin)
    _, scale = ScaleRule(jnp.dtype(recipe.dtype), recipe.power_of_two).of_amax(room)
    return np.float32(scale)
