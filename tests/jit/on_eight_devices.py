"""Sharded programs on 8 CPU devices; test_sharding.py runs this file in a process that has them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import xla_fp8
from tests.jit.programs import assert_close, conv, inputs, layer, quantize, tensors, wide_layer
from xla_fp8.backends.protocol import Config, Implementation
from xla_fp8.backends.registry import ReferenceBackend
from xla_fp8.target import GraphCall

COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


@dataclasses.dataclass(frozen=True)
class OpaqueBackend(ReferenceBackend):
    """The reference, but behind custom partitioning and for fixed shapes, as a kernel that XLA cannot look into."""

    name: str = "opaque"
    opaque: bool = True

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        run = super().lower(call, config)

        def implementation(*operands: jax.Array) -> tuple[jax.Array, ...]:
            assert [o.shape for o in operands] == [shape.dimensions for shape in call.operand_shapes]
            return run(*operands)

        return implementation


BACKENDS = [ReferenceBackend(), OpaqueBackend()]


@dataclasses.dataclass(frozen=True)
class PreparedBackend(OpaqueBackend):
    """Notes what it is told to prepare: the batch of the call, and the devices."""

    name: str = "prepared"
    prepared: list[tuple[int, list[int]]] = dataclasses.field(default_factory=list, hash=False, compare=False)

    def prepare(self, call: GraphCall, config: Config, devices: Sequence[jax.Device]) -> None:
        self.prepared.append((call.operand_shapes[0].dimensions[0], [device.id for device in devices]))


def mesh(*shape: int) -> jax.sharding.Mesh:
    axes = ("data", "model")[: len(shape)]
    return jax.make_mesh(shape, axes, axis_types=(AxisType.Auto,) * len(shape))


def collectives(compiled: Any) -> dict[str, int]:
    text = compiled.as_text()
    return {name: text.count(f" {name}(") + text.count(f" {name}-start(") for name in COLLECTIVES if f" {name}" in text}


def sharded(args: tuple[Any, ...], on: jax.sharding.Mesh) -> tuple[Any, ...]:
    """`layer`'s arguments with the batch split over "data" and everything else on every device."""
    x, *rest = args
    return jax.device_put(x, NamedSharding(on, P("data"))), *(jax.device_put(a, NamedSharding(on, P())) for a in rest)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("shape", [(8,), (4, 2)])
