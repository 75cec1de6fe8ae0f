"""xla_fp8.jit and rewrite on straight-line functions: numbers, arguments of every kind, decorators."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.jit.programs import assert_close, inputs, layer, tensors, wide_layer
from xla_fp8.backends.registry import ReferenceBackend

pytestmark = pytest.mark.unoptimized


def test_rewritten_function_computes_what_the_original_does() -> None:
    args = inputs()
    fast = xla_fp8.jit(layer)
    assert len(fast.report(*args).rewritten) == 1
    assert_close(fast(*args), jax.jit(layer)(*args))
    assert "@xla_fp8_region" in fast.lower(*args).as_text()
    assert_close(xla_fp8.rewrite(layer)(*args), layer(*args))


def test_two_layers_with_a_residual() -> None:
    def net(x8: jax.Array, w8: jax.Array, v8: jax.Array, s: Any) -> jax.Array:
        y8, amax = layer(x8, w8, s, s, 4.0)
        z = wide_layer(y8, v8) + x8.astype(jnp.float32).sum(-1, keepdims=True) * amax
        return jax.nn.silu(z).astype(jnp.bfloat16)

    x8, w8, s, *_ = inputs()
    v8 = jnp.asarray(np.random.default_rng(1).normal(size=(3, 3, 8, 4)), w8.dtype)
    fast = xla_fp8.jit(net)
    assert len(fast.report(x8, w8, v8, s).rewritten) == 2
    assert_close(fast(x8, w8, v8, s), jax.jit(net)(x8, w8, v8, s), rtol=1e-2, atol=1e-2)


def test_function_without_fp8_is_traced_to_the_same_program() -> None:
    def plain(x: jax.Array) -> jax.Array:
        return jnp.clip(jnp.sin(x) @ x, 0, 1)

    x = jnp.ones((4, 4))
    assert str(xla_fp8.jit(plain).trace(x).jaxpr) == str(jax.jit(plain).trace(x).jaxpr)


def test_decorators_with_and_without_parentheses() -> None:
    @xla_fp8.jit
    def bare(x8: jax.Array, w8: jax.Array) -> jax.Array:
        """Documented."""
        return wide_layer(x8, w8)

    @xla_fp8.jit(static_argnames="relu", target="h100", backend="reference")
    def called(x8: jax.Array, w8: jax.Array, *, relu: bool) -> jax.Array:
        y = wide_layer(x8, w8)
        return jax.nn.relu(y) if relu else y

    args = tensors()
    assert_close(bare(*args), wide_layer(*args))
    assert bare.__doc__ == "Documented."
    assert bare.__name__ == "bare"
    assert list(inspect.signature(bare).parameters) == ["x8", "w8"]
    assert_close(called(*args, relu=True), jax.nn.relu(wide_layer(*args)))
    assert_close(called(*args, relu=False), wide_layer(*args))
    assert "h100" in called.report(*args, relu=False).target


def test_method_and_static_self() -> None:
    @dataclasses.dataclass(frozen=True)
    class Model:
        scale: float

        @functools.partial(xla_fp8.jit, static_argnums=0)
        def __call__(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
            return wide_layer(x8, w8, self.scale)

        @xla_fp8.rewrite
        def eager(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
            return wide_layer(x8, w8, self.scale)

    args = tensors()
    for scale in (0.01, 0.5):
        model = Model(scale)
        assert_close(model(*args), wide_layer(*args, scale))
        assert_close(model.eager(*args), wide_layer(*args, scale))


def test_leaves_that_are_no_arrays_are_closed_over() -> None:
    def fn(params: dict[str, Any], mode: str, act: Any, unused: None, times: int) -> dict[str, Any]:
        y = params["layers"][0]
        for _ in range(times):
            y = act(wide_layer(y, params["w"])).astype(y.dtype)[..., :4]
        return {"y": y, "none": None, "extra": (params["scalar"] * 2 if mode == "double" else params["scalar"],)}

    x8, w8 = tensors()
    params = {"layers": [x8], "w": w8, "scalar": np.float32(3)}
    for act in (jnp.tanh, jax.nn.relu):
        for times in (1, 2):
            wanted = fn(params, "double", act, None, times)
            assert_close(xla_fp8.rewrite(fn)(params, "double", act, None, times), wanted)
            jitted = xla_fp8.jit(fn, static_argnums=(1, 2, 4))
            assert_close(jitted(params, "double", act, None, times), wanted)


def test_closed_over_leaves_that_compare_equal_are_not_confused() -> None:
    seen = []

    @xla_fp8.rewrite
    def fn(x8: jax.Array, w8: jax.Array, leaf: Any) -> jax.Array:
        seen.append(leaf)
        return wide_layer(x8, w8) * (1.0 if isinstance(leaf, bool) else 2.0 if isinstance(leaf, int) else 3.0)

    args = tensors()
    for leaf, factor in ((1, 2.0), (True, 1.0), (1.0, 3.0), (0.0, 3.0), (-0.0, 3.0), (1, 2.0)):
        assert_close(fn(*args, leaf), wide_layer(*args) * factor)
    assert [repr(leaf) for leaf in seen] == ["1", "True", "1.0", "0.0", "-0.0"]


def test_unhashable_leaf_is_closed_over_too() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]
        factor = 2.0

    def fn(x8: jax.Array, w8: jax.Array, leaf: Any) -> jax.Array:
        return wide_layer(x8, w8) * leaf.factor

    args = tensors()
    assert_close(xla_fp8.rewrite(fn)(*args, Unhashable()), wide_layer(*args) * 2)


def test_python_scalars_stay_weakly_typed() -> None:
    def fn(x8: jax.Array, w8: jax.Array, scale: Any) -> tuple[Any, ...]:
        return wide_layer(x8, w8).astype(jnp.bfloat16) * scale, scale + 1

    args = tensors()
    for scale in (2.0, 3):
        for got, wanted in (
            (xla_fp8.jit(fn)(*args, scale), jax.jit(fn)(*args, scale)),
            (xla_fp8.rewrite(fn)(*args, scale), fn(*args, scale)),
        ):
            assert_close(got, wanted, rtol=1e-2, atol=1e-2)
        traced, original = (jit(fn).trace(*args, scale).jaxpr for jit in (xla_fp8.jit, jax.jit))
        assert [a.weak_type for a in traced.out_avals] == [a.weak_type for a in original.out_avals]


def test_x64() -> None:
    def fn(x8: jax.Array, w8: jax.Array, scale: Any) -> tuple[jax.Array, jax.Array]:
        y = wide_layer(x8, w8, jnp.float32(0.5))
        return y * scale, jnp.arange(3) + 2**40

    args = tensors()
    with jax.enable_x64(True):
        scale = jnp.float64(1 / 3)
        got, wanted = xla_fp8.jit(fn)(*args, scale), jax.jit(fn)(*args, scale)
        assert got[0].dtype == jnp.float64
        assert_close(got, wanted)
        assert_close(xla_fp8.rewrite(fn)(*args, scale), wanted)


def test_donated_arguments() -> None:
    def fn(state: jax.Array, x8: jax.Array, w8: jax.Array) -> jax.Array:
        return state + wide_layer(x8, w8)

    args = tensors()
    state = jnp.ones((2, 6, 6, 8))
    got = xla_fp8.jit(fn, donate_argnums=0)(state, *args)
    assert state.is_deleted()
    assert_close(got, 1 + wide_layer(*args))


def test_keep_unused_inline_and_shardings() -> None:
    def fn(x8: jax.Array, w8: jax.Array, unused: jax.Array) -> jax.Array:
        return wide_layer(x8, w8)

    args = (*tensors(), jnp.zeros(3))
    wanted = wide_layer(*args[:2])
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for kwargs in (
        {"keep_unused": True},
        {"inline": True},
        {"in_shardings": device, "out_shardings": device},
    ):
        assert_close(xla_fp8.jit(fn, **kwargs)(*args), wanted)
    main = xla_fp8.jit(fn, keep_unused=True).lower(*args).as_text().split("@main(")[1].split(")")[0]
    assert main.count("tensor") == 3
    assert_close(jax.jit(lambda *a: xla_fp8.jit(fn, inline=True)(*a) * 2)(*args), wanted * 2)


def test_stages_of_ahead_of_time_compilation() -> None:
    args = inputs()
    fast = xla_fp8.jit(layer)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in args]
    compiled = fast.trace(*shapes).lower().compile()
    assert_close(compiled(*args), layer(*args))
    assert jax.tree.map(lambda s: (s.shape, s.dtype), fast.eval_shape(*args)) == jax.tree.map(
        lambda a: (a.shape, a.dtype), layer(*args)
    )
    assert jax.eval_shape(xla_fp8.rewrite(layer), *shapes) == jax.eval_shape(layer, *shapes)


def test_inside_and_outside_jit() -> None:
    args = tensors()
    wanted = wide_layer(*args) + 1
    assert_close(jax.jit(lambda *a: xla_fp8.rewrite(wide_layer)(*a) + 1)(*args), wanted)
    assert_close(jax.jit(lambda *a: xla_fp8.jit(wide_layer)(*a) + 1)(*args), wanted)
    assert_close(xla_fp8.jit(lambda *a: jax.jit(wide_layer)(*a) + 1)(*args), wanted)
    assert_close(xla_fp8.jit(xla_fp8.jit(lambda *a: wide_layer(*a) + 1))(*args), wanted)
    assert len(xla_fp8.explain(lambda *a: jax.jit(wide_layer)(*a) + 1)(*args).rewritten) == 1


def test_closing_over_a_tracer() -> None:
    args = tensors()

    def outer(scale: jax.Array) -> jax.Array:
        return xla_fp8.rewrite(lambda *a: wide_layer(*a, scale))(*args)

    for scale in (jnp.float32(0.1), jnp.float32(0.2)):
        assert_close(jax.jit(outer)(scale), wide_layer(*args, scale))
    assert_close(jax.jacfwd(outer)(jnp.float32(0.1)), jax.jacfwd(lambda s: wide_layer(*args, s))(jnp.float32(0.1)))


def test_value_dependent_function_falls_back_with_one_warning() -> None:
    @xla_fp8.rewrite
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        return wide_layer(x8, w8) if x8.astype(jnp.float32).max() > 0 else w8

    args = tensors()
    with pytest.warns(xla_fp8.FallbackWarning, match=r"needs the value of x8, .*return wide_layer") as caught:
        assert_close(fn(*args), wide_layer(*args))
    assert len(caught) == 1
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.jit(fn)(*args)


def test_errors_of_the_function_are_its_own() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        xla_fp8.jit(fn)(*tensors())


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"target": "h900"}, "TargetError", "unknown target 'h900'"),
        ({"passes": ["simplify", "magic"]}, "UnknownPassError", "unknown pass 'magic'"),
        ({"backend": "fast"}, "BackendError", "the backends are: auto, .*xla$"),
        (
            {"backend": "cpu"},
            "BackendError",
            r"the backends are: auto, .*: jax\.jit\(xla_fp8\.rewrite\(fn\), backend='cpu'\)$",
        ),
        ({"backend": None}, "TypeError", "takes a name or a Backend, and not a NoneType"),
        ({"backend": ReferenceBackend}, "TypeError", "and not a type: <class '.*ReferenceBackend'>"),
        ({"backend": ["reference"]}, "TypeError", r"and not a list: \['reference'\]"),
        ({"colour": "red"}, "TypeError", "colour"),
    ],
)
def test_bad_options_are_refused_at_once(kwargs: dict[str, Any], error: str, message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        xla_fp8.jit(wide_layer, **kwargs)
    assert type(caught.value).__name__ == error


def test_the_backend_of_jax_jit_is_given_to_jax_jit() -> None:
    with pytest.deprecated_call():
        found = jax.jit(xla_fp8.rewrite(wide_layer), backend="cpu")(*tensors())
    assert_close(found, wide_layer(*tensors()))


def test_what_cannot_be_called_is_refused_at_once() -> None:
    for make in (xla_fp8.jit, xla_fp8.rewrite, xla_fp8.explain):
        with pytest.raises(TypeError, match="rewrites functions, and this is a int: 3"):
            make(3)
    for make in (xla_fp8.jit, xla_fp8.rewrite):
        with pytest.raises(TypeError, match="report= takes a function"):
            make(wide_layer, report=3)


def test_dead_convolution_costs_nothing() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        wide_layer(x8, w8)
        return x8.astype(jnp.float32)

    args = tensors()
    assert "xla_fp8_region" not in xla_fp8.jit(fn).lower(*args).as_text()
    assert_close(xla_fp8.jit(fn)(*args), fn(*args))


def test_without_jit_everything_runs_operation_by_operation() -> None:
    seen = []

    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        seen.append(isinstance(x8, jax.core.Tracer))
        return wide_layer(x8, w8)

    args = tensors()
    with jax.disable_jit():
        assert_close(xla_fp8.jit(fn)(*args), wide_layer(*args))
        assert_close(jax.grad(lambda s: xla_fp8.jit(wide_layer)(*args, s).sum())(1.0), wide_layer(*args, 1.0).sum())
    assert seen == [False]
