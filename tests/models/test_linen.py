"""Flax Linen modules in FP8: parameters keep their paths, the state is a collection, plans are made at each call."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization

import xla_fp8
from xla_fp8.models import Fp8Conv, Fp8Dot

pytestmark = pytest.mark.unoptimized

ANY_SIZE = xla_fp8.Recipe(min_flops=0)
DELAYED = dataclasses.replace(ANY_SIZE, scaling="delayed")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        y = nn.Conv(32, (3, 3), use_bias=False)(x)
        return nn.relu(nn.BatchNorm(use_running_average=not train)(y)) + x


class Net(nn.Module):
    def setup(self) -> None:
        self.stem = nn.Conv(32, (3, 3))
        self.block = nn.remat(Block, static_argnums=(2,))()
        self.hidden = nn.DenseGeneral(32)
        self.head = nn.Dense(10)

    def features(self, x: jax.Array, train: bool = False) -> jax.Array:
        return self.block(nn.relu(self.stem(x)), train).mean((1, 2))

    def __call__(self, x: jax.Array, train: bool = False) -> jax.Array:
        return self.head(nn.relu(self.hidden(self.features(x, train))))


@pytest.fixture(scope="module")
def x() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 6, 16)), jnp.float32)


@pytest.fixture(scope="module")
def variables(x: jax.Array) -> Any:
    return jax.jit(Net().init)(jax.random.key(0), x)


@pytest.fixture(scope="module")
def wide(variables: Any, x: jax.Array) -> jax.Array:
    return jax.jit(Net().apply)(variables, x)


def made(model: nn.Module, x: jax.Array) -> Any:
    """The variables of a module, made by one program: by operations, Flax makes them by a hundred."""
    return jax.jit(model.init)(jax.random.key(0), x)


def decibels(of: Any, against: Any) -> float:
    noise = jnp.sum((of - against) ** 2)
    return float(10 * jnp.log10(jnp.sum(against**2) / noise))


def test_parameters_of_the_wide_module_serve_the_converted_one(variables: Any, x: jax.Array, wide: jax.Array) -> None:
    fp8 = xla_fp8.convert(Net(), dataclasses.replace(ANY_SIZE, weights="channel"))
    shapes = jax.eval_shape(fp8.init, jax.random.key(0), x)
    assert jax.tree.map(lambda a, b: a.shape == b.shape, shapes, variables)
    assert jax.tree.structure(shapes) == jax.tree.structure(variables)
    assert 20 < decibels(jax.jit(fp8.apply)(variables, x), wide) < 50
    whole = xla_fp8.convert(Net(), dataclasses.replace(ANY_SIZE, keep_last=0))
    features = whole.apply(variables, "features", x, method="call")
    assert 20 < decibels(features, Net().apply(variables, x, method="features")) < 60


def test_the_report_is_of_the_call_that_it_is_asked_for(x: jax.Array) -> None:
    fp8 = xla_fp8.convert(Net(), ANY_SIZE)
    report = xla_fp8.conversion_report(fp8, x, train=True)
    names = [entry.layer.name for entry in report.entries]
    assert names == ["stem", "block/Conv_0", "hidden", "head"]
    assert [layer.name for layer in report.converted] == ["block/Conv_0", "hidden"]
    assert report.converted[0].size.flops == 2 * 4 * 36 * 9 * 32 * 32
    large = xla_fp8.convert(Net(), xla_fp8.Recipe(min_flops=2e6))
    assert [layer.name for layer in xla_fp8.conversion_report(large, x).converted] == ["block/Conv_0"]
    with pytest.raises(xla_fp8.ModelError, match="hand over arguments of a call"):
        xla_fp8.conversion_report(fp8)
    with pytest.raises(xla_fp8.ModelError, match="Net was not converted"):
        xla_fp8.conversion_report(Net(), x)


def test_the_state_is_a_collection_that_a_step_updates(variables: Any, x: jax.Array) -> None:
    fp8 = xla_fp8.convert(Net(), DELAYED, filter="block/*")
    state = jax.jit(fp8.init)(jax.random.key(0), x)["fp8"]
    assert list(state) == ["block"]

    def loss(params: Any, state: Any, model: Any = fp8) -> Any:
        collections = {"params": params, "fp8": state, "batch_stats": variables["batch_stats"]}
        y, _ = model.apply(collections, x, train=True, mutable=["batch_stats"])
        return jnp.mean(y**2)

    gradients, observed = jax.jit(jax.grad(loss, (0, 1)))(variables["params"], state)
    exact = jax.jit(jax.grad(lambda params: loss(params, {}, Net())))(variables["params"])
    flat = [jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in (gradients, exact)]
    assert 12 < decibels(*flat) < 40
    scaling = xla_fp8.update_scaling(state, observed)["block"]["Conv_0"]["state"]
    assert scaling.rhs.amax_history[0] == jnp.max(jnp.abs(variables["params"]["block"]["Conv_0"]["kernel"]))
    assert scaling.gradient.amax_history[0] > 0
    with pytest.raises(xla_fp8.ModelError, match=r"(?s)block/Conv_0 has no state in the collection 'fp8'.*sizes"):
        fp8.apply(variables, x)


def test_a_calibrated_module_has_fp8_kernels_and_its_convolution_becomes_a_graph(
    variables: Any, x: jax.Array, wide: jax.Array
) -> None:
    fp8, served = xla_fp8.calibrate(Net(), [(x,), (x / 2,)], ANY_SIZE, variables=variables)
    assert jax.tree.structure(served["params"]) == jax.tree.structure(variables["params"])
    assert served["params"]["block"]["Conv_0"]["kernel"].dtype == jnp.float8_e4m3fn
    assert served["params"]["stem"]["kernel"].dtype == jnp.float32
    assert 20 < decibels(jax.jit(fp8.apply)(served, x), wide) < 50
    (entry,) = xla_fp8.explain(fp8.apply)(served, x).rewritten
    assert entry.graph.startswith("1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2)")
    assert [layer.name for layer in xla_fp8.conversion_report(fp8, x).converted] == ["block/Conv_0", "hidden"]
    with pytest.raises(xla_fp8.ModelError, match="variables=variables"):
        xla_fp8.calibrate(Net(), [x])
    with pytest.raises(xla_fp8.ModelError, match="there are no batches"):
        xla_fp8.calibrate(Net(), [], variables=variables)
    with pytest.raises(xla_fp8.ModelError, match="stem: a batch brought values that are not finite"):
        xla_fp8.calibrate(
            Net(), [x.at[0].set(jnp.inf)], dataclasses.replace(ANY_SIZE, keep_first=0), variables=variables
        )


def test_flax_writes_and_reads_what_layers_keep(variables: Any, x: jax.Array) -> None:
    _, served = xla_fp8.calibrate(Net(), [x], ANY_SIZE, variables=variables)
    delayed = jax.jit(xla_fp8.convert(Net(), DELAYED).init)(jax.random.key(0), x)
    for kept in (served, delayed):
        empty = jax.tree.map(jnp.zeros_like, kept)
        read = serialization.from_bytes(empty, serialization.to_bytes(kept))
        assert jax.tree.structure(read) == jax.tree.structure(kept)
        jax.tree.map(np.testing.assert_array_equal, read, kept)


def test_a_module_that_is_called_without_what_it_needs_says_what(x: jax.Array) -> None:
    dense, every = nn.Dense(16), dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0)
    with pytest.raises(xla_fp8.ModelError, match=r"called by model\.apply\(variables, \.\.\.\)"):
        xla_fp8.convert(dense, every)(x)
    fp8, served = xla_fp8.calibrate(dense, [x], every, variables=made(dense, x))
    with pytest.raises(xla_fp8.ModelError, match="Dense: fixed scales are missing"):
        fp8.apply({"params": served["params"]}, x)


def test_inside_another_module_and_for_a_layer_that_is_the_whole_model(x: jax.Array) -> None:
    class Outer(nn.Module):
        inner: nn.Module

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * self.inner(x)

    recipe = dataclasses.replace(DELAYED, keep_first=0, keep_last=0)
    outer = Outer(xla_fp8.convert(nn.Dense(32), recipe))
    variables = outer.init(jax.random.key(0), x)
    assert list(variables["params"]["inner"]) == ["kernel", "bias"]
    assert "state" in variables["fp8"]["inner"]
    assert 25 < decibels(outer.apply(variables, x), Outer(nn.Dense(32)).apply(variables, x)) < 45
    plain = made(nn.Dense(32), x)
    fp8, served = xla_fp8.calibrate(nn.Dense(32), [x], dataclasses.replace(recipe, scaling="static"), variables=plain)
    assert served["params"]["kernel"].dtype == jnp.float8_e4m3fn
    assert 25 < decibels(fp8.apply(served, x), nn.Dense(32).apply(plain, x)) < 45


def test_layers_that_are_not_the_libraries_own_stay(x: jax.Array) -> None:
    class Other(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.Conv(16, (1, 1), conv_general_dilated=Fp8Conv(), name="ours")(x)
            x = nn.ConvTranspose(16, (1, 1), name="up")(x)
            return nn.Dense(16, dot_general=lambda *a, **k: 2 * jax.lax.dot_general(*a, **k), name="own")(x)

    fp8 = xla_fp8.convert(Other(), ANY_SIZE)
    variables = made(Other(), x)
    assert jnp.array_equal(fp8.apply(variables, x), Other().apply(variables, x))
    report = xla_fp8.conversion_report(fp8, x)
    assert {layer.name: reason for layer, reason in report.kept} == {
        "up": "nn.ConvTranspose is not converted",
        "own": "it has a dot_general of its own",
    }


def test_functions_are_handed_to_layers_by_hand(x: jax.Array) -> None:
    for fp8, plain in (
        (nn.Conv(20, (3, 3), conv_general_dilated=Fp8Conv()), nn.Conv(20, (3, 3))),
        (nn.Dense(20, dot_general=Fp8Dot()), nn.Dense(20)),
    ):
        variables = made(plain, x)
        assert 25 < decibels(fp8.apply(variables, x), plain.apply(variables, x)) < 45


def test_modules_in_fields_are_converted_like_those_that_a_module_makes(x: jax.Array) -> None:
    class Holder(nn.Module):
        inner: nn.Module

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.inner(self.inner(x))

    sequence = nn.Sequential([nn.Dense(16), nn.relu, nn.remat(nn.Dense)(16), nn.Dense(16)])
    for model, path in ((sequence, ["layers_2"]), (Holder(sequence), ["inner", "layers_2"])):
        variables = made(model, x)
        fp8 = xla_fp8.convert(model, DELAYED)
        own = made(fp8, x)
        jax.tree.map(np.testing.assert_array_equal, own["params"], variables["params"])
        state = own["fp8"]
        for part in path:
            state = state[part]
        assert isinstance(state["state"], xla_fp8.DelayedScaling)
        assert 15 < decibels(fp8.apply(own, x), model.apply(variables, x)) < 60


def test_what_nn_jit_traced_for_one_model_does_not_serve_another(x: jax.Array) -> None:
    jitted = nn.jit(nn.Dense)

    class Class(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return jitted(16)(nn.Dense(16)(x))

    class Method(nn.Module):
        @nn.jit
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(16)(nn.Dense(16)(x))

    every = dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0)
    for model in (Class(), Method()):
        fp8 = xla_fp8.convert(model, every)
        variables = made(fp8, x)
        first = fp8.apply(variables, x)
        wide = model.apply(variables, x)
        assert 15 < decibels(first, wide) < 60
        np.testing.assert_array_equal(fp8.apply(variables, x), first)
        assert len(xla_fp8.conversion_report(fp8, x).converted) == 2


class Step(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(nn.Dense(16, name="dense")(x)), None


class Scanned(nn.Module):
    handed_on: tuple[str, ...] = ("params",)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        axes = dict.fromkeys(self.handed_on, 0)
        steps = nn.scan(Step, variable_axes=axes, split_rngs={"params": True}, length=3)
        y: jax.Array = steps(name="steps")(x, None)[0]
        return y


def test_layers_in_a_scan_have_delayed_state_where_it_hands_on_the_collection(x: jax.Array) -> None:
    delayed = dataclasses.replace(DELAYED, keep_first=0, keep_last=0)
    without = xla_fp8.convert(Scanned(), delayed)
    variables = made(without, x)
    assert "fp8" not in variables
    assert {reason for _, reason in xla_fp8.conversion_report(without, x).kept} == {
        "inside a transformation (nn.scan, nn.vmap) without the collection 'fp8' it has no state of its own, which "
        "delayed scaling needs"
    }
    fp8 = xla_fp8.convert(Scanned(("params", "fp8")), delayed)
    own = made(fp8, x)
    assert own["fp8"]["steps"]["dense"]["state"].lhs.amax_history.shape == (3, 16)
    assert 15 < decibels(fp8.apply(own, x), without.apply(variables, x)) < 60


def scans_take_callbacks() -> bool:
    """Whether Flax's scan takes a body with a callback, which 0.12.12 does not."""

    class Called(nn.Module):
        def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
            jax.debug.callback(lambda x: None, x)
            return x, None

    try:
        nn.scan(Called, length=2)().apply({}, jnp.ones(()), None)
    except ValueError:
        return False
    return True


