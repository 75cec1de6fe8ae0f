"""Float8: what it looks like, moves, computes and refuses; and that it is a pytree everywhere."""

from __future__ import annotations

import copy
import operator
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import xla_fp8
from xla_fp8 import Float8

pytestmark = pytest.mark.unoptimized

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(3, 4, 6)), jnp.float32)
OPTIONS: list[dict[str, Any]] = [
    {}, {"axis": 2}, {"axis": (0, 1)}, {"axis": 0, "layout": "both"}, {"layout": "transposed", "axis": 1},
]  # fmt: skip


def same(a: Any, b: Any) -> None:
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert jnp.shape(a) == jnp.shape(b)


# What it looks like


def test_attributes() -> None:
    q = xla_fp8.quantize(X, E5M2, layout="both")
    assert (q.shape, q.ndim, q.size, len(q), q.dtype) == ((3, 4, 6), 3, 72, 3, E5M2)
    assert q.nbytes == 72 + 72 + 4
    only = xla_fp8.quantize(X, layout="transposed")
    assert (only.shape, only.ndim, only.dtype, only.data) == ((3, 4, 6), 3, E4M3, None)


def test_prints() -> None:
    q = xla_fp8.quantize(jnp.float32([[1.0, -2.0], [0.0, 448.0]]), layout="both")
    assert repr(q) == "Float8(float8_e4m3fn[2, 2], scale=1, both layouts)"
    assert str(q) == f"{q!r}\n[[  1.  -2.]\n [  0. 448.]]"
    assert repr(xla_fp8.quantize(X, axis=2)) == "Float8(float8_e4m3fn[3, 4, 6], scale=float32[1, 1, 6])"
    assert repr(xla_fp8.quantize(X, E5M2, layout="transposed", scale=0.5)) == (
        "Float8(float8_e5m2[3, 4, 6], scale=0.5, transposed)"
    )
    shapes = jax.eval_shape(xla_fp8.quantize, X)
    assert str(shapes) == "Float8(float8_e4m3fn[3, 4, 6], scale=float32[])"
    assert repr(jax.tree.map(lambda _: None, q)) == "Float8(data=None, scale=None, transposed=None)"
    seen: list[str] = []
    jax.jit(lambda q: seen.append(str(q)))(q)
    assert seen == ["Float8(float8_e4m3fn[2, 2], scale=float32[], both layouts)"]


# What it stands for


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dequantize_is_close(options: Any) -> None:
    q = xla_fp8.quantize(X, **options)
    assert jnp.max(jnp.abs(q.dequantize() - X) / jnp.abs(X).clip(0.05)) < 2**-4
    same(q.dequantize(jnp.bfloat16), q.dequantize().astype(jnp.bfloat16))
    same(q.astype(jnp.float16), q.dequantize(jnp.float16))
    scale = jnp.reshape(q.scale, q.scale.shape + (1,) * (3 - q.scale.ndim))
    same(q.dequantize(), q.unscaled() * scale)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_to_the_other_fp8_type(options: Any) -> None:
    q = xla_fp8.quantize(X, **options)
    assert q.astype(E4M3) is q
    other, expected = q.astype(E5M2), xla_fp8.quantize(q.dequantize(), E5M2, **options)
    assert jax.tree.structure(other) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(expected), strict=True):
        same(a, b)
        assert a.dtype == b.dtype


def test_a_scale_that_does_not_fit_is_told() -> None:
    for scale in (jnp.ones(5), jnp.ones((3, 1, 1, 1)), jnp.ones((1, 1, 3))):
        q = Float8(X.astype(E4M3), scale)
        for function in (q.dequantize, lambda q=q: q[0], lambda q=q: q.reshape(12, 6), lambda q=q: q.mT):
            with pytest.raises(xla_fp8.QuantizationError, match=r"does not fit data of shape \[3, 4, 6\]"):
                function()
    with pytest.raises(xla_fp8.QuantizationError, match="without data"):
        Float8(None, jnp.ones(())).dequantize()


# What moves its elements

