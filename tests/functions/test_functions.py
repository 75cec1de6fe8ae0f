"""xla_fp8.conv_general_dilated and saturating_cast: what they compute, and that each chain becomes one graph."""

from __future__ import annotations

import itertools
import re
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
    node = {"gelu": "gelu_erf", "relu6": "clamp", "leaky_relu": "max"}.get(activation, activation)
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


BIAS = jnp.asarray(RNG.normal(size=32), jnp.float32)
CHOICES: dict[str, tuple[dict[str, Any], ...]] = {
    "lhs": ({}, {"lhs_scale": SCALE}),
    "rhs": ({}, {"rhs_scale": jnp.asarray([0.25])}, {"rhs_scale": jnp.abs(BIAS)}),
    "bias": ({}, {"bias": BIAS}),
    "residual": (
        {},
        {"residual": TENSOR},
        {"residual": TENSOR, "residual_scale": SCALE},
        {"residual": TENSOR.astype(jnp.bfloat16)},
        {"residual": TENSOR.astype(jnp.float32), "residual_scale": SCALE},
    ),
    "out": (
        {},
        {"out_dtype": E4M3},
        {"out_dtype": E5M2, "out_scale": SCALE},
        {"out_dtype": jnp.bfloat16, "out_scale": SCALE},
    ),
    "amax": ({}, {"return_amax": True}),
}
NODES = {"gelu": "gelu_erf", "leaky_relu": "scale max", "relu6": "clamp"}
SHORT = {E4M3: "f8e4m3fn", E5M2: "f8e5m2", jnp.bfloat16: "bf16", jnp.float16: "f16", jnp.float32: "f32"}


def expected_graph(options: dict[str, Any]) -> str:
    """The graph that a convolution with these options should be, from the docstring's formula."""
    names = ["conv"]
    if "lhs_scale" in options:
        names.append("scale")
    if "rhs_scale" in options:
        names.append("scale" if options["rhs_scale"].size == 1 else "channel_scale")
    if "bias" in options:
        names.append("bias")
    if "residual" in options:
        is_fp8 = options["residual"].dtype.itemsize == 1
        names.append("add_scaled" if is_fp8 and "residual_scale" in options else "add")
    if activation := options.get("activation"):
        names += NODES.get(activation, activation).split()
    last = len(names)
    if "out_scale" in options:
        names.append("scale")
    out = SHORT[options.get("out_dtype") or options.get("preferred_element_type") or jnp.float32]
    types = ["f32"] * (len(names) - 1) + [out]
    if options.get("return_amax"):
        names.append("amax")
        types.append(SHORT[options.get("preferred_element_type", jnp.float32)])
    nodes = []
    for uid, (name, type_) in enumerate(zip(names, types, strict=True), 1):
        operands = "" if uid == 1 else str(last if name == "amax" else uid - 1)
        if name == "max":  # leaky relu: of the scaled value and the value itself
            operands = f"{uid - 1},{uid - 2}"
        nodes.append(f"{uid}:[{type_}]{name}({operands});")
    return "".join(nodes)


def with_and_without(name: str) -> list[Any]:
    """The two choices of an argument; that without it is slow, for a run that only samples the combinations."""
    without, with_it = CHOICES[name]
    return [pytest.param(without, marks=pytest.mark.slow, id=f"no_{name}"), pytest.param(with_it, id=name)]


