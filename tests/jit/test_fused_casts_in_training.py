"""Fused casts of a training step: kernels with several results, of which others compute gradients and scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import xla_fp8
import xla_fp8.tracing.lowering  # by which regions run
from tests.fused_casts import BF16, F32, Array, affine, group_norm, layer_norm, normal
from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import kernel
from xla_fp8.backends.quantize import choice
from xla_fp8.tracing.equations import is_literal
from xla_fp8.tracing.fused_cast_problem import implementation, problem_of
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed, fused_cast_p


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU; the kernels are not there, so that what is fused runs as plain JAX."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)


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
        ],
    ),
    "gated": (
        gated,
        (2, 512, 128),
        [["float8_e4m3fn", "amax"], ["float8_e5m2", "amax"], ["float8_e5m2", "amax", "column_sum"]],
    ),
    "unet": (
        unet,
        (4, 32, 32, 64),
        [
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["float8_e5m2", "bfloat16", "amax"],
            ["float8_e5m2", "bfloat16", "bfloat16", "amax", "column_sum"],
        ],
    ),
    "resnet": (
        resnet,
        (4, 32, 32, 64),
        [
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["float8_e4m3fn", "bfloat16", "amax"],
            ["float8_e5m2", "bfloat16", "amax"],
            ["float8_e5m2", "bfloat16", "amax", "column_sum"],
            ["float8_e5m2", "bfloat16", "amax", "column_sum"],
        ],
    ),
}


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


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_a_step_computes_stays(name: str) -> None:
    """To the last bit, where each operation runs by itself: everything reads what it read before."""
    step, arguments = step_of(name)
    jaxpr, _ = rewritten(name)
    assert kernels(jaxpr)
    with jax.disable_jit():
        ours = core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments))
        theirs = core.jaxpr_as_fun(jax.make_jaxpr(step)(*arguments))(*jax.tree.leaves(arguments))
    for found, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.parametrize("name", PROGRAMS)
def test_kinds_of_results(name: str) -> None:
    found = []
    for equation in kernels(rewritten(name)[0]):
        described = problem_of(equation.params["jaxpr"])
        assert described is not None
        found.append([r.dtype.name if r.kind == "tensor" else r.kind for r in described[0].results])
    assert found == PROGRAMS[name][2]


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_kernels_compute_what_the_step_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Pallas' interpreter, each kernel of what the step gives it."""
    monkeypatch.setattr(kernel, "run", functools.partial(kernel.run, interpret=True))
    jaxpr, arguments = rewritten(name)
    for index, equation in enumerate(jaxpr.eqns):
        if equation.primitive is not fused_cast_p:
            continue
        read = [atom for atom in equation.invars if not is_literal(atom)]
        inputs = core.jaxpr_as_fun(_jax_compat.with_equations(jaxpr, jaxpr.eqns[:index], read))(
            *jax.tree.leaves(arguments)
        )
        ours = implementation(equation.params["jaxpr"])(*inputs)
        theirs = core.jaxpr_as_fun(equation.params["jaxpr"])(*inputs)
        for found, wanted in zip(ours, theirs, strict=True):
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            found, wanted = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
            # The program rounds to bf16 on the way, the kernel does not: of what lies between two numbers of FP8, and
            # after a rounding there are many, one goes up and the other down.
            assert np.linalg.norm(found - wanted) <= 0.04 * np.linalg.norm(wanted)
