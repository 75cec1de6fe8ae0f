"""Dots of a training step that contract rows get operands that a kernel transposed, and compute what they did."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import xla_fp8
from tests.fused_casts import F32, Array, normal
from tests.training_steps import rewritten, step_of
from xla_fp8 import _jax_compat
from xla_fp8.backends.quantize import choice
from xla_fp8.backends.transpose import exchange, kernel
from xla_fp8.backends.transpose.primitive import PRIMITIVE
from xla_fp8.tracing import transposed_operands
from xla_fp8.tracing.equations import bodies
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_jaxpr

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU, and of small tensors as well."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)
    monkeypatch.setattr(transposed_operands, "SMALLEST_SIZE", 1)
    monkeypatch.setattr(exchange, "SMALLEST_SIZE", 1)


def transposes(jaxpr: Any) -> list[tuple[int, ...]]:
    """Shapes of what kernels transpose, wherever they stand."""
    found = []
    for equation in _jax_compat.open_jaxpr(jaxpr).eqns:
        if equation.primitive.name == PRIMITIVE:
            found.append(equation.invars[0].aval.shape)
        for body in bodies(equation):
            found += transposes(body)
    return found


def cut(function: Any, *arguments: Any) -> Any:
    """Each time anew: what is remembered knows nothing of sizes that tests change."""
    return cut_jaxpr(jax.make_jaxpr(function)(*arguments), Options())


def fp8(shape: tuple[int, ...], dtype: Any = E4M3, seed: int = 0) -> Array:
    x: Array = normal(shape, F32, seed).astype(dtype)
    return x


def gradient(x8: Array, g8: Array) -> Array:
    """As a weight's: both are contracted along all but their last dimensions."""
    rows = tuple(range(x8.ndim - 1))
    wide = x8.astype(F32) * 0.5, g8.astype(F32) * 0.25
    return jax.lax.dot_general(*wide, ((rows, rows), ((), ())))


WANTED = {
    "transformer": [(2, 256, 256), (2, 256, 128), (2, 256, 128), (2, 256, 256)],
    "gated": [(2, 512, 128), (2, 512, 128), (2, 512, 128), (2, 512, 256)],
    "unet": [],
}


@pytest.mark.parametrize("name", WANTED)
def test_filter_gradients_of_dots(name: str) -> None:
    """Those of convolutions read tensors in bf16."""
    assert sorted(transposes(rewritten(name)[0])) == sorted(WANTED[name])