def strict_graphs(options: dict[str, Any]) -> list[str]:
    """The graphs that xla_fp8.rewrite makes with strict=True, which raises where an FP8 convolution stays."""
    arrays = {name: value for name, value in options.items() if isinstance(value, jax.Array)}

    def function(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> Any:
        return xla_fp8.conv_general_dilated(x, w, **WINDOW, **{**options, **arrays})

    reports: list[Any] = []
    jax.eval_shape(xla_fp8.rewrite(function, strict=True, report=reports.append, target="h200"), X, W, arrays)
    (report,) = reports
    return [entry.graph for entry in report.rewritten]


@pytest.mark.parametrize("bias", with_and_without("bias"))
@pytest.mark.parametrize("amax", with_and_without("amax"))
def test_every_combination_is_one_whole_graph(bias: dict[str, Any], amax: dict[str, Any]) -> None:
    wides = itertools.cycle((jnp.float32, jnp.bfloat16, jnp.float16))
    activations = itertools.cycle((None, *ACTIVATIONS))
    for chosen in itertools.product(CHOICES["residual"], CHOICES["lhs"], CHOICES["rhs"], CHOICES["out"]):
        case = {key: value for choice in (*chosen, bias, amax) for key, value in choice.items()}
        if activation := next(activations):
            case["activation"] = activation
        case["preferred_element_type"] = next(wides)
        assert strict_graphs(case) == [expected_graph(case)], case


ALL = {
    "lhs_scale": SCALE,
    "rhs_scale": jnp.abs(BIAS),
    "bias": BIAS,
    "residual": TENSOR,
    "residual_scale": jnp.float32(2),
    "out_scale": jnp.float32(4),
}


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("wide", [jnp.float32, jnp.bfloat16])
def test_gradients_are_those_of_the_chain_written_out(activation: str | None, wide: Any) -> None:
    def loss(y: jax.Array, amax: jax.Array) -> jax.Array:
        return jnp.sum(y.astype(jnp.float32) ** 2) + amax.astype(jnp.float32)

    def ours(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        options = {"activation": activation, "preferred_element_type": wide, "return_amax": True}
        return loss(*xla_fp8.conv_general_dilated(x, w, **WINDOW, **arrays, **options))

    def by_hand(x: jax.Array, w: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        x, w, a = jax.tree.map(lambda array: array.astype(wide), (x, w, arrays))
        y = lax.conv_general_dilated(x * a["lhs_scale"], w * a["rhs_scale"], **WINDOW)
        y = y + a["bias"] + a["residual"] * a["residual_scale"]
        y = y if activation is None else jax.nn.silu(y)
        return loss(y * a["out_scale"], jnp.max(jnp.abs(y)))

    arguments = X.astype(wide), W.astype(wide), {**ALL, "residual": TENSOR.astype(wide)}
    expected = jax.jit(jax.grad(by_hand, (0, 1, 2)))(*arguments)
    for jit in (jax.jit, xla_fp8.jit):
        for one, other in zip(
            *map(jax.tree.leaves, (jit(jax.grad(ours, (0, 1, 2)))(*arguments), expected)), strict=True
        ):
            assert one.dtype == other.dtype
            size = float(jnp.max(jnp.abs(other)))
            np.testing.assert_allclose(
                np.asarray(one, np.float32),
                np.asarray(other, np.float32),
                atol=size * (1e-5 if wide == jnp.float32 else 0.05),
            )


@pytest.mark.parametrize("mapped", ["lhs", "rhs", *ALL])
def test_vmap_over_each_argument_is_a_loop_over_it(mapped: str) -> None:
    options = {"activation": "relu", "out_dtype": E4M3, "return_amax": True}
    arguments: dict[str, jax.Array] = {"lhs": X, "rhs": W, **ALL}
    three = jnp.stack([arguments[mapped].astype(jnp.float32) * factor for factor in (1, 0.5, 2)])
    three = three.astype(arguments[mapped].dtype)

    def one(value: jax.Array) -> Any:
        return xla_fp8.conv_general_dilated(**{**arguments, mapped: value}, **WINDOW, **options)

    y, amax = xla_fp8.jit(jax.vmap(one))(three)
    for index, value in enumerate(three):
        expected, expected_amax = jax.jit(one)(value)
        assert np.mean(np.asarray(y[index] != expected)) <= 0.005
        np.testing.assert_allclose(np.asarray(y[index], np.float32), np.asarray(expected, np.float32), rtol=0.25)
        np.testing.assert_allclose(amax[index], expected_amax, rtol=1e-5)


def test_amax_of_nothing_is_zero() -> None:
    y, amax = xla_fp8.conv_general_dilated(X[:0], W, **WINDOW, return_amax=True)
    assert y.shape == (0, 6, 6, 32)
    assert amax == 0


@pytest.mark.parametrize("source", [E4M3, E5M2, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_saturating_cast_from_every_float_type(source: Any, dtype: Any) -> None:
    x = jnp.asarray([448.0, -448.0, 1.5, 0.0, jnp.nan], source)
    np.testing.assert_array_equal(np.asarray(xla_fp8.saturating_cast(x, dtype), np.float32), np.asarray(x, np.float32))


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"lhs": X.astype(jnp.int8)}, "lhs must be of a float type, not int8[2, 6, 6, 16]"),
    ({"rhs": W.astype(jnp.complex64)}, "rhs must be of a float type, not complex64[3, 3, 16, 32]"),
    ({"lhs_scale": jnp.ones(16)}, "lhs_scale must be one number for the whole tensor, not an array of shape [16]"),
    ({"lhs_scale": True}, "lhs_scale must be of a float or integer type, not bool[]"),
    (
        {"rhs_scale": jnp.ones(16)},
        "rhs_scale must be one number, or of shape [32], one for each output channel, not [16]",
    ),
    ({"rhs_scale": jnp.ones((1, 32))}, "rhs_scale must be one number, or of shape [32], one for each output channel"),
    ({"rhs_scale": jnp.ones(32, jnp.complex64)}, "rhs_scale must be of a float or integer type, not complex64[32]"),
    ({"bias": jnp.ones((1, 32))}, "bias must be of shape [32], one for each output channel, not [1, 32]"),
    ({"bias": 1.0}, "bias must be of shape [32], one for each output channel, not []"),
    ({"bias": jnp.ones(32, jnp.int32)}, "bias must be of a float type, not int32[32]"),
    ({"residual": TENSOR[:1]}, "residual must have the result's shape [2, 6, 6, 32], not [1, 6, 6, 32]"),
    ({"residual": 1.0}, "residual must have the result's shape [2, 6, 6, 32], not []"),
    ({"residual": TENSOR.astype(jnp.int8)}, "residual must be of a float type, not int8[2, 6, 6, 32]"),
    ({"residual": TENSOR, "residual_scale": BIAS}, "residual_scale must be one number for the whole tensor"),
    ({"residual_scale": SCALE}, "residual_scale was given without a residual"),
    ({"out_scale": BIAS}, "out_scale must be one number for the whole tensor, not an array of shape [32]"),
    ({"activation": "swish"}, "there is no activation 'swish': expected a function or relu, relu6"),
    ({"activation": jnp.sum}, "activation must keep the shape and type of its argument, float32[2, 6, 6, 32]"),
    ({"activation": lambda y: y.astype(jnp.bfloat16)}, "it returned bfloat16[2, 6, 6, 32]"),
    ({"out_dtype": jnp.int8}, "out_dtype must be float8_e4m3fn, float8_e5m2, float32, bfloat16"),
    ({"out_dtype": jnp.float8_e4m3fnuz}, "or float64, not float8_e4m3fnuz"),
    (
        {"preferred_element_type": E4M3},
        "preferred_element_type must be float32, bfloat16, float16 or float64, not float8",
    ),
)


@pytest.mark.parametrize(
    ("options", "message"), WRONG, ids=[f"{'_'.join(options)}{i}" for i, (options, _) in enumerate(WRONG)]
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        xla_fp8.conv_general_dilated(**{"lhs": X, "rhs": W, **WINDOW, **options})


def test_saturating_cast_of_integers_is_refused() -> None:
    with pytest.raises(TypeError, match="x must be of a float type, not int32"):
        xla_fp8.saturating_cast(jnp.arange(3), E4M3)