def test_batch_sharded_layer_stays_sharded(backend: Any, shape: tuple[int, ...]) -> None:
    args = sharded(inputs(batch=16), mesh(*shape))
    compiled = xla_fp8.jit(layer, backend=backend).lower(*args).compile()
    assert collectives(compiled).keys() == {"all-reduce"}  # amax
    y, amax = compiled(*args)
    assert y.sharding.spec[0] == "data"
    assert amax.sharding.is_fully_replicated
    assert_close((y, amax), layer(*inputs(batch=16)))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_net_with_constraints_and_a_residual(backend: Any) -> None:
    on = mesh(8)

    def net(x8: jax.Array, w8: jax.Array, v8: jax.Array) -> jax.Array:
        y = jax.nn.relu(wide_layer(x8, w8))
        y = lax.with_sharding_constraint(y, NamedSharding(on, P("data")))
        z = wide_layer(quantize(y, 4.0), v8) + y
        return lax.with_sharding_constraint(z, NamedSharding(on, P("data"))).astype(jnp.bfloat16)

    x8, w8 = tensors(batch=16)
    v8 = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 8, 8)), w8.dtype)
    args = (*sharded((x8, w8), on), jax.device_put(v8, NamedSharding(on, P())))
    fast = xla_fp8.jit(net, backend=backend)
    assert len(fast.report(*args).rewritten) == 2
    compiled = fast.lower(*args).compile()
    assert collectives(compiled) == {}
    assert_close(compiled(*args), jax.jit(net)(*args), rtol=2e-2, atol=5e-2)  # an FP8 step between the layers
    assert "sdy.mesh" in fast.lower(*args).as_text()  # Shardy, not GSPMD


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_in_and_out_shardings(backend: Any) -> None:
    on = mesh(8)
    batch, everywhere = NamedSharding(on, P("data")), NamedSharding(on, P())
    fast = xla_fp8.jit(wide_layer, backend=backend, in_shardings=(batch, everywhere), out_shardings=batch)
    args = tensors(batch=16)
    assert collectives(fast.lower(*args).compile()) == {}
    assert_close(fast(*args), wide_layer(*args))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("spec", [P("data"), P()])
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(spec: P, check_vma: bool, backend: Any) -> None:
    on = mesh(8)

    def local(x8: jax.Array, w8: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = wide_layer(x8, w8)
        return quantize(y, 1.0), lax.pmax(jnp.max(jnp.abs(y)), "data")

    def fn(x8: jax.Array, w8: jax.Array) -> Any:
        out = (spec, P())
        return jax.shard_map(local, mesh=on, in_specs=(spec, P()), out_specs=out, check_vma=check_vma)(x8, w8)

    fast = xla_fp8.jit(fn, backend=backend)
    plain = tensors(batch=16)
    for args in (plain, sharded(plain, on)):
        assert len(fast.report(*args).rewritten) == 1
        assert_close(fast(*args), jax.jit(fn)(*args))


def test_gradient_under_shard_map() -> None:
    on = mesh(8)

    @functools.partial(jax.shard_map, mesh=on, in_specs=(P("data"), P(), P()), out_specs=P())
    def loss(x8: jax.Array, w8: jax.Array, scale: jax.Array) -> jax.Array:
        return lax.pmean(jnp.mean(jnp.tanh(wide_layer(x8, w8, scale))), "data")

    args = (*sharded(tensors(batch=16), on), jnp.float32(0.01))
    wanted = jax.grad(loss, argnums=2)(*args)
    for transform in (lambda f: jax.grad(xla_fp8.rewrite(f), argnums=2), lambda f: xla_fp8.jit(jax.grad(f, argnums=2))):
        assert_close(transform(loss)(*args), wanted, rtol=1e-3)


@jax.custom_vjp
def fp8_conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return forward(x, w)[0]


def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    x8, w8 = quantize(x, 8.0), quantize(w, 16.0)
    return wide_layer(x8, w8, 1 / 128), (x8, w8)


def backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, w8 = saved
    g = quantize(g, 1024.0).astype(jnp.float32) / 1024
    _, pull = jax.vjp(conv, x8.astype(jnp.float32) / 8, w8.astype(jnp.float32) / 16)
    dx, dw = pull(g)
    return dx, dw


fp8_conv.defvjp(forward, backward)


def test_training_step_under_shard_map() -> None:
    """Data-parallel with replicated filters, JAX's default check_vma=True: pvary everywhere, out_sharding in grad."""
    on = mesh(8)

    @functools.partial(jax.shard_map, mesh=on, in_specs=(P(), P("data")), out_specs=P())
    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.nn.relu(fp8_conv(x, w))
        return lax.pmean(jnp.mean(x), "data")

    rng = np.random.default_rng(0)
    ws = [jnp.asarray(rng.normal(size=(3, 3, 4, 4)), jnp.float32) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(16, 6, 6, 4)), jnp.float32)
    step = xla_fp8.jit(jax.value_and_grad(loss))
    report = step.report(ws, x)
    assert len(report.rewritten) == 3, "two convolutions and the input gradient of the second"
    assert {entry.rule for entry in report.refused} == {"filter-gradient"}
    wanted = jax.jit(jax.value_and_grad(loss))(ws, x)
    assert_close(step(ws, x), wanted, rtol=1e-4)
    assert_close(jax.jit(jax.value_and_grad(xla_fp8.rewrite(loss)))(ws, x), wanted, rtol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_gradient_of_a_sharded_function(backend: Any) -> None:
    def loss(x8: jax.Array, w8: jax.Array, scale: jax.Array) -> jax.Array:
        return jnp.mean(jax.nn.relu(wide_layer(x8, w8, scale)))

    args = (*sharded(tensors(batch=16), mesh(8)), jnp.float32(0.01))
    wanted = jax.grad(loss, argnums=2)(*args)
    assert_close(jax.jit(jax.grad(xla_fp8.rewrite(loss, backend=backend), argnums=2))(*args), wanted, rtol=1e-4)


AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]


