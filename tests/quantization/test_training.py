"""fp8_dot, fp8_conv, fake_quantize and delayed scaling: values, first and second derivatives, transforms, memory."""

from __future__ import annotations

import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from xla_fp8 import DelayedScale, DelayedScaling
from xla_fp8.quantization.numerics import ScaleRule

pytestmark = pytest.mark.unoptimized

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), dtype)


# The model to compare with, written apart from the package: quantize and dequantize, straight through, with scales that
# are powers of two, so that the product of two dequantized numbers is exact in f32.


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    largest = jnp.float32(jnp.finfo(dtype).max)
    scale = jnp.exp2(jnp.ceil(jnp.log2(jnp.max(jnp.abs(x)) / largest)))
    return jnp.clip(x / scale, -largest, largest).astype(dtype).astype(jnp.float32) * scale


@jax.custom_jvp
def fake(x: jax.Array) -> jax.Array:
    return rounded(x, E4M3)


fake.defjvp(lambda primals, tangents: (fake(*primals), tangents[0]))


@jax.custom_jvp
def fake_gradient(x: jax.Array) -> jax.Array:
    return rounded(x, E5M2)


fake_gradient.defjvp(lambda primals, tangents: (fake_gradient(*primals), tangents[0]))


@jax.custom_vjp
def quantized_gradient(y: jax.Array) -> jax.Array:
    """y; its cotangent is quantized."""
    return y


quantized_gradient.defvjp(lambda y: (y, None), lambda _, g: (fake_gradient(g),))

NUMBERS = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}


def model_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return quantized_gradient(fake(x) @ fake(w))


def model_conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return quantized_gradient(lax.conv_general_dilated(fake(x), fake(w), (1, 1), "SAME", **NUMBERS))


def own_dot(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    return xla_fp8.fp8_dot(x, w, **{"power_of_two": True, **options})


def own_conv(x: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
    options = {"power_of_two": True, "filter_gradient_dtype": jnp.float32, **options}
    return xla_fp8.fp8_conv(x, w, (1, 1), "SAME", **NUMBERS, **options)


def plain_conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", **NUMBERS)


PAIRS = {
    "dot": (own_dot, model_dot, jnp.matmul, normal(12, 16), 0.25 * normal(16, 8)),
    "conv": (own_conv, model_conv, plain_conv, normal(2, 5, 5, 16), 0.1 * normal(3, 3, 16, 8)),
}


def loss(function: Any) -> Any:
    """Not linear, so that second derivatives are there."""
    return lambda x, w: jnp.sum(jnp.sin(function(x, w)) * jnp.cos(jnp.arange(w.shape[-1], dtype=jnp.float32)))


def close(ours: Any, theirs: Any, part: float = 3e-6) -> None:
    """Equal but for the order of sums: within `part` of the largest entry."""
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        largest = np.max(np.abs(np.asarray(b, np.float32)))
        assert largest > 0
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=0, atol=part * largest)


@pytest.mark.parametrize(("pair", "jit"), [("dot", False), ("dot", True), ("conv", True)])
def test_first_derivatives_are_those_of_fake_quantization(pair: str, jit: bool) -> None:
    own, model, _, x, w = PAIRS[pair]
    wrap = jax.jit if jit else lambda f: f
    close(wrap(own)(x, w), model(x, w))
    close(wrap(jax.grad(loss(own), (0, 1)))(x, w), jax.grad(loss(model), (0, 1))(x, w))


@pytest.mark.parametrize("pair", PAIRS)
def test_second_derivatives_are_those_of_fake_quantization(pair: str) -> None:
    own, model, _, x, w = PAIRS[pair]
    direction = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size, dtype=jnp.float32)).reshape(a.shape), (x, w))

    def along(function: Any) -> Any:
        def value(x: jax.Array, w: jax.Array) -> jax.Array:
            gradient = jax.grad(loss(function), (0, 1))(x, w)
            return sum(jnp.vdot(g, d) for g, d in zip(gradient, direction, strict=True))

        return value

    reverse = jax.jit(jax.grad(along(own), (0, 1)))(x, w)
    close(reverse, jax.jit(jax.grad(along(model), (0, 1)))(x, w))
    forward = jax.jit(lambda x, w: jax.jvp(jax.grad(loss(own), (0, 1)), (x, w), direction)[1])(x, w)
    expected = jax.jit(lambda x, w: jax.jvp(jax.grad(loss(model), (0, 1)), (x, w), direction)[1])(x, w)
    close(forward, expected)


