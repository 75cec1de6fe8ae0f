"""Programs that look like those that a fused cast computes, and mean something else."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.extend import core

import xla_fp8
from tests.fused_casts import E4M3, F32, IMAGE, ROWS, Array, affine, cast, group_norm, layer_norm, normal, rms
from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import kernel
from xla_fp8.backends.fused_cast.arithmetic import computed
from xla_fp8.backends.fused_cast.problem import FusedCast, Matrix, Node, Result
from xla_fp8.backends.fused_cast.support import supports
from xla_fp8.backends.quantize import choice
from xla_fp8.backends.triton.device import hopper_gpu
from xla_fp8.tracing.equations import is_literal
from xla_fp8.tracing.fused_cast_problem import implementation
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed, fused_cast_p


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU, by Pallas' interpreter."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)
    monkeypatch.setattr(kernel, "run", functools.partial(kernel.run, interpret=True))


def by_kernel(function: Callable[..., Array], *arguments: Array) -> Array | None:
    """What the kernel of a function's only cast computes; None where XLA keeps it."""
    jaxpr = cut_closed(jax.make_jaxpr(function)(*arguments), Options())
    casts = [(i, equation) for i, equation in enumerate(jaxpr.eqns) if equation.primitive is fused_cast_p]
    if not casts:
        return None
    [(index, equation)] = casts
    read = [atom for atom in equation.invars if not is_literal(atom)]
    inputs = core.jaxpr_as_fun(_jax_compat.with_equations(jaxpr, jaxpr.eqns[:index], read))(*arguments)
    [found] = implementation(equation.params["jaxpr"])(*inputs)
    return found


def check(function: Callable[..., Array], *arguments: Array, is_fused: bool = True) -> None:
    """Compares the kernel with the program in f32."""
    found = by_kernel(function, *arguments)
    assert (found is not None) == is_fused
    if found is not None:
        wanted = function(*(x.astype(F32) for x in arguments))
        ours, theirs = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
        assert np.linalg.norm(ours - theirs) < 0.01 * np.linalg.norm(theirs)


def norm(x: Array) -> Array:
    return layer_norm(x, affine(x.shape[-1])).astype(F32) * 100


CLAMPS: dict[str, Callable[[Array], Array]] = {
    "one above, twice": lambda x: jnp.minimum(jnp.minimum(jnp.maximum(x, -448), 6), 448),
    "both, and one above": lambda x: jnp.minimum(jnp.clip(x, -448, 6), 448),
    "relu, and all below": lambda x: jnp.maximum(jax.nn.relu(jnp.minimum(x, 448)), -448),
    "a wider one within": lambda x: jnp.minimum(jnp.clip(x, -1e4, 1e4), 448).clip(-448),
    "both of a part": lambda x: jnp.clip(x, -100, 240),
}


@pytest.mark.parametrize("clamp", CLAMPS)
def test_only_clamps_to_all_of_fp8_are_left_to_the_cast(clamp: str) -> None:
    check(lambda x: CLAMPS[clamp](norm(x)).astype(E4M3), normal(ROWS))


def test_a_clamp_of_a_constant_is_none() -> None:
    check(
        lambda x: lax.clamp(norm(x), lax.full(ROWS, 5.0), lax.full(ROWS, 448.0)).astype(E4M3),
        normal(ROWS),
        is_fused=False,
    )


@pytest.mark.parametrize("per_image", [False, True])
def test_numbers_that_start_again_within_a_row(per_image: bool) -> None:
    """Those of a head, say: of 320 columns each has the number of its place among 32."""

    def heads(x: Array, w: Array) -> Array:
        wide = x.astype(F32).reshape(2, 256, 10, 32)
        return cast(jax.nn.silu(wide * (w[:, None, None] if per_image else w) + 1).reshape(ROWS))

    numbers = jnp.linspace(0.5, 2, 64, dtype=F32)
    check(heads, normal(ROWS), numbers.reshape(2, 32) if per_image else numbers[:32])


