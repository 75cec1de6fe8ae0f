"""The Mosaic kernel on a Hopper GPU: one feature each, random calls, every config, and through jit and grad.

`python -m tests.hopper.mosaic_run` runs the same cases, and a thousand random ones, in many processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.hopper.mosaic_cases import FULL, H200, NAMED, MosaicCase, random_case
from tests.hopper.mosaic_check import prepare, verify
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.mosaic.backend import MosaicBackend

pytestmark = pytest.mark.hopper

FIRST, LAST = map(int, os.environ.get("XLA_FP8_SEEDS", "0:50").split(":"))
E4M3 = jnp.float8_e4m3fn

Note = Callable[[str, object], None]


def check(case: MosaicCase, note: Note, repeats: int = 100) -> dict[str, Any]:
    result = verify(prepare(case), repeats)
    note("graph", str(case.call.graph))
    for key in ("share_equal", "of_bound", "poisoned", "guarded"):
        note(key, result[key])
    assert result["outcome"] == "passed", result["message"]
    return result


@pytest.mark.parametrize("name", NAMED)
def test_one_feature(name: str, record_property: Note) -> None:
    check(NAMED[name], record_property)


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_random_calls(seed: int, record_property: Note) -> None:
    check(random_case(seed), record_property, repeats=10)


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("window", ["{size=3x3 pad=1_1x1_1}", "{size=3x3 pad=1_2x1_2 lhs_dilate=2x2}"])
def test_every_config_gives_the_same(window: str, precision: Any, record_property: Note) -> None:
    call = graph_call(FULL, batch=3, image=(33, 40), channels=256, features=272, window=window)
    for config in MosaicBackend(precision).configs(call, H200):
        check(MosaicCase(str(config), call, precision, config), record_property, repeats=2)


def test_memory_for_results_was_poisoned_and_guarded(record_property: Note) -> None:
    """That `verify` looks where it means to: of three results at least one is where NaNs were, between guards."""
    result = check(NAMED["plain-full"], record_property)
    assert result["results"] == 3
    assert result["poisoned"] >= 1
    assert result["guarded"] >= 1


@pytest.mark.parametrize("precision", ["default", "highest"])
def test_highest_equals_the_reference(precision: Any, record_property: Note) -> None:
    """Of 4,608 products in e4m3, f32 keeps all that the output shows; the tensor core's own sum does not."""
    graph = "1:[f32]conv();2:[f8e4m3fn]scale(1);"
    call = graph_call(graph, batch=8, image=(14, 14), channels=512, features=512)
    result = check(MosaicCase("deep", call, precision, operands="random"), record_property)
    assert result["share_equal"][0] > {"default": 0.9, "highest": 0.98}[precision]


# Through jit


def conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    y: jax.Array = jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)
    return y


def on_both(function: Callable[..., Any], *arguments: Any) -> None:
    """What runs on the GPU, with the kernel in it, is within 2% of plain JAX on the CPU in the L2 norm."""
    fast = xla_fp8.jit(function)
    text = fast.lower(*arguments).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.convolution" not in text
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(function)(*map(np.asarray, arguments))
    for wanted, output in zip(jax.tree.leaves(expected), jax.tree.leaves(fast(*arguments)), strict=True):
        a, b = (np.asarray(array).astype(np.float64) for array in (wanted, output))
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)


def test_jit_uses_it_by_itself() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(4, 28, 28, 128)), E4M3)
    w = jnp.asarray(rng.normal(size=(3, 3, 128, 128)), E4M3)

    def layer(x: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.nn.relu(conv(x.astype(jnp.float32), w.astype(jnp.float32), 1) * scale)
        return jnp.clip(y, -448, 448).astype(E4M3), jnp.max(jnp.abs(y))

    on_both(layer, x, w, jnp.float32(0.5))


@pytest.mark.parametrize(("size", "stride", "image"), [(3, 1, 28), (3, 2, 28), (3, 2, 27), (1, 2, 28), (4, 4, 32)])
def test_input_gradients_of_any_stride(size: int, stride: int, image: int) -> None:
    rng = np.random.default_rng(0)
    out = -(-image // stride)
    dy = jnp.asarray(rng.normal(size=(4, out, out, 96)), jnp.float8_e5m2)
    w = jnp.asarray(rng.normal(size=(size, size, 128, 96)), E4M3)

    def gradient(dy: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        x = jnp.zeros((4, image, image, 128))
        _, pull = jax.vjp(lambda x: conv(x, w.astype(jnp.float32), stride), x)
        dx: jax.Array = pull(dy.astype(jnp.float32) * scale)[0]
        return dx.astype(jnp.bfloat16)

    on_both(gradient, dy, w, jnp.float32(0.5))