@pytest.mark.parametrize("pair", PAIRS)
def test_derivatives_are_those_of_f32_within_the_error_of_fp8(pair: str) -> None:
    own, _, plain, x, w = PAIRS[pair]
    for ours, exact in zip(
        (own(x, w, power_of_two=False), *jax.grad(loss(own), (0, 1))(x, w)),
        (plain(x, w), *jax.grad(loss(plain), (0, 1))(x, w)),
        strict=True,
    ):
        error = jnp.linalg.norm((ours - exact).ravel()) / jnp.linalg.norm(exact.ravel())
        assert 1e-3 < error < 0.1


def test_the_error_of_the_gradient_of_a_linear_loss_is_that_of_its_casts() -> None:
    x, w, g = normal(64, 128), normal(128, 32), normal(64, 32)
    gradient = jax.grad(lambda x: jnp.vdot(xla_fp8.fp8_dot(x, w), g))(x)
    exact = g @ w.T
    assert jnp.linalg.norm(gradient - exact) / jnp.linalg.norm(exact) < 2**-4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_types_of_results_and_gradients(dtype: Any) -> None:
    x, w = normal(4, 8, dtype=dtype), normal(8, 3)
    assert xla_fp8.fp8_dot(x, x.T).dtype == dtype
    assert xla_fp8.fp8_dot(x, w).dtype == jnp.float32
    assert xla_fp8.fp8_dot(x, w, preferred_element_type=dtype).dtype == dtype
    dx, dw = jax.grad(lambda x, w: jnp.sum(xla_fp8.fp8_dot(x, w, preferred_element_type=dtype)), (0, 1))(x, w)
    assert (dx.dtype, dw.dtype) == (dtype, jnp.float32)


def test_any_dimension_numbers() -> None:
    x, w = normal(3, 5, 4, 6), normal(6, 3, 7, 5)
    numbers = (((1, 3), (3, 0)), ((0,), (1,)))
    y = xla_fp8.fp8_dot(x, w, numbers)
    np.testing.assert_allclose(y, lax.dot_general(x, w, numbers), atol=1.0)
    dx, dw = jax.grad(lambda x, w: jnp.sum(xla_fp8.fp8_dot(x, w, numbers) ** 2), (0, 1))(x, w)
    assert (dx.shape, dw.shape) == (x.shape, w.shape)


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (2, 1), "padding": [(1, 0), (0, 2)]},
        {"window_strides": (1, 1), "padding": "VALID", "rhs_dilation": (2, 1)},
        {"window_strides": (1, 1), "padding": [(1, 1), (0, 1)], "lhs_dilation": (2, 2)},
        {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 2},
    ],
    ids=str,
)
def test_any_window(options: Any) -> None:
    x, w = normal(2, 7, 6, 8), normal(3, 2, 8 // options.get("feature_group_count", 1), 4)

    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        return xla_fp8.fp8_conv(x, w, **options, **NUMBERS, filter_gradient_dtype=jnp.float32, power_of_two=True)

    def model(x: jax.Array, w: jax.Array) -> jax.Array:
        return quantized_gradient(lax.conv_general_dilated(fake(x), fake(w), **options, **NUMBERS))

    close(own(x, w), model(x, w))
    close(jax.grad(loss(own), (0, 1))(x, w), jax.grad(loss(model), (0, 1))(x, w))


def test_filter_gradients_convolve_bf16() -> None:
    x, w = normal(2, 5, 5, 16), normal(3, 3, 16, 8)
    exact, rounded_sum = (
        jax.grad(loss(lambda x, w, t=t: own_conv(x, w, filter_gradient_dtype=t)), 1)(x, w)
        for t in (jnp.float32, jnp.bfloat16)
    )
    close(rounded_sum, exact, 2**-8)
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(xla_fp8.fp8_conv(x, w, (1, 1), "SAME", **NUMBERS))))(w)
    types = [
        equation.invars[0].aval.dtype for equation in jaxpr.eqns if equation.primitive.name == "conv_general_dilated"
    ]
    assert jnp.bfloat16 in types


