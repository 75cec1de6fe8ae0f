"""The Mosaic kernel on a Hopper GPU: random calls against the reference, the same bits each time, jit end to end."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.hopper.conftest import f32_reference
from xla_fp8.backends.compare import Tolerance, compare
from xla_fp8.backends.example_calls import graph_call, random_call
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.backends.mosaic.backend import MosaicBackend
from xla_fp8.hlo import Shape
from xla_fp8.target import GraphCall, Target

pytestmark = pytest.mark.hopper

H200 = Target.parse("h200")
FIRST, LAST = map(int, os.environ.get("XLA_FP8_SEEDS", "0:200").split(":"))
NEAR = {"default": Tolerance(2.0**-7, 0.1, 0.02), "highest": Tolerance(2.0**-8, 0.02, 0.005)}
"""The tensor core keeps about 14 bits of a sum: FP8 outputs are a step off here and there, others by 2^-7 of the
largest (bf16 rounds by as much)."""

FULL = (
    "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]silu(3);5:[f32]add_scaled(4);6:[f32]amax(5);7:[bf16]copy(5);"
    "8:[f8e4m3fn]scale(5);"
)


def whole_rows(call: GraphCall) -> GraphCall:
    """`call` with its channels and features rounded up to multiples of 16, which the kernel wants."""
    labels, (input, filter, *sides) = call.dim_labels, call.operand_shapes

    def rounded(shape: Shape, *dimensions: int) -> Shape:
        sizes = [-(-n // 16) * 16 if d in dimensions else n for d, n in enumerate(shape.dimensions)]
        return shape.with_dimensions(sizes)

    def like_output(shape: Shape) -> Shape:
        dimension = labels.output_feature_dimension if shape.rank > 1 else 0
        return rounded(shape, dimension) if shape.rank else shape

    return dataclasses.replace(
        call,
        operand_shapes=(
            rounded(input, labels.input_feature_dimension),
            rounded(filter, labels.kernel_input_feature_dimension, labels.kernel_output_feature_dimension),
            *map(like_output, sides),
        ),
        output_shapes=tuple(map(like_output, call.output_shapes)),
    )


CALLS = {seed: whole_rows(random_call(seed, groups=(1,))) for seed in range(FIRST, LAST)}
CALLS = {seed: call for seed, call in CALLS.items() if MosaicBackend().supports(call, H200).ok}


def run(call: GraphCall, backend: MosaicBackend, index: int = 0) -> tuple[Any, list[np.ndarray[Any, Any]]]:
    configs = backend.configs(call, H200)
    function = jax.jit(backend.lower(call, configs[index % len(configs)]))
    return function, random_inputs(call.operand_shapes, seed=1)


def compare_all(call: GraphCall, outputs: Any, operands: Any, precision: str) -> None:
    expected = f32_reference(call, operands)
    for index, (wanted, output) in enumerate(zip(expected, map(np.asarray, outputs), strict=True)):
        difference = compare(wanted, output)
        assert NEAR[precision].accepts(difference, wanted.dtype), f"result {index} of {call.graph}: {difference}"


@pytest.mark.parametrize("seed", CALLS)
def test_random_calls(seed: int, record_property: Callable[[str, object], None]) -> None:
    """A random one of its configs, so that all families are seen."""
    call = CALLS[seed]
    precision: Any = ("default", "highest")[seed % 2]
    record_property("graph", str(call.graph))
    function, operands = run(call, MosaicBackend(precision), seed)
    compare_all(call, function(*map(jnp.asarray, operands)), operands, precision)


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_every_config_gives_the_same(precision: Any) -> None:
    call = graph_call(FULL, batch=3, image=(33, 40), channels=256, features=272)
    backend = MosaicBackend(precision)
    for index in range(len(backend.configs(call, H200))):
        function, operands = run(call, backend, index)
        compare_all(call, function(*map(jnp.asarray, operands)), operands, precision)


def test_the_same_bits_a_hundred_times() -> None:
    call = graph_call(FULL, batch=8, image=(56, 56), channels=128, features=256)
    function, operands = run(call, MosaicBackend())
    arrays = list(map(jnp.asarray, operands))
    first = [np.asarray(output).tobytes() for output in function(*arrays)]
    for _ in range(100):
        assert [np.asarray(output).tobytes() for output in function(*arrays)] == first


def test_every_element_is_written_and_no_other() -> None:
    """The output is a part of a buffer that holds NaNs: what was there is gone, what lies around stays."""
    call = graph_call("1:[f32]conv();2:[f32]scale(1);", batch=3, image=(13, 11), channels=48, features=80)
    function, operands = run(call, MosaicBackend())

    @jax.jit
    def between(*operands: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        before, after = jnp.full(1 << 16, jnp.nan), jnp.full(1 << 16, jnp.nan)
        before, after, operands = jax.lax.optimization_barrier((before, after, operands))  # type: ignore[no-untyped-call]
        return before, function(*operands)[0], after

    before, output, after = between(*map(jnp.asarray, operands))
    assert np.isnan(np.asarray(before)).all()
    assert np.isnan(np.asarray(after)).all()
    compare_all(call, [output], operands, "default")


def test_nan_and_infinity_stay_what_they_are() -> None:
    call = graph_call(
        "1:[f32]conv();2:[f32]scale(1);3:[f32]relu(2);", image=(9, 9), types=("f8e5m2", "f8e5m2"), filter=(1, 1)
    )
    function, operands = run(call, MosaicBackend())
    operands[0].reshape(-1)[[0, 100]] = np.nan, np.inf
    (output,) = function(*map(jnp.asarray, operands))
    (expected,) = f32_reference(call, operands)
    np.testing.assert_array_equal(np.isnan(np.asarray(output)), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(np.asarray(output)), np.isinf(expected))


def test_jit_uses_it_by_itself() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 28, 28, 128)), jnp.float8_e4m3fn)
    w = jnp.asarray(rng.normal(size=(3, 3, 128, 128)), jnp.float8_e4m3fn)

    def layer(x: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.conv_general_dilated(
            x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = jax.nn.relu(y * scale)
        return jnp.clip(y, -448, 448).astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(y))

    fast = xla_fp8.jit(layer)
    assert "mosaic_gpu" in fast.lower(x, w, jnp.float32(0.5)).as_text()
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(layer)(*map(np.asarray, (x, w, np.float32(0.5))))
    for wanted, output in zip(expected, fast(x, w, jnp.float32(0.5)), strict=True):
        wanted = np.asarray(wanted)
        assert NEAR["default"].accepts(compare(wanted, np.asarray(output)), wanted.dtype)
