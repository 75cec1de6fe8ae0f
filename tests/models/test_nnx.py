"""Flax NNX modules in FP8: layers, parameters and their checkpoints, delayed state, calibration."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import xla_fp8
from xla_fp8.models import Fp8Conv, Fp8Dot
from xla_fp8.models.nnx import Fp8State

pytestmark = pytest.mark.unoptimized

ANY_SIZE = xla_fp8.Recipe(min_flops=0)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(16, 32, (3, 3), rngs=rngs)
        self.blocks = nnx.List([nnx.Conv(32, 32, (3, 3), rngs=rngs) for _ in range(2)])
        self.grouped = nnx.Conv(32, 32, (3, 3), feature_group_count=32, rngs=rngs)
        self.hidden = nnx.LinearGeneral(32, (2, 16), rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = nnx.relu(block(x))
        x = (x + self.grouped(x)).mean((1, 2))
        return self.head(nnx.relu(self.hidden(x)).reshape(-1, 32))


@pytest.fixture(scope="module")
def net() -> Net:
    return nnx.jit(lambda: Net(nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def delayed(net: Net, x: jax.Array) -> Net:
    return xla_fp8.convert(net, dataclasses.replace(ANY_SIZE, scaling="delayed"), example=x)


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 6, 16)), jnp.float32)


run = nnx.jit(lambda net, x: net(x))


def decibels(of: Any, against: Any) -> float:
    """Signal to noise of one array against another."""
    noise = jnp.sum((of - against) ** 2)
    return float(10 * jnp.log10(jnp.sum(against**2) / noise))


def paths(model: nnx.Module, kind: Any) -> list[Any]:
    return [path for path, _ in nnx.to_flat_state(nnx.state(model, kind))]


@pytest.mark.parametrize(
    ("scaling", "weights"), [("dynamic", "tensor"), ("dynamic", "channel"), ("delayed", "channel")]
)
def test_outputs_are_those_of_the_wide_model_with_fp8s_noise(
    net: Net, x: jax.Array, scaling: Any, weights: Any
) -> None:
    recipe = dataclasses.replace(ANY_SIZE, scaling=scaling, weights=weights)
    fp8 = xla_fp8.convert(net, recipe, example=x)
    assert 20 < decibels(run(fp8, x), run(net, x)) < 50
    assert paths(fp8, nnx.Param) == paths(net, nnx.Param)
    assert len(paths(fp8, Fp8State)) == (3 if scaling == "delayed" else 0)


def test_the_report_has_every_layer_in_the_order_in_which_it_runs_and_says_why_it_stays_wide(
    net: Net, x: jax.Array
) -> None:
    report = xla_fp8.conversion_report(xla_fp8.convert(net, ANY_SIZE, example=x), x)
    assert [entry.layer.name for entry in report.entries] == [
        "stem", "blocks/0", "blocks/1", "grouped", "hidden", "head",
    ]  # fmt: skip
    assert [layer.name for layer in report.converted] == ["blocks/0", "blocks/1", "hidden"]
    reasons = {layer.name: reason for layer, reason in report.kept}
    assert "keep_first" in reasons["stem"]
    assert "keep_last" in reasons["head"]
    assert "32 groups" in reasons["grouped"]
    assert "3x3x32x32" in str(report)
    assert report.summary in str(report)
    flops = [
        2 * 4 * 36 * 9 * 16 * 32,
        *[2 * 4 * 36 * 9 * 32 * 32] * 2,
        2 * 4 * 36 * 9 * 32,
        2 * 4 * 32 * 32,
        2 * 4 * 320,
    ]
    assert [entry.layer.size.flops for entry in report.entries if entry.layer.size] == flops
    assert report.fp8_share == pytest.approx((flops[1] + flops[2] + flops[4]) / sum(flops))


def test_small_calls_stay_wide_by_default(net: Net, x: jax.Array) -> None:
    recipe = xla_fp8.Recipe(keep_first=0, keep_last=0)
    small = xla_fp8.convert(net, recipe)  # sizes are not known: decided when it is called
    assert "8 GFLOP or more" in str(xla_fp8.conversion_report(small))
    assert not xla_fp8.conversion_report(small, x).converted
    assert jnp.array_equal(run(small, x), run(net, x))
    with pytest.warns(xla_fp8.NothingConvertedWarning, match="0.00265 GFLOP, less than 8"):
        xla_fp8.convert(net, example=x)


def test_which_layers_are_first_and_last_needs_an_example(net: Net) -> None:
    with pytest.raises(xla_fp8.ModelError, match="example="):
        xla_fp8.convert(net)


@pytest.mark.parametrize("filter", ["blocks/*", ["nothing", "blocks/?"], lambda layer: layer.kind == "conv"])
def test_a_filter_leaves_layers_out(net: Net, x: jax.Array, filter: Any) -> None:
    report = xla_fp8.conversion_report(xla_fp8.convert(net, ANY_SIZE, example=x, filter=filter), x)
    assert [layer.name for layer in report.converted] == ["blocks/0", "blocks/1"]
    assert ("hidden", "the filter leaves it out") in [(layer.name, reason) for layer, reason in report.kept]


def test_the_model_given_stays_and_a_converted_one_is_converted_anew(net: Net, delayed: Net, x: jax.Array) -> None:
    dynamic = xla_fp8.convert(delayed, ANY_SIZE, example=x)
    assert not paths(dynamic, Fp8State)
    assert xla_fp8.conversion_report(dynamic) == xla_fp8.conversion_report(xla_fp8.convert(net, ANY_SIZE, example=x))
    again = xla_fp8.convert(dynamic, dataclasses.replace(ANY_SIZE, scaling="delayed"), example=x)
    assert paths(again, Fp8State) == paths(delayed, Fp8State)
    assert net.stem.conv_general_dilated is net.blocks[0].conv_general_dilated is jax.lax.conv_general_dilated


def test_a_checkpoint_of_parameters_loads_into_the_converted_model(net: Net, delayed: Net, x: jax.Array) -> None:
    other = xla_fp8.convert(
        jax.tree.map(jnp.zeros_like, net), dataclasses.replace(ANY_SIZE, scaling="delayed"), example=x
    )
    nnx.update(other, nnx.state(net, nnx.Param))
    assert jnp.array_equal(run(other, x), run(delayed, x))


def test_a_step_has_the_gradients_of_the_wide_model_and_updates_the_state(net: Net, delayed: Net, x: jax.Array) -> None:
    fp8 = nnx.clone(delayed)

    def loss(net: Net, x: jax.Array) -> jax.Array:
        return jnp.mean(net(x) ** 2)

    @nnx.jit
    def step(net: Net, x: jax.Array) -> Any:
        gradients = nnx.grad(loss, argnums=nnx.DiffState(0, (nnx.Param, Fp8State)))(net, x)
        xla_fp8.update_scaling(net, gradients)
        return nnx.filter_state(gradients, nnx.Param)

    gradients, exact = step(fp8, x), nnx.jit(nnx.grad(loss))(net, x)
    flat = [jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in (gradients, exact)]
    assert 12 < decibels(*flat) < 40
    state = fp8.blocks[1].conv_general_dilated.state.get_value()
    assert isinstance(state, xla_fp8.DelayedScaling)
    assert state.rhs.amax_history[0] == jnp.max(jnp.abs(net.blocks[1].kernel[...]))
    assert state.rhs.scale == pytest.approx(float(state.rhs.amax_history[0]) / 448, rel=1e-6)
    assert 0 < state.gradient.amax_history[0] < 1
    step(fp8, 2 * x)
    assert jnp.all(fp8.blocks[1].conv_general_dilated.state.get_value().lhs.amax_history[:2] > 0)


@pytest.mark.parametrize("weights", ["tensor", "channel"])
def test_a_calibrated_model_has_fp8_weights_and_its_chains_become_graphs(net: Net, x: jax.Array, weights: Any) -> None:
    fp8 = xla_fp8.calibrate(net, [x, 2 * x], dataclasses.replace(ANY_SIZE, weights=weights))
    assert 20 < decibels(run(fp8, 2 * x), run(net, 2 * x)) < 50
    assert fp8.blocks[0].kernel[...].dtype == jnp.float8_e4m3fn
    assert fp8.stem.kernel[...].dtype == jnp.float32
    assert paths(fp8, nnx.Param) == paths(net, nnx.Param)
    scales = fp8.blocks[0].conv_general_dilated.state.get_value()
    assert scales.lhs == pytest.approx(float(jnp.max(nnx.relu(net.stem(2 * x)))) / 448, rel=1e-6)
    assert scales.rhs.shape == (() if weights == "tensor" else (1, 1, 1, 32))
    np.testing.assert_allclose(xla_fp8.jit(lambda x: fp8(x))(x), run(fp8, x), rtol=0.02, atol=0.01)
    report = xla_fp8.explain(lambda x: fp8(x))(x)
    first, second = (entry.graph for entry in report.rewritten)
    scale = "scale" if weights == "tensor" else "channel_scale"
    assert first.startswith(
        f"1:[f32]conv();2:[f32]scale(1);3:[f32]{scale}(2);4:[f32]bias(3);5:[f32]relu(4);6:[f8e4m3fn]"
    )
    assert second.startswith(f"1:[f32]conv();2:[f32]scale(1);3:[f32]{scale}(2);4:[f32]bias(3)")
    assert [layer.name for layer in xla_fp8.conversion_report(fp8, x).converted] == ["blocks/0", "blocks/1", "hidden"]
    with pytest.raises(xla_fp8.ModelError, match="Convert the one that it was made of"):
        xla_fp8.convert(fp8)


def test_layers_that_are_not_the_libraries_own_stay(x: jax.Array) -> None:
    class Other(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.own = nnx.Conv(
                16,
                16,
                (1, 1),
                conv_general_dilated=lambda *a, **k: 2 * jax.lax.conv_general_dilated(*a, **k),
                rngs=rngs,
            )
            self.masked = nnx.Conv(16, 16, (1, 1), mask=np.ones((1, 1, 16, 16)), rngs=rngs)
            self.up = nnx.ConvTranspose(16, 16, (1, 1), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.up(self.masked(self.own(x)))

    with pytest.warns(xla_fp8.NothingConvertedWarning, match="own: it has a conv_general_dilated of its own"):
        fp8 = xla_fp8.convert(Other(nnx.Rngs(0)), ANY_SIZE, example=x)
    assert jnp.array_equal(fp8(x), Other(nnx.Rngs(0))(x))
    reasons = {layer.name: reason for layer, reason in xla_fp8.conversion_report(fp8).kept}
    assert reasons["masked"] == "its kernel is masked"
    assert reasons["up"] == "nnx.ConvTranspose is not converted"


def test_functions_are_handed_to_layers_by_hand(x: jax.Array) -> None:
    """However small: whoever writes it means it."""
    conv = nnx.Conv(16, 20, (3, 3), conv_general_dilated=Fp8Conv(), rngs=nnx.Rngs(0))
    plain = nnx.Conv(16, 20, (3, 3), rngs=nnx.Rngs(0))
    assert 25 < decibels(conv(x), plain(x)) < 45
    dot = nnx.Linear(16, 20, dot_general=Fp8Dot(xla_fp8.Recipe(weights="channel")), rngs=nnx.Rngs(0))
    assert 25 < decibels(dot(x), nnx.Linear(16, 20, rngs=nnx.Rngs(0))(x)) < 45
    with pytest.raises(xla_fp8.ModelError, match=r"xla_fp8\.convert"):
        Fp8Conv("delayed")


def test_a_layer_that_no_batch_runs_stays_wide_and_is_not_the_last(x: jax.Array) -> None:
    class Partly(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a, self.b, self.unused = (nnx.Linear(16, 16, rngs=rngs) for _ in range(3))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.b(self.a(x))

    model = Partly(nnx.Rngs(0))
    served = xla_fp8.calibrate(model, [x], dataclasses.replace(ANY_SIZE, keep_first=0))
    report = xla_fp8.conversion_report(served, x)
    assert [layer.name for layer in report.converted] == ["a"]
    assert {layer.name: reason for layer, reason in report.kept} == {
        "b": "among the last 1 (keep_last)",
        "unused": "the batches do not run it",
    }
    compared = xla_fp8.compare(model, x, dataclasses.replace(ANY_SIZE, keep_first=0))
    assert {layer.name: layer.is_fp8 for layer in compared.layers} == {"a": True, "b": False}


def test_a_gradient_without_observations_is_an_error_that_says_so(delayed: Net, x: jax.Array) -> None:
    gradients = nnx.jit(nnx.grad(lambda net, x: jnp.mean(net(x))))(delayed, x)
    with pytest.raises(xla_fp8.ModelError, match="DiffState"):
        xla_fp8.update_scaling(delayed, gradients)


def test_the_first_state_may_be_donated() -> None:
    state = xla_fp8.Recipe("delayed").initial_scaling()
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers) == 6


def test_calibration_leaves_a_weight_wide_that_an_embedding_reads_too() -> None:
    class Tied(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embedding = nnx.Embed(32, 32, rngs=rngs)
            self.body, self.head = (nnx.Linear(32, 32, rngs=rngs) for _ in range(2))
            self.head.kernel = self.embedding.embedding

        def __call__(self, tokens: jax.Array) -> jax.Array:
            return self.head(self.body(self.embedding(tokens)))

    model, tokens = Tied(nnx.Rngs(0)), jnp.arange(8)
    served = xla_fp8.calibrate(model, [tokens], dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0))
    assert 20 < decibels(served(tokens), model(tokens)) < 45
    assert [layer.name for layer in xla_fp8.conversion_report(served).converted] == ["body"]


def test_calibration_takes_batches_of_several_types(x: jax.Array) -> None:
    model = nnx.Linear(16, 16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    recipe = dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0)
    served = xla_fp8.calibrate(model, [x, x.astype(jnp.bfloat16)], recipe)
    assert len(xla_fp8.conversion_report(served).converted) == 1


def test_a_model_is_calibrated_once(net: Net, x: jax.Array) -> None:
    served = xla_fp8.calibrate(net, [x], ANY_SIZE)
    with pytest.raises(xla_fp8.ModelError, match="Calibrate the one that it was made of"):
        xla_fp8.calibrate(served, [x], ANY_SIZE)


def test_a_weight_that_is_not_finite_is_named(x: jax.Array) -> None:
    first, second = (nnx.Linear(16, 16, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    first.kernel[...] = first.kernel[...].at[0, 0].set(jnp.nan)
    every = dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0)
    with pytest.raises(xla_fp8.ModelError, match="layers/0: its weight has values that are not finite"):
        xla_fp8.calibrate(nnx.Sequential(first, second), [x], every)