WIDE_PAIRS = {
    "dot": (xla_fp8.fp8_dot, lambda x, w: fake(x) @ fake(w), jnp.matmul),
    "conv": (own_conv, lambda x, w: plain_conv(fake(x), fake(w)), plain_conv),
}


def with_wide_filter_gradient(pair: str) -> Any:
    """The model to compare with: the value and the input gradient of fake quantization, the filter's of the plain
    function; a rule that JAX differentiates by itself."""
    _, rounded_function, plain = WIDE_PAIRS[pair]

    @jax.custom_vjp
    def function(x: jax.Array, w: jax.Array) -> jax.Array:
        return rounded_function(x, w)

    def backward(operands: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = operands
        (of_x,) = jax.linear_transpose(lambda x: plain(x, fake(w)), x)(fake_gradient(g))
        (of_w,) = jax.linear_transpose(lambda w: plain(x, w), w)(g)
        return of_x, of_w

    function.defvjp(lambda x, w: (rounded_function(x, w), (x, w)), backward)
    return function


@pytest.mark.parametrize("pair", WIDE_PAIRS)
def test_wide_filter_gradients_and_their_derivatives(pair: str) -> None:
    """Of the operands as they are; all else is as with the gradient of FP8 tensors."""
    *_, x, w = PAIRS[pair]

    def own(x: jax.Array, w: jax.Array) -> jax.Array:
        return WIDE_PAIRS[pair][0](x, w, power_of_two=True, filter_gradient="wide")

    def squares(function: Any) -> Any:
        return jax.grad(lambda x, w: sum(jnp.sum(g**2) for g in function(x, w)), (0, 1))

    model = with_wide_filter_gradient(pair)
    close(own(x, w), model(x, w))
    first = jax.jit(jax.grad(loss(own), (0, 1)))
    close(first(x, w), jax.grad(loss(model), (0, 1))(x, w))
    assert not np.array_equal(first(x, w)[1], jax.grad(loss(PAIRS[pair][0]), 1)(x, w))
    close(jax.jit(squares(first))(x, w), squares(jax.grad(loss(model), (0, 1)))(x, w), 1e-5)


def test_wide_filter_gradients_leave_the_state_of_delayed_scaling_alone() -> None:
    x, w = PAIRS["conv"][3:]
    state = DelayedScaling.create(amax=4.0)

    def observed(choice: str) -> Any:
        return jax.grad(
            lambda state: loss(lambda x, w: own_conv(x, w, scaling=state, filter_gradient=choice))(x, w), allow_int=True
        )(state)

    for wide, fp8 in zip(*(jax.tree.leaves(state.update(observed(c))) for c in ("wide", "fp8")), strict=True):
        np.testing.assert_array_equal(wide, fp8)


@pytest.mark.parametrize(
    ("dtype", "result", "is_wide"),
    [(jnp.bfloat16, None, True), (jnp.float16, None, True), (jnp.float32, None, False), (jnp.bfloat16, "f4", False)],
)
def test_what_auto_is(dtype: Any, result: Any, is_wide: bool) -> None:
    """Wide where nothing has to be converted: then the convolution of the filter gradient reads what the layer read."""
    x, w = normal(2, 5, 5, 16, dtype=dtype), normal(3, 3, 16, 8, dtype=dtype)
    options = {"preferred_element_type": result, **NUMBERS}
    gradients = [
        jax.grad(loss(lambda x, w, c=c: xla_fp8.fp8_conv(x, w, (1, 1), "SAME", **options, filter_gradient=c)), 1)(x, w)
        for c in ("auto", "wide", "fp8")
    ]
    assert np.array_equal(gradients[0], gradients[1]) == is_wide
    assert np.array_equal(gradients[0], gradients[2]) != is_wide
    dots = [
        jax.grad(loss(lambda x, w, c=c: xla_fp8.fp8_dot(x, w, filter_gradient=c)), 1)(x, w[0, 0])
        for c in ("auto", "wide", "fp8")
    ]
    assert np.array_equal(dots[0], dots[2])
    assert not np.array_equal(dots[0], dots[1])


def test_a_wide_filter_gradient_converts_nothing() -> None:
    """What the backward pass keeps is the input and the FP8 filter; its bf16 convolution reads them unconverted."""
    x, w = normal(2, 6, 6, 16, dtype=jnp.bfloat16), normal(3, 3, 16, 16, dtype=jnp.bfloat16)

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return xla_fp8.fp8_conv(x, w, (1, 1), "SAME", **NUMBERS)

    y, pullback = jax.vjp(conv, x, w)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if leaf.shape == x.shape]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]
    report = xla_fp8.explain(lambda x, w, g: jax.vjp(conv, x, w)[1](g))(x, w, y)
    assert (len(report.rewritten), len(report.refused_fp8)) == (1, 0)  # the value is not asked for