def test_statistics_of_places_that_come_again() -> None:
    def normalized(x: Array) -> Array:
        wide = x.astype(F32).reshape(2, 256, 10, 32)
        mean, variance = (f(wide, axis=(1, 2), keepdims=True) for f in (jnp.mean, jnp.var))
        return cast(jax.nn.silu((wide - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape))

    check(normalized, normal(IMAGE))


@pytest.mark.parametrize("channels", [256, 1024])
def test_numbers_for_each_line_of_an_image(channels: int) -> None:
    """A program of statistics, and one of whole images, have rows of several lines."""
    lines = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, (16, 1, channels)), F32)

    def normalized(x: Array) -> Array:
        return group_norm(x.astype(F32), affine(channels)).astype(F32)

    x = normal((1, 16, 16, channels))
    check(lambda x, lines: cast(jax.nn.silu(normalized(x) * lines)), x, lines)
    check(lambda x, lines: cast(jax.nn.silu(normalized(x * lines))), x, lines, is_fused=False)


def test_a_reshape_that_transposes() -> None:
    check(
        lambda x: cast(layer_norm(lax.reshape(x, (2, 256, 256), (0, 2, 1)), affine(256))),
        normal((2, 256, 256)),
        is_fused=False,
    )


def test_a_function_with_two_results_and_derivatives_of_its_own() -> None:
    @jax.custom_jvp
    def both(x: Array) -> tuple[Array, Array]:
        return x * 2, jnp.exp(x) * 3

    both.defjvp(lambda primals, tangents: (both(*primals), both(*tangents)))

    def program(x: Array) -> Array:
        one, other = both(x.astype(F32))
        return cast(one * other * x + x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.make_jaxpr(xla_fp8.rewrite(program))(normal(ROWS))


def test_logic_is_xlas() -> None:
    """Triton has no maximum of truth values, and a choice of one is none."""
    check(lambda x: cast(jnp.where(jnp.maximum(x > 1, x < -1), norm(x), 0)), normal(ROWS), is_fused=False)
    check(lambda x: cast(lax.select_n(x > 0, norm(x))), normal(ROWS), is_fused=False)


@pytest.mark.parametrize("name", ["reduce_max", "reduce_min"])
def test_the_largest_of_a_row_is_nan_where_one_is(name: str) -> None:
    """Triton's drops it, and so does XLA's on a CPU, of rows as long as these."""
    tile = jnp.zeros((512, 320)).at[3, 5].set(jnp.nan)
    [found] = computed(Node(name, (0,)), [[tile]], interpret=False)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found)), [3])


def test_a_stream_in_f32_is_not_added_up_again_in_each_layer() -> None:
    def network(x: Array) -> list[Array]:
        stream, results = x.astype(F32), []
        for _ in range(12):
            results.append(cast(layer_norm(stream, affine(320))))
            stream += jnp.sin(stream).astype(jnp.bfloat16)
        return results

    jaxpr = cut_closed(jax.make_jaxpr(network)(normal(ROWS)), Options())
    casts = [equation for equation in jaxpr.eqns if equation.primitive is fused_cast_p]
    assert max(sum(a.aval.shape == ROWS for a in equation.invars) for equation in casts) <= 4
    assert len(casts) < 6


def test_an_exported_program_takes_no_kernel_along() -> None:
    """JAX serializes none."""
    with hopper_gpu():
        exported = export.export(jax.jit(xla_fp8.rewrite(rms)), platforms=("cuda",))(normal(ROWS))
    assert "custom_call" not in exported.mlir_module()


def test_what_there_is_no_kernel_for() -> None:
    def problem(rows: int, dtype: Any) -> FusedCast:
        result = Result("tensor", (1,), np.dtype(dtype))
        return FusedCast(rows, 320, (Matrix(np.dtype(jnp.bfloat16), 320),), (Node("square", (0,)),), (result,))

    assert supports(problem(2**20, E4M3)).ok
    assert "32 bits" in supports(problem(2**23, E4M3)).reason
    for dtype in (jnp.float8_e4m3b11fnuz, jnp.float8_e5m2fnuz, jnp.float8_e4m3, jnp.float8_e3m4, jnp.float8_e8m0fnu):
        assert jnp.dtype(dtype).name in supports(problem(2**10, dtype)).reason