def two_layers(x8: jax.Array, w8: jax.Array, *scales: Any) -> tuple[jax.Array, jax.Array]:
    return layer(layer(x8, w8, *scales)[0], w8, *scales)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("net", [layer, two_layers])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_under_set_mesh(axis_type: AxisType, net: Any, backend: Any) -> None:
    """relu and clip are jit equations with that mesh there, and explicit axes are in every type."""
    on = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    plain = inputs(batch=16, channels=8)
    outside = [entry.graph for entry in xla_fp8.explain(net, backend=backend)(*plain).rewritten]
    wanted = net(*plain)
    with jax.set_mesh(on):
        args = sharded(plain, on)
        fast = xla_fp8.jit(net, backend=backend, strict=True)
        for given in (args, plain):
            assert [entry.graph for entry in fast.report(*given).rewritten] == outside
        compiled = fast.lower(*args).compile()
        ordinary = jax.jit(net).lower(*args).compile()
        assert collectives(compiled).keys() == collectives(ordinary).keys() == {"all-reduce"}  # amax
        got = compiled(*args)
        assert [a.sharding.spec for a in got] == [a.sharding.spec for a in ordinary(*args)]
        assert_close(got, wanted)
        assert_close(fast(*plain), wanted)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=str)
def test_shard_map_under_set_mesh(axis_type: AxisType) -> None:
    on = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    (outside,) = xla_fp8.explain(layer)(*inputs(batch=16)).rewritten

    def local(*args: jax.Array) -> jax.Array:
        return layer(*args)[0]

    with jax.set_mesh(on):
        fn = jax.shard_map(local, in_specs=(P("data"), *[P()] * 4), out_specs=P("data"))
        fast = xla_fp8.jit(fn, strict=True)
        args = sharded(inputs(batch=16), on)
        (entry,) = fast.report(*args).rewritten
        assert entry.graph == outside.graph.partition("6:[f32]amax")[0], "to the FP8 output: nobody reads the amax here"
        assert collectives(fast.lower(*args).compile()) == {}
        assert_close(fast(*args), jax.jit(fn)(*args))


def test_a_mesh_of_one_device() -> None:
    args = inputs()
    (outside,) = xla_fp8.explain(layer)(*args).rewritten
    with jax.set_mesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])):
        (entry,) = xla_fp8.jit(layer).report(*args).rewritten
        assert entry.graph == outside.graph
        assert_close(xla_fp8.jit(layer)(*args), jax.jit(layer)(*args))