def test_a_wrong_filter_gradient_is_told() -> None:
    with pytest.raises(xla_fp8.QuantizationError, match="filter_gradient='f8': expected one of 'auto', 'wide', 'fp8'"):
        xla_fp8.fp8_dot(normal(4, 4), normal(4, 4), filter_gradient="f8")


def test_a_filter_gradient_of_small_tensors_does_not_underflow() -> None:
    """Of f32 numbers that are normal, though the product of the scales is not."""
    x, w = normal(2, 6, 6, 16), normal(3, 3, 16, 8)

    def gradient(x: jax.Array, size: float) -> jax.Array:
        return jax.jit(jax.grad(lambda w: size * jnp.sum(own_conv(x, w, filter_gradient="fp8"))))(w)

    close(gradient(x * 2.0**-50, 2.0**-60) * 2.0**110, gradient(x, 1.0))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.int32, jnp.float8_e4m3fn], ids=str)
def test_a_filter_gradient_dtype_that_cannot_hold_the_sum_is_told(dtype: Any) -> None:
    x, w = normal(2, 5, 5, 16), normal(3, 3, 16, 8)
    with pytest.raises(xla_fp8.QuantizationError, match=r"filter_gradient_dtype=.*: expected bfloat16 or float32"):
        xla_fp8.fp8_conv(x, w, (1, 1), "SAME", **NUMBERS, filter_gradient_dtype=dtype)


def test_what_is_no_state_and_no_type_of_a_result_is_told() -> None:
    x, w = normal(8, 16), normal(16, 4)
    state = xla_fp8.DelayedScaling.create()
    for wrong in (state.lhs, {"lhs": state.lhs, "rhs": state.rhs, "gradient": state.gradient}):
        with pytest.raises(xla_fp8.QuantizationError, match=r"scaling is a .*: expected a DelayedScaling"):
            xla_fp8.fp8_dot(x, w, scaling=wrong)  # type: ignore[arg-type]
    with pytest.raises(xla_fp8.QuantizationError, match="preferred_element_type=int8"):
        xla_fp8.fp8_dot(x, w, preferred_element_type=jnp.int8)


# Transforms


