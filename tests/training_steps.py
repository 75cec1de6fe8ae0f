"""Training steps of small models in FP8, whose casts are fused with what is in front of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

import xla_fp8
import xla_fp8.tracing.lowering  # by which regions run
from tests.fused_casts import BF16, F32, Array, affine, group_norm, layer_norm, normal
from xla_fp8 import _jax_compat
from xla_fp8.tracing.equations import is_literal
from xla_fp8.tracing.fused_cast_problem import implementation
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed, fused_cast_p


class Layers:
    """FP8 layers in order, each with its state of delayed scaling."""

    def __init__(self, states: list[xla_fp8.DelayedScaling]) -> None:
        self.states = iter(states)

    def dot(self, x: Array, w: Array) -> Array:
        y: Array = xla_fp8.fp8_dot(x, w.astype(x.dtype), scaling=next(self.states))
        return y

    def conv(self, x: Array, w: Array) -> Array:
        numbers = ("NHWC", "OHWI", "NHWC")
        y: Array = xla_fp8.fp8_conv(
            x, w.astype(x.dtype), (1, 1), "SAME", dimension_numbers=numbers, scaling=next(self.states)
        )
        return y


Params = dict[str, Array]


def transformer(layers: Layers, x: Array, params: Params) -> Array:
    """Layer norm and gelu; the mean and variance of each row are read by the backward pass."""
    y = layers.dot(layer_norm(x, params), params["up"]) + params["bias"].astype(BF16)
    return x + layers.dot(jax.nn.gelu(y), params["down"])


def residual(layers: Layers, x: Array, params: Params) -> Array:
    """A relu of a sum: its mask is of what is in memory, the result."""
    y = jax.nn.relu(x + layers.conv(jax.nn.relu(x), params["filter"]))
    return jax.nn.relu(y + layers.conv(y, params["filter"]))


def gated(layers: Layers, x: Array, params: Params) -> Array:
    """A gate, whose gradient is of two parts beside each other."""
    value, gate = jnp.split(layers.dot(x, params["up"]) + params["bias"].astype(BF16), 2, -1)
    return layers.dot(value * jax.nn.gelu(gate), params["square"])


def unet(layers: Layers, x: Array, params: Params) -> Array:
    """Group norm and silu."""
    y = layers.conv(jax.nn.silu(group_norm(x, params)), params["filter"])
    return x + layers.conv(jax.nn.silu(group_norm(y, params)), params["filter"])


def resnet(layers: Layers, x: Array, params: Params) -> Array:
    """Batch norm and relu; a filter gradient is of the tensor in bf16."""
    for _ in range(2):
        y = layers.conv(x, params["filter"]).astype(F32)
        mean, square = y.mean((0, 1, 2)), (y * y).mean((0, 1, 2))
        y = (y - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5) * params["gamma"] + params["beta"]
        x = jax.nn.relu(y.astype(BF16))
    return layers.conv(x, params["filter"])


PROGRAMS: dict[str, tuple[Callable[..., Array], tuple[int, ...], list[list[str]]]] = {
    "transformer": (
        transformer,
        (2, 256, 128),
        [
            ["float8_e4m3fn", "amax", "row", "row"],
            ["float8_e4m3fn", "amax"],
            ["float8_e5m2", "amax"],
            ["float8_e5m2", "amax", "column_sum"],
            ["bfloat16", "column_sum", "column_sum"],
        ],
    ),
    "gated": (
        gated,
        (2, 512, 128),
        [["float8_e4m3fn", "amax"], ["float8_e5m2", "amax"], ["float8_e5m2", "amax", "column_sum"]],
    ),
    "residual": (
        residual,
        (4, 32, 32, 64),
        [["float8_e5m2", "bfloat16", "amax"], ["float8_e5m2", "bfloat16", "amax"]],
    ),
    "unet": (
        unet,
        (4, 32, 32, 64),
        [
            ["group_sum", "group_sum"],
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["group_sum", "group_sum"],
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["float8_e5m2", "bfloat16", "amax"],
            ["float8_e5m2", "bfloat16", "amax", "column_sum", "column_sum"],
            ["bfloat16", "column_sum", "column_sum"],
            ["group_sum", "group_sum"],
        ],
    ),
    "resnet": (
        resnet,
        (4, 32, 32, 64),
        [
            ["column_sum", "column_sum"],
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["column_sum", "column_sum"],
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["float8_e5m2", "bfloat16", "amax"],
            ["bfloat16", "column_sum", "column_sum"],
            ["float8_e5m2", "bfloat16", "amax", "column_sum", "column_sum"],
            ["bfloat16", "column_sum", "column_sum"],
            ["float8_e5m2", "bfloat16", "amax", "column_sum", "column_sum"],
        ],
    ),
}
"""Each with the shape of its input, and the results of each kernel in program order."""


def parameters(channels: int) -> Params:
    def of(*shape: int) -> Array:
        return normal(shape, F32, seed=len(shape)) / math.sqrt(math.prod(shape[1:]))

    norm = {name: jnp.asarray(value) for name, value in affine(channels).items()}
    return {
        **norm,
        "up": of(channels, 2 * channels),
        "down": of(2 * channels, channels),
        "square": of(channels, channels),
        "bias": of(2 * channels),
        "filter": of(channels, 3, 3, channels),
    }


def step_of(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(loss, (gradients, amaxes)) of a program, and its arguments."""
    function, shape, _ = PROGRAMS[name]

    def loss(x: Array, params: Params, states: list[xla_fp8.DelayedScaling]) -> Array:
        return jnp.sum(jnp.square(function(Layers(states), x, params).astype(F32)))

    states = [xla_fp8.DelayedScaling.create(amax=8.0) for _ in range(3)]
    return jax.value_and_grad(loss, (0, 1, 2)), (normal(shape), parameters(shape[-1]), states)


def rewritten(name: str) -> tuple[Any, tuple[Any, ...]]:
    step, arguments = step_of(name)
    return cut_closed(jax.make_jaxpr(step)(*arguments), Options()), arguments


def kernels(jaxpr: Any) -> list[Any]:
    return [equation for equation in jaxpr.eqns if equation.primitive is fused_cast_p]


def assert_kernels_compute_what_a_step_means(name: str) -> None:
    assert_kernels_compute_what_is_meant(*rewritten(name))


def assert_kernels_compute_what_is_meant(
    jaxpr: Any, arguments: tuple[Any, ...], meant: Callable[[Any], Callable[..., Any]] = core.jaxpr_as_fun
) -> None:
    """Each kernel of what the rewritten program gives it.

    Args:
        meant: the function of a kernel's jaxpr.
    """
    for index, equation in enumerate(jaxpr.eqns):
        if equation.primitive is not fused_cast_p:
            continue
        read = [atom for atom in equation.invars if not is_literal(atom)]
        given = core.jaxpr_as_fun(_jax_compat.with_equations(jaxpr, jaxpr.eqns[:index], read))
        inputs = given(*jax.tree.leaves(arguments))
        ours = jax.jit(implementation(equation.params["jaxpr"]))(*inputs)
        theirs = jax.jit(meant(equation.params["jaxpr"]))(*inputs)
        for found, wanted in zip(ours, theirs, strict=True):
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
            # The program rounds to bf16 on the way, the kernel does not: of what lies between two numbers of FP8, and
            # after a rounding there are many, one goes up and the other down.
            assert np.linalg.norm(found - wanted) <= 0.04 * np.linalg.norm(wanted)
