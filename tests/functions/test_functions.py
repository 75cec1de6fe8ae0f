"""xla_fp8.conv_general_dilated and saturating_cast: what they compute, and that each chain becomes one graph."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.functions import ACTIVATIONS
from xla_fp8.graph import graph_of

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(2, 6, 6, 16)), E4M3)
W = jnp.asarray(RNG.normal(size=(3, 3, 16, 32)), E4M3)
WINDOW = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
SCALE = jnp.float32(0.5)
TENSOR = jnp.asarray(RNG.normal(size=(2, 6, 6, 32)), E5M2)
FULL = {"lhs_scale": SCALE, "rhs_scale": SCALE, "out_scale": SCALE, "out_dtype": E4M3}


def graphs(options: dict[str, Any], dialect: str = "extended") -> list[str]:
    """The graphs of a convolution with these options after the pipeline; nothing wide must be left beside them."""
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}
    others = {name: value for name, value in options.items() if name not in arrays}

    def function(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        return xla_fp8.conv_general_dilated(x, w, **WINDOW, **arrays, **others)

    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(function).lower(X, W, arrays)))
    passes.run(module, target="h200", dialect=dialect, options=passes.PipelineOptions(verify_each=True))
    left = [i.opcode for i in module.entry if i.shape.is_array and i.shape.rank > 2 and i.opcode in ("multiply", "add")]
    assert not left, hlo.to_text(module)
    return [str(graph) for i in module.entry if (graph := graph_of(i)) is not None]


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_saturating_cast(dtype: Any) -> None:
    largest = float(jnp.finfo(dtype).max)
    x = jnp.asarray([1.0625, -3 * largest, jnp.inf, -jnp.inf, jnp.nan, largest], jnp.float32)
    expected = [1.0, -largest, largest, -largest, np.nan, largest]
    np.testing.assert_array_equal(np.asarray(xla_fp8.saturating_cast(x, dtype), np.float32), expected)


def test_saturating_cast_is_for_fp8() -> None:
    with pytest.raises(TypeError, match="float8_e4m3fn or float8_e5m2, not to float16"):
        xla_fp8.saturating_cast(jnp.ones(3), jnp.float16)


def test_without_options_it_is_jax_s_convolution_in_f32() -> None:
    y = xla_fp8.conv_general_dilated(X, W, **WINDOW)
    expected = lax.conv_general_dilated(X.astype(jnp.float32), W.astype(jnp.float32), **WINDOW)
    np.testing.assert_array_equal(y, expected)


def test_it_computes_what_its_docstring_says() -> None:
    bias = jnp.arange(32, dtype=jnp.float32)
    result, amax = xla_fp8.conv_general_dilated(
        X, W, **WINDOW, **FULL, bias=bias, residual=TENSOR, residual_scale=2.0, activation="relu", return_amax=True
    )
    y = lax.conv_general_dilated(X.astype(jnp.float32) * 0.5, W.astype(jnp.float32) * 0.5, **WINDOW)
    y = jax.nn.relu(y + bias + TENSOR.astype(jnp.float32) * 2)
    np.testing.assert_array_equal(amax, jnp.max(jnp.abs(y)))
    np.testing.assert_array_equal(result, xla_fp8.saturating_cast(y * 0.5, E4M3))


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "1:[f32]conv();"),
    "scales": (FULL, "1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2);4:[f8e4m3fn]scale(3);"),
    "channel": (
        {"rhs_scale": jnp.ones(32), "out_dtype": E4M3},
        "1:[f32]conv();2:[f8e4m3fn]channel_scale(1);",
    ),
    "bias": ({"bias": jnp.ones(32), "out_dtype": E5M2}, "1:[f32]conv();2:[f8e5m2]bias(1);"),
    "residual": ({"residual": TENSOR.astype(jnp.bfloat16), "out_dtype": E4M3}, "1:[f32]conv();2:[f8e4m3fn]add(1);"),
    "fp8_residual": (
        {"residual": TENSOR, "residual_scale": SCALE, "out_dtype": E4M3},
        "1:[f32]conv();2:[f8e4m3fn]add_scaled(1);",
    ),
    "amax": (
        {"out_dtype": E4M3, "out_scale": SCALE, "return_amax": True},
        "1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);",
    ),
    "bf16": ({"preferred_element_type": jnp.bfloat16, "lhs_scale": SCALE}, "1:[f32]conv();2:[bf16]scale(1);"),
}


@pytest.mark.parametrize("case", CASES)
def test_each_chain_is_one_graph(case: str) -> None:
    options, expected = CASES[case]
    assert graphs(options) == [expected]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("wide", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_each_activation_is_in_the_graph(activation: str, wide: Any) -> None:
    (graph,) = graphs({**FULL, "activation": activation, "preferred_element_type": wide})
    assert "f8e4m3fn" in graph
    node = {"gelu": "gelu_erf", "relu6": "relu", "leaky_relu": "max"}.get(activation, activation)
    assert f"[f32]{node}(" in graph


def test_a_dilated_grouped_convolution_in_other_dimension_orders() -> None:
    def function(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        return xla_fp8.conv_general_dilated(
            x, w, (2, 1), [(1, 0), (0, 2)], rhs_dilation=(1, 2), dimension_numbers=("NCHW", "OIHW", "NCHW"),
            feature_group_count=2, lhs_scale=scale, out_dtype=E4M3, bias=jnp.arange(32.0),
        )  # fmt: skip

    x, w = jnp.transpose(X, (0, 3, 1, 2)), jnp.ones((32, 8, 2, 2), E4M3)
    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(function).lower(x, w, SCALE)))
    passes.run(module, target="h200", dialect="extended")
    (graph,) = [str(graph) for i in module.entry if (graph := graph_of(i)) is not None]
    assert graph == "1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]bias(2);"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lhs_scale": jnp.ones(16)}, r"lhs_scale must be one number for the whole tensor, not .*\(16,\)"),
        ({"rhs_scale": jnp.ones(16)}, r"rhs_scale must have shape \[32\]"),
        ({"bias": jnp.ones((1, 32))}, r"bias must have shape \[32\]"),
        ({"activation": "swish"}, "there is no activation 'swish'"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        xla_fp8.conv_general_dilated(X, W, **WINDOW, **options)
