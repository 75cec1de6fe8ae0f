"""The bound of what a kernel may compute: a model of the tensor core stays within it, wrong kernels do not."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.sampling import sampled
from xla_fp8.backends import reference
from xla_fp8.backends.error_bound import F32, TENSOR_CORE, Accumulator, Interval, intervals
from xla_fp8.backends.example_calls import POINTWISE, TYPES, graph_call, random_call
from xla_fp8.backends.inputs import random_inputs, random_operands
from xla_fp8.target import GraphCall

pytestmark = pytest.mark.unoptimized

Array = np.ndarray[Any, Any]
STEP = 32
"""Products that one instruction of Hopper's FP8 tensor core adds up."""


def tensor_core_sum(products: Array) -> Array:
    """Sums along the last axis as the tensor core does: aligned to the largest addend, cut off 13 bits behind."""
    *rows, count = products.shape
    padded = np.concatenate([products, np.zeros((*rows, -count % STEP))], axis=-1)
    total = np.zeros(rows)
    for start in range(0, padded.shape[-1], STEP):
        addends = np.concatenate([total[..., None], padded[..., start : start + STEP]], axis=-1)
        largest = np.abs(addends).max(axis=-1, keepdims=True)
        unit = np.exp2(np.floor(np.log2(np.where(largest == 0, 1, largest))) - 13)
        total = (np.trunc(addends / unit) * unit).sum(axis=-1)
    return total


@pytest.mark.parametrize("shape", [(3, 9, 10, 144), (1, 1, 1, 16)])
def test_the_amax_of_nan_is_nan(shape: tuple[int, ...]) -> None:
    batch, *image, channels = shape
    graph = "1:[f32]conv();2:[f32]amax(1);"
    call = graph_call(graph, batch=batch, image=tuple(image), channels=channels, features=channels, filter=(1, 1))
    x, w = random_inputs(call.operand_shapes, seed=0)
    _, amax = intervals(call, [x, w], TENSOR_CORE)
    assert np.isfinite(amax.value)
    x[0, 0, 0, 0] = np.nan
    _, amax = intervals(call, [x, w], TENSOR_CORE)
    assert np.isnan(amax.value)
    assert amax.outside(np.asarray(np.inf, np.float32))
    assert not amax.outside(np.asarray(np.nan, np.float32))


def pointwise_conv(channels: int, output: str) -> tuple[GraphCall, list[Array], Array]:
    """A 1x1 convolution, operands, and its products [pixels, features, channels]."""
    graph = f"1:[f32]conv();2:[{output}]scale(1);"
    call = graph_call(graph, batch=1, image=(16, 16), channels=channels, features=32, filter=(1, 1))
    x, w, _ = random_inputs(call.operand_shapes, seed=channels)
    products = x.astype(np.float64).reshape(256, 1, channels) * w.astype(np.float64).reshape(1, 32, channels)
    return call, [x, w, np.asarray(np.float32(1 / 64))], products


def outside(call: GraphCall, operands: list[Array], sums: Array, accumulator: Accumulator = TENSOR_CORE) -> int:
    (interval,) = intervals(call, operands, accumulator)
    output = np.clip(sums / 64, -448, 448) if interval.type == "f8e4m3fn" else sums / 64
    stored = output.astype(np.float32).reshape(interval.value.shape).astype(interval.stored.dtype)
    return int(np.count_nonzero(interval.outside(stored)))


@pytest.mark.parametrize("output", ["f8e4m3fn", "bf16", "f32"])
@pytest.mark.parametrize("channels", [16, 256, 2304])
def test_a_model_of_the_tensor_core_is_within_the_bound(channels: int, output: str) -> None:
    call, operands, products = pointwise_conv(channels, output)
    sums = tensor_core_sum(products)
    assert outside(call, operands, sums) == 0
    assert outside(call, operands, products.sum(axis=-1)) == 0
    # It is no f32 sum, and the bound of f32 says so.
    if output == "f32":
        assert outside(call, operands, sums, F32) > 1000


