"""FP8 transposes that passes put into a region are a kernel's where graphs are kernels' too."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import xla_fp8
import xla_fp8.tracing.lowering  # by which regions run
from tests.fused_casts import BF16, F32, Array, normal
from xla_fp8.backends.transpose import exchange, kernel
from xla_fp8.backends.transpose.primitive import PRIMITIVE
from xla_fp8.target import Target
from xla_fp8.tracing import rewriting
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_jaxpr, is_region
from xla_fp8.tracing.rewriting import Rewritten, rewritten

CHANNELS, FEATURES = 352, 336
OPTIONS = Options(target=Target.parse("h200"), backend="mosaic")


def step(x: Array, w: Array) -> Any:
    """A convolution and its gradients; of one FP8 type, as before JAX 0.11 the kernel multiplies no two."""
    scaling = xla_fp8.DelayedScaling.create(gradient_dtype=jnp.float8_e4m3fn, amax=8.0)
    numbers = ("NHWC", "OHWI", "NHWC")

    def loss(x: Array, w: Array) -> Array:
        y = xla_fp8.fp8_conv(x, w, (1, 1), "SAME", dimension_numbers=numbers, scaling=scaling)
        return jnp.sum(jnp.square(y.astype(F32)))

    return jax.value_and_grad(loss, (0, 1))(x, w)


def arguments(window: tuple[int, int] = (3, 3)) -> tuple[Array, Array]:
    return normal((2, 8, 8, CHANNELS), BF16), normal((FEATURES, *window, CHANNELS), BF16) / 50


def regions(options: Options, platform: str, *operands: Array) -> list[Rewritten]:
    jaxpr = cut_jaxpr(jax.make_jaxpr(step)(*operands), options)
    found = [equation for equation in jaxpr.eqns if is_region(equation)]
    return [rewritten(region.params["jaxpr"], region.params["options"], platform) for region in found]


@pytest.mark.parametrize("window", [(3, 3), (1, 1)])
def test_the_filter_of_an_input_gradient(window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward convolution's, whose window is reversed on the way."""
    monkeypatch.setattr(exchange, "SMALLEST_SIZE", CHANNELS * FEATURES)
    rewriting._passed.cache_clear()
    (call,) = [call for region in regions(OPTIONS, "cuda", *arguments(window)) for call in region.transposes]
    assert call.operand.dimensions == (FEATURES, *window, CHANNELS)
    assert call.result.dimensions == (CHANNELS, *window, FEATURES)
    assert set(call.mirrored) <= {1, 2}
    assert bool(call.mirrored) or window == (1, 1)


@pytest.mark.parametrize(
    ("options", "platform"),
    [
        (OPTIONS, "cpu"),
        (Options(target=OPTIONS.target, backend="reference"), "cuda"),
        (Options(target=OPTIONS.target, backend="mosaic", is_partitioned=True), "cuda"),
    ],
    ids=["another platform", "graphs in plain JAX", "XLA's partitioner comes after"],
)
def test_elsewhere_they_are_left_to_xla(options: Options, platform: str) -> None:
    assert any(region.transposes for region in regions(OPTIONS, "cuda", *arguments()))
    assert not any(region.transposes for region in regions(options, platform, *arguments()))


def test_small_ones_are_left_to_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SMALLEST_SIZE", 2**30)
    operands = normal((2, 8, 8, CHANNELS), BF16), normal((FEATURES + 16, 3, 3, CHANNELS), BF16)
    found = regions(OPTIONS, "cuda", *operands)
    assert found
    assert not any(region.transposes for region in found)


def test_lowers_to_one_kernel_with_the_graph() -> None:
    jaxpr = cut_jaxpr(jax.make_jaxpr(step)(*arguments()), OPTIONS)
    function = jax.jit(core.jaxpr_as_fun(jaxpr))
    text = function.trace(*arguments()).lower(lowering_platforms=("cuda",)).as_text(debug_info=True)
    assert text.count(f'name = "{kernel.NAME}"') == 1
    assert PRIMITIVE in text
    assert "stablehlo.reverse" not in text


def test_what_it_computes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the reference's graphs, whose transposes are given calls here as kernels' are: on a CPU they are lax's."""
    jaxpr = jax.make_jaxpr(step)(*arguments())
    results = []
    for marks in (False, True):
        options = Options(target=OPTIONS.target, backend="reference")
        monkeypatch.setattr(rewriting, "_kernels_transpose", lambda *_, marks=marks: marks)
        rewriting._rewritten.cache_clear()
        rewriting._passed.cache_clear()
        lowered = jax.jit(core.jaxpr_as_fun(cut_jaxpr(jaxpr, options))).lower(*arguments())
        assert (PRIMITIVE in lowered.as_text(debug_info=True)) == marks
        results.append(lowered.compile()(*arguments()))
    for found, wanted in zip(*results, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
