"""Recipe: how the tensors of a model are scaled to FP8, and which of its layers are left wide."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp
from jax.typing import DTypeLike

from xla_fp8.models.errors import ModelError
from xla_fp8.quantization.delayed import DelayedScale, DelayedScaling
from xla_fp8.quantization.numerics import fp8_dtype
from xla_fp8.quantization.training import FilterGradient

Scaling = Literal["dynamic", "delayed", "static"]
Weights = Literal["tensor", "channel"]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is computed in FP8. Immutable and hashable; every field has a default that can be trained with.

    Attributes:
        scaling: where the scale of a tensor comes from. "dynamic": from its own amax, at each step. "delayed": from the
            amaxes of earlier steps, which is state that the model carries. "static": from sample batches, once, for
            inference; `xla_fp8.calibrate` makes such a model.
        dtype: FP8 type of inputs and weights.
        gradient_dtype: FP8 type of the gradients of outputs.
        weights: "tensor" gives a weight one scale, "channel" one for each output channel.
        filter_gradient: what the gradient of a weight is computed from: "fp8" tensors, "wide" ones, or "auto", which is
            wide for convolutions in 16 bits; `fp8_conv` has why.
        power_of_two: scales are powers of two.
        amax_history: how many steps an amax counts; of delayed scaling only.
        margin: delayed and static scales leave room for 2^margin times the largest amax seen.
        keep_first, keep_last: how many layers at the input and at the output stay wide. They see data and make logits,
            and hold little of the arithmetic.
        channel_multiple: layers whose input or output channels are no multiple stay wide. 16: what the FP8 kernels of
            Hopper GPUs need (docs/mosaic-conv.md; cuBLASLt too).
        min_flops: calls with less arithmetic stay wide (a multiply and an add are two). None: what was measured on an
            H200 (docs/models.md, "What is too small"). Less than 8e9 gains little; and where the recipe trains, less
            than 450 for each element of input, weight and result gains less than it costs to quantize them.
        depthwise: depthwise convolutions, which stay wide, are left to this project's kernels on one Hopper GPU. Their
            types are what they were; elsewhere nothing changes.
    """

    scaling: Scaling = "dynamic"
    dtype: DTypeLike = jnp.float8_e4m3fn
    gradient_dtype: DTypeLike = jnp.float8_e5m2
    weights: Weights = "tensor"
    filter_gradient: FilterGradient = "auto"
    power_of_two: bool = False
    amax_history: int = 16
    margin: float = 0.0
    keep_first: int = 1
    keep_last: int = 1
    channel_multiple: int = 16
    min_flops: float | None = None
    depthwise: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", fp8_dtype(self.dtype))
        object.__setattr__(self, "gradient_dtype", fp8_dtype(self.gradient_dtype))
        for name, kinds in (("scaling", Scaling), ("weights", Weights), ("filter_gradient", FilterGradient)):
            allowed = get_args(kinds)
            if getattr(self, name) not in allowed:
                raise ModelError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(map(repr, allowed))}")
        for name, least in (("amax_history", 1), ("keep_first", 0), ("keep_last", 0), ("channel_multiple", 1)):
            if getattr(self, name) < least:
                raise ModelError(f"{name}={getattr(self, name)}: expected at least {least}")

    @staticmethod
    def of(recipe: Recipe | str) -> Recipe:
        """A recipe, or one with that scaling and everything else by default.

        Raises:
            ModelError: neither.
        """
        given: object = recipe
        if not isinstance(given, (Recipe, str)):
            what = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
            raise ModelError(
                f"recipe is {what}: expected an xla_fp8.Recipe(...) or the name of a scaling, 'delayed'. Arguments of "
                "a call go to example="
            )
        return recipe if isinstance(recipe, Recipe) else Recipe(recipe)  # type: ignore[arg-type]

    def initial_scaling(self) -> DelayedScaling:
        """The state of delayed scaling before the first step.

        Nothing was seen yet, so the first scales leave room: e4m3 operands up to 16 keep their bits down to 6e-4, e5m2
        gradients up to 1 theirs down to 1e-9 (largest value * smallest normal number / amax).
        """
        options = {"length": self.amax_history, "margin": self.margin, "power_of_two": self.power_of_two}

        def first(dtype: DTypeLike, amax: float) -> DelayedScale:
            return _forgotten(DelayedScale.create(dtype, amax=amax, **options))  # type: ignore[arg-type]

        # Each has arrays of its own: a step to which the state is donated cannot take one buffer twice.
        operands = first(self.dtype, _FIRST_AMAX), first(self.dtype, _FIRST_AMAX)
        return DelayedScaling(*operands, first(self.gradient_dtype, _FIRST_GRADIENT))

    @property
    def least_flops(self) -> float:
        """The arithmetic of a call from which on it is in FP8."""
        return _LEAST_FLOPS if self.min_flops is None else self.min_flops

    @property
    def least_intensity(self) -> float:
        """The same for each element of input, weight and result. With static scales a tensor is mostly quantized by the
        kernel that makes it, and fewer bytes are written than in 16 bits."""
        return _LEAST_INTENSITY if self.min_flops is None and self.scaling != "static" else 0

    @property
    def least_size(self) -> str:
        """Both in words."""
        intensity = f" and {self.least_intensity:.3g} operations for each element" if self.least_intensity else ""
        return f"{self.least_flops / 1e9:.3g} GFLOP or more{intensity}"

    def __str__(self) -> str:
        return (
            f"{self.scaling} scales, {jnp.dtype(self.dtype).name} forward, {jnp.dtype(self.gradient_dtype).name} "
            f"backward, one scale for each {'weight' if self.weights == 'tensor' else 'output channel of a weight'}"
        )


_LEAST_FLOPS = 8e9
_LEAST_INTENSITY = 450.0

_FIRST_AMAX = 16.0
_FIRST_GRADIENT = 1.0


def _forgotten(state: DelayedScale) -> DelayedScale:
    """The same scale with an empty history: a guess must not outlast what is seen."""
    return dataclasses.replace(state, amax_history=jnp.zeros_like(state.amax_history))
