"""Activations, clamps and amax as people write them by hand: which are fused, and that NaN and infinities stay."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.report import Entry

E4M3 = jnp.float8_e4m3fn
Array = jax.Array
WIDE = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
X, W = jax.ShapeDtypeStruct((2, 8, 8, 16), E4M3), jax.ShapeDtypeStruct((3, 3, 16, 32), E4M3)
C = math.sqrt(2 / math.pi)

LEAKY = "scale max"
SPELLINGS: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "relu_less": ("relu", lambda y: jnp.where(y < 0, 0, y)),
    "relu_less_equal": ("relu", lambda y: jnp.where(y <= 0, 0.0, y)),
    "relu_mirrored": ("relu", lambda y: jnp.where(jnp.greater(0, y), 0.0, y)),
    "relu_select": ("relu", lambda y: lax.select(y < 0, jnp.zeros_like(y), y)),
    "relu6_of_where": ("min relu", lambda y: jnp.where(y < 0, 0, jnp.where(y > 6, 6, y))),
    "relu6_other_way": ("relu min", lambda y: jnp.where(y > 6, 6, jnp.where(y < 0, 0, y))),
    "relu6_of_relu": ("relu min", lambda y: jnp.minimum(jnp.where(y < 0, 0, y), 6)),
    "upper_bound": ("min", lambda y: jnp.where(y > 100, 100, y)),
    "lower_bound": ("max", lambda y: jnp.where(y <= -0.5, -0.5, y)),
    "clip": ("clamp", lambda y: jnp.clip(y, -1, 1)),
    "clip_above": ("clamp", lambda y: lax.clamp(y.dtype.type(0.5), y, y.dtype.type(2))),
    "clip_other_way": ("clamp", lambda y: jnp.maximum(-1, jnp.minimum(3, y))),
    "clip_of_where": ("clamp", lambda y: jnp.where(y < -2, -2, jnp.where(y > 3, 3, y))),
    "clip_open": ("clamp", lambda y: jnp.clip(y, -jnp.inf, 6)),
    "clip_between_numbers": ("relu clamp scale", lambda y: jnp.clip(jax.nn.relu(y), 0.25, 1) * 2),
    "hard_tanh": ("clamp", jax.nn.hard_tanh),
    "relu6": ("clamp", jax.nn.relu6),
    "hard_sigmoid": ("add clamp invscale", jax.nn.hard_sigmoid),
    "celu": ("elu", jax.nn.celu),
    "leaky_less": (LEAKY, lambda y: jnp.where(y < 0, 0.1 * y, y)),
    "leaky_less_equal": (LEAKY, lambda y: jnp.where(y <= 0, y * 0.1, y)),
    "leaky_mirrored": (LEAKY, lambda y: jnp.where(jnp.less_equal(0, y), y, y * 0.1)),
    "leaky_subnormal": ("min scale max", lambda y: jnp.where(y < 0, y * jnp.asarray(1e-40, y.dtype), y)),
    "leaky_max": ("scale max", lambda y: jnp.maximum(y, 0.1 * y)),
    "elu": ("elu", lambda y: jnp.where(y > 0, y, jnp.expm1(y))),
    "elu_exp": ("elu", lambda y: jnp.where(y > 0, y, jnp.exp(y) - 1)),
    "elu_less": ("elu", lambda y: jnp.where(y < 0, jnp.expm1(y), y)),
    "elu_guarded": ("elu", lambda y: jnp.where(y > 0, y, jnp.expm1(jnp.minimum(y, 0)))),
    "elu_exp_guarded": ("elu", lambda y: jnp.where(y < 0, jnp.exp(jnp.minimum(y, 0)) - 1, y)),
    "elu_sum": ("elu", lambda y: jnp.maximum(y, 0) + jnp.expm1(jnp.minimum(y, 0))),
    "silu_quotient": ("silu", lambda y: y / (1 + jnp.exp(-y))),
    "silu_product": ("silu", lambda y: y * (1 / (1 + jnp.exp(-y)))),
    "sigmoid": ("sigmoid", lambda y: 1 / (1 + jnp.exp(-y))),
    "gelu_tanh": ("gelu_tanh", lambda y: 0.5 * y * (1 + jnp.tanh(C * (y + 0.044715 * y**3)))),
    "gelu_tanh_factored": ("gelu_tanh", lambda y: 0.5 * y * (1 + jnp.tanh(y * C * (1 + 0.044715 * y * y)))),
    "gelu_tanh_square": ("gelu_tanh", lambda y: y * 0.5 * (1 + jnp.tanh(C * y * (1 + 0.044715 * y**2)))),
    "gelu_tanh_products": ("gelu_tanh", lambda y: 0.5 * y * (1 + jnp.tanh(C * (y + 0.044715 * y * y * y)))),
    "gelu_tanh_power": ("gelu_tanh", lambda y: 0.5 * (y * (1 + jnp.tanh(C * (y + 0.044715 * jnp.power(y, 3)))))),
    "gelu_tanh_expanded": ("gelu_tanh", lambda y: 0.5 * y * (1 + jnp.tanh(C * y + C * 0.044715 * y**3))),
    "gelu_tanh_halved": ("gelu_tanh", lambda y: y * (0.5 + 0.5 * jnp.tanh(C * (y + 0.044715 * y**3)))),
    "gelu_erf": ("gelu_erf", lambda y: 0.5 * y * (1 + lax.erf(y / math.sqrt(2)))),
    "gelu_erf_product": ("gelu_erf", lambda y: y * 0.5 * (1 + jax.scipy.special.erf(y * math.sqrt(0.5)))),
    "gelu_erf_halved": ("gelu_erf", lambda y: y * (0.5 + 0.5 * lax.erf(y / math.sqrt(2)))),
    "gelu_erfc": ("gelu_erf", lambda y: 0.5 * y * jax.scipy.special.erfc(-y / math.sqrt(2))),
    "gelu_erfc_halved": ("gelu_erf", lambda y: y * (0.5 * lax.erfc(-y * math.sqrt(0.5)))),
}


def entry(function: Callable[[Array], Any], wide: Any = jnp.float32, dialect: str = "extended") -> Entry:
    """What becomes of a convolution with `function` behind it."""

    def program(x: Array, w: Array) -> Any:
        labels = ("NHWC", "HWIO", "NHWC")
        return function(
            lax.conv_general_dilated(x.astype(wide), w.astype(wide), (1, 1), "SAME", dimension_numbers=labels)
        )

    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(program).lower(X, W)))
    report = passes.run(module, target="h200", dialect=dialect, options=passes.PipelineOptions(verify_each=True))
    (found,) = report.rewritten
    return found


def quantized(y: Array) -> Array:
    return jnp.clip(y, -448, 448).astype(E4M3)


def ops(graph: str | None) -> str:
    """The names of a graph's ops behind the convolution."""
    assert graph is not None
    return " ".join(node.op for node in xla_fp8.graph.Graph.parse(graph).nodes[1:])


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("name", SPELLINGS)
def test_a_spelling_is_the_graph_s_own_op(name: str, wide: str) -> None:
    expected, function = SPELLINGS[name]
    found = entry(lambda y: quantized(function(y)), WIDE[wide])
    assert ops(found.graph) == expected
    assert found.graph is not None
    assert found.graph.count("f8e4m3fn") == 1
    assert found.reason == ""


