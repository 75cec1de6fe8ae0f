"""NaN, infinity, overflow and zero scales through cuDNN on a Hopper GPU: what docs/numbers.md says of each op."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.hopper.conftest import Arrays, Check, cudnn_function
from xla_fp8.backends.example_calls import graph_call

pytestmark = pytest.mark.hopper

NAN, INF = float("nan"), float("inf")
EYE = np.eye(16, dtype=np.float32).reshape(16, 1, 1, 16)
SMALL = {"batch": 1, "image": (4, 4), "channels": 16, "features": 16, "filter": (1, 1)}

OPS = {
    # op: what it makes of NaN, infinity and -infinity
    "add": (NAN, INF, -INF),
    "scale": (NAN, INF, -INF),
    "relu": (NAN, INF, 0.0),
    "min": (0.0, 0.0, -INF),
    "max": (0.0, INF, 0.0),
    "elu": (NAN, INF, -1.0),
    "silu": (NAN, INF, NAN),
    "gelu_erf": (NAN, INF, NAN),
    "gelu_tanh": (NAN, INF, NAN),
    "sigmoid": (NAN, 1.0, 0.0),
    "tanh": (NAN, 1.0, -1.0),
}
"""cuDNN: min (with 0) and max (with 0) drop a NaN, where the reference keeps it; the rest is alike."""


def fp8(*arrays: np.ndarray) -> Arrays:
    return [array.astype(ml_dtypes.float8_e4m3fn) for array in arrays]


def run(graph: str, *operands: np.ndarray) -> Arrays:
    call = graph_call(graph, **SMALL)  # type: ignore[arg-type]
    return [np.asarray(output) for output in jax.jit(cudnn_function(call))(*map(jnp.asarray, operands))]


@pytest.mark.parametrize("output", ["f8e4m3fn", "f8e5m2", "bf16", "f16", "f32"])
@pytest.mark.parametrize("scale", [1.0, 0.0, INF, NAN, 1e30, 1e-30], ids=str)
def test_scales_at_the_edge(output: str, scale: float, check: Check) -> None:
    """Saturation, overflow to infinity, a zero scale, and NaN come out as the reference says."""
    call = graph_call(f"1:[f32]conv();2:[{output}]scale(1);", **SMALL)  # type: ignore[arg-type]
    x = np.linspace(-448, 448, 256).reshape(1, 4, 4, 16)
    check(call, operands=[*fp8(x, EYE), np.asarray(np.float32(scale))])


@pytest.mark.parametrize("which", range(3), ids=["nan", "inf", "-inf"])
@pytest.mark.parametrize("op", OPS)
def test_nan_and_infinity_inside(op: str, which: int, record_property: Callable[[str, object], None]) -> None:
    """An f32 residual brings a NaN or an infinity into the graph, in front of the op."""
    residual = np.zeros((1, 4, 4, 16), np.float32)
    residual[0, 1, 2, 3] = (NAN, INF, -INF)[which]
    sides = {"min": [np.zeros_like(residual)], "max": [np.zeros_like(residual)], "add": [np.zeros_like(residual)]}
    more = sides.get(op, [np.asarray(np.float32(1))] if op == "scale" else [])
    graph = f"1:[f32]conv();2:[f32]add(1);3:[f32]{op}(2);4:[f32]amax(3);"
    output, amax = run(graph, *fp8(np.ones((1, 4, 4, 16)), EYE), residual, *more)
    wanted = OPS[op][which]
    found = float(output[0, 1, 2, 3])
    record_property("found", [found, float(amax)])
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    others = np.delete(output.reshape(-1), np.ravel_multi_index((0, 1, 2, 3), output.shape))
    assert np.isfinite(others).all()
    assert (others == others[0]).all()
    # amax drops a NaN too: it is the largest of the numbers.
    largest = abs(float(others[0])) if math.isnan(found) else max(abs(float(others[0])), abs(found))
    np.testing.assert_allclose(float(amax), largest, atol=1e-4)


@pytest.mark.parametrize(("type_", "special"), [("f8e4m3fn", NAN), ("f8e5m2", NAN), ("f8e5m2", INF)])
def test_nan_and_infinity_in_the_input(type_: str, special: float) -> None:
    """One pixel has it in one channel: with a filter of ones it reaches every feature of that pixel, and no other."""
    dtype = {"f8e4m3fn": ml_dtypes.float8_e4m3fn, "f8e5m2": ml_dtypes.float8_e5m2}[type_]
    call = graph_call("1:[f32]conv();2:[f32]scale(1);3:[f32]amax(2);", types=(type_, type_), **SMALL)  # type: ignore[arg-type]
    x = np.ones((1, 4, 4, 16)).astype(dtype)
    x[0, 2, 2, 2] = special
    w = np.ones((16, 1, 1, 16)).astype(dtype)
    output, amax = (np.asarray(o) for o in jax.jit(cudnn_function(call))(x, w, np.float32(2)))
    wanted = np.full((1, 4, 4, 16), 32.0, np.float32)
    wanted[0, 2, 2] = special
    np.testing.assert_array_equal(output, wanted)
    assert float(amax) == (32.0 if math.isnan(special) else INF)


@pytest.mark.parametrize("output", ["f8e4m3fn", "f8e5m2"])
def test_what_fp8_stores(output: str) -> None:
    """Infinities saturate, NaN stays NaN."""
    residual = np.zeros((1, 4, 4, 16), np.float32)
    residual[0, 0, 0, :5] = NAN, INF, -INF, 1e9, -1e9
    (stored,) = run(f"1:[f32]conv();2:[{output}]add(1);", *fp8(np.ones((1, 4, 4, 16)), EYE), residual)
    largest = float(ml_dtypes.finfo(stored.dtype).max)
    np.testing.assert_array_equal(
        stored[0, 0, 0, :6].astype(np.float32), [NAN, largest, -largest, largest, -largest, 1.0]
    )
