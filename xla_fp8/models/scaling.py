"""The state of delayed scaling inside a model's tree: kept away from the optimizer, and updated from what was observed.

parameters, _ = split_scaling(model)                    what an optimizer sees
gradients, observed = split_scaling(gradients)          the state's "gradient" is what a step saw
model = update_scaling(model, observed)
"""

from __future__ import annotations

import sys
from typing import Any

import jax

from xla_fp8.models.errors import ModelError
from xla_fp8.quantization.delayed import DelayedScaling, update_all


def split_scaling(tree: Any) -> tuple[Any, Any]:
    """A tree without its `DelayedScaling`s, and the tree of nothing but them; None stands where something is missing.

    Args:
        tree: any pytree: an Equinox model, its gradients, the variables of a Linen model.
    """
    rest = jax.tree.map(lambda leaf: None if _is_scaling(leaf) else leaf, tree, is_leaf=_is_scaling)
    scaling = jax.tree.map(lambda leaf: leaf if _is_scaling(leaf) else None, tree, is_leaf=_is_scaling)
    return rest, scaling


def update_scaling(model: Any, observed: Any) -> Any:
    """The model, or the state alone, for the next step.

    Args:
        model: a pytree with `DelayedScaling`s in it (an Equinox model, the collection "fp8" of a Linen model, the state
            of a function); or an NNX module, which is changed in place and returned.
        observed: its gradient, of which only the states' parts are read.

    Raises:
        ModelError: there is no observation for a state.
    """
    if _is_nnx(model):
        return _update_nnx(model, observed)

    states: list[DelayedScaling] = []
    observations: list[DelayedScaling] = []

    def collect(leaf: Any, seen: Any) -> None:
        if not _is_scaling(leaf):
            return
        if not _is_scaling(seen):
            raise ModelError(
                f"for the state of a layer there is {type(seen).__name__} and no observation: differentiate with "
                "respect to the state too, and hand over that gradient"
            )
        states.append(leaf)
        observations.append(seen)

    try:
        jax.tree.map(collect, model, observed, is_leaf=_is_scaling)
    except ValueError as error:  # of trees that do not fit
        raise ModelError(
            "what was observed is not the gradient of this model or state: differentiate with respect to the state too "
            "(of an NNX module, argnums=nnx.DiffState(0, (nnx.Param, Fp8State))), and hand over that gradient"
        ) from error
    updated = iter(update_all(states, observations))
    return jax.tree.map(lambda leaf: next(updated) if _is_scaling(leaf) else leaf, model, is_leaf=_is_scaling)


def _is_scaling(leaf: Any) -> bool:
    return isinstance(leaf, DelayedScaling)


def _is_nnx(model: Any) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(model, nnx.Module)


def _update_nnx(model: Any, observed: Any) -> Any:
    from flax import nnx

    from xla_fp8.models.nnx import Fp8State

    state = nnx.state(model, Fp8State)
    _, seen = split_scaling(nnx.to_pure_dict(nnx.filter_state(observed, Fp8State)))
    values = update_scaling(nnx.to_pure_dict(state), seen)
    nnx.replace_by_pure_dict(state, values)
    nnx.update(model, state)
    return model
