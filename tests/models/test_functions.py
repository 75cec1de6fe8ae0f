"""Plain functions in FP8: contractions wherever tracing finds them, names for a filter, explicit state."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from xla_fp8.models import Fp8Dot

pytestmark = pytest.mark.unoptimized

EVERY = xla_fp8.Recipe(min_flops=0, keep_first=0, keep_last=0)


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X, W = normal(0, 8, 16), normal(1, 16, 16) / 4


def decibels(of: Any, against: Any) -> float:
    noise = jnp.sum((of - against) ** 2)
    return float(10 * jnp.log10(jnp.sum(against**2) / noise))


def network(x: jax.Array, w: jax.Array, steps: int = 2) -> jax.Array:
    """A contraction in every kind of equation that holds a jaxpr."""
    with jax.named_scope("block"):
        x = jax.jit(lambda x: jax.nn.silu(x @ w))(x)
    x, _ = lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=steps)
    x = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
    return lax.cond(x[0, 0] > -9, lambda x: x @ w, lambda x: x, x)


def test_contractions_are_found_and_named_in_loops_branches_and_calls() -> None:
    report = xla_fp8.conversion_report(xla_fp8.convert(network, EVERY), X, W)
    assert [(layer.name, layer.inside) for layer in report.converted] == [
        ("block/dot_general", ""),
        ("dot_general", "scan"),
        ("dot_general_1", "remat2"),
        ("dot_general_2", "cond"),
    ]
    assert __file__ in report.converted[0].source
    assert report.fp8_share == 1


def test_numbers_and_gradients_are_those_of_the_function_with_fp8s_noise() -> None:
    fp8 = xla_fp8.convert(network, EVERY)
    assert 15 < decibels(jax.jit(fp8, static_argnames="steps")(X, W, steps=2), network(X, W)) < 40
    gradients = [jax.jit(jax.grad(lambda w, f=f: jnp.sum(f(X, w) ** 2)))(W) for f in (fp8, network)]
    assert 12 < decibels(*gradients) < 40
    text = jax.jit(jax.grad(lambda w: jnp.sum(fp8(X, w) ** 2))).lower(W).as_text()
    assert text.count("f8E4M3FN") > 4
    assert "f8E5M2" in text


@pytest.mark.parametrize("transformed", [jax.vmap, jax.checkpoint, lambda f: xla_fp8.jit(f)])
def test_it_goes_through_transformations(transformed: Any) -> None:
    fp8 = xla_fp8.convert(lambda x: jnp.tanh(x @ W), EVERY)
    assert 25 < decibels(transformed(fp8)(X), jnp.tanh(X @ W)) < 45


def test_a_filter_names_scopes() -> None:
    fp8 = xla_fp8.convert(network, EVERY, filter="block/*")
    assert [layer.name for layer in xla_fp8.conversion_report(fp8, X, W).converted] == ["block/dot_general"]


def test_trees_and_static_arguments_go_in_and_trees_come_out() -> None:
    def function(tree: dict[str, Any], *, name: str) -> dict[str, Any]:
        return {name: (tree["x"] @ tree["w"], None)}

    result = xla_fp8.convert(function, EVERY)({"x": X, "w": W}, name="y")
    assert result["y"][1] is None
    assert 25 < decibels(result["y"][0], X @ W) < 45


def test_convolutions_are_converted_with_scales_by_channel_too() -> None:
    x, w = normal(2, 2, 6, 6, 16), normal(3, 3, 3, 16, 32) * jnp.geomspace(1e-6, 1, 32)

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    quietest = {}
    for weights in ("tensor", "channel"):
        fp8 = xla_fp8.convert(conv, dataclasses.replace(EVERY, weights=weights))
        quietest[weights] = decibels(fp8(x, w)[..., 0], conv(x, w)[..., 0])
        report = xla_fp8.explain(jax.grad(lambda x, f=fp8: jnp.sum(f(x, w) ** 2)))(x)
        assert len(report.rewritten) == 2
    assert quietest["tensor"] < 10 < 25 < quietest["channel"]
    toward = normal(4, 2, 6, 6, 32)
    gradient, exact = (jax.grad(lambda w, f=f: jnp.sum(f(x, w) * toward))(w) for f in (fp8, conv))
    assert min(decibels(gradient[..., i], exact[..., i]) for i in (0, 15, 31)) > 15


def test_factors_of_channels_are_numbers_of_the_weights_own_type() -> None:
    """Also of a channel that is zero, and of one so small that its factor is no number of float16."""
    scales = jnp.geomspace(1e-6, 1, 16).at[3].set(0)
    w = (W * scales).astype(jnp.float16)
    fp8 = xla_fp8.convert(jnp.matmul, dataclasses.replace(EVERY, weights="channel"))
    y = jax.jit(fp8)(X.astype(jnp.float16), w)
    assert y.dtype == jnp.float16
    assert jnp.all(y[:, 3] == 0)
    assert decibels(y.astype(jnp.float32)[:, 4:], (X @ w.astype(jnp.float32))[:, 4:]) > 22
    assert jnp.all(jnp.isfinite(y))


def test_what_has_a_rule_of_its_own_stays() -> None:
    @jax.custom_vjp
    def own(x: jax.Array) -> jax.Array:
        return x @ W

    own.defvjp(lambda x: (own(x), None), lambda _, g: (g @ W.T,))
    report = xla_fp8.conversion_report(xla_fp8.convert(lambda x: own(x) @ W, EVERY), X)
    ((_, reason),) = report.kept
    assert reason == "it stands in a function with a derivative rule of its own (custom_vjp_call)"
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    sharded = jax.shard_map(lambda x: x @ W, mesh=mesh, in_specs=spec, out_specs=spec)
    ((_, reason),) = xla_fp8.conversion_report(xla_fp8.convert(sharded, EVERY), X).kept
    assert "convert the function inside" in reason
    wrong = xla_fp8.convert(lambda x: x.astype(jnp.int32) @ W.astype(jnp.int32), EVERY)
    assert [reason for _, reason in xla_fp8.conversion_report(wrong, X).kept] == ["its operands are int32"]


def test_layers_whose_quantization_costs_more_than_they_gain_stay_wide() -> None:
    def block(x: jax.Array, narrow: jax.Array, square: jax.Array) -> jax.Array:
        for w in (narrow, square):
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return x

    shapes = (256, 56, 56, 256), (1, 1, 256, 64), (3, 3, 64, 64)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def converted(recipe: xla_fp8.Recipe) -> dict[str, str]:
        report = xla_fp8.conversion_report(xla_fp8.convert(block, recipe), *arguments)
        return {entry.layer.name: entry.reason for entry in report.entries}

    recipe = xla_fp8.Recipe("delayed", keep_first=0, keep_last=0)
    # 2 * 256 * 64 / (256 + 64) and 2 * 9 * 64 * 64 / (64 + 64), and a little less for the weights.
    assert converted(recipe) == {
        "conv_general_dilated": "102 operations for each element of input, weight and result, less than 450: "
        "to quantize them takes longer than FP8 gains",
        "conv_general_dilated_1": "",
    }
    assert set(converted(dataclasses.replace(recipe, min_flops=0)).values()) == {""}
    assert set(converted(dataclasses.replace(recipe, min_flops=1e9)).values()) == {""}
    assert recipe.least_size == "8 GFLOP or more and 450 operations for each element"
    assert dataclasses.replace(recipe, scaling="static").least_size == "8 GFLOP or more"


def test_a_product_has_its_operations_by_element() -> None:
    report = xla_fp8.conversion_report(xla_fp8.convert(lambda x, w: x @ w, EVERY), X, W)
    (layer,) = report.converted
    assert layer.size is not None
    assert layer.size.intensity == 2 * 8 * 16 * 16 / (8 * 16 + 16 * 16 + 8 * 16)


def test_delayed_scaling_has_its_state_explicit() -> None:
    fp8 = xla_fp8.convert(network, dataclasses.replace(EVERY, scaling="delayed"))
    state = fp8.init(X, W)
    assert list(state) == ["block/dot_general"]  # loops have no state of their own
    report = xla_fp8.conversion_report(fp8, X, W)
    assert report.kept[0][1] == "inside scan it has no state of its own, which delayed scaling needs"
    observed = jax.jit(jax.grad(lambda state: jnp.sum(fp8(state, X, W) ** 2)))(state)
    updated = xla_fp8.update_scaling(state, observed)["block/dot_general"]
    assert updated.lhs.amax_history[0] == jnp.max(jnp.abs(X))
    assert updated.rhs.scale == pytest.approx(float(jnp.max(jnp.abs(W))) / 448, rel=1e-6)
    assert updated.gradient.amax_history[0] > 0


def test_a_calibrated_function_has_fixed_scales() -> None:
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    fp8 = xla_fp8.calibrate(layer, [(X, W), (X / 2, W)], EVERY)
    assert fp8.states["dot_general"].lhs == pytest.approx(float(jnp.max(jnp.abs(X))) / 448, rel=1e-6)
    assert 25 < decibels(fp8(X, W), layer(X, W)) < 45
    saturated = fp8(100 * X, W)
    assert jnp.all(jnp.isfinite(saturated))


def stack(x: jax.Array, w: jax.Array, layers: int = 3, *, named: bool = False) -> jax.Array:
    """Layers of one name, the first of which may have a scope of its own."""
    for layer in range(layers):
        with jax.named_scope("extra") if named and layer == 0 else contextlib.nullcontext():
            x = jnp.tanh(x @ w)
    return x


@pytest.mark.parametrize("keep_last", [0, 1])
@pytest.mark.parametrize(("made", "called"), [(3, 2), (2, 3)])
def test_a_state_of_other_layers_is_refused(keep_last: int, made: int, called: int) -> None:
    fp8 = xla_fp8.convert(stack, dataclasses.replace(EVERY, scaling="delayed", keep_last=keep_last))
    state = fp8.init(X, W, made)
    assert len(state) == made - keep_last
    fp8(state, X, W, made)
    with pytest.raises(xla_fp8.ModelError, match=r"init.* for arguments of"):
        jax.jit(fp8, static_argnums=3)(state, X, W, called)


@pytest.mark.parametrize(("made", "called", "names"), [(3, 2, "dot_general_2 with"), (2, 3, "dot_general_2 without")])
def test_fixed_scales_of_other_layers_are_refused(made: int, called: int, names: str) -> None:
    fp8 = xla_fp8.calibrate(lambda x, w, layers=made: stack(x, w, layers), [(X, W)], EVERY)
    fp8(X, W)
    with pytest.raises(xla_fp8.ModelError, match=rf"there is {names} scales.*calibrate the function.*named_scope"):
        fp8(X, W, called)


def test_batches_may_run_more_and_fewer_layers() -> None:
    def function(xs: list[jax.Array], w: jax.Array) -> jax.Array:
        return stack(xs[0], w, len(xs))

    fp8 = xla_fp8.calibrate(function, [([X] * layers, W) for layers in (2, 3)], EVERY)
    for layers in (2, 3):
        assert 15 < decibels(fp8([X] * layers, W), stack(X, W, layers)) < 45
    for layers, names in ((1, "dot_general_1 with"), (4, "dot_general_3 without")):
        with pytest.raises(xla_fp8.ModelError, match=f"there is {names} scales"):
            fp8([X] * layers, W)


def test_a_part_with_a_scope_of_its_own_need_not_run() -> None:
    def function(x: jax.Array, w: jax.Array, *, whole: bool = True) -> jax.Array:
        return stack(x, w, 3, named=True) if whole else stack(x, w, 2)

    fp8 = xla_fp8.convert(function, dataclasses.replace(EVERY, scaling="delayed"))
    state = fp8.init(X, W)
    assert list(state) == ["extra/dot_general", "dot_general", "dot_general_1"]
    assert 15 < decibels(fp8(state, X, W, whole=False), stack(X, W, 2)) < 45
    fixed = xla_fp8.calibrate(function, [(X, W)], EVERY)
    x = jnp.tanh(X) / 2  # in the range of what the part returns
    assert 15 < decibels(fixed(x, W, whole=False), stack(x, W, 2)) < 45


def test_a_state_serves_calls_that_are_too_small_for_fp8() -> None:
    recipe = dataclasses.replace(EVERY, scaling="delayed", min_flops=2 * 8 * 16 * 16)
    fp8 = xla_fp8.convert(stack, recipe)
    state = fp8.init(X, W)
    assert len(state) == 3
    np.testing.assert_array_equal(fp8(state, X[:4], W), stack(X[:4], W))


def test_a_margin_makes_no_scale_infinite() -> None:
    x, w = X.at[0, 0].set(3e38), W * 1e-30
    recipe = dataclasses.replace(EVERY, scaling="static", margin=1)
    assert jnp.all(jnp.isfinite(xla_fp8.calibrate(jnp.matmul, [(x, w)], recipe)(x, w)))
    (layer,) = xla_fp8.compare(jnp.matmul, (x, w), recipe).layers
    assert np.isfinite(layer.snr)


def test_what_is_no_model_and_recipes_without_sense_are_refused() -> None:
    with pytest.raises(xla_fp8.ModelError, match="int is no model"):
        xla_fp8.convert(3)
    with pytest.raises(xla_fp8.ModelError, match=r"xla_fp8\.calibrate\(model, batches\)"):
        xla_fp8.convert(network, "static")
    with pytest.raises(xla_fp8.ModelError, match="scaling='fast': expected one of 'dynamic', 'delayed', 'static'"):
        xla_fp8.convert(network, "fast")
    with pytest.raises(xla_fp8.ModelError, match="keep_last=-1"):
        xla_fp8.Recipe(keep_last=-1)
    with pytest.raises(xla_fp8.QuantizationError, match="quantize to"):
        xla_fp8.Recipe(dtype=jnp.bfloat16)


def test_an_out_sharding_of_an_fp8_layer_is_refused() -> None:
    x = jnp.ones((16, 16))
    with pytest.raises(xla_fp8.ModelError, match="dot in FP8: reshard the layer's output"):
        Fp8Dot()(x, x, (((1,), (0,)), ((), ())), out_sharding=jax.sharding.PartitionSpec())


def test_a_missing_framework_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "equinox" or name == "xla_fp8.models.equinox"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(xla_fp8.MissingPackageError, match=r"pip install 'xla-fp8\[equinox\]'"):
        importlib.import_module("xla_fp8.models.equinox")
