"""The gradients that the benchmark times are gradients: as calls of the kernel they compute what JAX's own rules do."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8.backends import reference
from xla_fp8.backends.mosaic.backend import MosaicBackend
from xla_fp8.target import GraphCall

pytestmark = pytest.mark.unoptimized

if TYPE_CHECKING:
    from benchmarks import gradients
else:
    with pytest.MonkeyPatch.context() as patch:  # the package of the benchmarks is not installed
        patch.syspath_prepend(str(Path(__file__).resolve().parents[3]))
        gradients = importlib.import_module("benchmarks.gradients")

SHAPES: list[gradients.Shape] = [
    # N, H = W, C, K, R = S, stride
    (16, 7, 32, 48, 3, 1),
    (16, 8, 32, 48, 3, 2),
    (16, 9, 32, 16, 3, 2),
    (32, 6, 16, 32, 1, 1),
    (16, 8, 16, 16, 1, 2),
    (16, 12, 16, 16, 7, 2),
]


def run(call: GraphCall, *operands: Any) -> np.ndarray[Any, Any]:
    assert MosaicBackend("highest").supports(call, gradients.H200).ok
    arrays = [jnp.asarray(operand) for operand in operands]
    (output,) = reference.run(call.graph, call.window, call.dim_labels, 1, [*arrays, jnp.float32(1)], ["f32"])
    return np.asarray(output)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_filter_gradient_is_a_convolution_with_batch_and_channels_swapped(shape: gradients.Shape) -> None:
    x, _, dy = gradients.random_tensors(shape)
    expected = gradients.filter_gradient(shape)(x.astype(np.float32), dy.astype(np.float32), jnp.float32(1))
    np.testing.assert_allclose(run(gradients.swapped_call(shape, False), x, dy), expected, rtol=1e-5, atol=1e-3)
    moved = (array.transpose(3, 1, 2, 0) for array in (x, dy))
    np.testing.assert_allclose(run(gradients.swapped_call(shape, True), *moved), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_input_gradient_is_a_convolution_over_the_dilated_cotangent(shape: gradients.Shape) -> None:
    _, w, dy = gradients.random_tensors(shape)
    expected = gradients.input_gradient(shape)(dy.astype(np.float32), w.astype(np.float32), jnp.float32(1))
    mirrored = w[:, ::-1, ::-1].transpose(3, 1, 2, 0)
    np.testing.assert_allclose(run(gradients.input_call(shape), dy, mirrored), expected, rtol=1e-5, atol=1e-3)
