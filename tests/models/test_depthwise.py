"""Depthwise layers stay wide and run by this project's kernels on a Hopper GPU; elsewhere they are what they were."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import xla_fp8

pytestmark = pytest.mark.unoptimized

EVERY = xla_fp8.Recipe(min_flops=0, keep_first=0, keep_last=0)
OFF = dataclasses.replace(EVERY, depthwise=False)
C = 32
REASON = f"{C} groups: each is a convolution of its own, too small for FP8"
BY_KERNEL = "; on a Hopper GPU by this project's depthwise kernel in "


def normal(*shape: int, dtype: Any = jnp.bfloat16, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


IMAGES = normal(2, 8, 8, C)


def kernels_of(function: Any, *arguments: Any) -> list[str]:
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r'name = "(depthwise_\w+)"', text)


def same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


# Plain functions


def block(x: jax.Array, w: jax.Array, numbers: Any = ("NHWC", "HWIO", "NHWC"), **options: Any) -> jax.Array:
    with jax.named_scope("block"):
        arguments: dict[str, Any] = {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": C} | options
        return lax.conv_general_dilated(x, w.astype(x.dtype), dimension_numbers=numbers, **arguments)


FILTER = normal(7, 7, 1, C, dtype=jnp.float32, seed=1)


def only_reason(fp8: Any, *arguments: Any) -> str:
    ((_, reason),) = xla_fp8.conversion_report(fp8, *arguments).kept
    return reason


def test_the_report_says_which_kernel() -> None:
    assert only_reason(xla_fp8.convert(block, EVERY), IMAGES, FILTER) == f"{REASON}{BY_KERNEL}bfloat16"
    assert only_reason(xla_fp8.convert(block, OFF), IMAGES, FILTER) == REASON
    first = xla_fp8.convert(block, dataclasses.replace(EVERY, keep_first=1))
    assert only_reason(first, IMAGES, FILTER) == f"among the first 1 (keep_first){BY_KERNEL}bfloat16"
    wide = IMAGES.astype(jnp.float32)
    assert only_reason(xla_fp8.convert(block, EVERY), wide, FILTER) == f"{REASON}{BY_KERNEL}float32"


def test_a_switch_turns_it_off() -> None:
    for recipe, expected in ((EVERY, ["depthwise_forward"]), (OFF, [])):
        assert kernels_of(xla_fp8.convert(block, recipe), IMAGES, FILTER) == expected


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({"window_strides": (2, 2)}, True),
        ({"padding": ((1, 2), (0, 0))}, True),
        ({"rhs_dilation": (2, 2)}, False),
        ({"precision": "highest"}, True),
        ({"numbers": ("NHWC", "OHWI", "NHWC")}, True),
        ({"numbers": ("NCHW", "OIHW", "NCHW")}, True),
        ({"numbers": ("HWNC", "OHWI", "NCWH")}, True),
    ],
)
def test_what_the_kernel_takes_is_to_the_last_bit_what_it_was(options: dict[str, Any], takes: bool) -> None:
    orders = dict(zip(("x", "w"), options.get("numbers", ("NHWC", "HWIO", "NHWC")), strict=False))
    x = IMAGES.transpose(["NHWC".index(name) for name in orders["x"]])
    w = FILTER.transpose(["HWIO".index(name) for name in orders["w"]])

    def loss(function: Any) -> Any:
        return lambda x, w: jnp.sum(jnp.sin(function(x, w, **options).astype(jnp.float32)))

    fp8 = xla_fp8.convert(block, EVERY)
    same(jax.jit(lambda: fp8(x, w, **options))(), jax.jit(lambda: block(x, w, **options))())
    same(jax.jit(jax.grad(loss(fp8), (0, 1)))(x, w), jax.jit(jax.grad(loss(block), (0, 1)))(x, w))
    assert bool(kernels_of(lambda x, w: fp8(x, w, **options), x, w)) == takes
    report = xla_fp8.conversion_report(xla_fp8.convert(lambda x, w: block(x, w, **options), EVERY), x, w)
    assert report.kept[0][1].endswith(f"{BY_KERNEL}bfloat16") == takes


def test_a_result_of_another_type_stays_with_xla() -> None:
    for dtype, takes in ((jnp.float32, False), (jnp.bfloat16, True)):
        fp8 = xla_fp8.convert(lambda x, w, dtype=dtype: block(x, w, preferred_element_type=dtype), EVERY)
        assert bool(kernels_of(fp8, IMAGES, FILTER)) == takes
        assert jax.eval_shape(fp8, IMAGES, FILTER).dtype == dtype


def test_channels_that_are_not_last_are_transposed_in_16_bits_only() -> None:
    numbers = ("NCHW", "OIHW", "NCHW")
    fp8 = xla_fp8.convert(lambda x, w: block(x, w, numbers), EVERY)
    x, w = IMAGES.transpose((0, 3, 1, 2)), FILTER.transpose((3, 2, 0, 1))
    assert kernels_of(fp8, x, w)
    assert not kernels_of(fp8, x.astype(jnp.float32), w)


def test_other_groups_stay_with_xla() -> None:
    def grouped(x: jax.Array, w: jax.Array) -> jax.Array:
        return block(x, w, feature_group_count=C // 2)

    w = normal(3, 3, 2, C, seed=1)
    fp8 = xla_fp8.convert(grouped, EVERY)
    assert only_reason(fp8, IMAGES, w) == f"{C // 2} groups: each is a convolution of its own, too small for FP8"
    assert not kernels_of(fp8, IMAGES, w)


def test_loops_and_delayed_scaling() -> None:
    def network(x: jax.Array, w: jax.Array, m: jax.Array) -> jax.Array:
        x, _ = lax.scan(lambda x, _: (jnp.tanh(block(x, w)), None), x, length=3)
        return jax.checkpoint(lambda x: jnp.tanh(block(x, w)))(x) @ m

    m = normal(C, C, seed=2)
    fp8 = xla_fp8.convert(network, dataclasses.replace(EVERY, scaling="delayed"))
    state = fp8.init(IMAGES, FILTER, m)
    assert list(state) == ["dot_general"]
    gradient = jax.grad(lambda w: jnp.sum(fp8(state, IMAGES, w, m).astype(jnp.float32)))
    assert kernels_of(gradient, FILTER).count("depthwise_filter_gradient") == 2
    assert all(BY_KERNEL in reason for _, reason in xla_fp8.conversion_report(fp8, IMAGES, FILTER, m).kept)


def test_calibrated_functions() -> None:
    def network(x: jax.Array, w: jax.Array, m: jax.Array) -> jax.Array:
        return block(x @ m, w)

    m = normal(C, C, seed=2)
    served = xla_fp8.calibrate(network, [(IMAGES, FILTER, m)], EVERY)
    assert only_reason(served, IMAGES, FILTER, m).endswith(f"{BY_KERNEL}bfloat16")
    assert kernels_of(served, IMAGES, FILTER, m) == ["depthwise_forward"]


# Frameworks


class NnxNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.depthwise = nnx.Conv(C, C, (7, 7), feature_group_count=C, **options)
        self.mix = nnx.Linear(C, C, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mix(self.depthwise(x))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(C, (7, 7), feature_group_count=C, dtype=jnp.bfloat16, name="depthwise")(x)
        return nn.Dense(C, dtype=jnp.bfloat16, name="mix")(x)


class EquinoxNet(eqx.Module):
    depthwise: eqx.nn.Conv2d
    mix: eqx.nn.Conv2d

    def __init__(self, key: jax.Array) -> None:
        self.depthwise = eqx.nn.Conv2d(C, C, 7, padding=3, groups=C, dtype=jnp.bfloat16, key=key)
        self.mix = eqx.nn.Conv2d(C, C, 1, dtype=jnp.bfloat16, key=key)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.mix(self.depthwise(x))


def over(model: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


def only_depthwise(recipe: xla_fp8.Recipe) -> dict[str, Any]:
    """No layer in FP8, so that the numbers can be compared to the last bit."""
    return {"recipe": recipe, "filter": "nothing"}


@pytest.mark.filterwarnings("ignore::xla_fp8.NothingConvertedWarning")
@pytest.mark.parametrize("recipe", [EVERY, OFF], ids=["on", "off"])
def test_nnx(recipe: xla_fp8.Recipe) -> None:
    net = NnxNet(nnx.Rngs(0))
    fp8 = xla_fp8.convert(net, example=IMAGES, **only_depthwise(recipe))
    graph, state = nnx.split(fp8)
    same(fp8(IMAGES), net(IMAGES))
    expected = ["depthwise_forward"] if recipe.depthwise else []
    assert kernels_of(lambda state, x: nnx.merge(graph, state)(x), state, IMAGES) == expected
    served = xla_fp8.calibrate(net, [IMAGES], recipe)
    report = xla_fp8.conversion_report(served, IMAGES)
    assert [layer.name for layer in report.converted] == ["mix"]
    assert (BY_KERNEL in report.kept[0][1]) == recipe.depthwise
    assert kernels_of(lambda x: served(x), IMAGES) == expected


@pytest.mark.parametrize("recipe", [EVERY, OFF], ids=["on", "off"])
def test_linen(recipe: xla_fp8.Recipe) -> None:
    net = LinenNet()
    fp8 = xla_fp8.convert(net, **only_depthwise(recipe))
    variables = net.init(jax.random.key(0), IMAGES)

    def gradient(model: Any) -> Any:
        return jax.jit(jax.grad(lambda variables: jnp.sum(model.apply(variables, IMAGES).astype(jnp.float32) ** 2)))

    same(fp8.apply(variables, IMAGES), net.apply(variables, IMAGES))
    same(gradient(fp8)(variables), gradient(net)(variables))
    expected = ["depthwise_forward"] if recipe.depthwise else []
    assert kernels_of(fp8.apply, variables, IMAGES) == expected
    report = xla_fp8.conversion_report(fp8, IMAGES)
    assert (BY_KERNEL in report.kept[0][1]) == recipe.depthwise
    served, variables = xla_fp8.calibrate(net, [IMAGES], recipe, variables=variables)
    assert kernels_of(served.apply, variables, IMAGES) == expected


@pytest.mark.filterwarnings("ignore::xla_fp8.NothingConvertedWarning")
@pytest.mark.parametrize("recipe", [EVERY, OFF], ids=["on", "off"])
@pytest.mark.parametrize("with_example", [True, False])
def test_equinox(recipe: xla_fp8.Recipe, with_example: bool) -> None:
    x = IMAGES.transpose((0, 3, 1, 2))
    net = EquinoxNet(jax.random.key(0))
    example = {"example": x, "call": over} if with_example else {}
    fp8 = xla_fp8.convert(net, **only_depthwise(recipe), **example)
    gradient = eqx.filter_jit(eqx.filter_grad(lambda model, x: jnp.sum(over(model, x).astype(jnp.float32) ** 2)))
    same(eqx.filter_jit(over)(fp8, x), eqx.filter_jit(over)(net, x))
    same(gradient(fp8, x), gradient(net, x))
    expected = ["depthwise_forward"] if recipe.depthwise else []
    assert kernels_of(lambda x: over(fp8, x), x) == expected
    report = xla_fp8.conversion_report(fp8, x, call=over)
    assert (BY_KERNEL in report.kept[0][1]) == recipe.depthwise
    served = xla_fp8.calibrate(net, [x], recipe, call=over)
    assert kernels_of(lambda x: over(served, x), x) == expected


def test_nnx_without_an_example_decides_at_each_call() -> None:
    fp8 = xla_fp8.convert(NnxNet(nnx.Rngs(0)), EVERY)
    assert kernels_of(lambda x: fp8(x), IMAGES) == ["depthwise_forward"]
    assert BY_KERNEL in xla_fp8.conversion_report(fp8, IMAGES).kept[0][1]
