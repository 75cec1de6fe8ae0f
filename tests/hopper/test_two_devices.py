"""Several GPUs in one process: a batch-sharded training step, and programs that each run on a device of their own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import xla_fp8
from tests.hopper.conftest import Check, cudnn_function, expected
from xla_fp8.backends.example_calls import graph_call

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
pytestmark = [
    pytest.mark.hopper,
    pytest.mark.skipif(len(jax.devices()) < 2, reason=f"needs two GPUs, and JAX sees {len(jax.devices())} device"),
]
BATCH, CHANNELS = 8, 64
GRADIENT_SCALE = 2.0**16


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
    )


def quantize(y: jax.Array, dtype: jnp.dtype = E4M3) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(y, -largest, largest).astype(dtype)


@jax.custom_vjp
def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A convolution whose input, filter and (in the backward pass) cotangent are FP8."""
    return jax.nn.relu(conv(quantize(x), quantize(w * 16)) / 16)


def layer_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    y = layer(x, w)
    return y, (x, w, y)


def layer_backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w, y = saved
    g = quantize(jnp.where(y > 0, cotangent, 0) * GRADIENT_SCALE, E5M2)
    flipped = jnp.flip(quantize(w * 16), (1, 2)).transpose(3, 1, 2, 0)
    dx = conv(g, flipped) / (16 * GRADIENT_SCALE)
    dw = jax.vjp(lambda w: conv(x, w), w)[1](g.astype(jnp.float32) / GRADIENT_SCALE)[0]
    return dx, dw


layer.defvjp(layer_forward, layer_backward)


def step(
    filters: list[jax.Array], x: jax.Array, wanted: jax.Array
) -> tuple[list[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
    """A training step: the new filters; loss, amax of the last layer, and its output in FP8 (an activation)."""

    def loss(filters: list[jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        y = x
        for w in filters:
            y = layer(y, w)
        return jnp.mean((y - wanted) ** 2), (jnp.max(jnp.abs(y)), quantize(y))

    (value, (amax, y8)), gradients = jax.value_and_grad(loss, has_aux=True)(filters)
    return [w - 0.1 * g for w, g in zip(filters, gradients, strict=True)], (value, amax, y8)


def arguments(batch: int = BATCH) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    filters = [jnp.asarray(rng.normal(size=(CHANNELS, 3, 3, CHANNELS)) / 24, jnp.float32) for _ in range(3)]
    x, wanted = (jnp.asarray(rng.normal(size=(batch, 14, 14, CHANNELS)), jnp.float32) for _ in range(2))
    return filters, x, wanted


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what these tests are about, and XLA alone tunes a convolution for 20 s."""
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")


@pytest.mark.parametrize("backend", ["mosaic", "auto", "cudnn"])
def test_a_sharded_training_step_gives_the_numbers_of_one_device(
    backend: str, check: Check, record_property: Callable[[str, object], None]
) -> None:
    filters, x, wanted = arguments()
    function = xla_fp8.jit(step, backend=backend)
    # Three layers forward, and the input gradients of two.
    assert len(function.report(filters, x, wanted).rewritten) == 5
    single = jax.tree.leaves(function(filters, x, wanted))

    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    sharded = (jax.device_put(filters, whole), jax.device_put(x, split), jax.device_put(wanted, split))
    compiled = function.lower(*sharded).compile()
    text = compiled.as_text()
    collectives = {
        name: text.count(f" {name}(") + text.count(f" {name}-start(")
        for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    }
    record_property("collectives", collectives)
    outputs = compiled(*sharded)
    activation = outputs[1][2]
    assert activation.sharding.spec[0] == "batch"
    # Gradients, loss and amax are reduced; nothing else goes from one device to the other.
    assert collectives.pop("all-reduce") > 0
    assert not any(collectives.values()), collectives
    check.same(list(map(np.asarray, single)), list(map(np.asarray, jax.tree.leaves(outputs))), backend)
    for before, after in zip(filters, outputs[0], strict=True):
        assert np.any(np.asarray(before) != np.asarray(after)), "the step moved nothing"


def test_a_step_is_lowered_while_others_wait_in_collectives(check: Check) -> None:
    """Each batch is a program with plans of its own; nothing is awaited between them, and no plan was used before."""
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    split, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    function = xla_fp8.jit(step, backend="cudnn")
    batches = {batch: arguments(batch) for batch in (10, 12, 14)}
    results = {}
    for batch, (filters, x, wanted) in batches.items():
        sharded = (jax.device_put(filters, whole), jax.device_put(x, split), jax.device_put(wanted, split))
        for _ in range(5):
            results[batch] = function(*sharded)
    for batch, given in batches.items():
        single = list(map(np.asarray, jax.tree.leaves(function(*given))))
        check.same(single, list(map(np.asarray, jax.tree.leaves(results[batch]))), f"batch {batch}")


def test_each_device_runs_a_program_of_its_own(check: Check) -> None:
    """From a thread each, at once; plans and handles are per device, and a plan may first be needed in a CUDA graph."""
    call = graph_call("1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);", batch=4, image=(28, 28), channels=64)
    operands, wanted = expected(call)
    function = jax.jit(lambda *operands: [cudnn_function(call)(*operands) for _ in range(8)][-1])

    def run(device: jax.Device) -> list[np.ndarray]:
        here = jax.device_put(operands, device)
        for _ in range(20):
            outputs = function(*here)
        assert all(output.devices() == {device} for output in outputs)
        return [np.asarray(output) for output in outputs]

    with ThreadPoolExecutor(len(jax.devices())) as pool:
        results = list(pool.map(run, jax.devices()))
    for outputs in results:
        check.within(wanted, outputs, str(call.graph))
        for output, first in zip(outputs, results[0], strict=True):
            np.testing.assert_array_equal(output.astype(np.float32), first.astype(np.float32))


def test_one_function_on_one_device_after_the_other(check: Check) -> None:
    filters, x, _ = arguments()
    function = xla_fp8.jit(lambda x, w: quantize(conv(quantize(x), quantize(w * 16)) / 16), backend="cudnn")
    outputs = [np.asarray(function(*jax.device_put((x, filters[0]), device))) for device in jax.devices()]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output.astype(np.float32), outputs[0].astype(np.float32))