@pytest.mark.parametrize("pair", PAIRS)
def test_vmap(pair: str) -> None:
    own, _, _, x, w = PAIRS[pair]
    xs, ws = jnp.stack([x, 2 * x, -x]), jnp.stack([w, w / 3, w])
    gradient = jax.grad(loss(own), (0, 1))
    mapped = jax.vmap(gradient)(xs, ws)
    close(mapped, jax.tree.map(lambda *a: jnp.stack(a), *[gradient(xs[i], ws[i]) for i in range(3)]))


def test_one_scale_across_vmap_is_that_of_a_batch_dimension() -> None:
    """And so are the derivatives; the convolutions then read a batch, and become graphs."""
    rng = np.random.default_rng(1)
    xs, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 6, 6, 16), (3, 3, 16, 16)))
    xs *= jnp.float32([1, 10, 100])[:, None, None, None]
    window = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

    def mapped(xs: jax.Array, w: jax.Array, **options: Any) -> jax.Array:
        y = jax.vmap(lambda x: xla_fp8.fp8_conv(x[None], w, **window, **options)[0])(xs)
        return jnp.sum(jax.nn.relu(y) ** 2)

    def batched(xs: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jax.nn.relu(xla_fp8.fp8_conv(xs, w, **window)) ** 2)

    shared = jax.jit(jax.grad(lambda xs, w: mapped(xs, w, scale_across_vmap=True), (0, 1)))(xs, w)
    for of_mapped, of_batch in zip(shared, jax.jit(jax.grad(batched, (0, 1)))(xs, w), strict=True):
        np.testing.assert_allclose(of_mapped, of_batch, rtol=1e-2, atol=1e-2 * float(jnp.max(jnp.abs(of_batch))))
    own = jax.jit(jax.grad(mapped))(xs, w)
    assert not jnp.array_equal(own[0], shared[0][0])
    report = xla_fp8.explain(jax.grad(lambda xs: mapped(xs, w, scale_across_vmap=True)))(xs)
    assert len(report.rewritten) == 2


@pytest.mark.parametrize("pair", PAIRS)
def test_remat(pair: str) -> None:
    own, _, _, x, w = PAIRS[pair]
    gradient = jax.jit(jax.grad(loss(jax.checkpoint(own)), (0, 1)))(x, w)
    close(gradient, jax.grad(loss(own), (0, 1))(x, w))


def deep(x: jax.Array, ws: jax.Array) -> jax.Array:
    y, _ = lax.scan(lambda x, w: (jnp.sin(xla_fp8.fp8_dot(x, w)), None), x, ws)
    return jnp.sum(y**2)


def unrolled(x: jax.Array, ws: jax.Array) -> jax.Array:
    for w in ws:
        x = jnp.sin(xla_fp8.fp8_dot(x, w))
    return jnp.sum(x**2)


def test_scan() -> None:
    x, ws = normal(8, 16), 0.25 * normal(3, 16, 16)
    close(jax.jit(jax.grad(deep, (0, 1)))(x, ws), jax.jit(jax.grad(unrolled, (0, 1)))(x, ws), 1e-5)
    second = jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(deep)(x, ws) ** 2)))(x)
    close(second, jax.jit(jax.grad(lambda x: jnp.sum(jax.grad(unrolled)(x, ws) ** 2)))(x), 1e-4)


def test_scan_keeps_fp8_for_the_backward_pass() -> None:
    """What the compiled loops carry: FP8 filters, one wide tensor (the cosine, which is sin's), no zeros."""
    x, ws = normal(8, 24), normal(3, 24, 24)
    text = jax.jit(jax.grad(deep)).lower(x, ws).compile().as_text()
    (forward, backward) = (line for line in text.splitlines() if re.search(r" = \(.* while\(", line))
    for loop in (forward, backward):
        assert re.findall(r"(\w+)\[3,8,24\]", loop.partition(" while(")[0]) == ["f32"]
    assert "f8e4m3fn[3,24,24]" in forward
    assert "f32[3,24,24]" not in backward  # CPUs widen FP8 to f16