@pytest.mark.parametrize("name", ["relu_less", "relu6_of_where", "leaky_less", "elu_exp", "elu_sum", "upper_bound"])
def test_what_xla_has_an_op_for_is_in_its_dialect_too(name: str) -> None:
    expected, function = SPELLINGS[name]
    expected = "min scale max" if expected == LEAKY else expected  # as XLA's own matcher writes it
    assert ops(entry(lambda y: quantized(function(y)), dialect="xla").graph) == expected


CLAMPS = [name for name, (expected, _) in SPELLINGS.items() if expected == "clamp"]


@pytest.mark.parametrize("name", CLAMPS)
def test_a_clamp_is_max_and_min_in_xla_s_dialect(name: str) -> None:
    expected = "relu min" if name == "relu6" else "max min"
    assert ops(entry(lambda y: quantized(SPELLINGS[name][1](y)), dialect="xla").graph) == expected


@pytest.mark.parametrize("dialect", ["xla", "extended"])
@pytest.mark.parametrize(("low", "high"), [(-240, 240), (-448, 1), (-1, 448), (0, 6), (0.5, 2), (0, 448)])
def test_a_clamp_within_the_type_s_bounds_is_cast_with_its_own(low: float, high: float, dialect: str) -> None:
    found = entry(lambda y: jnp.clip(y, low, high).astype(E4M3), dialect=dialect)
    assert found.graph is not None
    assert found.graph.count("f8e4m3fn") == 1
    assert found.reason == ""
    clamp = "clamp" if dialect == "extended" else "relu min" if low == 0 else "max min"
    assert ops(found.graph) == ("relu" if (low, high) == (0, 448) else clamp)