def test_calibration_leaves_stacked_kernels_wide(x: jax.Array) -> None:
    variables = made(Scanned(), x)
    every = dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0)
    if not scans_take_callbacks():
        with pytest.raises(xla_fp8.ModelError, match="no callback"):
            xla_fp8.calibrate(Scanned(), [x], every, variables=variables)
        return
    served, own = xla_fp8.calibrate(Scanned(), [x], every, variables=variables)
    np.testing.assert_array_equal(served.apply(own, x), Scanned().apply(variables, x))
    assert "stacked" in xla_fp8.conversion_report(served, x).kept[0][1]


def test_calibration_leaves_weights_wide_that_are_changed_before_they_are_used(x: jax.Array) -> None:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.WeightNorm(nn.Dense(16))(x)

    class Transposed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            def transposed(variables: Any) -> Any:
                return jax.tree.map(jnp.transpose, variables)

            is_new = self.is_initializing()
            dense = nn.map_variables(nn.Dense, "params", transposed, transposed, init=is_new, mutable=is_new)
            return dense(16, use_bias=False)(x)

    recipe = dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0, weights="channel")
    for model in (Normed(), Transposed()):
        variables = made(model, x)
        fp8, served = xla_fp8.calibrate(model, [x], recipe, variables=variables)
        np.testing.assert_array_equal(fp8.apply(served, x), model.apply(variables, x))


@pytest.mark.skipif(not scans_take_callbacks(), reason="nn.scan of this Flax takes no callbacks")
def test_calibration_leaves_layers_wide_in_a_scan_that_hands_on_no_scales() -> None:
    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return nn.Dense(16)(nn.RNN(nn.SimpleCell(16))(x))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 16)), jnp.float32)
    variables = made(Recurrent(), x)
    recipe = dataclasses.replace(ANY_SIZE, keep_first=0, keep_last=0)
    fp8, served = xla_fp8.calibrate(Recurrent(), [x], recipe, variables=variables)
    assert 20 < decibels(fp8.apply(served, x), Recurrent().apply(variables, x)) < 45
    report = xla_fp8.conversion_report(fp8, x)
    assert {layer.name for layer in report.converted} == {"Dense_0"}
    assert "fixed scales do not reach" in report.kept[0][1]