def test_a_compiled_step_does_not_hold_the_zeros() -> None:
    x, w = normal(256, 512), normal(512, 128)
    text = jax.jit(jax.grad(loss(xla_fp8.fp8_dot), (0, 1))).lower(x, w).compile().as_text()
    zero = re.findall(r"(\S+) = f32\[\] constant\(0\)", text)
    spread = re.findall(r"= f32\[(?:256,512|512,128)\]\S* broadcast\(([^)]*)\)", text)
    assert not {*zero} & {*spread}


# Chains that become FP8 graphs


def test_forward_and_input_gradient_are_fp8_graphs() -> None:
    x, w = normal(2, 8, 8, 16), normal(3, 3, 16, 32)

    def layer(x: jax.Array) -> jax.Array:
        y = xla_fp8.fp8_conv(x, w, (1, 1), "SAME", **NUMBERS)
        return jnp.sum(jax.nn.relu(y) ** 2)

    step = xla_fp8.jit(jax.value_and_grad(layer), strict=True, backend="reference")
    assert len(step.report(x).rewritten) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", xla_fp8.FallbackWarning)
        ours = step(x)
    close(ours, jax.jit(jax.value_and_grad(layer))(x), 1e-5)


@pytest.mark.parametrize("delayed", [False, True])
def test_the_filter_gradient_is_what_is_refused(delayed: bool) -> None:
    x, w = normal(2, 8, 8, 16), normal(3, 3, 16, 32)
    state = DelayedScaling.create(amax=4.0) if delayed else None

    def layer(x: jax.Array, w: jax.Array, state: Any) -> jax.Array:
        return jnp.sum(jax.nn.relu(xla_fp8.fp8_conv(x, w, (1, 1), "SAME", **NUMBERS, scaling=state)) ** 2)

    arguments = (0, 1, 2) if delayed else (0, 1)
    report = xla_fp8.explain(jax.grad(layer, arguments))(x, w, state)
    assert len(report.rewritten) == 2
    assert [entry.rule for entry in report.refused_fp8] == ["filter-gradient"]


def test_dots_multiply_scaled_fp8_tensors() -> None:
    """convert(x8) * scalar on both sides of each of the three dots, as XLA's gemm-rewriter asks."""
    x, w = normal(16, 32), normal(32, 48)
    text = jax.jit(jax.grad(loss(xla_fp8.fp8_dot), (0, 1))).lower(x, w).as_text("hlo")
    lines = dict(re.findall(r"^\s*(?:ROOT )?(\S+) = (.*)$", text, re.MULTILINE))
    dots = [line for line in lines.values() if " dot(" in line]
    assert len(dots) == 3
    for dot in dots:
        for operand in re.search(r" dot\(([^)]*)\)", dot)[1].split(", "):
            while " transpose(" in lines[operand]:
                operand = re.search(r"transpose\(([^)]*)\)", lines[operand])[1]
            tensor, scale = re.search(r" multiply\(([^)]*)\)", lines[operand])[1].split(", ")
            source = re.search(r" convert\(([^)]*)\)", lines[tensor])[1]
            assert lines[source].startswith("f8e")
            assert "dimensions={}" in lines[scale]


# Delayed scaling


def test_the_gradient_of_a_state_is_what_was_observed() -> None:
    x, w, g = normal(8, 16), normal(16, 4), normal(8, 4)
    state = DelayedScaling.create(amax=8.0, length=3)
    observed = jax.grad(lambda s: jnp.vdot(xla_fp8.fp8_dot(x, w, scaling=s), g))(state)
    for tensor, seen in ((x, observed.lhs), (w, observed.rhs), (g, observed.gradient)):
        np.testing.assert_array_equal(seen.amax_history, [jnp.max(jnp.abs(tensor)), 0, 0])
        assert seen.scale == 0
    after = state.update(observed)
    np.testing.assert_array_equal(after.lhs.amax_history, [jnp.max(jnp.abs(x)), 8, 0])
    assert (after.gradient.rule.dtype, after.lhs.rule.dtype) == (jnp.dtype(E5M2), jnp.dtype(E4M3))


