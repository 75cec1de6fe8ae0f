"""What never goes through HLO text works beside FP8 convolutions: effects, callbacks, shard_map, kernels, keys."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import xla_fp8
from tests.jit.programs import assert_close, quantize, tensors, wide_layer
from xla_fp8.backends.registry import ReferenceBackend

pytestmark = pytest.mark.unoptimized

X8, W8 = tensors()


def step(x: jax.Array) -> jax.Array:
    """One FP8 layer from and to [2, 6, 6, 4]."""
    return wide_layer(quantize(x, 1.0), W8)[..., :4]


X = X8.astype(jnp.float32)


def check(fn: Any, *args: Any, count: int) -> None:
    """Rewrites `count` convolutions of `fn`, alone and inside a scan, with the numbers of plain JAX."""
    fast = xla_fp8.jit(fn)
    assert len(fast.report(*args).rewritten) == count
    wanted = jax.jit(fn)(*args)
    assert_close(fast(*args), wanted, rtol=1e-4, atol=1e-4)
    assert_close(jax.jit(xla_fp8.rewrite(fn))(*args), wanted, rtol=1e-4, atol=1e-4)


def double(x: Any) -> np.ndarray[Any, Any]:
    return np.asarray(x) * np.float32(2)


def test_pure_callback_before_between_and_after() -> None:
    def call(x: jax.Array) -> jax.Array:
        return jax.pure_callback(double, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    check(lambda x: call(step(call(step(call(x))))), X, count=2)
    check(lambda x: lax.scan(lambda c, _: (step(call(step(c))), None), x, None, length=2)[0], X, count=2)


@pytest.mark.parametrize("ordered", [False, True])
def test_io_callbacks_run_once_and_in_order(ordered: bool) -> None:
    def fn(x: jax.Array, log: list[tuple[str, float]]) -> jax.Array:
        def note(name: str, value: jax.Array) -> None:
            io_callback(lambda v: log.append((name, float(v))), None, value.sum(), ordered=ordered)

        note("in", x)
        y = step(x)
        note("middle", y)
        z = step(y)
        note("out", z)
        return z

    wanted: list[tuple[str, float]] = []
    got: list[tuple[str, float]] = []
    original = jax.jit(lambda x: fn(x, wanted))(X)
    assert_close(xla_fp8.jit(lambda x: fn(x, got))(X), original, rtol=1e-4, atol=1e-4)
    jax.effects_barrier()
    assert [name for name, _ in got] == [name for name, _ in wanted] if ordered else len(got) == 3
    np.testing.assert_allclose(sorted(v for _, v in got), sorted(v for _, v in wanted), rtol=1e-4)


def test_ordered_debug_print_keeps_its_order(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("first {}", x.sum(), ordered=True)
        y = step(x)
        jax.debug.print("second {}", y.shape[0], ordered=True)
        z = step(y) + y
        jax.debug.print("third {}", z.sum() * 0, ordered=True)
        return z

    fast = xla_fp8.jit(fn)
    assert len(fast.report(X).rewritten) == 2
    assert_close(fast(X), jax.jit(lambda x: step(step(x)) + step(x))(X), rtol=1e-4, atol=1e-4)
    jax.effects_barrier()
    assert [line.split()[0] for line in capfd.readouterr().out.splitlines()] == ["first", "second", "third"]


def test_debug_print_inside_a_loop_and_a_branch(capfd: pytest.CaptureFixture[str]) -> None:
    def fn(x: jax.Array) -> jax.Array:
        def body(i: jax.Array, c: jax.Array) -> jax.Array:
            y = step(c)
            jax.debug.print("step {}", i, ordered=True)
            return y

        return lax.fori_loop(0, 3, body, x)

    assert_close(xla_fp8.jit(fn)(X), jax.jit(lambda x: step(step(step(x))))(X), rtol=1e-4, atol=1e-4)
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["step", "0", "step", "1", "step", "2"]


def test_pallas_call_beside() -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] * 2

    def call(x: jax.Array) -> jax.Array:
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    check(lambda x: call(step(call(x))), X, count=1)


def test_ffi_call_beside() -> None:
    """LAPACK's Cholesky factor is an FFI call that every CPU build of jaxlib registers."""

    def call(x: jax.Array) -> jax.Array:
        square = x[0, :4, :4, 0]
        symmetric = square @ square.T + 100 * jnp.eye(4)
        return x * jnp.linalg.cholesky(symmetric)[0, 0]

    def raw(x: jax.Array) -> jax.Array:
        factor, _ = jax.ffi.ffi_call(
            "lapack_spotrf_ffi", (jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
        )(jnp.eye(4) * 4, uplo=np.uint8(ord("L")))
        return x * factor[0, 0]

    check(lambda x: call(step(call(x))), X, count=1)
    check(lambda x: raw(step(raw(x))), X, count=1)


def test_random_keys_typed_and_raw() -> None:
    def fn(x: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        key, one = jax.random.split(key)
        y = step(x + jax.random.normal(one, x.shape))
        return y * jax.random.bernoulli(key, 0.5, y.shape), key

    for key in (jax.random.key(3), jax.random.PRNGKey(3), jax.random.key(3, impl="rbg")):
        fast = xla_fp8.jit(fn)
        assert len(fast.report(X, key).rewritten) == 1
        got, wanted = fast(X, key), jax.jit(fn)(X, key)
        assert_close(got[0], wanted[0], rtol=1e-4, atol=1e-4)
        assert (got[1] == wanted[1]).all()


def test_optimization_barrier_named_checkpoint_and_stop_gradient() -> None:
    from jax.ad_checkpoint import checkpoint_name

    def fn(x: jax.Array) -> jax.Array:
        y = checkpoint_name(step(lax.optimization_barrier(x)), "y")
        return lax.stop_gradient(step(y)) + y

    check(fn, X, count=2)
    # With the value: for the gradient alone nobody reads the convolutions.
    check(jax.value_and_grad(lambda x: fn(x).mean()), X * 0.01, count=2)


def test_function_with_refs() -> None:
    def fn(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] = step(ref[...])
        ref[...] = step(ref[...]) + 1
        return jax.freeze(ref)

    check(fn, X, count=2)


def test_named_scope_and_compute_context_are_kept() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("the_scope"):
            return step(jnp.sin(x))

    assert "the_scope" in xla_fp8.jit(fn).lower(X).as_text(debug_info=True)
    check(fn, X, count=1)


def test_shard_map_on_one_device() -> None:
    mesh = jax.make_mesh((1,), ("i",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=(spec, jax.sharding.PartitionSpec()))
    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = step(x)
        return y, lax.pmax(jnp.max(jnp.abs(y)), "i")

    check(fn, X, count=1)


def test_shard_map_over_some_axes_of_a_mesh() -> None:
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((1, 1), ("i", "j"), devices=jax.devices()[:1], axis_types=types)
    spec = jax.sharding.PartitionSpec("i")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"i"})
    def fn(x: jax.Array) -> jax.Array:
        return quantize(wide_layer(x, W8, 0.5), 0.25)  # scales are literals, which have types over the mesh

    check(fn, X8, count=1)
    (entry,) = xla_fp8.explain(fn, target="h200")(X8).rewritten
    assert entry.graph == "1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]scale(2);"
    # One such call in a module, and XLA turns Shardy off for all of it.
    assert "@Sharding" not in xla_fp8.jit(fn).lower(X8).as_text()


def test_export_round_trip() -> None:
    fast = xla_fp8.jit(step)
    exported = jax.export.export(fast)(X)
    again = jax.export.deserialize(exported.serialize())
    assert_close(again.call(X), step(X), rtol=1e-4, atol=1e-4)
    both = jax.export.export(fast, platforms=("cpu", "cuda"))(X)
    assert_close(jax.export.deserialize(both.serialize()).call(X), step(X), rtol=1e-4, atol=1e-4)


def test_export_of_a_symbolic_batch_runs_as_plain_jax() -> None:
    (batch,) = jax.export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 6, 6, 4), jnp.float32)
    with pytest.warns(xla_fp8.FallbackWarning, match="its shapes are not static") as caught:
        exported = jax.export.export(xla_fp8.jit(step))(shape)
    assert len(caught) == 1
    assert_close(exported.call(X), step(X), rtol=1e-4, atol=1e-4)


class PythonBackend(ReferenceBackend):
    """One whose calls only a process with this package can run."""

    needs_python = True


def test_export_with_a_backend_that_needs_python_says_so_and_exports_plain_jax() -> None:
    fast = xla_fp8.jit(step, backend=PythonBackend())
    assert "call @xla_fp8_region" in fast.lower(X).as_text()
    with pytest.warns(xla_fp8.FallbackWarning, match="an exported program cannot take along.*backend='reference'"):
        exported = jax.export.export(fast)(X)
    assert "call @xla_fp8_region" not in exported.mlir_module()
    assert_close(jax.export.deserialize(exported.serialize()).call(X), step(X), rtol=1e-4, atol=1e-4)
    with pytest.raises(xla_fp8.NotRewrittenError, match="Export with backend='reference'"):
        jax.export.export(xla_fp8.jit(step, backend=PythonBackend(), strict=True))(X)