INDICES: list[Any] = [
    0, -1, slice(1, None), (slice(None), 2), (..., 0), (None, 1), (0, ..., slice(None, None, 2)),
    (slice(None), None, -1),
    (1, 2, 3), ..., (slice(0, 0),), (slice(None, None, -1), slice(1, 3)),
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing(options: Any, index: Any) -> None:
    q = xla_fp8.quantize(X, **options)
    same(q[index].dequantize(), q.dequantize()[index])
    assert q[index].transposed is None


def test_indexing_with_traced_integers_and_arrays() -> None:
    q, channels = xla_fp8.quantize(X), xla_fp8.quantize(X, axis=0)
    same(jax.jit(lambda q, i: q[i].dequantize())(channels, 1), channels.dequantize()[1])
    same(q[jnp.array([2, 0])].dequantize(), q.dequantize()[jnp.array([2, 0])])
    same(q[q.dequantize() > 0].dequantize(), q.dequantize()[q.dequantize() > 0])
    for index in (jnp.array([2, 0]), [0, 1], (slice(None), jnp.array([True, False, True, True]))):
        with pytest.raises((xla_fp8.QuantizationError, TypeError), match=r"integers, slices|non-tuple sequence"):
            channels[index]
    assert [a.shape for a in q] == [(4, 6)] * 3
    with pytest.raises(xla_fp8.QuantizationError, match="len"):
        len(q[0, 0, 0])


def test_a_stack_of_one_stays_a_stack() -> None:
    """What moves the elements, or changes their type, keeps the scale's dimension along which scan and vmap go."""
    for layers in (1, 2):
        stack = jax.vmap(lambda x: xla_fp8.quantize(x))(jnp.stack([X[0]] * layers))
        for moved in (
            stack[:, 1:],
            stack.reshape(layers, 6, 4),
            stack.transpose(0, 2, 1),
            stack.mT,
            stack.astype(E5M2),
        ):
            _, values = lax.scan(lambda c, q: (c, q.dequantize()), 0, moved)
            same(values, moved.dequantize())
            same(jax.vmap(lambda q: q.dequantize())(moved), moved.dequantize())
    one = xla_fp8.quantize(X[:1], axis=0)
    same(one[jnp.array([0, 0])].dequantize(), one.dequantize()[jnp.array([0, 0])])
    same(one[one.dequantize() > 0].dequantize(), one.dequantize()[one.dequantize() > 0])


@pytest.mark.parametrize(
    ("options", "shape", "fits"),
    [
        ({}, (72,), True),
        ({}, (6, -1), True),
        ({"axis": 0}, (3, 24), True),
        ({"axis": 0}, (3, 2, 2, 6), True),
        ({"axis": 0}, (1, 3, 24), True),
        ({"axis": 0}, (12, 6), False),
        ({"axis": 1}, (3, 4, 6), True),
        ({"axis": 1}, (3, 4, 2, 3), True),
        ({"axis": 1}, (4, 3, 6), False),
        ({"axis": 2}, (12, 6), True),
        ({"axis": 2}, (72,), False),
        ({"axis": (0, 2)}, (3, 2, 2, 6), True),
    ],
)
def test_reshape(options: Any, shape: tuple[int, ...], fits: bool) -> None:
    q = xla_fp8.quantize(X, **options)
    if fits:
        same(q.reshape(shape).dequantize(), q.dequantize().reshape(shape))
        same(q.reshape(*shape).dequantize(), q.dequantize().reshape(shape))
    else:
        with pytest.raises(xla_fp8.QuantizationError, match="does not stay a dimension of its own"):
            q.reshape(shape)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transpose(options: Any) -> None:
    q = xla_fp8.quantize(X, **options)
    wide = q.dequantize()
    same(q.T.dequantize(), wide.T)
    same(q.mT.dequantize(), wide.mT)
    same(q.transpose(1, 2, 0).dequantize(), wide.transpose(1, 2, 0))
    same(q.transpose((-1, 0, 1)).dequantize(), wide.transpose((2, 0, 1)))
    same(q.swapaxes(0, 2).dequantize(), wide.swapaxes(0, 2))
    same(q.transpose(None).dequantize(), q.dequantize().transpose(None))


@pytest.mark.parametrize(
    "function", [lambda q: q.transpose(5, 1, 0), lambda q: q.swapaxes(0, -4), lambda q: q[0, 0].mT]
)
def test_a_dimension_that_there_is_not_is_told(function: Any) -> None:
    with pytest.raises(xla_fp8.QuantizationError, match=r"there is no dimension (5|-4|-2) in Float8"):
        function(xla_fp8.quantize(X))


def test_exchanging_the_last_dimensions_exchanges_the_copies() -> None:
    q = xla_fp8.quantize(X, layout="both")
    assert q.mT.data is q.transposed
    assert q.mT.transposed is q.data
    only = xla_fp8.quantize(X, layout="transposed")
    assert only.mT.data is only.transposed
    assert only.mT.transposed is None


# Operators


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "eq", "ne", "lt", "le", "gt", "ge"]
)
def test_operators_dequantize(name: str) -> None:
    q = xla_fp8.quantize(abs(X) + 1, axis=2)
    function = getattr(operator, name)
    for other in (2, 1.5, X, X.astype(jnp.bfloat16), np.asarray(X, np.float16), np.float32(2), jnp.ones((4, 6))):
        dtype = getattr(other, "dtype", jnp.float32)
        for ours, plain in (
            (function(q, other), function(q.dequantize(dtype), other)),
            (function(other, q), function(other, q.dequantize(dtype))),
        ):
            same(ours, plain)
            assert isinstance(ours, jax.Array)
            assert ours.dtype == plain.dtype
    same(function(q, q), function(q.dequantize(), q.dequantize()))
    same(function(q, jnp.int32(2)), function(q.dequantize(), 2))


