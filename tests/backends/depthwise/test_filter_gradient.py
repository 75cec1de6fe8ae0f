"""The kernel of the depthwise filter gradient, interpreted on the CPU, against sums in f64; and lowered for an H200."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.backends.depthwise.test_forward import BF16, F16, F32, PROBLEMS, Array, problem_of
from tests.backends.quantize.test_lowering import lowered
from tests.sampling import sampled
from xla_fp8.backends.depthwise import products
from xla_fp8.backends.depthwise.filter_gradient import FilterGradient, filter_gradient
from xla_fp8.backends.depthwise.filter_gradient_configs import Config, configs
from xla_fp8.backends.depthwise.problem import Problem

pytestmark = pytest.mark.unoptimized


def operands(problem: Problem) -> tuple[Array, Array]:
    rng = np.random.default_rng(len(str(problem)))
    x, dy = rng.normal(size=problem.input_shape), rng.normal(size=problem.output_shape)
    return x.astype(problem.dtype), dy.astype(problem.dtype)


def expected(problem: Problem, x: Array, dy: Array) -> Array:
    """In f64."""
    wide = np.pad(x.astype(np.float64), ((0, 0), *problem.padding, (0, 0)))
    _, p, q, _ = problem.output_shape
    down, across = problem.stride
    dw = np.zeros(problem.filter_shape)
    for r, s in np.ndindex(*problem.window):
        part = wide[:, r : r + (p - 1) * down + 1 : down, s : s + (q - 1) * across + 1 : across]
        dw[r, s] = (part * dy.astype(np.float64)).sum((0, 1, 2))
    return dw


def interpreted(problem: Problem, config: Config, x: Any, dy: Any) -> Array:
    # The interpreted kernel is much code for few numbers: that it is compiled soon matters more than that it is fast.
    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    dw = jax.jit(lambda x, dy: filter_gradient(problem, x, dy, config, True), compiler_options=quickly)(x, dy)
    assert (dw.shape, dw.dtype) == (problem.filter_shape, F32)
    return np.asarray(dw)


# Blocks of 32 or 64 numbers, so that small images have several programs. With and without a loop over rows, programs
# that have nothing in their last block, and channels that two programs share.
CASES: dict[str, tuple[Problem, Config]] = {
    "7x7, a loop over rows": (problem_of((2, 10, 3, 8), (7, 7)), Config(1, 1, 8, 1, 1, 1)),
    "7x7, a whole image": (problem_of((3, 4, 3, 8), (7, 7), dtype=BF16), Config(3, 1, 8, 1, 7, 1)),
    "7x7, an image smaller than the window": (problem_of((5, 2, 3, 16), (7, 6)), Config(1, 2, 16, 1, 1, 2)),
    "5x5, strides of 2": (problem_of((3, 16, 8, 24), (5, 5), (2, 2)), Config(2, 1, 16, 1, 2, 1)),
    "3x3, strides of 2, padded at the end": (
        problem_of((2, 16, 8, 24), (3, 3), (2, 2), ((0, 1), (0, 1)), BF16),
        Config(2, 2, 16, 1, 1, 2),
    ),
    "3x3, two strides": (problem_of((1, 9, 9, 16), (3, 3), (1, 2), ((2, 1), (1, 2))), Config(5, 1, 16, 1, 2, 3)),
    "3x3, a window that leaves rows of x out": (
        problem_of((1, 12, 8, 8), (3, 3), (2, 2), ((0, 0), (0, 0))),
        Config(3, 1, 8, 1, 1, 1),
    ),
    "1x7": (problem_of((2, 5, 12, 8), (1, 7), dtype=F16), Config(4, 1, 8, 1, 2, 1)),
    "7x1, no padding": (problem_of((1, 17, 5, 8), (7, 1), padding=((0, 0), (0, 0))), Config(1, 1, 8, 1, 3, 3)),
    "1x1": (problem_of((1, 3, 3, 8), (1, 1)), Config(1, 1, 8, 2, 1, 1)),
    "strides wider than the window": (problem_of((1, 7, 8, 8), (1, 1), (2, 2)), Config(4, 1, 8, 1, 1, 1)),
    "an even window": (problem_of((2, 9, 8, 8), (4, 6), padding=((3, 0), (1, 5))), Config(3, 1, 8, 1, 2, 1)),
    "one pixel": (problem_of((40, 1, 1, 8), (3, 5)), Config(1, 1, 8, 1, 1, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_sums_of_products_with_shifted_images(case: str) -> None:
    problem, config = CASES[case]
    x, dy = operands(problem)
    np.testing.assert_allclose(interpreted(problem, config, x, dy), expected(problem, x, dy), rtol=1e-5, atol=1e-4)


def test_it_is_the_gradient_of_laxs_convolution() -> None:
    problem = problem_of((2, 11, 8, 8), (5, 3), (2, 1), ((3, 1), (0, 2)))
    x, dy = operands(problem)
    _, pullback = jax.vjp(
        lambda w: lax.conv_general_dilated(
            x,
            w[:, :, None],
            problem.stride,
            problem.padding,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=problem.channels,
            precision="highest",
        ),
        jnp.zeros(problem.filter_shape),
    )
    found = interpreted(problem, Config(4, 1, 8, 1, 1, 1), x, dy)
    np.testing.assert_allclose(found, pullback(dy)[0], rtol=1e-5, atol=1e-4)


# Of x, in corners and where rows and images end: nothing that lies beyond an edge of dy meets them. Of dy, in the
# middle: there it meets no padding.
@pytest.mark.parametrize("config", [Config(3, 1, 8, 1, 2, 1), Config(1, 1, 8, 2, 1, 2), Config(9, 1, 8, 1, 1, 1)])
def test_nan_and_infinity_stay_in_their_taps(config: Config) -> None:
    problem = problem_of((3, 9, 9, 8), (3, 3), padding=((2, 1), (1, 1)))
    x, dy = operands(problem)
    for value, at in (
        (np.inf, (0, 0, 0, 0)),
        (np.nan, (0, 3, 8, 1)),
        (-np.inf, (0, 8, 8, 2)),
        (np.inf, (1, 4, 0, 3)),
        (np.nan, (2, 8, 4, 4)),
    ):
        x[at] = value
    dy[1, 5, 4, 5], dy[2, 6, 3, 6] = np.inf, np.nan
    found, wanted = interpreted(problem, config, x, dy), expected(problem, x, dy)
    assert not np.isfinite(wanted).all(axis=(0, 1))[:7].any()
    assert np.isfinite(wanted[..., :5]).any(axis=(0, 1)).all()
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(wanted))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_instructions_add_every_product_once(count: int) -> None:
    """No CPU runs PTX, so they are read here: each writes its first operand."""
    factors = np.random.default_rng(count).integers(1, 9, 2 * count)
    registers = dict(enumerate([None, 100, *factors]))
    for line in products.ptx(count).splitlines():
        found = re.fullmatch(r"fma\.rn\.f32 \$(\d+), \$(\d+), \$(\d+), \$(\d+);", line)
        assert found
        to, a, b, c = map(int, found.groups())
        registers[to] = registers[a] * registers[b] + registers[c]
    assert registers[0] == 100 + sum(a * b for a, b in factors.reshape(count, 2))
    assert registers[1] == 100


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_configs_fit_the_problem(problem: Problem) -> None:
    choices = configs(problem)
    assert 1 <= len(choices) == len(set(choices)) <= 10
    for config in choices:
        assert problem.output_shape[2] % config.columns == 0
        assert 8 <= config.channels <= problem.channels
        assert config.groups >= 1
        assert all(math.log2(size).is_integer() for size in (config.per_thread, config.channels, config.warps))
        kernel = FilterGradient(problem, config)
        assert kernel.parts * problem.channels * kernel.taps * 4 <= 8 * 2**20
        # Every group has a program, and every program has a group.
        assert (kernel.parts - 1) * config.blocks * config.groups < kernel.groups
        assert kernel.parts * config.blocks * config.groups >= kernel.groups


@pytest.mark.parametrize("problem", sampled(PROBLEMS[::2], 2), ids=str)
def test_configs_lower_for_a_gpu(problem: Problem) -> None:
    x, dy = (jax.ShapeDtypeStruct(shape, problem.dtype) for shape in (problem.input_shape, problem.output_shape))
    for config in configs(problem):
        text = lowered(lambda x, dy, config=config: filter_gradient(problem, x, dy, config), x, dy)
        assert text.count("stablehlo.custom_call") == text.count('name = "depthwise_filter_gradient"') == 1
        assert f"num_warps = {config.warps} : i32" in text


def test_offsets_of_the_largest_images_have_32_bits() -> None:
    """Where the edge of a group may lie beyond 2**31 elements, no bit of its offset is taken away."""
    largest = problem_of((1, 3, 2729, 2**18), (1, 11), dtype=BF16)
    config = Config(1, 2, 32, 4, 3, 1)
    for problem, are_cut in ((largest, False), (dataclasses.replace(largest, width=2726), True)):
        x, dy = (jax.ShapeDtypeStruct(shape, BF16) for shape in (problem.input_shape, problem.output_shape))
        text = str(jax.make_jaxpr(lambda *xs, problem=problem: filter_gradient(problem, *xs, config))(x, dy))
        # Those of dy always are, for each row; those of x here.
        assert text.count("2147483647:i32[]") == 3 * (1 + are_cut)
