"""The reference backend against numpy: convolutions of every shape, every op, saturation and NaN."""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from xla_fp8.backends import reference
from xla_fp8.graph import OPS, Graph, GraphError, GraphStringError, GraphTypeError
from xla_fp8.hlo import ConvolutionDimensionNumbers, Window
from xla_fp8.hlo.attributes import WindowDimension

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
NHWC = ConvolutionDimensionNumbers.parse("b01f_01io->b01f")
ONE_BY_ONE = Window.parse("{size=1x1}")


def small_integers(shape: tuple[int, ...], dtype: type, seed: int) -> np.ndarray:
    """Integers that FP8 holds, so that the f32 convolution is exact in any order of summation."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def dilated(array: np.ndarray, axis: int, factor: int) -> np.ndarray:
    sizes = list(array.shape)
    sizes[axis] = max(0, (sizes[axis] - 1) * factor + 1)
    result = np.zeros(sizes, array.dtype)
    result[(slice(None),) * axis + (slice(None, None, factor),)] = array
    return result


def padded(array: np.ndarray, axis: int, low: int, high: int) -> np.ndarray:
    widths = [(0, 0)] * array.ndim
    widths[axis] = (max(low, 0), max(high, 0))
    array = np.pad(array, widths)
    stop = array.shape[axis] - max(-high, 0)
    return array[(slice(None),) * axis + (slice(max(-low, 0), max(stop, 0)),)]


def convolution(x: np.ndarray, w: np.ndarray, window: Window, feature_groups: int, batch_groups: int) -> np.ndarray:
    """HLO's convolution as its definition says it: input [b,f,...], filter [o,i,...] -> output [b,o,...], in f64."""
    for axis, d in enumerate(window, start=2):
        x = padded(dilated(x, axis, d.base_dilation), axis, d.padding_low, d.padding_high)
        w = dilated(np.flip(w, axis) if d.reversal else w, axis, d.window_dilation)
    groups = max(feature_groups, batch_groups)
    inputs = np.split(x, groups, axis=1 if feature_groups > 1 else 0) if groups > 1 else [x]
    filters = np.split(w, groups, axis=0)
    sizes = [max(0, (n - k) // d.stride + 1) for n, k, d in zip(x.shape[2:], w.shape[2:], window, strict=True)]
    inner = range(1, x.ndim)
    parts = []
    for part, kernel in zip(inputs, filters, strict=True):
        y = np.zeros((part.shape[0], kernel.shape[0], *sizes))
        for at in itertools.product(*map(range, sizes)):
            starts = [i * d.stride for i, d in zip(at, window, strict=True)]
            box = tuple(slice(s, s + k) for s, k in zip(starts, w.shape[2:], strict=True))
            y[(slice(None), slice(None), *at)] = np.tensordot(part[(..., *box)], kernel, (inner, inner))
        parts.append(y)
    return np.concatenate(parts, axis=1)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Window, ConvolutionDimensionNumbers, int, int]:
    dimensions = []
    for _ in range(draw(st.integers(1, 3))):
        base_dilation, size = draw(st.integers(1, 2)), draw(st.integers(1, 3))
        window_dilation = draw(st.integers(1, 2))
        low, high = draw(st.tuples(st.integers(-1, 3), st.integers(-1, 3)))
        dimensions.append(
            WindowDimension(
                size, draw(st.integers(1, 3)), low, high, window_dilation, base_dilation, draw(st.booleans())
            )
        )
    spatial = [str(i) for i in range(len(dimensions))]
    labels = ["".join(draw(st.permutations([*names, *spatial]))) for names in ("bf", "io", "bf")]
    groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    return Window(tuple(dimensions)), ConvolutionDimensionNumbers(*labels), *groups


@settings(max_examples=40)
@given(convolutions(), st.sampled_from([E4M3, E5M2]), st.sampled_from([E4M3, E5M2]))
def test_convolutions(
    case: tuple[Window, ConvolutionDimensionNumbers, int, int], lhs_type: type, rhs_type: type
) -> None:
    window, labels, feature_groups, batch_groups = case
    spatial = [5, 4, 3][: len(window)]
    # JAX refuses an input that padding makes smaller than nothing.
    assume(all(n + d.padding_low + d.padding_high > 0 for n, d in zip(spatial, window, strict=True)))
    x = small_integers((2, 4, *spatial), lhs_type, seed=1)
    w = small_integers((6, 4 // feature_groups, *(d.size for d in window)), rhs_type, seed=2)
    # `x` is [b,f,0,1..] and `w` is [o,i,0,1..]; the labels say where each of these dimensions goes.
    names = "".join(map(str, range(len(window))))
    lhs = np.transpose(x, [("bf" + names).index(c) for c in labels.lhs])
    rhs = np.transpose(w, [("oi" + names).index(c) for c in labels.rhs])
    expected = convolution(x.astype(float), w.astype(float), window, feature_groups, batch_groups)
    expected = np.transpose(expected, [("bf" + names).index(c) for c in labels.output])

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return reference.run("1:[f32]conv();", window, labels, feature_groups, operands, batch_group_count=batch_groups)

    [y] = jax.jit(run)(lhs, rhs)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(y), expected)


@pytest.mark.parametrize("image", [(1, 1), (2, 1), (2, 4)], ids=str)
def test_zeros_of_padding_are_multiplied(image: tuple[int, int]) -> None:
    """XLA's CPU leaves them out where a filter is larger than its image."""
    window = Window.parse("{size=3x3 pad=1_1x1_1}")
    x = np.ones((2, *image, 1), E5M2)
    w = np.ones((3, 3, 1, 2), E5M2)
    w[0, 0, 0, 1] = np.inf
    with np.errstate(invalid="ignore"):  # infinity times zero
        expected = convolution(
            x.transpose(0, 3, 1, 2).astype(float), w.transpose(3, 2, 0, 1).astype(float), window, 1, 1
        )
    (y,) = reference.run("1:[f32]conv();", window, NHWC, 1, [x, w])
    np.testing.assert_array_equal(np.asarray(y), expected.transpose(0, 2, 3, 1))
    assert np.isnan(y[:, 0, 0, 1]).all()


@pytest.mark.parametrize("stride", [1, 2])
def test_what_a_row_is_shifted_by_is_not_seen(stride: int) -> None:
    """XLA's CPU returns for the last output of a row padded by -1_1 what lies behind the input in memory."""
    window = Window.parse(f"{{size=1 stride={stride} pad=-1_1}}")
    labels = ConvolutionDimensionNumbers.parse("b0f_o0i->b0f")
    x, w = small_integers((2, 35, 320), E4M3, seed=3), small_integers((320, 1, 320), E4M3, seed=4)
    (y,) = reference.run("1:[f32]conv();", window, labels, 1, [x, w])
    seen = np.pad(x.astype(np.float32)[:, 1:], ((0, 0), (0, 1), (0, 0)))[:, ::stride]
    np.testing.assert_array_equal(np.asarray(y), seen @ w[:, 0].astype(np.float32).T)


X = np.linspace(-6, 6, 48).reshape(1, 4, 4, 3).astype(E4M3)
EYE = np.eye(3).reshape(1, 1, 3, 3).astype(E4M3)
WIDE = X.astype(np.float32)
TENSOR = np.random.default_rng(0).normal(size=X.shape).astype(np.float32)
VECTOR = np.array([0.5, -2, 3], np.float32)


def run(graph: str, *sides: np.ndarray, x: np.ndarray = X) -> tuple[jax.Array, ...]:
    """A graph behind a convolution that changes nothing."""
    return reference.run(graph, ONE_BY_ONE, NHWC, 1, [x, EYE, *sides])


_erf = np.vectorize(math.erf)

ONE_OP = {
    "scale": ([np.float32(0.3)], WIDE * np.float32(0.3)),
    "invscale": ([np.float32(0.3)], WIDE / np.float32(0.3)),
    "add": ([TENSOR], WIDE + TENSOR),
    "min": ([TENSOR], np.minimum(WIDE, TENSOR)),
    "max": ([TENSOR], np.maximum(WIDE, TENSOR)),
    "relu": ([], np.maximum(WIDE, 0)),
    "elu": ([], np.where(WIDE > 0, WIDE, np.expm1(WIDE))),
    "bias": ([VECTOR], WIDE + VECTOR),
    "channel_scale": ([VECTOR], WIDE * VECTOR),
    "add_scaled": ([X, np.float32(0.3)], WIDE + WIDE * np.float32(0.3)),
    "clamp": ([np.float32(-0.5), np.float32(0.75)], np.clip(WIDE, -0.5, 0.75)),
    "silu": ([], WIDE / (1 + np.exp(-WIDE))),
    "gelu_erf": ([], WIDE * (1 + _erf(WIDE / np.sqrt(2))) / 2),
    "gelu_tanh": ([], WIDE * (1 + np.tanh(np.sqrt(2 / np.pi) * (WIDE + 0.044715 * WIDE**3))) / 2),
    "sigmoid": ([], 1 / (1 + np.exp(-WIDE))),
    "tanh": ([], np.tanh(WIDE)),
}


@pytest.mark.parametrize("op", ONE_OP)
def test_ops(op: str) -> None:
    sides, expected = ONE_OP[op]
    [y] = run(f"1:[f32]conv();2:[f32]{op}(1);", *sides)
    np.testing.assert_allclose(np.asarray(y), expected, rtol=2e-6, atol=1e-6)


def test_every_op_is_tested() -> None:
    assert {*ONE_OP, "conv", "amax", "copy"} == set(OPS)


@pytest.mark.parametrize(
    ("op", "expected"), [("add", WIDE * 3), ("min", np.minimum(WIDE, WIDE * 2)), ("max", np.maximum(WIDE, WIDE * 2))]
)
def test_ops_of_two_nodes_have_no_side_operand(op: str, expected: np.ndarray) -> None:
    [y] = run(f"1:[f32]conv();2:[f32]scale(1);3:[f32]{op}(1,2);", np.float32(2))
    np.testing.assert_array_equal(np.asarray(y), expected)


def test_results_and_their_order() -> None:
    graph = "1:[f32]conv();2:[f32]amax(1);3:[f32]scale(1);4:[bf16]copy(3);5:[f8e4m3fn]bias(3);6:[f16]amax(5);"
    y, amax, copy, last_amax = run(graph, np.float32(0.3), VECTOR)
    scaled = WIDE * np.float32(0.3)
    assert (y.dtype, amax.dtype, copy.dtype, last_amax.dtype) == (E4M3, np.float32, ml_dtypes.bfloat16, np.float16)
    assert amax == np.max(np.abs(WIDE))
    assert amax.shape == ()
    np.testing.assert_array_equal(copy, scaled.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(y, (scaled + VECTOR).astype(E4M3))
    assert last_amax == np.max(np.abs(scaled + VECTOR)).astype(np.float16), "amax reads y before it is rounded"


def test_the_caller_may_name_the_types() -> None:
    y, amax = reference.run(
        "1:[bf16]conv();2:[f8e4m3fn]amax(1);", ONE_BY_ONE, NHWC, 1, [X, EYE], output_types=["f8e5m2", "f32"]
    )
    np.testing.assert_array_equal(y, WIDE.astype(E5M2))
    assert amax == np.max(np.abs(WIDE))


def test_side_tensors_are_read_in_their_own_type() -> None:
    for dtype in (ml_dtypes.bfloat16, np.float16, E4M3, E5M2):
        side = TENSOR.astype(dtype)
        [y] = run("1:[f32]conv();2:[f32]add(1);", side)
        np.testing.assert_array_equal(np.asarray(y), WIDE + side.astype(np.float32))


@pytest.mark.parametrize(("name", "dtype", "largest"), [("f8e4m3fn", E4M3, 448), ("f8e5m2", E5M2, 57344)])
def test_fp8_results_saturate(name: str, dtype: type, largest: float) -> None:
    sides = np.array([[[[np.inf, -np.inf, np.nan]], [[1e6, -1e6, largest]], [[1, 0, -0.0]]]], np.float32)
    x = np.zeros((1, 3, 1, 3), E4M3)
    y, copy = run(f"1:[f32]conv();2:[{name}]add(1);3:[{name}]copy(2);", sides, x=x)
    expected = [largest, -largest, np.nan, largest, -largest, largest, 1, 0, 0]
    assert y.dtype == copy.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y, np.float32).ravel(), np.array(expected, np.float32))
    np.testing.assert_array_equal(np.asarray(copy, np.float32), np.asarray(y, np.float32))


def test_other_results_overflow() -> None:
    [y] = run("1:[f32]conv();2:[f16]scale(1);", np.float32(1e5))
    assert np.isinf(np.asarray(y, np.float32)).any()


@pytest.mark.parametrize("op", [op for op in ONE_OP if op != "add_scaled"])
def test_nan_stays_nan(op: str) -> None:
    x = X.copy()
    x[0, 1, 2, 0] = np.nan
    [y] = run(f"1:[f32]conv();2:[f8e4m3fn]{op}(1);", *ONE_OP[op][0], x=x)
    assert np.isnan(np.asarray(y, np.float32)[0, 1, 2, 0])


def test_amax_of_nan_is_nan() -> None:
    x = X.copy()
    x[0, 1, 2, 0] = np.nan
    assert np.isnan(run("1:[f32]conv();2:[f32]relu(1);3:[f32]amax(2);", x=x)[1])


@pytest.mark.parametrize("share", ["one", "all"])
def test_amax_of_nan_is_nan_in_a_large_tensor(share: str) -> None:
    """Where XLA's reduction on a CPU is vectorized, and drops NaN."""
    x = np.ones((2, 16, 16, 4), E4M3)
    x[(0, 3, 5, 1) if share == "one" else ...] = np.nan
    w, graph = np.ones((1, 1, 4, 8), E4M3), "1:[f32]conv();2:[f32]amax(1);"
    _, amax = jax.jit(lambda x: reference.run(graph, ONE_BY_ONE, NHWC, 1, [x, w]))(x)
    assert np.isnan(amax)


def test_amax_of_nothing_is_zero() -> None:
    assert run("1:[f32]conv();2:[f32]amax(1);", x=X[:0])[1] == 0


def test_traces_under_jit() -> None:
    graph = Graph.parse("1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]relu(2);4:[f32]amax(2);")
    traced = jax.jit(lambda *operands: reference.run(graph, ONE_BY_ONE, NHWC, 1, operands))
    results = traced(X, EYE, jnp.float32(0.7))
    for got, expected in zip(results, run(str(graph), np.float32(0.7)), strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(expected, np.float32))


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(GraphStringError):
        run("1:[f32]conv()")
    with pytest.raises(GraphError, match="2 tensor endpoints"):
        run("1:[f32]conv();2:[f32]relu(1);3:[f32]tanh(1);")
    with pytest.raises(GraphTypeError, match="needs 3 operands"):
        run("1:[f32]conv();2:[f32]scale(1);")
    with pytest.raises(GraphTypeError, match="must have the dimensions of the output"):
        run("1:[f32]conv();2:[f32]add(1);", VECTOR)
    with pytest.raises(GraphTypeError, match="must have 3 elements"):
        run("1:[f32]conv();2:[f32]bias(1);", np.zeros(4, np.float32))
    with pytest.raises(GraphTypeError, match="the input must be f8e4m3fn or f8e5m2, not f32"):
        run("1:[f32]conv();", x=WIDE)
    with pytest.raises(GraphTypeError, match="floating-point"):
        run("1:[f32]conv();2:[f32]scale(1);", np.int32(3))
    with pytest.raises(GraphTypeError, match="1 results, but 2 output types"):
        reference.run("1:[f32]conv();", ONE_BY_ONE, NHWC, 1, [X, EYE], ["f32", "f32"])
