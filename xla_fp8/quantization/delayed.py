"""Delayed scaling: scales from the amaxes of earlier steps, as state that a training step takes and returns.

Nothing is mutated. A DelayedScaling goes into `fp8_dot` or `fp8_conv`; its "gradient" is what was observed (the amaxes
of this step's tensors), and `update` makes the next state of both.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from xla_fp8.quantization.errors import QuantizationError
from xla_fp8.quantization.numerics import ScaleRule, with_margin


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedScale:
    """The scale of one tensor, and the amaxes that it comes from. A pytree.

    Several may be stacked, as a scan over layers does: each array then has the same leading dimensions.

    Attributes:
        scale: float32[], of the next tensor.
        amax_history: float32[length], newest first; 0 where there was no step yet.
        rule: the FP8 type and how a scale follows from an amax.
        margin: the scale leaves room for 2^margin times the largest amax in the history.
    """

    scale: jax.Array
    amax_history: jax.Array
    rule: ScaleRule = dataclasses.field(metadata={"static": True})
    margin: float = dataclasses.field(metadata={"static": True})

    @staticmethod
    def create(
        dtype: DTypeLike = jnp.float8_e4m3fn,
        *,
        amax: ArrayLike | None = None,
        length: int = 16,
        margin: float = 0.0,
        power_of_two: bool = False,
    ) -> DelayedScale:
        """The state before the first step.

        Args:
            dtype: float8_e4m3fn or float8_e5m2.
            amax: of the first tensor, as far as one can tell; without it the first scale is 1.
            length: how many steps an amax stays in the history.
            margin, power_of_two: as in the class and `ScaleRule`.
        """
        if length < 1:
            raise QuantizationError(f"length={length}: the history holds at least one amax")
        empty = DelayedScale(
            jnp.ones((), jnp.float32),
            jnp.zeros(length, jnp.float32),
            ScaleRule(jnp.dtype(dtype), power_of_two),
            margin,
        )
        return empty if amax is None else empty.update(amax)

    def update(self, observed: DelayedScale | ArrayLike) -> DelayedScale:
        """The state for the next step.

        Args:
            observed: the amax of this step's tensor, or the "gradient" of this state, which holds it.

        An amax that is not finite is left out: history and scale stay. While the history holds only zeros, the scale
        stays.
        """
        seen = observed.amax_history[..., 0] if isinstance(observed, DelayedScale) else observed
        amax = jnp.asarray(seen, jnp.float32)
        history = jnp.concatenate([amax[..., None], self.amax_history[..., :-1]], axis=-1)
        largest = jnp.max(history, axis=-1)
        _, scale = self.rule.of_amax(with_margin(largest, self.margin))
        usable = jnp.isfinite(amax)
        return dataclasses.replace(
            self,
            scale=jnp.where(usable & (largest > 0), scale, self.scale),
            amax_history=jnp.where(usable[..., None], history, self.amax_history),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedScaling:
    """The state of one `fp8_dot` or `fp8_conv`: a DelayedScale for each of its three tensors. A pytree."""

    lhs: DelayedScale
    rhs: DelayedScale
    gradient: DelayedScale

    @staticmethod
    def create(
        dtype: DTypeLike = jnp.float8_e4m3fn, gradient_dtype: DTypeLike = jnp.float8_e5m2, **options: Any
    ) -> DelayedScaling:
        """The state before the first step; `options` as `DelayedScale.create` has them."""
        # Each has arrays of its own: a step to which the state is donated cannot take one buffer twice.
        types = dtype, dtype, gradient_dtype
        return DelayedScaling(*(DelayedScale.create(type_, **options) for type_ in types))

    def update(self, observed: DelayedScaling) -> DelayedScaling:
        """The state for the next step, from this one's "gradient"."""
        (updated,) = update_all([self], [observed])
        return updated


def update_all(states: Sequence[DelayedScaling], observed: Sequence[DelayedScaling]) -> list[DelayedScaling]:
    """The states of many layers for the next step, in a few kernels: one at a time, each scale would take two."""
    scales = [scale for state in states for scale in (state.lhs, state.rhs, state.gradient)]
    amaxes = [seen.amax_history[..., 0] for o in observed for seen in (o.lhs, o.rhs, o.gradient)]
    alike: dict[Any, list[int]] = collections.defaultdict(list)
    for index, (scale, amax) in enumerate(zip(scales, amaxes, strict=True)):
        where = tuple(map(_where, (scale.scale, scale.amax_history, amax)))
        alike[scale.rule, scale.margin, scale.amax_history.shape, where].append(index)
    updated = list(scales)
    for indices in alike.values():
        for start in range(0, len(indices), _AT_ONCE):
            chunk = indices[start : start + _AT_ONCE]
            stacked: DelayedScale = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(scales[i] for i in chunk))
            new = stacked.update(jnp.stack([amaxes[i] for i in chunk]))
            for place, index in enumerate(chunk):
                updated[index] = jax.tree.map(lambda leaf, place=place: leaf[place], new)
    return [DelayedScaling(*updated[start : start + 3]) for start in range(0, len(updated), 3)]


_AT_ONCE = 32
"""XLA takes so many apart again in a few kernels; of 64, compiled for Hopper, many had a kernel of their own (jax
0.11.2)."""


def observation(state: DelayedScale, amax: jax.Array) -> DelayedScale:
    """The cotangent of `state` that tells `amax`: it stands first in the history, all else is zero.

    Inside shard_map, of a state that all shards share, it is the largest amax of the shards.
    """
    amax = _once_in_a_sum(state.scale, amax)
    if across := _varying(amax) - _varying(state.amax_history):
        amax = lax.pmax(amax, tuple(sorted(across, key=str)))  # type: ignore[no-untyped-call]
    # Not .at[0].set: a scatter is two kernels, where this is part of what reads it.
    history = jnp.where(jnp.arange(state.amax_history.shape[-1]) == 0, amax, jnp.zeros_like(state.amax_history))
    return dataclasses.replace(state, scale=jnp.zeros_like(state.scale), amax_history=history)


def _where(x: jax.Array) -> Any:
    """Where x is, and over which mesh axes it varies: only what is alike in that can be stacked without being moved."""
    placed = jax.typeof(x) if isinstance(x, jax.core.Tracer) else x
    return getattr(placed, "sharding", None), _varying(x)  # an array of NumPy, of a checkpoint say, is nowhere yet


def _varying(x: jax.Array) -> frozenset[Any]:
    """The mesh axes over which x varies from shard to shard, as far as shard_map checks that (`check_vma`)."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


@jax.custom_batching.custom_vmap
def _once_in_a_sum(state: jax.Array, amax: jax.Array) -> jax.Array:
    """amax. Under jax.vmap of a state that all examples share, JAX adds up the cotangents of the examples; so that the
    sum is the largest amax, the first example gets it and the others zero."""
    return amax


@_once_in_a_sum.def_vmap
def _once_in_a_sum_vmap(axis_size: int, batched: Any, state: jax.Array, amax: jax.Array) -> tuple[jax.Array, bool]:
    state_is_batched, amax_is_batched = batched
    if amax_is_batched and not state_is_batched:
        amax = jnp.zeros_like(amax).at[0].set(jnp.max(amax, axis=0))
    return _once_in_a_sum(state, amax), amax_is_batched