@pytest.mark.parametrize("dialect", ["xla", "extended"])
@pytest.mark.parametrize(("low", "is_amax"), [(0, True), (0.5, True), (-1, False)])
def test_the_maximum_of_a_clamp_from_zero_up_is_its_amax(low: float, is_amax: bool, dialect: str) -> None:
    def clipped(y: Array) -> tuple[Array, Array]:
        y = jnp.clip(y, low, 6)
        return quantized(y * 2), jnp.max(y)

    found = entry(clipped, dialect=dialect)
    # In XLA's dialect only a relu is known to make nothing below zero.
    assert ("amax" in ops(found.graph)) == (is_amax and (dialect == "extended" or low == 0))


def test_the_maximum_of_a_clamp_to_a_computed_bound_is_not_its_amax() -> None:
    """Of bounds in the wrong order a clamp is the upper one: here -2, whose absolute value is no maximum."""

    def program(x: Array, w: Array, high: Array) -> tuple[Array, Array]:
        y = lax.clamp(0.0, lax.conv(x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME"), high)
        return quantized(y), jnp.max(y)

    arguments = jnp.ones((1, 16, 8, 8), E4M3), jnp.ones((16, 16, 3, 3), E4M3), jnp.float32(-2)
    (found,) = xla_fp8.explain(program)(*arguments).rewritten
    assert "amax" not in ops(found.graph)
    assert xla_fp8.jit(program)(*arguments)[1] == jax.jit(program)(*arguments)[1] == -2


@pytest.mark.parametrize(("low", "high"), [(-500, 500), (-1, 449), (-jnp.inf, 1), (449, 450)])
def test_a_clamp_beyond_the_type_s_bounds_does_not_saturate(low: float, high: float) -> None:
    found = entry(lambda y: jnp.clip(y * 2, low, high).astype(E4M3))
    assert (ops(found.graph), found.rule) == ("scale", "wrong-clamp-bounds")


def test_a_clamp_is_the_saturating_one_of_its_own_type_alone() -> None:
    assert ops(entry(lambda y: jnp.clip(y, -448, 448).astype(E4M3)).graph) == ""
    assert ops(entry(lambda y: jnp.clip(y, -448, 448).astype(jnp.float8_e5m2)).graph) == "clamp"
    assert ops(entry(lambda y: jnp.clip(y, -448, 448)).graph) == "clamp"


@pytest.mark.parametrize("dialect", ["xla", "extended"])
def test_a_product_of_two_values_of_the_graph_is_told(dialect: str) -> None:
    found = entry(lambda y: quantized(jax.nn.hard_swish(y)), dialect=dialect)
    assert (ops(found.graph), found.rule) == ("", "unknown-operation")
    assert "is the product of two values that the convolution makes" in found.reason


@pytest.mark.parametrize(
    ("between", "is_fused"),
    [
        (jnp.float16, True),
        (jnp.bfloat16, True),
        (jnp.int32, False),
        (jnp.int8, False),
        (jnp.float8_e5m2, False),
        (jnp.float8_e4m3b11fnuz, False),
    ],
)
def test_a_type_between_clamp_and_cast_that_rounds_is_not_left_out(between: Any, is_fused: bool) -> None:
    def program(x: Array, w: Array) -> Array:
        return jnp.clip(lax.conv(x.astype(jnp.float32), w, (1, 1), "SAME"), -448, 448).astype(between).astype(E4M3)

    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(1, 16, 8, 8)) * 4, E4M3), jnp.asarray(rng.normal(size=(32, 16, 3, 3)), E4M3)
    ours = xla_fp8.jit(lambda x, w: program(x, w.astype(jnp.float32)))
    (found,) = ours.report(x, w).rewritten
    assert ("f8e4m3fn" in str(found.graph)) == is_fused
    y, expected = (np.asarray(function(x, w), np.float32) for function in (ours, jax.jit(ours.__wrapped__)))
    differ = (y != expected) & ~(np.isnan(y) & np.isnan(expected))
    assert np.mean(differ) <= (0.05 if is_fused else 0.005)


