"""Rewritten and jitted functions as methods: what they are asked takes what the method takes, as it would be called."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xla_fp8
from tests.jit.programs import assert_close, tensors, wide_layer

pytestmark = pytest.mark.unoptimized

ARGS = tensors()


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Net:
    """The same function as every kind of method."""

    scale: Any

    @xla_fp8.jit
    def jitted(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
        """Documented."""
        return wide_layer(x8, w8, self.scale)

    @functools.partial(xla_fp8.jit, static_argnums=(0, 3), static_argnames="relu")
    def static(self, x8: jax.Array, w8: jax.Array, times: int, *, relu: bool = False) -> jax.Array:
        y = wide_layer(x8, w8, self.scale) * times
        return jax.nn.relu(y) if relu else y

    @xla_fp8.rewrite
    def rewritten(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
        return wide_layer(x8, w8, self.scale)

    @staticmethod
    @xla_fp8.jit
    def of_nothing(x8: jax.Array, w8: jax.Array) -> jax.Array:
        return wide_layer(x8, w8)

    @classmethod
    @functools.partial(xla_fp8.jit, static_argnums=0)
    def of_class(cls, x8: jax.Array, w8: jax.Array) -> jax.Array:
        assert issubclass(cls, Net)
        return wide_layer(x8, w8)

    @xla_fp8.jit
    def __call__(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
        return wide_layer(x8, w8, self.scale)

    def __hash__(self) -> int:
        return hash(self.scale)


NET = Net(0.5)
WANTED = wide_layer(*ARGS, 0.5)


def test_calls() -> None:
    assert_close(NET.jitted(*ARGS), WANTED)
    assert_close(NET.jitted(x8=ARGS[0], w8=ARGS[1]), WANTED)
    assert_close(Net.jitted(NET, *ARGS), WANTED)
    assert_close(NET.static(*ARGS, 2, relu=True), jax.nn.relu(WANTED * 2))
    assert_close(NET.rewritten(*ARGS), WANTED)
    assert_close(NET(*ARGS), WANTED)
    assert_close(Net.of_nothing(*ARGS), wide_layer(*ARGS))
    assert_close(Net.of_class(*ARGS), wide_layer(*ARGS))


@pytest.mark.parametrize(
    ("method", "args", "kwargs"),
    [
        (NET.jitted, ARGS, {}),
        (NET.static, (*ARGS, 2), {"relu": True}),
        (NET.of_nothing, ARGS, {}),
        (Net.of_class, ARGS, {}),
        (NET.__call__, ARGS, {}),
    ],
    ids=["jitted", "static", "staticmethod", "classmethod", "__call__"],
)
def test_what_a_method_is_asked_takes_what_the_method_takes(method: Any, args: Any, kwargs: dict[str, Any]) -> None:
    wanted = method(*args, **kwargs)
    assert len(method.report(*args, **kwargs).rewritten) == 1
    assert "xla_fp8_region" in method.lower(*args, **kwargs).as_text()
    assert [a.shape for a in method.trace(*args, **kwargs).jaxpr.out_avals] == [wanted.shape]
    assert method.eval_shape(*args, **kwargs).shape == wanted.shape
    assert len(xla_fp8.explain(method)(*args, **kwargs).rewritten) == 1
    assert len(xla_fp8.explain(method, backend="reference")(*args, **kwargs).rewritten) == 1


def test_report_of_a_rewritten_method() -> None:
    assert len(NET.rewritten.report(*ARGS).rewritten) == 1
    assert len(Net.rewritten.report(NET, *ARGS).rewritten) == 1
    assert len(xla_fp8.explain(NET.rewritten)(*ARGS).rewritten) == 1
    assert len(xla_fp8.explain(NET.rewritten, target="a100")(*ARGS).refused_fp8) == 1
    assert len(xla_fp8.jit(NET.rewritten).report(*ARGS).rewritten) == 1


def test_has_what_a_function_of_jax_jit_has() -> None:
    plain = jax.jit(wide_layer)
    fast = xla_fp8.jit(wide_layer)
    names = [name for name in dir(plain) if not name.startswith("__") or name == "__wrapped__"]
    assert {"lower", "trace", "eval_shape", "clear_cache", "_cache_size"} <= set(names)
    for name in names:
        assert hasattr(fast, name), name
    fast(*ARGS)
    assert fast._cache_size() == 1
    fast.clear_cache()
    assert fast._cache_size() == 0
    with pytest.raises(AttributeError):
        _ = fast.no_such_thing
    assert isinstance(fast, jax.stages.Wrapped)


def test_has_what_a_bound_method_has() -> None:
    method = NET.jitted
    assert method.__self__ is NET
    assert method.__func__ == Net.jitted
    assert method.__func__ is not method
    assert method.__name__ == "jitted"
    assert method.__qualname__ == "Net.jitted"
    assert method.__doc__ == "Documented."
    assert list(inspect.signature(method).parameters) == ["x8", "w8"]
    assert list(inspect.signature(Net.jitted).parameters) == ["self", "x8", "w8"]
    assert not hasattr(Net.jitted, "__self__")
    assert method == NET.jitted
    assert hash(method) == hash(NET.jitted)
    assert method != Net.jitted
    assert method != Net(0.5).jitted
    assert "Net.jitted" in repr(method)


def test_a_method_is_compiled_once_however_often_it_is_bound() -> None:
    traces = []

    class Counted:
        @functools.partial(xla_fp8.jit, static_argnums=0)
        def layer(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
            traces.append(self)
            return wide_layer(x8, w8)

    net = Counted()
    for _ in range(3):
        net.layer(*ARGS)
        jax.jit(net.layer)(*ARGS)
    assert traces == [net]


def test_attributes_of_the_function_are_kept_and_none_of_ours_is_hidden() -> None:
    class Model:
        report = "mine"

        def __init__(self) -> None:
            self.lower = self.func = self._report_for = "mine"
            self.tag = 3

        def __call__(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
            return wide_layer(x8, w8)

    fast = xla_fp8.jit(Model())
    assert fast.tag == 3
    assert len(fast.report(*ARGS).rewritten) == 1
    assert_close(fast.lower(*ARGS).compile()(*ARGS), wide_layer(*ARGS))
    assert_close(fast(*ARGS), wide_layer(*ARGS))


def test_a_method_can_be_exported() -> None:
    exported = jax.export.export(NET.of_nothing)(*ARGS)
    assert_close(exported.call(*ARGS), wide_layer(*ARGS))
    assert "xla_fp8_region" in jax.export.export(NET.jitted)(*ARGS).mlir_module()


def test_a_method_of_a_flax_module() -> None:
    linen = pytest.importorskip("flax.linen")

    class Layer(linen.Module):  # type: ignore[misc, name-defined]
        @linen.compact
        def __call__(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
            scale = self.param("scale", lambda key: jnp.float32(0.5))
            return self.layer(x8, w8, scale)

        @xla_fp8.rewrite
        def layer(self, x8: jax.Array, w8: jax.Array, scale: jax.Array) -> jax.Array:
            return wide_layer(x8, w8, scale)

    module = Layer()
    variables = module.init(jax.random.key(0), *ARGS)
    assert_close(module.apply(variables, *ARGS), WANTED)
    assert len(xla_fp8.explain(module.apply)(variables, *ARGS).rewritten) == 1
    assert_close(xla_fp8.jit(module.apply)(variables, *ARGS), WANTED)


def test_copies_and_partials() -> None:
    fast = xla_fp8.jit(wide_layer)
    compiled = fast.lower(*ARGS).compile()
    for function in (copy.copy(fast), copy.deepcopy(fast), functools.partial(fast), compiled):
        assert_close(function(*ARGS), wide_layer(*ARGS))
    part = functools.partial(NET.jitted, ARGS[0])
    assert_close(part(ARGS[1]), WANTED)
    assert_close(jax.jit(part)(ARGS[1]), WANTED)
    assert_close(jax.vmap(NET.jitted, (0, None))(jnp.stack([ARGS[0]] * 2), ARGS[1])[1], WANTED)
