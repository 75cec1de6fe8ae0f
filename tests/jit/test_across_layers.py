"""From one FP8 layer to the next, as users write them: what of the quantization in between is left to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8

pytestmark = pytest.mark.unoptimized

NHWC = ("NHWC", "OHWI", "NHWC")
SCALED = "1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2);"
CONV = f"{SCALED}4:[f32]bias(3);"
Arrays = tuple[Any, ...]


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    """x, two filters and a bias."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 8, 8, 16)), jnp.bfloat16)
    filters = [jnp.asarray(rng.normal(size=(16, 3, 3, 16)) * 0.1, jnp.float32) for _ in range(2)]
    return x, *filters, jnp.asarray(rng.normal(size=16), jnp.bfloat16)


def two(
    x: Any,
    w1: Any,
    w2: Any,
    bias: Any,
    scaling: Any = (None, None),
    activation: Any = jax.nn.relu,
    filter_gradient: Any = "auto",
) -> jax.Array:
    """Convolution, bias, activation, convolution."""
    options = {"dimension_numbers": NHWC, "preferred_element_type": jnp.bfloat16, "filter_gradient": filter_gradient}
    for number, (w, state) in enumerate(zip((w1, w2), scaling, strict=True)):
        x = activation(x + bias) if number else x
        x = xla_fp8.fp8_conv(x, w, (1, 1), "SAME", scaling=state, **options)
    return x


def delayed() -> Arrays:
    return tuple(xla_fp8.DelayedScaling.create(amax=8.0) for _ in range(2))


def graphs(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """Of all that is rewritten, in program order."""
    return [str(entry.graph) for entry in xla_fp8.jit(function, backend="reference").report(*arguments).rewritten]


def close(function: Callable[..., Any], *arguments: Any) -> None:
    """The same numbers as `jax.jit`. FP8 behind a value that is rounded once instead of twice is another one in places:
    an e4m3 number more or less, in one of thirty."""
    expected = jax.tree.leaves(jax.jit(function)(*arguments))
    found = jax.tree.leaves(xla_fp8.jit(function, backend="reference")(*arguments))
    for one, other in zip(expected, found, strict=True):
        a, b = np.asarray(one, np.float32), np.asarray(other, np.float32)
        assert np.linalg.norm(a - b) <= 0.08 * np.linalg.norm(a) + 1e-30


def test_delayed_scales_need_no_pass_in_between(arrays: Arrays) -> None:
    assert graphs(two, *arrays, delayed())[0] == f"{CONV}5:[f32]relu(4);6:[f8e4m3fn]scale(5);"
    close(two, *arrays, delayed())


def test_in_training_the_amax_comes_too_and_what_the_derivative_needs(arrays: Arrays) -> None:
    """Where filter gradients read FP8 tensors: wide ones need what is between the layers, and end the graph there."""

    def step(x: Any, w1: Any, w2: Any, bias: Any, scaling: Any) -> Any:
        def loss(w1: Any, w2: Any, scaling: Any) -> jax.Array:
            return jnp.mean(jnp.square(two(x, w1, w2, bias, scaling, filter_gradient="fp8").astype(jnp.float32)))

        return jax.value_and_grad(loss, (0, 1, 2))(w1, w2, scaling)

    first = graphs(step, *arrays, delayed())[0]
    assert first == f"{CONV}5:[f32]relu(4);6:[f8e4m3fn]scale(5);7:[bf16]amax(5);8:[bf16]copy(4);"
    close(step, *arrays, delayed())


def test_with_dynamic_scales_only_the_cast_is_left(arrays: Arrays) -> None:
    """The scale depends on the whole tensor, so the graph hands the amax out; it is not found again."""

    def function(*arguments: Any) -> jax.Array:
        return two(*arguments, activation=jax.nn.silu)

    assert graphs(function, *arrays)[0] == f"{CONV}5:[bf16]silu(4);6:[bf16]amax(5);"
    close(function, *arrays)


def test_a_given_scale_with_the_amax_of_the_same_tensor(arrays: Arrays) -> None:
    x, w1, w2, bias = arrays

    def function(x: Any, w1: Any, w2: Any, bias: Any, scale: Any) -> Any:
        q, v, w = xla_fp8.quantize(x, scale=scale), xla_fp8.quantize(w1), xla_fp8.quantize(w2)
        common = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC}
        y = xla_fp8.conv_general_dilated(
            q.data, v.data, **common, lhs_scale=q.scale, rhs_scale=v.scale, bias=bias, activation="gelu_tanh"
        )
        q, amax = xla_fp8.quantize(y, scale=scale, return_amax=True)
        z = xla_fp8.conv_general_dilated(
            q.data, w.data, **common, lhs_scale=q.scale, rhs_scale=w.scale, out_scale=scale, out_dtype=q.data.dtype
        )
        return z, amax

    found = graphs(function, x, w1, w2, bias, jnp.float32(0.02))
    assert found == [
        f"{CONV}5:[f32]gelu_tanh(4);6:[f8e4m3fn]scale(5);7:[f32]amax(5);",
        f"{SCALED}4:[f8e4m3fn]scale(3);",
    ]
    close(function, x, w1, w2, bias, jnp.float32(0.02))


def test_a_flax_model_that_was_calibrated_hands_fp8_from_layer_to_layer() -> None:
    """Convolution, batch norm, relu, and the sum of a block: all that there is between two of them."""
    nnx = pytest.importorskip("flax.nnx", reason="pip install '.[flax]'")

    class Block(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            sizes = (1, 3, 1)
            self.convs = nnx.List([nnx.Conv(16, 16, (s, s), use_bias=False, rngs=rngs) for s in sizes])
            self.norms = nnx.List([nnx.BatchNorm(16, use_running_average=True, rngs=rngs) for _ in sizes])

        def __call__(self, x: jax.Array) -> jax.Array:
            y = x
            for number, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
                y = norm(conv(y))
                y = jax.nn.relu(y + x if number == 2 else y)
            return y

    model = nnx.Sequential(Block(nnx.Rngs(0)), Block(nnx.Rngs(1)))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 16)), jnp.float32)
    recipe = xla_fp8.Recipe("static", min_flops=0, keep_first=0, keep_last=0)
    definition, state = nnx.split(xla_fp8.calibrate(model, [x], recipe))

    def function(state: Any, x: jax.Array) -> jax.Array:
        result: jax.Array = nnx.merge(definition, state)(x)
        return result

    norm = "4:[f32]bias(3);5:[f32]channel_scale(4);6:[f32]bias(5);"
    inner = f"{SCALED}{norm}7:[f32]relu(6);8:[f8e4m3fn]scale(7);"
    last = f"{SCALED}{norm}7:[f32]add(6);8:[f32]relu(7);"
    assert graphs(function, state, x) == [
        *[inner] * 2,
        last + "9:[f8e4m3fn]scale(8);10:[f32]copy(8);",
        *[inner] * 2,
        last,
    ]
    close(function, state, x)