VALUES = [math.nan, 448, -448, 104, -104, 9, -9, 6, -6, 1.5, -1.5, 1, -1, 0.5, -0.5, 2**-9, -(2**-9), 0]


@pytest.mark.parametrize("name", SPELLINGS)
def test_nan_and_infinity_stay_what_they_were(name: str) -> None:
    """A 1x1 convolution of one channel passes every value on; the larger scale makes infinities of some."""

    def program(x: Array, w: Array, scale: Array) -> Array:
        labels = ("NHWC", "HWIO", "NHWC")
        wide = x.astype(jnp.float32), w.astype(jnp.float32)
        y = lax.conv_general_dilated(*wide, (1, 1), "SAME", dimension_numbers=labels)
        return SPELLINGS[name][1](y * scale)

    x, w = jnp.asarray(VALUES, E4M3).reshape(1, -1, 1, 1), jnp.ones((1, 1, 1, 16), E4M3)
    assert "conv" in str(xla_fp8.explain(program)(x, w, jnp.float32(1)).rewritten)
    ours, plain = xla_fp8.jit(program), jax.jit(program)
    for scale in (1.0, 1e38):
        found, expected = (np.asarray(function(x, w, jnp.float32(scale))) for function in (ours, plain))
        assert np.isnan(expected[0, 0]).all()
        np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)


NOT_THE_SAME: dict[str, Callable[[Array], Array]] = {
    "relu": lambda y: jnp.where(y > 0, y, 0),
    "relu_equal": lambda y: jnp.where(y >= 0, y, 0.0),
    "upper_bound": lambda y: jnp.where(y < 6, y, 6),
    "relu6": lambda y: jnp.where(y > 0, jnp.where(y < 6, y, 6), 0),
}


@pytest.mark.parametrize("name", NOT_THE_SAME)
def test_what_makes_a_number_of_nan_is_not_fused_and_told(name: str) -> None:
    found = entry(lambda y: quantized(NOT_THE_SAME[name](y)))
    assert ops(found.graph) == ""
    assert found.rule == "nan-to-number"
    assert "of NaN, which the graph's relu, min and max pass on" in found.reason


LOOK_ALIKE: dict[str, Callable[[Array], Array]] = {
    "bound_differs": lambda y: jnp.where(y < 1, 2, y),
    "other_value": lambda y: jnp.where(y < 0, 0, y * y),
    "above_its_own_bound": lambda y: jnp.where(y < 6, 6, jnp.where(y > 3, 3, y)),
    "nan_bound": lambda y: jnp.where(y < jnp.nan, jnp.nan, y),
    "equal": lambda y: jnp.where(y == 0, 0, y),
    "elu_of_two": lambda y: jnp.where(y > 0, y, 2 * (jnp.exp(y) - 1)),
    "elu_guarded_to_zero": lambda y: jnp.where(y > 0, y, jnp.expm1(jnp.where(y < 0, y, 0))),
    "silu_of_two": lambda y: y / (2 + jnp.exp(-y)),
    "silu_of_plus": lambda y: y / (1 + jnp.exp(y)),
    "gelu_of_another_number": lambda y: 0.5 * y * (1 + jnp.tanh(C * (y + 0.05 * y**3))),
    "steep_leaky": lambda y: jnp.where(y < 0, 2 * y, y),
    "infinite_leaky": lambda y: jnp.where(y < 0, -jnp.inf * y, y),
}


