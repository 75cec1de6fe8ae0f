"""compare: the error of each layer, for each kind of model and recipe, and how it is shown."""

from __future__ import annotations

import html.parser
import json
import math
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import xla_fp8
from xla_fp8.models.comparison import Comparison, LayerError, TensorError

pytestmark = pytest.mark.unoptimized

LAYOUT = ("NHWC", "HWIO", "NHWC")
E4M3 = ml_dtypes.float8_e4m3fn
ALL = {"min_flops": 0, "keep_first": 0, "keep_last": 0}


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


X, W1, W2 = normal(2, 8, 8, 16), normal(3, 3, 16, 32, seed=1), normal(32, 16, seed=2)


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=LAYOUT)


def network(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    with jax.named_scope("first"):
        y = conv(x, w1)
    return jnp.dot(jax.nn.relu(y), w2)


def snr(wide: Any, narrow: Any) -> float:
    wide, narrow = np.asarray(wide, np.float64), np.asarray(narrow, np.float64)
    return 10 * math.log10((wide**2).sum() / ((narrow - wide) ** 2).sum())


def test_each_layer_is_fed_with_what_the_wide_model_feeds_it() -> None:
    first, second = xla_fp8.compare(network, (X, W1, W2), xla_fp8.Recipe(**ALL)).layers
    y = conv(X, W1)
    assert (first.name, first.kind, first.is_fp8) == ("first/conv_general_dilated", "conv", True)
    assert first.snr == pytest.approx(
        snr(y, xla_fp8.fp8_conv(X, W1, (1, 1), "SAME", dimension_numbers=LAYOUT)), abs=0.01
    )
    hidden = jax.nn.relu(y)
    assert second.snr == pytest.approx(snr(hidden @ W2, xla_fp8.fp8_dot(hidden, W2)), abs=0.01)


@pytest.mark.parametrize("scaling", ["static", "delayed"])
def test_what_is_beyond_the_calibration_saturates(scaling: str) -> None:
    recipe = xla_fp8.Recipe(scaling, **ALL)
    layer = xla_fp8.compare(network, (X, W1, W2), recipe, calibration=[(X / 2, W1, W2)]).layers[0]
    scale = np.float32(np.abs(X).max() / 2 / 448)
    assert layer.input.saturated == pytest.approx(np.mean(np.abs(X) / scale > 464), abs=1e-9)
    assert layer.input.saturated > 0
    assert layer.weight.saturated == 0
    assert xla_fp8.compare(network, (X, W1, W2), recipe).layers[0].input.saturated == 0


def test_what_is_tiny_underflows() -> None:
    x = X * jnp.where(normal(*X.shape, seed=4) > 0, 1, 1e-7) * (normal(*X.shape, seed=5) > -1)
    layer = xla_fp8.compare(network, (x, W1, W2), xla_fp8.Recipe(**ALL)).layers[0]
    values = np.asarray(x)
    quantized = (values / np.float32(np.abs(values).max() / 448)).astype(E4M3).astype(np.float32)
    share = np.mean(quantized[values != 0] == 0)
    assert 0.4 < share < 0.6
    assert layer.input.underflowed == pytest.approx(share, abs=1e-3)


def test_gradients_are_those_of_the_loss() -> None:
    """On their way to each layer: those of the first one come through the second and the relu."""
    c = jnp.where(normal(2, 8, 8, 16, seed=6) > 0, 1, 1e-12) * normal(2, 8, 8, 16, seed=7)
    recipe = xla_fp8.Recipe(**ALL)
    first, second = xla_fp8.compare(network, (X, W1, W2), recipe, loss=lambda y: jnp.sum(y * c)).layers
    through = np.asarray((c @ W2.T) * (conv(X, W1) > 0))
    for layer, gradient in ((second, np.asarray(c)), (first, through)):
        assert layer.gradient is not None
        scaled = gradient / np.float32(np.abs(gradient).max() / 57344)
        share = np.mean(scaled.astype(ml_dtypes.float8_e5m2).astype(np.float32)[gradient != 0] == 0)
        assert layer.gradient.underflowed == pytest.approx(share, abs=1e-3)
        assert layer.gradient.saturated == 0
    assert second.gradient is not None
    assert 0.4 < second.gradient.underflowed < 0.6


def test_a_layer_in_a_loop_counts_in_every_round() -> None:
    def looped(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=3)[0]

    x, w = normal(32, 32), normal(32, 32, seed=1)
    (layer,) = xla_fp8.compare(looped, (x, w), xla_fp8.Recipe(**ALL), loss=jnp.sum).layers
    wide, narrow, c = [], [], x
    for _ in range(3):
        wide, narrow = [*wide, c @ w], [*narrow, xla_fp8.fp8_dot(c, w)]
        c = jnp.tanh(wide[-1])
    assert layer.snr == pytest.approx(snr(wide, narrow), abs=0.02)
    assert layer.gradient is not None


def test_without_a_loss_there_are_no_gradients() -> None:
    comparison = xla_fp8.compare(network, (X, W1, W2), xla_fp8.Recipe(**ALL))
    assert {layer.gradient for layer in comparison.layers} == {None}
    assert "gradient" not in str(comparison)


def test_a_loss_with_static_scales_is_refused() -> None:
    with pytest.raises(xla_fp8.ModelError, match="is not trained"):
        xla_fp8.compare(network, (X, W1, W2), "static", loss=jnp.sum)


def test_the_bad_layer_is_the_worst() -> None:
    x, w1 = (
        X.at[..., 0].mul(1e6),
        W1.at[:, :, 0].set(0),
    )  # a channel that counts for nothing, beside which all underflow
    comparison = xla_fp8.compare(network, (x, w1, W2), xla_fp8.Recipe(**ALL))
    assert [layer.name for layer in comparison.worst(1)] == ["first/conv_general_dilated"]
    assert comparison.layers[0].input.underflowed > 0.9
    left_out = xla_fp8.compare(network, (x, w1, W2), xla_fp8.Recipe(**ALL), filter="dot*")
    assert left_out.output_snr > comparison.output_snr + 3
    assert [layer.reason for layer in left_out.layers] == ["the filter leaves it out", ""]


def nnx_model() -> tuple[Any, dict[str, Any], jax.Array]:
    nnx = pytest.importorskip("flax.nnx", reason="needs flax: pip install '.[flax]'")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.first = nnx.Conv(16, 32, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(32, rngs=rngs)
            self.second = nnx.Conv(32, 32, (3, 3), rngs=rngs)
            self.last = nnx.Linear(32, 16, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            x = nnx.relu(self.norm(self.first(x)))
            return self.last(nnx.relu(self.second(x)).mean((1, 2)))

    return Net(nnx.Rngs(0)), {}, X


def linen_model() -> tuple[Any, dict[str, Any], jax.Array]:
    nn = pytest.importorskip("flax.linen", reason="needs flax: pip install '.[flax]'")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            x = nn.relu(nn.Conv(32, (3, 3), name="first")(x))
            x = nn.relu(nn.Conv(32, (3, 3), name="second")(x))
            return nn.Dense(16, name="last")(x.mean((1, 2)))

    return Net(), {"variables": Net().init(jax.random.key(0), X)}, X


def equinox_model() -> tuple[Any, dict[str, Any], jax.Array]:
    eqx = pytest.importorskip("equinox", reason="needs equinox: pip install '.[equinox]'")

    class Net(eqx.Module):
        first: eqx.nn.Conv2d
        second: eqx.nn.Conv2d
        last: eqx.nn.Linear

        def __init__(self, key: jax.Array) -> None:
            keys = jax.random.split(key, 3)
            self.first = eqx.nn.Conv2d(16, 32, 3, padding=1, key=keys[0])
            self.second = eqx.nn.Conv2d(32, 32, 3, padding=1, key=keys[1])
            self.last = eqx.nn.Linear(32, 16, key=keys[2])

        def __call__(self, x: jax.Array) -> jax.Array:
            x = jax.nn.relu(self.second(jax.nn.relu(self.first(x))))
            return self.last(x.mean((1, 2)))

    return Net(jax.random.key(0)), {"call": lambda model, x: jax.vmap(model)(x)}, X.transpose(0, 3, 1, 2)


MODELS = {"nnx": nnx_model, "linen": linen_model, "equinox": equinox_model}
MakeModel = Callable[[], tuple[Any, dict[str, Any], jax.Array]]


@pytest.fixture(params=MODELS)
def make_model(request: pytest.FixtureRequest) -> MakeModel:
    return MODELS[request.param]


def output(model: Any, options: dict[str, Any], x: jax.Array) -> jax.Array:
    if "variables" in options:
        return model.apply(options["variables"], x)
    return options.get("call", lambda model, x: model(x))(model, x)


def converted_like(model: Any, recipe: xla_fp8.Recipe, options: dict[str, Any], x: jax.Array) -> Any:
    call = {"call": options["call"]} if "call" in options else {}
    return xla_fp8.convert(model, recipe, example=x, **call)


@pytest.mark.slow
def test_layers_of_every_framework_by_name(make_model: MakeModel) -> None:
    model, options, x = make_model()
    tiny = jnp.where(jnp.arange(16) % 2, 1, 1e-12)
    recipe = xla_fp8.Recipe(min_flops=0)
    comparison = xla_fp8.compare(model, x, recipe, loss=lambda y: jnp.sum(y * tiny), **options)
    last = comparison.layers[-1].gradient
    assert last is not None
    assert last.underflowed == 0.5
    assert [(layer.name, layer.is_fp8) for layer in comparison.layers] == [
        ("first", False),
        ("second", True),
        ("last", False),
    ]
    assert all(20 < layer.snr < 40 for layer in comparison.layers)
    assert "keep_first" in comparison.layers[0].reason
    converted = converted_like(model, recipe, options, x)
    wide, narrow = output(model, options, x), output(converted, options, x)
    assert comparison.output_snr == pytest.approx(snr(wide, narrow), abs=0.2)


def test_a_small_model_is_said_to_be_too_small() -> None:
    comparison = xla_fp8.compare(network, (X, W1, W2), xla_fp8.Recipe(keep_first=0, keep_last=0))
    assert not any(layer.is_fp8 for layer in comparison.layers)
    assert "GFLOP" in comparison.layers[1].reason
    assert comparison.output_snr > 100, "equal, but for what XLA rounds elsewhere in another program"


def test_a_converted_model_is_compared_with_its_own_scales(make_model: MakeModel) -> None:
    model, options, x = make_model()
    recipe = xla_fp8.Recipe("delayed", min_flops=0)
    converted = converted_like(model, recipe, options, x)
    if "variables" in options:
        options = {"variables": converted.init(jax.random.key(0), x)}
    second = xla_fp8.compare(converted, x, **options).layers[1]
    assert second.weight.underflowed > 0, "the first scales leave room up to 16"
    anew = xla_fp8.compare(converted, x, recipe, calibration=[x], **options)
    assert anew.layers[1].is_fp8


def test_a_function_with_state() -> None:
    converted = xla_fp8.convert(network, xla_fp8.Recipe("delayed", **ALL))
    state = converted.init(X, W1, W2)
    of_state = xla_fp8.compare(converted, (X, W1, W2), state=state, loss=lambda y: 1e6 * jnp.sum(y))
    gradient = of_state.layers[1].gradient
    assert gradient is not None
    assert gradient.saturated == 1, "the first scale of a gradient ends at 1"
    assert of_state.layers[1].input.saturated > 0, "the first scales end at 16, and the hidden values do not"
    assert snr(network(X, W1, W2), converted(state, X, W1, W2)) == pytest.approx(of_state.output_snr, abs=0.01)


def test_a_calibrated_model_has_nothing_to_be_compared_with(make_model: MakeModel) -> None:
    model, options, x = make_model()
    found = xla_fp8.calibrate(model, [x], xla_fp8.Recipe("static", min_flops=0), **options)
    if "variables" in options:
        found, options = found[0], {"variables": found[1]}
    with pytest.raises(xla_fp8.ModelError, match="Hand over the one that it was made of"):
        xla_fp8.compare(found, x, **options)


def test_a_linen_module_without_variables() -> None:
    model, _, x = linen_model()
    with pytest.raises(xla_fp8.ModelError, match=r"compare\(model, batch, variables=variables\)"):
        xla_fp8.compare(model, x)


def test_a_model_without_layers() -> None:
    with pytest.raises(xla_fp8.ModelError, match="no convolution and no dot"):
        xla_fp8.compare(jnp.sin, X)


NONE = TensorError(0.0, 0.0)
SHOWN = Comparison(
    (
        LayerError("a|<b>", "conv", 31.26, TensorError(0.125, 0.0003), NONE, True, ""),
        LayerError("c", "dot", math.nan, NONE, NONE, True, "", TensorError(0.5, 0.25)),
        LayerError("d", "dot", math.inf, NONE, NONE, False, "2 groups"),
    ),
    22.0,
    "dynamic scales",
)


def test_text() -> None:
    lines = str(SHOWN).splitlines()
    assert lines[1].split("  ")[0] == "a|<b>"
    assert "31.3 dB" in lines[1]
    assert "12%" in lines[1]
    assert "0.03%" in lines[1]
    assert lines[2].rstrip().endswith("FP8")
    assert "not finite" in lines[2]
    assert "50%" in lines[2]
    assert lines[3].endswith("wide: 2 groups")
    assert lines[-1] == (
        "output 22.0 dB with 2 of 3 layers in FP8; the lowest of a layer is not finite (c). dynamic scales"
    )


def test_what_is_not_finite_is_worst() -> None:
    assert [layer.name for layer in SHOWN.worst()] == ["c", "a|<b>"]


def test_json_is_strict() -> None:
    found = json.loads(SHOWN.to_json(), parse_constant=pytest.fail)
    assert found["layers"][0]["input"] == {"saturated": 0.125, "underflowed": 0.0003}
    assert [layer["snr"] for layer in found["layers"]] == [31.26, None, None]


def test_markdown_is_a_table() -> None:
    header, _, first, *_ = SHOWN.to_markdown().splitlines()
    assert first.startswith(r"| a\|<b> | conv | 31.3 dB |")
    assert first.count("|") - first.count(r"\|") == header.count("|")


def test_a_notebook_shows_a_table() -> None:
    shown = SHOWN._repr_html_()
    rows: list[str] = []

    class Reader(html.parser.HTMLParser):
        def handle_starttag(self, tag: str, attrs: Any) -> None:
            assert tag != "b"
            rows.extend([tag] if tag == "tr" else [])

    Reader().feed(shown)
    assert len(rows) == 4
    assert "a|&lt;b&gt;" in shown


def test_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="needs matplotlib: pip install '.[plot]'")
    matplotlib.use("agg")
    figure = SHOWN.plot()
    upper, lower = figure.axes
    assert [bar.get_height() for bar in upper.patches] == [31.26, 0.0, 0.0]
    assert len(lower.lines) == 4
    assert [tick.get_text() for tick in lower.get_xticklabels()] == ["a|<b>", "c", "d"]
    again = SHOWN.plot((upper, lower))
    assert again is figure


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(xla_fp8.MissingPackageError, match=r"pip install 'xla-fp8\[plot\]'"):
        SHOWN.plot()


def test_a_function_with_a_checkpoint() -> None:
    def model(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)

    x, w = jnp.ones((4, 16)), jnp.eye(16)
    comparison = xla_fp8.compare(model, (x, w), xla_fp8.Recipe(min_flops=0, keep_first=0, keep_last=0))
    assert [layer.is_fp8 for layer in comparison.layers] == [True]