@pytest.mark.parametrize("negative", [0, 1, 0.1])
@pytest.mark.parametrize("promoted", [math.inf, 128])
def test_losses_of_one_sign_add_up(negative: float, promoted: float) -> None:
    """What the tensor core cuts off lies towards zero: of numbers of one sign, all on one side of the sum."""
    channels = 16384
    call = graph_call("1:[f32]conv();", batch=1, image=(4, 4), channels=channels, features=8, filter=(1, 1))
    operands = [np.abs(operand) for operand in random_inputs(call.operand_shapes, seed=4)]
    flipped = np.random.default_rng(4).random(operands[0].shape) < negative
    operands[0] = np.where(flipped, -operands[0], operands[0])
    x, w = (operand.astype(np.float64).reshape(-1, channels) for operand in operands)
    products = x[:, None] * w
    parts = np.split(products, 1 if math.isinf(promoted) else channels // 128, axis=-1)
    sums = np.sum([tensor_core_sum(part) for part in parts], axis=0)
    exact = products.sum(axis=-1)
    assert (np.abs(sums) < np.abs(exact)).all()

    def outside(sums: Array, truncates: bool) -> int:
        accumulator = dataclasses.replace(TENSOR_CORE, promoted=promoted, truncates=truncates)
        (interval,) = intervals(call, operands, accumulator)
        return int(np.count_nonzero(interval.outside(sums.astype(np.float32).reshape(interval.value.shape))))

    assert outside(sums, truncates=True) == 0
    if math.isinf(promoted) and negative in (0, 1):
        assert outside(sums, truncates=False) == sums.size, "as if the losses had random signs"
    if not math.isinf(promoted):
        assert outside(exact * 0.95, truncates=True) == sums.size


@pytest.mark.parametrize("output", ["f8e4m3fn", "bf16", "f32"])
def test_a_wrong_sum_is_beyond_it(output: str) -> None:
    call, operands, products = pointwise_conv(256, output)
    exact = products.sum(axis=-1)
    assert outside(call, operands, exact - products[..., 17]) > 500, "one channel was left out"
    assert outside(call, operands, exact * 1.03) > 50, "a scale was off by 3%"
    assert outside(call, operands, np.roll(exact, 1, axis=0)) > 7000, "pixels were shifted"


def test_promotion_makes_the_bound_narrower() -> None:
    call, operands, _ = pointwise_conv(2304, "f32")
    (whole,) = intervals(call, operands, TENSOR_CORE)
    (promoted,) = intervals(call, operands, dataclasses.replace(TENSOR_CORE, promoted=128))
    # By the square root for sums about zero, whole for sums of one sign.
    narrower = whole.error / promoted.error
    assert narrower.min() > 0.99 * (2304 / 128) ** 0.5
    assert narrower.max() < 2304 / 128


def moderate_inputs(call: GraphCall) -> list[Array]:
    """Random operands with a small filter, so that not only the tails of activations are met."""
    operands = random_operands(call, seed=2)
    operands[1] = (operands[1].astype(np.float32) / 16).astype(operands[1].dtype)
    return operands


@functools.cache
def interval_of_the_convolution() -> Interval:
    call = graph_call("1:[f32]conv();", batch=1, image=(8, 8))
    (interval,) = intervals(call, moderate_inputs(call), TENSOR_CORE)
    return interval


@pytest.mark.parametrize("op", POINTWISE)
def test_the_error_of_an_op_covers_what_it_does_to_an_error(op: str) -> None:
    """A convolution that is wrong by nearly its bound, put through the graph, is within the bound of the result."""
    call = graph_call(f"1:[f32]conv();2:[f32]{op}(1);3:[f32]amax(2);", batch=1, image=(8, 8))
    operands = moderate_inputs(call)
    found = intervals(call, operands, TENSOR_CORE)
    first = interval_of_the_convolution()
    for sign in (1, -1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                reference, "convolution", lambda *_, s=sign: jnp.asarray(first.value + 0.99 * s * first.error)
            )
            with jax.disable_jit():
                outputs = reference.run(call.graph, call.window, call.dim_labels, 1, [jnp.asarray(o) for o in operands])
        for interval, output in zip(found, outputs, strict=True):
            assert not interval.outside(np.asarray(output)).any()


@pytest.mark.parametrize("seed", sampled(range(12), 4))
def test_the_reference_is_within_its_own_bound(seed: int) -> None:
    call = random_call(seed, largest=16)
    operands = random_inputs(call.operand_shapes, seed=seed)
    outputs = jax.jit(reference.implementation_of(call))(*operands)
    for interval, output in zip(intervals(call, operands, TENSOR_CORE), outputs, strict=True):
        assert not interval.outside(np.asarray(output)).any()
        finite = np.isfinite(interval.value)
        assert (interval.error[finite] >= 0).all()


@pytest.mark.parametrize("type_", TYPES)
def test_nan_and_infinity_must_come_out(type_: str) -> None:
    value = np.asarray([np.nan, np.inf, -np.inf, 1.0], np.float32)
    interval = Interval(value, np.asarray([np.inf, np.nan, 0, 0.25], np.float32), type_)
    stored = interval.stored
    assert interval.outside(stored).tolist() == [False] * 4
    zeros = np.zeros_like(stored)
    assert interval.outside(zeros).tolist() == [True] * 4
    assert interval.outside(np.full_like(stored, np.nan)).tolist() == [False, True, True, True]


def test_near_zero_an_error_of_the_sum_is_many_steps() -> None:
    """The reason for the bound: one e4m3 step near zero is less than a sum of thousands of products can promise."""
    interval = Interval(np.asarray([0.002, 98.0], np.float32), np.asarray([0.05, 0.05], np.float32), "f8e4m3fn")
    e4m3 = ml_dtypes.float8_e4m3fn
    assert interval.outside(np.asarray([-0.046875, 96.0], e4m3)).tolist() == [False, False]
    assert interval.outside(np.asarray([0.0625, 104.0], e4m3)).tolist() == [True, True]
