"""Fused casts of a training step: kernels with several results, of which others compute gradients and scales."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import xla_fp8
from tests.fused_casts import Array, normal
from tests.sampling import sampled
from tests.training_steps import PROGRAMS, assert_kernels_compute_what_a_step_means, kernels, rewritten, step_of
from xla_fp8.backends.fused_cast import kernel, statistics
from xla_fp8.backends.fused_cast.problem import FusedCast, Statistics
from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import choice
from xla_fp8.tracing import relu_masks
from xla_fp8.tracing.fused_cast_problem import problem_of
from xla_fp8.tracing.inline import inline_calls
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU; the kernels are not there, so that what is fused runs as plain JAX."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)


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


def results_of(problem: FusedCast | Statistics) -> list[str]:
    if isinstance(problem, Statistics):
        return ["group_sum"] * len(problem.results)
    return [result.dtype.name if result.kind == "tensor" else result.kind for result in problem.results]


@pytest.mark.parametrize("name", PROGRAMS)
def test_kinds_of_results(name: str) -> None:
    problems = [problem_of(equation.params["jaxpr"]) for equation in kernels(rewritten(name)[0])]
    assert [results_of(found[0]) for found in problems if not isinstance(found, No)] == PROGRAMS[name][2]


@pytest.mark.parametrize("name", sampled(PROGRAMS, 3))
def test_the_kernels_compute_what_the_step_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Pallas' interpreter."""
    monkeypatch.setattr(kernel, "run", functools.partial(kernel.run, interpret=True))
    monkeypatch.setattr(statistics, "totals", functools.partial(statistics.totals, interpret=True))
    assert_kernels_compute_what_a_step_means(name)


def test_masks_of_relu_read_its_result() -> None:
    """A sum that only its derivative would read is in no memory. What is one tensor or of one is read itself."""
    step, arguments = step_of("residual")
    equations = list(inline_calls(jax.make_jaxpr(step)(*arguments).eqns))
    changed = relu_masks.of_results(equations)
    relus = {equation.outvars[0] for equation in equations if equation.primitive.name == "custom_jvp_call"}
    for masks, of_results in ((equations, 0), (changed, 2)):
        found = [mask.invars[0] in relus for mask in masks if mask.primitive.name == "gt"]
        assert (len(found), sum(found)) == (3, of_results)


def test_a_sum_that_another_one_reads_is_no_result_beside_it() -> None:
    """The variance of batch norm in two passes: a kernel that made both would read its own mean."""

    def step(x: Array, y: Array) -> Any:
        wide = x.astype(jnp.float32)
        mean = wide.mean((0, 1, 2))
        variance = jnp.square(wide - mean).mean((0, 1, 2))
        q, amax = xla_fp8.quantize(jax.nn.silu(y + 1), scale=0.02, return_amax=True)
        return mean, variance, q.data, amax

    arguments = (normal((4, 32, 32, 64)), normal((4, 32, 32, 64), seed=1))
    jaxpr = cut_closed(jax.make_jaxpr(step)(*arguments), Options())
    assert len(kernels(jaxpr)) >= 2
    with jax.disable_jit():
        ours, theirs = core.jaxpr_as_fun(jaxpr)(*arguments), jax.tree.leaves(step(*arguments))
    for found, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
