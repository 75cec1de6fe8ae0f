"""Equinox modules in FP8: the same tree with other layers, one scale for all examples of a vmap, state in the tree."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8

pytestmark = pytest.mark.unoptimized

ANY_SIZE = xla_fp8.Recipe(min_flops=0)
DELAYED = dataclasses.replace(ANY_SIZE, scaling="delayed")


class Net(eqx.Module):
    stem: eqx.nn.Conv2d
    body: list[eqx.nn.Conv2d]
    hidden: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 5)
        self.stem = eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[0])
        self.body = [
            eqx.nn.Conv2d(32, 32, 3, padding=1, key=keys[1]),
            eqx.nn.Conv2d(32, 32, 3, padding=1, padding_mode="CIRCULAR", use_bias=False, key=keys[2]),
        ]
        self.hidden = eqx.nn.Linear(32, 32, key=keys[3])
        self.head = eqx.nn.Linear(32, 10, key=keys[4])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(self.stem(x))
        for layer in self.body:
            x = jax.nn.relu(layer(x))
        return self.head(jax.nn.relu(self.hidden(x.mean((1, 2)))))


def over(model: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(model)(x)


run = eqx.filter_jit(over)


@pytest.fixture(scope="module")
def net() -> Net:
    return Net(jax.random.key(0))


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(4, 16, 6, 6)), jnp.float32)


@pytest.fixture(scope="module")
def delayed(net: Net) -> Net:
    return xla_fp8.convert(net, DELAYED)


def decibels(of: Any, against: Any) -> float:
    noise = jnp.sum((of - against) ** 2)
    return float(10 * jnp.log10(jnp.sum(against**2) / noise))


@pytest.mark.parametrize("weights", ["tensor", "channel"])
def test_outputs_are_those_of_the_wide_model_with_fp8s_noise(net: Net, x: jax.Array, weights: Any) -> None:
    fp8 = xla_fp8.convert(net, dataclasses.replace(ANY_SIZE, weights=weights))
    assert 20 < decibels(run(fp8, x), run(net, x)) < 60
    assert isinstance(fp8.body[0], eqx.nn.Conv)


def test_one_scale_serves_all_examples_so_that_convolutions_become_graphs(net: Net, x: jax.Array) -> None:
    fp8 = xla_fp8.convert(net, ANY_SIZE, filter="body/*")
    report = xla_fp8.explain(lambda x: over(fp8, x))(x)
    assert len(report.rewritten) == 2
    assert not report.refused_fp8


def test_the_report_has_sizes_of_all_examples_where_it_has_an_example(net: Net, x: jax.Array) -> None:
    fp8 = xla_fp8.convert(net, ANY_SIZE, example=x, call=over)
    report = xla_fp8.conversion_report(fp8, x, call=over)
    assert [layer.name for layer in report.converted] == ["body/0", "body/1", "hidden"]
    assert report.converted[0].size.flops == 2 * 4 * 36 * 9 * 32 * 32
    assert report.converted[2].size.flops == 2 * 4 * 32 * 32
    by_size = xla_fp8.convert(net, xla_fp8.Recipe(min_flops=2e6))  # decided when it is called
    assert jnp.array_equal(run(by_size, x), run(xla_fp8.convert(net, ANY_SIZE, filter="body/*"), x))


def test_the_report_says_what_it_does_not_know(x: jax.Array) -> None:
    keys = jax.random.split(jax.random.key(0))
    model = eqx.nn.Sequential([eqx.nn.Conv2d(16, 16, 1, key=keys[0]), eqx.nn.ConvTranspose2d(16, 16, 1, key=keys[1])])
    fp8 = xla_fp8.convert(model, dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0))
    assert xla_fp8.conversion_report(fp8, x, call=over).summary.endswith("is in FP8, 1 of unknown size left out")
    ((_, reason),) = [(e.layer, e.reason) for e in xla_fp8.conversion_report(fp8).entries if e.is_fp8]
    assert reason.endswith("channels that are multiples of 16 and no groups")


def test_leaves_of_the_wide_model_load_into_the_converted_one(net: Net, x: jax.Array) -> None:
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, net)
    file.seek(0)
    fp8 = xla_fp8.convert(Net(jax.random.key(1)), ANY_SIZE)
    loaded = eqx.tree_deserialise_leaves(file, fp8)
    assert jnp.array_equal(run(loaded, x), run(xla_fp8.convert(net, ANY_SIZE), x))


def test_a_step_trains_the_parameters_and_updates_the_state(net: Net, delayed: Net, x: jax.Array) -> None:
    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model: Net, x: jax.Array) -> Any:
        return jnp.mean(over(model, x) ** 2)

    gradients, observed = xla_fp8.split_scaling(gradient(delayed, x))
    exact = gradient(net, x)
    flat = [jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in (gradients, exact)]
    assert 12 < decibels(*flat) < 40
    parameters, state = xla_fp8.split_scaling(eqx.filter(delayed, eqx.is_inexact_array))
    assert jax.tree.structure(parameters) == jax.tree.structure(gradients)
    assert len(jax.tree.leaves(state, is_leaf=lambda leaf: isinstance(leaf, xla_fp8.DelayedScaling))) == 3
    moved = eqx.apply_updates(delayed, jax.tree.map(lambda leaf: -0.1 * leaf, gradients))
    moved = xla_fp8.update_scaling(moved, observed)
    assert jnp.array_equal(moved.stem.weight, delayed.stem.weight - 0.1 * gradients.stem.weight)
    scaling = moved.body[0].state
    assert scaling.rhs.amax_history[0] == jnp.max(jnp.abs(net.body[0].weight))
    activations = jax.nn.relu(jax.vmap(net.stem)(x))
    assert scaling.lhs.amax_history[0] == pytest.approx(float(jnp.max(activations)), rel=1e-5)
    assert gradient(moved, x).body[0].state.gradient.amax_history[0] > 0
    with pytest.raises(xla_fp8.ModelError, match="there is NoneType and no observation"):
        xla_fp8.update_scaling(delayed, gradients)


def test_a_calibrated_model_has_fp8_weights_and_its_convolutions_become_graphs(net: Net, x: jax.Array) -> None:
    fp8 = xla_fp8.calibrate(net, [x, x / 2], ANY_SIZE, call=over)
    assert 20 < decibels(run(fp8, x), run(net, x)) < 60
    assert fp8.body[0].weight.dtype == jnp.float8_e4m3fn
    first, _ = xla_fp8.explain(lambda x: over(fp8, x))(x).rewritten
    assert first.graph.startswith("1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2);4:[f32]bias(3);5:[f32]relu(4)")
    wide, served = (sum(leaf.nbytes for leaf in jax.tree.leaves(eqx.filter(m.body, eqx.is_array))) for m in (net, fp8))
    assert served < 0.27 * wide


def test_layers_that_cannot_be_converted_say_why(x: jax.Array) -> None:
    class Own(eqx.nn.Linear):
        def __call__(self, x: jax.Array, *, key: jax.Array | None = None) -> jax.Array:
            return super().__call__(x)

    key = jax.random.key(0)
    stacked = eqx.tree_at(lambda layer: layer.weight, eqx.nn.Linear(16, 16, key=key), jnp.ones((3, 16, 16)))
    model = eqx.nn.Sequential(
        [
            Own(16, 16, key=key),
            eqx.nn.ConvTranspose2d(16, 16, 1, key=key),
            stacked,
            eqx.nn.Linear(16, "scalar", key=key),
        ]
    )
    with pytest.warns(xla_fp8.NothingConvertedWarning):
        report = xla_fp8.conversion_report(
            xla_fp8.convert(model, dataclasses.replace(ANY_SIZE, keep_last=0, keep_first=0))
        )
    assert [reason for _, reason in report.kept] == [
        "Own is a subclass with a __call__ of its own",
        "eqx.nn.ConvTranspose is not converted",
        "its weight is stacked: layers that were made under a vmap stay wide",
        "it takes or makes a scalar",
    ]


def test_calibration_leaves_weights_wide_that_are_read_or_changed_elsewhere() -> None:
    class Tied(eqx.Module):
        shared: eqx.nn.Shared
        normed: eqx.nn.WeightNorm

        def __init__(self, key: jax.Array) -> None:
            pair = eqx.nn.Embedding(32, 16, key=key), eqx.nn.Linear(32, 16, key=key)
            self.shared = eqx.nn.Shared(pair, lambda pair: pair[0].weight, lambda pair: pair[1].weight.T)
            self.normed = eqx.nn.WeightNorm(eqx.nn.Linear(16, 32, key=key))

        def __call__(self, token: jax.Array) -> jax.Array:
            embedding, head = self.shared()
            return head(self.normed(embedding(token)))

    model, tokens = Tied(jax.random.key(0)), jnp.arange(8)
    recipe = dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0)
    served = xla_fp8.calibrate(model, [tokens], recipe, call=over)
    np.testing.assert_array_equal(over(served, tokens), over(model, tokens))
    reasons = {layer.name: reason for layer, reason in xla_fp8.conversion_report(served).kept}
    assert "reads its weight too" in reasons["shared/pytree/1"]
    assert "changes its weight" in reasons["normed/layer"]