@pytest.mark.parametrize("name", ["transformer", "gated"])
@pytest.mark.parametrize("by_operation", [False, True])
def test_what_a_step_computes_stays(name: str, by_operation: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit: compiled, beside the same step whose operands XLA transposes; and operation by operation."""
    step, arguments = step_of(name)
    leaves = jax.tree.leaves(arguments)
    ours, _ = rewritten(name)
    monkeypatch.setattr(transposed_operands, "SMALLEST_SIZE", 2**40)
    theirs = cut(lambda *leaves: step(*jax.tree.unflatten(jax.tree.structure(arguments), leaves)), *leaves)
    assert transposes(ours)
    assert not transposes(theirs)
    with jax.disable_jit(by_operation):
        results = [core.jaxpr_as_fun(jaxpr) for jaxpr in (ours, theirs)]
        results = [function(*leaves) if by_operation else jax.jit(function)(*leaves) for function in results]
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


def test_what_several_dots_read_is_transposed_once() -> None:
    """As the input of query, key and value."""

    def read_alike(x8: Array, gs: list[Array]) -> list[Array]:
        return [gradient(x8, g8) for g8 in gs]

    gs = [fp8((2, 64, 48), E5M2, seed) for seed in range(3)]
    assert transposes(cut(read_alike, fp8((2, 64, 32)), gs)) == [(2, 64, 32), *[(2, 64, 48)] * 3]


def test_both_ways_to_write_a_scale() -> None:
    def of_reciprocals(x8: Array, g8: Array) -> Array:
        return jax.lax.dot_general(x8.astype(F32) / 3, jnp.float32(2) * g8.astype(F32), (((0,), (0,)), ((), ())))

    x8, g8 = fp8((64, 32)), fp8((64, 48), E5M2)
    jaxpr = cut(of_reciprocals, x8, g8)
    assert len(transposes(jaxpr)) == 2
    found = jax.jit(core.jaxpr_as_fun(jaxpr))(x8, g8)[0]
    np.testing.assert_array_equal(np.asarray(found), np.asarray(jax.jit(of_reciprocals)(x8, g8)))


def scaled_by_column(x8: Array, g8: Array) -> Array:
    return jax.lax.dot_general(x8.astype(F32) * jnp.arange(32.0), g8.astype(F32), (((0,), (0,)), ((), ())))


LEFT: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], Any]] = {
    "the contracted dimension is innermost": (lambda x, g: x.astype(F32) @ g.astype(F32).T, (32, 64), (48, 64), E5M2),
    "one operand contracts its columns": (lambda x, g: x.astype(F32) @ g.astype(F32), (32, 64), (64, 48), E5M2),
    "a batch": (lambda x, g: jnp.einsum("bij,bik->bjk", x.astype(F32), g.astype(F32)), (2, 64, 32), (2, 64, 48), E5M2),
    "an operand that is not FP8": (lambda x, g: gradient(x, g.astype(F32) + 1), (64, 32), (64, 48), E5M2),
    "numbers by column": (scaled_by_column, (64, 32), (64, 48), E5M2),
    "rows of which cuBLASLt takes none": (gradient, (72, 32), (72, 48), E5M2),
    "columns of which cuBLASLt takes none": (gradient, (64, 40), (64, 48), E5M2),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left(name: str) -> None:
    function, x, g, dtype = LEFT[name]
    assert transposes(cut(function, fp8(x), fp8(g, dtype))) == []


def test_cublaslt_has_no_matmul_of_two_tensors_in_e5m2() -> None:
    assert len(transposes(cut(gradient, fp8((64, 32)), fp8((64, 48))))) == 2
    assert transposes(cut(gradient, fp8((64, 32), E5M2), fp8((64, 48), E5M2))) == []


def test_small_operands_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """To XLA, which gives small dots to kernels that read any order; each operand by its own size."""
    monkeypatch.setattr(transposed_operands, "SMALLEST_SIZE", 64 * 48)
    assert transposes(cut(gradient, fp8((64, 32)), fp8((64, 48), E5M2))) == [(64, 48)]


def test_without_kernels_nothing_is_transposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "takes_fused", lambda platform: False)
    assert transposes(cut(gradient, fp8((64, 32)), fp8((64, 48), E5M2))) == []


def test_loops_have_it_inside() -> None:
    def summed(x8: Array, g8: Array) -> Array:
        return jax.lax.scan(lambda total, both: (total + gradient(*both), None), jnp.zeros((32, 48)), (x8, g8))[0]

    assert transposes(cut(summed, fp8((3, 64, 32)), fp8((3, 64, 48), E5M2))) == [(64, 32), (64, 48)]


def test_under_vmap_and_grad() -> None:
    """A transformation of the rewritten function computes what it computes of the function itself."""
    x8, g8 = fp8((3, 64, 32)), fp8((3, 64, 48), E5M2)

    def scaled(scale: Array, x8: Array, g8: Array) -> Array:
        return jnp.sum(gradient(x8, g8) * scale)

    ours = xla_fp8.jit(scaled, backend="reference")
    assert transposes(cut(scaled, jnp.float32(2), x8[0], g8[0]))
    for transform in (lambda f: jax.vmap(f, (None, 0, 0)), lambda f: jax.vmap(jax.grad(f), (None, 0, 0))):
        found, wanted = (transform(f)(jnp.float32(2), x8, g8) for f in (ours, scaled))
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=1e-5)


def test_lowers_to_kernels_and_for_export_to_none() -> None:
    jaxpr = cut(gradient, fp8((128, 256)), fp8((128, 512), E5M2))
    function = jax.jit(core.jaxpr_as_fun(jaxpr))
    shapes = jaxpr.in_avals
    assert function.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text().count(f'name = "{kernel.NAME}"') == 2
    exported = jax.export.export(function, platforms=("cuda",))(*shapes)
    assert kernel.NAME not in exported.mlir_module()
