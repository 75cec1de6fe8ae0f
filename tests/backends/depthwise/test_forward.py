"""The forward depthwise kernel, interpreted on the CPU, against sums of shifted images; and lowered for an H200."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from tests.backends.quantize.test_lowering import lowered
from tests.sampling import sampled
from xla_fp8.backends.depthwise.axis import Axis
from xla_fp8.backends.depthwise.forward import forward
from xla_fp8.backends.depthwise.forward_configs import Config, configs
from xla_fp8.backends.depthwise.problem import Problem, supports

pytestmark = pytest.mark.unoptimized

Array = np.ndarray[Any, Any]
F32, BF16, F16 = map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16))


def problem_of(
    shape: tuple[int, int, int, int],
    window: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: Any = None,
    dtype: Any = F32,
) -> Problem:
    """Padded so that strides of 1 keep the size, unless told otherwise."""
    same = tuple(((r - 1) // 2, r // 2) for r in window)
    problem = Problem(*shape, window, stride, padding or same, np.dtype(dtype))
    assert supports(problem).ok
    return problem


def operands(problem: Problem, filter_type: Any = F32) -> tuple[Array, Array]:
    rng = np.random.default_rng(len(str(problem)))
    x, w = rng.normal(size=problem.input_shape), rng.normal(size=problem.filter_shape)
    return x.astype(problem.dtype), w.astype(filter_type)


def expected(problem: Problem, x: Array, w: Array) -> Array:
    """In f64."""
    wide = np.pad(x.astype(np.float64), ((0, 0), *problem.padding, (0, 0)))
    _, p, q, _ = problem.output_shape
    down, across = problem.stride
    y = np.zeros(problem.output_shape)
    for r, s in np.ndindex(*problem.window):
        y += wide[:, r : r + (p - 1) * down + 1 : down, s : s + (q - 1) * across + 1 : across] * w[r, s].astype(float)
    return y


def interpreted(problem: Problem, config: Config, x: Any, w: Any) -> Array:
    # The interpreted kernel is much code for few numbers: that it is compiled soon matters more than that it is fast.
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    y = jax.jit(lambda x, w: forward(problem, x, w, config, True), compiler_options=quickly)(x, w)
    assert (y.shape, y.dtype) == (problem.output_shape, problem.dtype)
    return np.asarray(y)


def check(problem: Problem, config: Config, filter_type: Any = F32) -> None:
    x, w = operands(problem, filter_type)
    tolerance = {F32: 1e-5, BF16: 2**-8, F16: 2**-11}[problem.dtype]
    np.testing.assert_allclose(
        interpreted(problem, config, x, w).astype(np.float64), expected(problem, x, w), rtol=tolerance, atol=1e-4
    )


# Blocks of 32 numbers, so that a small image has many programs; sides of tiles that do and do not divide the image.
CASES: dict[str, tuple[Problem, Config]] = {
    "7x7, a loop over columns": (problem_of((2, 9, 11, 24), (7, 7)), Config(4, 2, 1, 8, 1, False)),
    "7x7, all columns": (problem_of((1, 6, 5, 16), (7, 7), dtype=BF16), Config(2, 2, 1, 16, 1, True)),
    "7x7, a whole image": (problem_of((3, 3, 4, 8), (7, 7)), Config(7, 7, 1, 8, 1, True)),
    "7x7, as many rows as the image": (problem_of((2, 7, 10, 8), (7, 7), dtype=F16), Config(7, 1, 1, 8, 1, False)),
    "5x5, strides of 2": (problem_of((2, 11, 12, 16), (5, 5), (2, 2)), Config(3, 2, 1, 8, 1, False)),
    "3x3, strides of 2, padded at the end": (
        problem_of((2, 8, 8, 24), (3, 3), (2, 2), ((0, 1), (0, 1)), BF16),
        Config(2, 2, 1, 24, 1, True),
    ),
    "3x3, two strides, too wide for a loop": (
        problem_of((1, 9, 9, 16), (3, 3), (1, 2), ((2, 1), (1, 2))),
        Config(2, 3, 2, 16, 1, False),
    ),
    "1x7": (problem_of((2, 5, 13, 8), (1, 7), dtype=F16), Config(2, 4, 1, 8, 1, False)),
    "7x1, no padding": (problem_of((1, 13, 5, 8), (7, 1), padding=((0, 0), (0, 0))), Config(4, 2, 1, 8, 1, True)),
    "1x1": (problem_of((1, 3, 3, 8), (1, 1)), Config(2, 2, 1, 8, 1, False)),
    "strides wider than the window": (problem_of((1, 7, 8, 8), (1, 1), (2, 2)), Config(2, 3, 1, 8, 1, False)),
    "an even window": (problem_of((2, 6, 7, 8), (4, 6), padding=((3, 0), (1, 5))), Config(3, 2, 2, 8, 1, False)),
    "one pixel": (problem_of((40, 1, 1, 8), (3, 5)), Config(4, 4, 1, 8, 1, True)),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_of_shifted_images(case: str) -> None:
    check(*CASES[case])


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_a_filter_of_the_images_type(dtype: Any) -> None:
    check(problem_of((1, 3, 4, 8), (2, 3), dtype=dtype), Config(2, 1, 1, 8, 1, False), dtype)


# One in a corner, one where the next row starts, one at the end of an image.
@pytest.mark.parametrize("unrolled", [True, False])
def test_nan_and_infinity_stay_in_their_windows(unrolled: bool) -> None:
    problem = problem_of((2, 7, 9, 8), (4, 3), padding=((2, 1), (1, 2)))
    x, w = operands(problem)
    for value, at in ((np.inf, (0, 0, 0, 1)), (np.nan, (0, 3, 8, 3)), (-np.inf, (0, 6, 8, 5)), (np.inf, (1, 4, 0, 7))):
        x[at] = value
    found, wanted = interpreted(problem, Config(3, 2, 1, 8, 1, unrolled), x, w), expected(problem, x, w)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))


@pytest.mark.parametrize("padding", [((1, 1), (2, 2)), ((0, 2), (4, 1)), ((0, 0), (0, 0))])
def test_the_input_gradient_is_a_convolution(padding: Any) -> None:
    problem = problem_of((2, 6, 7, 8), (3, 5), padding=padding)
    x, w = operands(problem)
    dy = np.random.default_rng(1).normal(size=problem.output_shape).astype(np.float32)
    gradient = problem.input_gradient
    assert gradient is not None
    _, pullback = jax.vjp(
        lambda x: lax.conv_general_dilated(
            x,
            w[:, :, None],
            problem.stride,
            padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=problem.channels,
            precision="highest",
        ),
        jnp.asarray(x),
    )
    found = interpreted(gradient, Config(3, 2, 1, 8, 1, False), dy, w[::-1, ::-1])
    np.testing.assert_allclose(found, pullback(dy)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("size", "window", "stride", "padding", "results"),
    [(7, 7, 1, (3, 3), 4), (7, 7, 1, (3, 3), 7), (8, 3, 2, (0, 1), 3), (5, 1, 2, (0, 0), 2), (9, 4, 1, (3, 2), 5)],
)
def test_an_axis_knows_what_lies_inside(
    size: int, window: int, stride: int, padding: tuple[int, int], results: int
) -> None:
    square = problem_of((1, size, size, 8), (window, window), (stride, stride), (padding, padding))
    axis = Axis.of(square, 0, results)
    tiles, found = range(axis.tiles), set()
    for tile, i in itertools.product(tiles, range(axis.extent)):
        at = tile * axis.results * stride - padding[0] + i
        assert bool(axis.has_input(jnp.int32(tile), i)) == bool(axis.has_input(tile, jnp.int32(i))) == (0 <= at < size)
        for result, tap in axis.taps(i):
            if axis.has_result(tile, result) is True or bool(axis.has_result(jnp.int32(tile), result)):
                found.add((tile * axis.results + result, at, tap))
    assert found == {(p, p * stride + r - padding[0], r) for p in range(square.output_shape[1]) for r in range(window)}
    for i in range(axis.extent):
        inside = {0 <= axis.start(tile) + i < size for tile in tiles}
        assert axis.knows_input(i) in (None, *inside)
        assert axis.tiles > 1 or axis.knows_input(i) is not None


# The stages of ConvNeXt-T and layers of MobileNet; little work; odd sizes; few channels; large windows.
PROBLEMS = [
    problem_of((256, 56, 56, 96), (7, 7), dtype=BF16),
    problem_of((256, 112, 112, 96), (3, 3), (2, 2), ((0, 1), (0, 1)), F16),
    problem_of((3, 7, 7, 768), (7, 7)),
    problem_of((64, 33, 31, 40), (5, 5), (2, 1)),
    problem_of((256, 28, 28, 192), (7, 7), dtype=BF16),
    problem_of((256, 14, 14, 384), (7, 7), dtype=BF16),
    problem_of((256, 7, 7, 768), (7, 7), dtype=F16),
    problem_of((256, 112, 112, 32), (3, 3), dtype=BF16),
    problem_of((256, 56, 56, 144), (3, 3), dtype=BF16),
    problem_of((1, 1, 1, 8), (1, 1)),
    problem_of((2, 64, 64, 64), (11, 11), dtype=BF16),
    problem_of((32, 17, 17, 8), (1, 7), dtype=BF16),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_configs_fit_the_problem(problem: Problem) -> None:
    choices = configs(problem)
    assert 2 <= len(choices) == len(set(choices)) <= 8
    for config in choices:
        assert config.rows <= problem.output_shape[1]
        assert config.columns <= problem.output_shape[2]
        assert problem.channels % config.channels == 0 == config.channels % 8
        assert all(math.log2(number).is_integer() for number in (config.per_thread, config.warps))
        assert config.per_thread <= 8
        assert config.rows * config.columns * config.per_thread <= 112  # of 255 registers


@pytest.mark.parametrize("problem", sampled(PROBLEMS[::2], 2), ids=str)
def test_configs_lower_for_a_gpu(problem: Problem) -> None:
    x = jax.ShapeDtypeStruct(problem.input_shape, problem.dtype)
    for config, filter_type in zip(configs(problem), itertools.cycle((F32, problem.dtype))):
        w = jax.ShapeDtypeStruct(problem.filter_shape, filter_type)
        text = lowered(lambda x, w, config=config: forward(problem, x, w, config), x, w)
        assert text.count("stablehlo.custom_call") == text.count('name = "depthwise_forward"') == 1
        assert f"num_warps = {config.warps} : i32" in text


def test_offsets_of_the_largest_images_have_32_bits() -> None:
    """Where the edge of a tile may lie beyond 2**31 elements, no bit of its offset is taken away."""
    largest = problem_of((1, 2**11 - 2, 2**12, 2**8), (3, 3), dtype=BF16)
    config = Config(8, 4, 2, 8, 4, True)
    for problem, are_cut in ((largest, False), (dataclasses.replace(largest, height=2**10), True)):
        x = jax.ShapeDtypeStruct(problem.input_shape, problem.dtype)
        w = jax.ShapeDtypeStruct(problem.filter_shape, F32)
        text = str(jax.make_jaxpr(lambda x, w, problem=problem: forward(problem, x, w, config))(x, w))
        # Those of w always are, for each column of the window; those of x, for each column of its tile, and of y, here.
        assert text.count("2147483647:i32[]") == (3 + (6 + 1) * are_cut)
