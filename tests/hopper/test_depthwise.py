"""The depthwise kernels on a Hopper GPU against float64: each config where networks have them, odd shapes."""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from xla_fp8.backends.depthwise import filter_gradient, forward
from xla_fp8.backends.depthwise.problem import Problem, supports

pytestmark = pytest.mark.hopper

BF16, F16, F32 = (np.dtype(dtype) for dtype in (jnp.bfloat16, np.float16, np.float32))
Array = np.ndarray[Any, Any]
RANDOM = 30
KERNELS: dict[str, Any] = {"forward": forward.forward, "filter": filter_gradient.filter_gradient}
CONFIGS: dict[str, Any] = {"forward": forward.configs, "filter": filter_gradient.configs}


def same(batch: int, size: int, channels: int, window: int, stride: int = 1, dtype: np.dtype[Any] = BF16) -> Problem:
    """Square images, padded as "SAME"."""
    total = max((-(-size // stride) - 1) * stride + window - size, 0)
    pad = total // 2, total - total // 2
    return Problem(batch, size, size, channels, (window, window), (stride, stride), (pad, pad), dtype)


CONVNEXT = [same(4, size, channels, 7) for size, channels in ((56, 96), (28, 192), (14, 384), (7, 768))]
MOBILENET = [
    same(4, size, channels, 3, stride) for size, channels in ((56, 144), (14, 576), (7, 960)) for stride in (1, 2)
]
EFFICIENTNET = [same(4, 28, 240, 5), same(4, 14, 672, 5, 2)]
NETWORKS = CONVNEXT + MOBILENET + EFFICIENTNET


def random_problem(seed: int) -> Problem:
    """Any that kernels support: odd sizes, windows that are no squares, padding on one side only."""
    rng = np.random.default_rng(seed)
    while True:
        window = int(rng.integers(1, 12)), int(rng.integers(1, 12))
        padding = [tuple(int(rng.integers(0, r)) for _ in range(2)) for r in window]
        problem = Problem(
            int(rng.integers(1, 6)),
            int(rng.integers(1, 40)),
            int(rng.integers(1, 40)),
            8 * int(rng.integers(1, 20)),
            window,
            (int(rng.integers(1, 3)), int(rng.integers(1, 3))),
            (padding[0], padding[1]),  # type: ignore[arg-type]
            [BF16, F16, F32][seed % 3],
        )
        if supports(problem).ok:
            return problem


def normal(shape: Sequence[int], dtype: Any, seed: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def operands(problem: Problem, part: str) -> tuple[Array, Array]:
    x = normal(problem.input_shape, problem.dtype, 1)
    if part == "forward":
        return x, normal(problem.filter_shape, problem.dtype, 2)
    return x, normal(problem.output_shape, problem.dtype, 3)


def reference(problem: Problem, part: str, x: Array, other: Array) -> Array:
    """In float64, window position by window position."""
    wide, other = np.pad(x.astype(np.float64), ((0, 0), *problem.padding, (0, 0))), other.astype(np.float64)
    (_, p, q, _), (down, across) = problem.output_shape, problem.stride
    result = np.zeros(problem.output_shape if part == "forward" else problem.filter_shape)
    for r, s in np.ndindex(problem.window):
        seen = wide[:, r : r + (p - 1) * down + 1 : down, s : s + (q - 1) * across + 1 : across]
        if part == "forward":
            result += seen * other[r, s]
        else:
            result[r, s] = np.einsum("npqc,npqc->c", seen, other)
    return result


def bound(problem: Problem, part: str, x: Array, other: Array) -> tuple[Array, Array]:
    """What is expected, and how far a result may be off: f32 rounds each of n sums, and 16 bits the result once."""
    expected = reference(problem, part, x, other)
    n = np.prod(problem.window) if part == "forward" else np.prod(problem.output_shape[:3])
    # Errors of rounding have random signs, so that they grow with the root of n, in proportion to the magnitudes.
    slack = 4 * np.sqrt(n) * 2.0**-24 * reference(problem, part, np.abs(x), np.abs(other)) + 1e-30
    if part == "forward" and problem.dtype != F32:
        slack += np.abs(expected) * (2.0**-8 if problem.dtype == BF16 else 2.0**-11) + 2.0**-25
    return expected, slack


Job = tuple[str, Problem, Any]


@functools.cache
def pool() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(os.cpu_count())


@functools.cache
def compiled(job: Job) -> concurrent.futures.Future[Any]:
    """A kernel, compiled in a thread: that takes the time here."""
    part, problem, config = job
    shapes = problem.input_shape, problem.filter_shape if part == "forward" else problem.output_shape
    types = [jax.ShapeDtypeStruct(shape, problem.dtype) for shape in shapes]
    function = jax.jit(lambda x, other: KERNELS[part](problem, x, other, config))
    return pool().submit(lambda: function.lower(*types).compile())


def jobs(part: str, problem: Problem, most: int | None = None) -> list[Job]:
    return [(part, problem, config) for config in CONFIGS[part](problem)[:most]]


@pytest.fixture(scope="module", autouse=True)
def _compile_ahead() -> None:
    """The first guesses first: most tests are of those, and some take long."""
    guesses = [*map(random_problem, range(RANDOM)), *NETWORKS]
    for problem, most in [*((problem, 1) for problem in guesses), *((problem, None) for problem in NETWORKS)]:
        for part in KERNELS:
            for job in jobs(part, problem, most):
                compiled(job)


def first(part: str, problem: Problem) -> Any:
    """The compiled first guess."""
    return compiled(jobs(part, problem, 1)[0]).result()


def check(part: str, problem: Problem, most: int | None = None) -> None:
    x, other = operands(problem, part)
    expected, slack = bound(problem, part, x, other)
    for job in jobs(part, problem, most):
        found = np.asarray(compiled(job).result()(x, other))
        assert found.dtype == (problem.dtype if part == "forward" else F32)
        error = np.abs(found.astype(np.float64) - expected)
        worst = np.unravel_index(np.argmax(error - slack), error.shape)
        assert (error <= slack).all(), (job, worst, found[worst], expected[worst], slack[worst])


@pytest.mark.parametrize("part", KERNELS)
@pytest.mark.parametrize("problem", NETWORKS, ids=str)
def test_every_config_on_layers_of_networks(part: str, problem: Problem) -> None:
    check(part, problem)


@pytest.mark.parametrize("part", KERNELS)
@pytest.mark.parametrize("start", range(0, RANDOM, 10))
def test_random_problems(part: str, start: int) -> None:
    for seed in range(start, start + 10):
        check(part, random_problem(seed), 1)


@pytest.mark.parametrize("problem", [CONVNEXT[0], CONVNEXT[2]], ids=str)
def test_a_filter_in_float32(problem: Problem) -> None:
    x, w = operands(problem, "forward")
    fine = w.astype(np.float32) * np.float32(1 + 2.0**-12)
    expected, slack = bound(problem, "forward", x, fine)
    found = np.asarray(jax.jit(functools.partial(forward.forward, problem))(x, fine), np.float64)
    assert (np.abs(found - expected) <= slack).all()


@pytest.mark.parametrize("problem", [CONVNEXT[1], CONVNEXT[3], MOBILENET[1]], ids=str)
def test_a_value_reaches_its_own_window_and_channel_alone(problem: Problem) -> None:
    """NaN in one pixel of one channel, in corners and in the middle: padding and neighbours read nothing of it."""
    x, w = operands(problem, "forward")
    run = first("forward", problem)
    clean = np.asarray(run(x, w), np.float32)
    for n, at, c in ((0, 0, 0), (1, problem.height - 1, problem.channels - 1), (2, problem.height // 2, 9)):
        poisoned = x.copy()
        poisoned[n, at, at, c] = np.nan
        found = np.asarray(run(poisoned, w), np.float32)
        reached = np.isnan(reference(problem, "forward", poisoned, w))
        assert 0 < reached.sum() <= np.prod(problem.window)
        np.testing.assert_array_equal(np.isnan(found), reached)
        np.testing.assert_array_equal(found[~reached], clean[~reached])


@pytest.mark.parametrize("problem", [CONVNEXT[1], CONVNEXT[3], MOBILENET[1]], ids=str)
def test_a_filters_gradient_is_of_its_own_channel_alone(problem: Problem) -> None:
    x, dy = operands(problem, "filter")
    gradient = first("filter", problem)
    clean = np.asarray(gradient(x, dy))
    for tensor in (0, 1):
        poisoned = [x.copy(), dy.copy()]
        poisoned[tensor][1, -1, -1, 9] = np.nan
        found = np.asarray(gradient(*poisoned))
        assert np.isnan(found[..., 9]).any()
        np.testing.assert_array_equal(np.delete(found, 9, -1), np.delete(clean, 9, -1))


@pytest.mark.parametrize("part", KERNELS)
@pytest.mark.parametrize("problem", [CONVNEXT[0], CONVNEXT[3]], ids=str)
def test_twenty_repeats_have_the_same_bits(part: str, problem: Problem) -> None:
    # Two tensors in turn: what a run before left in memory is another's.
    x, other = operands(problem, part)
    tensors = [jax.device_put(x), jax.device_put(-2 * x)]
    run = first(part, problem)
    expected = [np.asarray(run(tensor, other)).tobytes() for tensor in tensors]
    assert expected[0] != expected[1]
    for repeat in range(20):
        assert np.asarray(run(tensors[repeat % 2], other)).tobytes() == expected[repeat % 2], repeat


@pytest.mark.parametrize(("stride", "dtype"), [(1, BF16), (2, BF16), (1, F32)])
def test_derivatives_of_the_public_function(stride: int, dtype: np.dtype[Any]) -> None:
    x, w = normal((3, 17, 15, 40), dtype, 1), normal((5, 3, 40), dtype, 2)
    conv = functools.partial(xla_fp8.depthwise_conv, window_strides=(stride, stride))

    def derivatives(x: jax.Array, w: jax.Array) -> Any:
        def loss(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.sum(jnp.sin(conv(x, w).astype(jnp.float32)))

        gradient = jax.grad(loss, (0, 1))
        return gradient(x, w), jax.jvp(gradient, (x, w), (x, w))[1]

    assert "depthwise_filter_gradient" in jax.jit(derivatives).lower(x, w).as_text()
    found = jax.jit(derivatives)(x, w)
    with jax.default_device(jax.devices("cpu")[0]):  # lax's convolution, in f32
        expected = jax.jit(derivatives)(x.astype(np.float32), w.astype(np.float32))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == dtype
        error = np.linalg.norm(np.asarray(a, np.float32) - np.asarray(b))
        assert error <= (2e-2 if dtype == BF16 else 1e-5) * np.linalg.norm(b)


def test_a_vmap_and_a_transposed_image() -> None:
    x, w = normal((2, 3, 40, 12, 12), BF16, 1), normal((7, 7, 40), BF16, 2)

    def of_example(image: jax.Array) -> jax.Array:
        return xla_fp8.depthwise_conv(image.transpose(0, 2, 3, 1), w)

    found = np.asarray(jax.jit(jax.vmap(of_example))(x))
    expected = [np.asarray(jax.jit(of_example)(each)) for each in x]
    assert found.tobytes() == np.stack(expected).tobytes()