def test_delayed_scales_are_what_quantizes() -> None:
    x, w = normal(8, 16), normal(16, 4)
    state = DelayedScaling.create(amax=1.0)  # too small: saturates
    y = xla_fp8.fp8_dot(x, w, scaling=state)
    q, p = (xla_fp8.quantize(a, scale=state.lhs.scale) for a in (x, w))
    np.testing.assert_array_equal(y, q @ p)
    assert jnp.max(jnp.abs(q.dequantize())) <= 1.001


def test_states_go_through_scan_and_jit() -> None:
    x, ws = normal(8, 16), normal(3, 16, 16)
    one = DelayedScaling.create(amax=4.0, length=2)
    states = jax.tree.map(lambda a: jnp.stack([a] * 3), one)

    @jax.jit
    def observe(x: jax.Array, ws: jax.Array, states: DelayedScaling) -> DelayedScaling:
        def run(states: DelayedScaling) -> jax.Array:
            def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
                return jnp.tanh(xla_fp8.fp8_dot(x, w[0], scaling=w[1])), None

            return jnp.sum(lax.scan(layer, x, (ws, states))[0])

        return jax.vmap(DelayedScaling.update)(states, jax.grad(run)(states))

    after = observe(x, ws, states)
    np.testing.assert_array_equal(after.rhs.amax_history[:, 0], jnp.max(jnp.abs(ws), (1, 2)))
    assert after.lhs.amax_history[0, 0] == jnp.max(jnp.abs(x))
    assert (after.lhs.amax_history[1:, 0] <= 1).all()


def test_a_state_shared_by_a_mapped_axis_sees_the_largest() -> None:
    xs, w = normal(5, 8, 16), normal(16, 4)
    state = DelayedScaling.create(amax=8.0)

    def total(state: DelayedScaling, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.vmap(lambda x: xla_fp8.fp8_dot(x, w, scaling=state))(xs)))

    observed = jax.grad(total)(state, w)
    assert observed.lhs.amax_history[0] == jnp.max(jnp.abs(xs))
    assert observed.rhs.amax_history[0] == jnp.max(jnp.abs(w))
    nested = jax.grad(
        lambda s: jnp.sum(jax.vmap(jax.vmap(lambda x: xla_fp8.fp8_dot(x, w, scaling=s)))(xs[None] * normal(2, 1, 1, 1)))
    )(state)
    assert nested.lhs.amax_history[0] > 0
    each = jax.tree.map(lambda a: jnp.stack([a] * 5), state)
    apart = jax.grad(lambda s: jnp.sum(jax.vmap(lambda x, s: xla_fp8.fp8_dot(x, w, scaling=s))(xs, s)))(each)
    np.testing.assert_array_equal(apart.lhs.amax_history[:, 0], jnp.max(jnp.abs(xs), (1, 2)))


def test_update() -> None:
    state = DelayedScale.create(length=3, margin=1)
    assert (state.scale, state.amax_history.tolist()) == (1, [0, 0, 0])
    factor = np.float32(2) * np.float32(1 / 448)
    for amax, history, scale in (
        (0.0, [0, 0, 0], 1),
        (4.0, [4, 0, 0], 4 * factor),
        (1.0, [1, 4, 0], 4 * factor),
        (np.nan, [1, 4, 0], 4 * factor),
        (np.inf, [1, 4, 0], 4 * factor),
        (0.5, [0.5, 1, 4], 4 * factor),
        (0.25, [0.25, 0.5, 1], 1 * factor),
    ):
        state = state.update(jnp.float32(amax))
        assert state.amax_history.tolist() == history
        assert state.scale == np.float32(scale)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_finite_amax_makes_a_finite_scale(power_of_two: bool) -> None:
    state = DelayedScale.create(margin=1, power_of_two=power_of_two).update(3e38)
    assert jnp.isfinite(state.scale)
    assert jnp.isfinite(xla_fp8.quantize(jnp.ones(3), scale=state.scale).dequantize()).all()