def test_other_operators() -> None:
    q, w = xla_fp8.quantize(X), xla_fp8.quantize(X[0].T)
    same(-q, -q.dequantize())
    same(+q, q.dequantize())
    same(abs(q), abs(q.dequantize()))
    same(q @ w, q.dequantize() @ w.dequantize())
    same(np.asarray(X) @ w, X @ w.dequantize())
    assert bool(xla_fp8.quantize(jnp.float32(2.0)))
    with pytest.raises(TypeError, match="unsupported operand"):
        q + "text"
    with pytest.raises(TypeError, match="unhashable"):
        hash(q)


def test_numpy_and_jax_numpy_refuse() -> None:
    q = xla_fp8.quantize(X)
    for function in (np.asarray, jnp.asarray):
        with pytest.raises(xla_fp8.QuantizationError, match=r"is no array.*q.dequantize\(\)"):
            function(q)
    for function in (jnp.sin, jnp.sum, np.sin, np.sum):
        with pytest.raises(TypeError, match="Float8"):
            function(q)


# A pytree


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_jit_scan_vmap_cond(options: Any) -> None:
    q = xla_fp8.quantize(X, **options)
    assert isinstance(jax.jit(lambda q: q)(q), Float8)
    same(jax.jit(lambda q: q.dequantize())(q), q.dequantize())
    mapped = jax.vmap(lambda x: xla_fp8.quantize(x))(X)
    assert mapped.scale.shape == (3,)
    for i, row in enumerate(mapped):
        same(row.dequantize(), xla_fp8.quantize(X[i]).dequantize())
    same(jax.vmap(lambda q: q.dequantize())(mapped), mapped.dequantize())
    total, rows = lax.scan(lambda c, q: (c + q.dequantize(), q), jnp.zeros((4, 6)), mapped)
    same(rows.dequantize(), mapped.dequantize())
    np.testing.assert_allclose(total, mapped.dequantize().sum(0), rtol=1e-6)
    same(lax.cond(True, lambda q: q, lambda q: q, q).dequantize(), q.dequantize())


def test_mapped_channel_scales() -> None:
    mapped = jax.vmap(lambda x: xla_fp8.quantize(x, axis=1, layout="both"))(X)
    assert mapped.scale.shape == (3, 1, 6)
    same(mapped.dequantize(), xla_fp8.quantize(X, axis=(0, 2)).dequantize())
    same(mapped[1].dequantize(), xla_fp8.quantize(X[1], axis=1).dequantize())


def test_shard_map() -> None:
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    q = xla_fp8.quantize(X)
    specs = Float8(P("i"), P())  # type: ignore[arg-type]
    wide = jax.shard_map(lambda q: q.dequantize(), mesh=mesh, in_specs=(specs,), out_specs=P("i"))(q)
    same(wide, q.dequantize())


def test_pickle_and_copy() -> None:
    q = xla_fp8.quantize(X, axis=0, layout="both")
    for other in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        same(other.dequantize(), q.dequantize())
        same(other.transposed, q.transposed)


def test_orbax(tmp_path: Path) -> None:
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="needs orbax-checkpoint")
    tree = {"w": xla_fp8.quantize(X, axis=0, layout="both"), "b": xla_fp8.quantize(X[0], E5M2), "n": jnp.ones(3)}
    state = xla_fp8.DelayedScaling.create(amax=3.0, length=4)
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "step", {"tree": tree, "state": state})
        saver.wait_until_finished()
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), {"tree": tree, "state": state})
        restored = saver.restore(tmp_path / "step", abstract)
    assert jax.tree.structure(restored) == jax.tree.structure({"tree": tree, "state": state})
    assert isinstance(restored["tree"]["w"], Float8)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves({"tree": tree, "state": state}), strict=True):
        same(a, b)
        assert a.dtype == b.dtype


# Derivatives


def test_differentiating_raises() -> None:
    q = xla_fp8.quantize(X)
    for function in (
        lambda q: jnp.sum(q.dequantize()),
        lambda q: jnp.sum(q * 2),
        lambda q: jnp.sum(q.unscaled()),
        lambda q: jnp.sum(xla_fp8.dot_general(q, q, (((2,), (2,)), ((0,), (0,))))),
    ):
        with pytest.raises(xla_fp8.DifferentiationError, match="a Float8 has no derivative"):
            jax.grad(function)(q)


def test_a_frozen_float8_lets_gradients_pass_beside_it() -> None:
    w = xla_fp8.quantize(X[0])
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(x * w)))(X)
    same(gradient, jnp.cos(X * w.dequantize()) * w.dequantize())
    same(jax.grad(lambda x: jnp.sum(x * lax.stop_gradient(w)))(X), jnp.broadcast_to(w.dequantize(), X.shape))