@pytest.mark.parametrize("name", LOOK_ALIKE)
def test_what_only_looks_alike_keeps_its_numbers(name: str) -> None:
    def program(x: Array, w: Array) -> Array:
        labels = ("NHWC", "HWIO", "NHWC")
        wide = x.astype(jnp.float32), w.astype(jnp.float32)
        return LOOK_ALIKE[name](lax.conv_general_dilated(*wide, (1, 1), "SAME", dimension_numbers=labels))

    x, w = jnp.asarray(VALUES, E4M3).reshape(1, -1, 1, 1), jnp.ones((1, 1, 1, 16), E4M3)
    ours, plain = (np.asarray(jit(program)(x, w)) for jit in (xla_fp8.jit, jax.jit))
    np.testing.assert_array_equal(ours, plain)


def test_a_total_order_is_not_a_comparison_of_numbers() -> None:
    text = _jax_compat.lowered_hlo_text(
        jax.jit(lambda x, w: quantized(SPELLINGS["relu_less"][1](convolution(x, w)))).lower(X, W)
    )
    assert "direction=LT" in text
    module = hlo.parse(text.replace("direction=LT", "direction=LT, type=TOTALORDER"))
    assert ops(passes.run(module, target="h200").rewritten[0].graph) == ""


def convolution(x: Array, w: Array, filter_labels: str = "HWIO", out: str = "NHWC") -> Array:
    wide = x.astype(jnp.float32), w.astype(jnp.float32)
    return lax.conv_general_dilated(*wide, (1, 1), "SAME", dimension_numbers=("NHWC", filter_labels, out))


AMAX: dict[str, Callable[[Array], Array]] = {
    "flattened": lambda y: jnp.max(jnp.abs(y.reshape(-1))),
    "flattened_behind_abs": lambda y: jnp.max(jnp.abs(y).reshape(-1)),
    "raveled_twice": lambda y: jnp.max(jnp.abs(jnp.ravel(y).reshape(-1, 8)).T),
    "transposed": lambda y: jnp.max(jnp.abs(y.T)),
    "reversed": lambda y: jnp.max(jnp.flip(jnp.abs(y), 1)),
    "of_relu": lambda y: jnp.max(y.ravel()),
}


@pytest.mark.parametrize("out", ["NHWC", "NCHW"])
@pytest.mark.parametrize("filter_labels", ["OHWI", "HWIO"])
@pytest.mark.parametrize("name", AMAX)
def test_an_amax_does_not_mind_the_order_of_the_elements(name: str, filter_labels: str, out: str) -> None:
    def program(x: Array, w: Array) -> tuple[Array, Array]:
        y = convolution(x, w, filter_labels, out)
        y = jax.nn.relu(y) if name == "of_relu" else y
        return quantized(y), AMAX[name](y)

    shape = (32, 3, 3, 16) if filter_labels == "OHWI" else (3, 3, 16, 32)
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=(2, 8, 8, 16)), E4M3), jnp.asarray(rng.normal(size=shape), E4M3)
    (found,) = xla_fp8.explain(program)(x, w).rewritten
    assert ops(found.graph) == ("relu amax" if name == "of_relu" else "amax")
    assert xla_fp8.jit(program)(x, w)[1] == jax.jit(program)(x, w)[1]


@pytest.mark.parametrize("dialect", ["xla", "extended"])
def test_an_amax_that_is_taken_again_is_one_node(dialect: str) -> None:
    found = entry(
        lambda y: (quantized(y), *(amax(y) for name, amax in AMAX.items() if name != "of_relu")), dialect=dialect
    )
    assert ops(found.graph) == "amax"
    of_relu = entry(lambda y: (quantized(jax.nn.relu(y)), *(amax(jax.nn.relu(y)) for amax in AMAX.values())))
    assert ops(of_relu.graph) == "relu amax"