def test_states_are_made_as_asked() -> None:
    state = DelayedScaling.create(E5M2, E4M3, amax=3.0, power_of_two=True)
    assert state.lhs.rule == ScaleRule(jnp.dtype(E5M2), power_of_two=True)
    assert np.frexp(float(state.gradient.scale))[0] == 0.5
    with pytest.raises(xla_fp8.QuantizationError, match="at least one amax"):
        DelayedScale.create(length=0)


@pytest.mark.parametrize("options", [{}, {"amax": 4.0}])
def test_the_first_state_may_be_donated(options: dict[str, Any]) -> None:
    state = DelayedScaling.create(**options)
    step = jax.jit(lambda state: state.update(state), donate_argnums=0)
    expected = state.update(state)
    for one, other in zip(jax.tree.leaves(step(state)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)


# fake_quantize


def test_fake_quantize_is_straight_through() -> None:
    x = normal(6, 7)
    np.testing.assert_array_equal(xla_fp8.fake_quantize(x), xla_fp8.quantize(x).dequantize())
    np.testing.assert_array_equal(
        xla_fp8.fake_quantize(x, E5M2, axis=0), xla_fp8.quantize(x, E5M2, axis=0).dequantize()
    )
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.vdot(xla_fp8.fake_quantize(x), x))(x), x + xla_fp8.quantize(x))
    second = jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(xla_fp8.fake_quantize(x) ** 3))(x)))(x)
    np.testing.assert_allclose(second, 6 * xla_fp8.quantize(x), rtol=1e-6)
    assert xla_fp8.fake_quantize(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("given", [{"scale": 0.5 / 448}, {"scale": -0.5 / 448}, {"amax": 0.5}])
def test_saturated_values(given: Any) -> None:
    x = jnp.float32([0.25, 0.5, -0.5, 0.6, -3.0])

    def gradient(**options: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(xla_fp8.fake_quantize(x, **given, **options)))(x).tolist()

    assert gradient() == [1, 1, 1, 1, 1]
    assert gradient(saturated="zero") == [1, 1, 1, 0, 0]


@pytest.mark.parametrize("axis", [None, 0, 1])
def test_dynamic_scales_saturate_nothing(axis: Any) -> None:
    x = normal(9, 50)
    gradient = jax.grad(lambda x: jnp.sum(xla_fp8.fake_quantize(x, axis=axis, saturated="zero")))(x)
    assert (gradient == 1).all()


def test_refusals() -> None:
    x = jnp.ones((3, 3))
    q = xla_fp8.quantize(x)
    with pytest.raises(xla_fp8.QuantizationError, match="there is no saturated='clip'"):
        xla_fp8.fake_quantize(x, saturated="clip")  # type: ignore[arg-type]
    with pytest.raises(xla_fp8.QuantizationError, match=r"(?s)rhs is a Float8.*xla_fp8.dot_general"):
        xla_fp8.fp8_dot(x, q)  # type: ignore[arg-type]
    for dtype in (jnp.int32, jnp.float8_e4m3fn):
        with pytest.raises(
            xla_fp8.QuantizationError, match=rf"rhs is {jnp.dtype(dtype).name}: .* take float32, bfloat16"
        ):
            xla_fp8.fp8_dot(x, jnp.ones((3, 3), dtype))
    with pytest.raises(xla_fp8.QuantizationError, match="not to float16"):
        xla_fp8.fp8_dot(x, x, dtype=jnp.float16)