def test_plain_jax_under_explicit_axes_gathers_nothing_either() -> None:
    """A region that no pass changes, and one whose backend fails."""
    on = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    @dataclasses.dataclass(frozen=True)
    class FailingBackend(ReferenceBackend):
        def lower(self, call: GraphCall, config: Config) -> Implementation:
            raise ValueError("no plan")

    with jax.set_mesh(on):
        args = sharded(inputs(batch=16), on)
        for backend in ("xla", FailingBackend()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", xla_fp8.FallbackWarning)
                compiled = xla_fp8.jit(layer, backend=backend).lower(*args).compile()
            assert collectives(compiled).keys() == {"all-reduce"}  # amax
            assert_close(compiled(*args), jax.jit(layer)(*args))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_filters_that_are_sharded_are_right_too(backend: Any) -> None:
    on = mesh(4, 2)
    x8, w8 = tensors(batch=8)
    for spec in (P(None, None, None, "model"), P(None, None, "model")):
        args = (jax.device_put(x8, NamedSharding(on, P("data"))), jax.device_put(w8, NamedSharding(on, spec)))
        assert_close(xla_fp8.jit(wide_layer, backend=backend)(*args), wide_layer(x8, w8))


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["summed", "columns"])
def test_weights_of_a_dot_that_are_split_stay_split(spec: P) -> None:
    """Tensor parallelism: XLA splits its own dots along any dimension, and is left those that it is to split."""

    def dense(x8: jax.Array, w8: jax.Array) -> jax.Array:
        return jax.nn.relu(x8.astype(jnp.float32) @ w8.astype(jnp.float32))

    on = mesh(8)
    x8, w8 = (
        jax.random.normal(jax.random.key(n), s).astype(jnp.float8_e4m3fn) for n, s in enumerate([(64, 32), (32, 48)])
    )
    split = jax.device_put(w8, NamedSharding(on, spec))
    fn = xla_fp8.rewrite(dense, target="h200", backend=OpaqueBackend())
    plain, compiled = (jax.jit(f).lower(x8, split).compile() for f in (dense, fn))
    assert collectives(compiled) == collectives(plain)
    np.testing.assert_allclose(compiled(x8, split), jax.jit(dense)(x8, w8), rtol=1e-5, atol=1e-5)
    with pytest.raises(xla_fp8.NotRewrittenError, match="splits over devices"):
        xla_fp8.jit(dense, target="h200", backend=OpaqueBackend(), strict=True).lower(x8, split)

    per_device = jax.shard_map(fn, mesh=on, in_specs=(P("data"), P()), out_specs=P("data"))
    rows = jnp.tile(x8, (8, 1))
    assert "relu" in str(xla_fp8.explain(per_device, target="h200")(rows, w8).rewritten[0].graph)
    np.testing.assert_allclose(jax.jit(per_device)(rows, w8), jax.jit(dense)(rows, w8), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_one_device_of_many(backend: Any) -> None:
    args = jax.device_put(tensors(), jax.devices()[3])
    got = xla_fp8.jit(wide_layer, backend=backend)(*args)
    assert got.devices() == {jax.devices()[3]}
    assert_close(got, wide_layer(*tensors()))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
@pytest.mark.parametrize("axis_type", [None, *AXIS_TYPES], ids=str)
def test_training_step_with_a_sharded_batch(axis_type: AxisType | None, backend: Any) -> None:
    """As above, but split by the partitioner: transposed convolutions have an out_sharding, also over its own axes."""

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = jax.nn.relu(fp8_conv(x, w))
        return jnp.mean(x)

    rng = np.random.default_rng(0)
    on = jax.make_mesh((8,), ("data",), axis_types=(axis_type or AxisType.Auto,))
    ws = [jnp.asarray(rng.normal(size=(3, 3, 4, 4)), jnp.float32) for _ in range(2)]
    x = jnp.asarray(rng.normal(size=(16, 6, 6, 4)), jnp.float32)
    wanted = jax.jit(jax.value_and_grad(loss))(ws, x)
    split = jax.device_put(ws, NamedSharding(on, P())), jax.device_put(x, NamedSharding(on, P("data")))
    with jax.set_mesh(on) if axis_type else contextlib.nullcontext():
        step = xla_fp8.jit(jax.value_and_grad(loss), backend=backend)
        assert len(step.report(*split).rewritten) == 3, "two convolutions and the input gradient of the second"
        compiled = step.lower(*split).compile()
        assert collectives(compiled).keys() == {"all-reduce"}, "nothing but loss and gradients is exchanged"
        assert_close(compiled(*split), wanted, rtol=1e-4)


def test_a_shard_is_prepared_on_every_device_before_the_program_runs() -> None:
    backend, on = PreparedBackend(), mesh(8)
    args = sharded(tensors(batch=16), on)
    lowered = xla_fp8.jit(wide_layer, backend=backend).lower(*args)
    assert backend.prepared == [], "the whole call never runs"
    lowered.compile()
    assert set(map(str, backend.prepared)) == {str((2, list(range(8))))}


def test_what_runs_under_shard_map_is_prepared_on_the_devices_of_its_mesh() -> None:
    backend = PreparedBackend()
    on = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[4:6])
    fn = jax.shard_map(wide_layer, mesh=on, in_specs=(P("data"), P()), out_specs=P("data"))
    xla_fp8.jit(fn, backend=backend).lower(*sharded(tensors(batch=16), on))
    assert backend.prepared == [(8, [4, 5])]


def test_what_runs_on_one_device_is_prepared_there() -> None:
    backend = PreparedBackend()
    xla_fp8.jit(wide_layer, backend=backend).lower(*jax.device_put(tensors(batch=16), jax.devices()[3]))
    assert backend.prepared == [(16, [3])]