def test_an_amax_of_another_value_or_type_is_another_node() -> None:
    found = entry(lambda y: (quantized(y * 2), *(jnp.max(jnp.abs(v)) for v in (y, y * 2, y, y * 2))))
    assert ops(found.graph) == "scale amax amax"
    found = entry(lambda y: (quantized(y), jnp.max(jnp.abs(y)), jnp.max(jnp.abs(y.astype(jnp.float32)))), jnp.bfloat16)
    assert found.graph is not None
    assert "[bf16]amax(1)" in found.graph
    assert "[f32]amax(1)" in found.graph


def test_both_users_of_an_amax_get_its_number() -> None:
    def program(x: Array, w: Array) -> tuple[Array, Array, Array]:
        y = jax.nn.relu(convolution(x, w))
        return quantized(y), jnp.max(jnp.abs(y)), jnp.max(y.ravel()) / 448

    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.normal(size=X.shape), E4M3), jnp.asarray(rng.normal(size=W.shape), E4M3)
    (found,) = xla_fp8.explain(program)(x, w).rewritten
    assert ops(found.graph) == "relu amax"
    for ours, plain in zip(xla_fp8.jit(program)(x, w)[1:], jax.jit(program)(x, w)[1:], strict=True):
        assert ours == plain


@pytest.mark.parametrize(
    "function",
    [
        lambda y: jnp.max(jnp.abs(y.reshape(-1)[:100])),
        lambda y: jnp.max(jnp.abs(jnp.pad(y, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=1))),
        lambda y: jnp.max(y.reshape(-1)),
        lambda y: jnp.max(jnp.abs(y.reshape(-1, 16)), 1),
    ],
)
def test_what_is_no_amax_of_every_element_stays_beside_the_graph(function: Callable[[Array], Array]) -> None:
    found = entry(lambda y: (quantized(y), function(y)))
    assert "amax" not in ops(found.graph)


def test_an_optimization_barrier_is_a_reason() -> None:
    found = entry(lambda y: quantized(lax.optimization_barrier(y * 2) * 2))
    assert ops(found.graph) == "scale"
    assert found.rule == "optimization-barrier"
    assert "is an optimization barrier: nothing is fused across it" in found.reason
    found = entry(lambda y: quantized(lax.optimization_barrier((y, y * 2))[0] * 2))
    assert (ops(found.graph), found.rule) == ("", "optimization-barrier")


def test_a_barrier_in_front_of_a_convolution_is_a_refusal() -> None:
    def program(x: Array, w: Array) -> Array:
        labels = ("NHWC", "HWIO", "NHWC")
        x, w = lax.optimization_barrier((x.astype(jnp.float32), w.astype(jnp.float32)))
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=labels)

    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(program).lower(X, W)))
    (found,) = passes.run(module, target="h200").refused
    assert found.rule == "optimization-barrier"
    assert "comes out of an optimization barrier" in found.reason


@pytest.mark.parametrize("clip", [None, 240, 448])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz, jnp.float8_e4m3b11fnuz])
def test_an_fp8_type_without_graphs_is_named(dtype: Any, clip: float | None) -> None:
    bounded = (lambda y: y) if clip is None else functools.partial(jnp.clip, min=-clip, max=clip)
    found = entry(lambda y: bounded(y * 2).astype(dtype))
    assert ops(found.graph) == "scale"
    assert found.rule == "fp8-type"
    assert found.reason.endswith("a type that a graph cannot store")


def test_a_saturating_cast_of_two_selects() -> None:
    found = entry(lambda y: jnp.where(y > 448, 448, jnp.where(y < -448, -448, y)).astype(E4M3))
    assert found.graph == "1:[f8e4m3fn]conv();"
    found = entry(lambda y: jnp.where(y < -448, -448, jnp.where(y > 448, 448, y)).astype(E4M3))
    assert found.graph == "1:[f8e4m3fn]conv();"


def test_a_bound_in_front_of_the_clip_leaves_the_clip_whole() -> None:
    assert entry(lambda y: quantized(jnp.minimum(y, 6))).graph == "1:[f32]conv();2:[f8e4m3fn]min(1);"
    assert entry(lambda y: quantized(jnp.maximum(y, -2))).graph == "1:[f32]conv();2:[f8e4m3fn]max(1);"
