"""Functions that need the values of their arguments: what they are told, in their own names and lines."""

from __future__ import annotations

import enum
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.jit.programs import assert_close, tensors, wide_layer
from xla_fp8.tracing.errors import UntraceableError

X8, W8 = tensors()
THREE = jnp.int32(3)


def branches(n: jax.Array, x8: jax.Array, w8: jax.Array) -> jax.Array:
    return wide_layer(x8, w8) if n > 0 else x8  # the line


def loops(n: jax.Array, x8: jax.Array, w8: jax.Array) -> jax.Array:
    y = wide_layer(x8, w8)
    for _ in range(n):  # the line
        y = y + 1
    return y


def shapes(n: jax.Array, x8: jax.Array, w8: jax.Array) -> jax.Array:
    return wide_layer(x8, w8).sum() + jnp.zeros(n)  # the line


def converts(n: jax.Array, x8: jax.Array, w8: jax.Array) -> jax.Array:
    return wide_layer(x8, w8, float(n))  # the line


def calls_numpy(n: jax.Array, x8: jax.Array, w8: jax.Array) -> jax.Array:
    return wide_layer(x8, w8, np.sin(n))  # the line


def masks(n: jax.Array, x8: jax.Array, w8: jax.Array) -> jax.Array:
    return wide_layer(x8, w8)[np.arange(2) < n]  # the line


FUNCTIONS: list[tuple[Callable[..., jax.Array], str]] = [
    (branches, "lax.cond"),
    (loops, "lax.fori_loop"),
    (shapes, "shapes that are Python numbers"),
    (converts, "instead of float()"),
    (calls_numpy, "jax.pure_callback"),
    (masks, "jnp.where(mask, x, fill)"),
]


def here(fn: Any) -> str:
    """`file:line` of the line of `fn` that is to be named."""
    lines, first = inspect.getsourcelines(fn)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if '# the line' in line)}"


def what(fn: Any) -> str:
    """JAX does not say which argument a mask comes from."""
    return "a value that it computes" if fn is masks else "the value of n"


@pytest.mark.parametrize(("fn", "advice"), FUNCTIONS)
@pytest.mark.parametrize(
    "make", [xla_fp8.explain, lambda fn: xla_fp8.jit(fn).report, lambda fn: xla_fp8.rewrite(fn).report]
)
def test_a_report_says_what_is_needed_where_and_what_to_do(
    make: Callable[..., Any], fn: Callable[..., jax.Array], advice: str
) -> None:
    with pytest.raises(UntraceableError) as caught:
        make(fn)(THREE, X8, W8)
    message = str(caught.value)
    assert message.startswith(f"{fn.__name__} cannot be traced: it needs {what(fn)}, which tracing hides ({here(fn)}")
    assert advice in message
    assert "static_argnums" in message
    assert "<unknown>" not in message
    assert isinstance(caught.value, xla_fp8.XlaFp8Error)
    assert caught.value.__cause__ is not None


@pytest.mark.parametrize(("fn", "advice"), FUNCTIONS)
def test_rewrite_runs_them_as_plain_jax_with_a_warning(fn: Callable[..., jax.Array], advice: str) -> None:
    with pytest.warns(xla_fp8.FallbackWarning) as caught:
        assert_close(xla_fp8.rewrite(fn)(THREE, X8, W8), fn(THREE, X8, W8))
    (warning,) = caught
    assert str(warning.message).startswith(f"xla_fp8: {fn.__name__} runs as plain JAX: it needs {what(fn)}")
    assert here(fn) in str(warning.message)
    assert warning.filename == __file__


def test_the_warning_comes_once_for_a_function_and_signature() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for fn in (branches, loops):
            fast = xla_fp8.rewrite(fn)
            for _ in range(3):
                fast(THREE, X8, W8)
            fast(THREE, X8[:1], W8)
    names = [str(warning.message).split()[1] for warning in caught]
    assert names == ["branches", "branches", "loops", "loops"]


class Mode(enum.Enum):
    FAST = 1


def test_results_that_are_no_arrays() -> None:
    def fn(x8: jax.Array, w8: jax.Array, name: str) -> dict[str, Any]:
        return {"y": wide_layer(x8, w8), "name": [name, None, (Mode.FAST,)], "dtype": (x8.dtype, jnp.float32)}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = xla_fp8.rewrite(fn, strict=True)
        for name in ("a", "b", "a"):
            found, wanted = fast(X8, W8, name), fn(X8, W8, name)
            assert_close(found.pop("y"), wanted.pop("y"))
            assert found == wanted
        assert len(fast.report(X8, W8, "a").rewritten) == 1

        def summed(scale: jax.Array) -> tuple[jax.Array, Any]:
            result = fast(X8, W8, "a")
            return result["y"].sum() * scale, result["name"]

        assert jax.grad(summed, has_aux=True)(1.0)[1] == ["a", None, (Mode.FAST,)]


def test_a_result_that_may_be_another_each_time_runs_as_plain_jax() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> Any:
        return wide_layer(x8, w8), object()

    fast = xla_fp8.rewrite(fn)
    with pytest.warns(xla_fp8.FallbackWarning, match="it returns a value of type object, which is no array") as caught:
        (one, first), (_, second) = fast(X8, W8), fast(X8, W8)
    assert len(caught) == 1
    assert first is not second
    assert_close(one, wide_layer(X8, W8))
    with pytest.raises(UntraceableError, match="it returns a value of type object"):
        fast.report(X8, W8)
    with pytest.raises(xla_fp8.NotRewrittenError, match="it returns a value of type object"):
        xla_fp8.rewrite(fn, strict=True)(X8, W8)


@pytest.mark.parametrize(("fn", "advice"), FUNCTIONS)
def test_a_python_number_is_static(fn: Callable[..., jax.Array], advice: str) -> None:
    if fn is not calls_numpy:
        assert xla_fp8.explain(fn)(3, X8, W8).rewritten
        assert xla_fp8.jit(fn, static_argnums=0).report(3, X8, W8).rewritten
    assert_close(xla_fp8.rewrite(fn)(3, X8, W8), fn(3, X8, W8))


@pytest.mark.parametrize("make", [xla_fp8.jit, lambda fn: jax.jit(xla_fp8.rewrite(fn))])
def test_jax_names_the_function_and_its_argument(make: Callable[..., Any]) -> None:
    class Model:
        def __call__(self, x8: jax.Array, params: dict[str, jax.Array], *, mode: str = "a") -> jax.Array:
            return wide_layer(x8, params["w"]) if params["n"] > 0 else x8

    def fn(x8: jax.Array, params: dict[str, jax.Array], *, mode: str = "a") -> jax.Array:
        return Model()(x8, params, mode=mode)

    params = {"w": W8, "n": THREE}
    for function, name in (
        (fn, "fn"),
        (Model(), "__call__"),
        (Model().__call__, "__call__"),
        (functools.partial(fn, mode="b"), "fn"),
        (lambda x8, params: fn(x8, params, mode="c"), "<lambda>"),
    ):
        with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
            make(function)(X8, params)
        assert f"while tracing the function {name} at {__file__}:" in str(caught.value)
        assert "the value of the argument params['n']" in str(caught.value)


def test_names_are_right_beside_leaves_that_are_no_arrays() -> None:
    def fn(mode: str, params: dict[str, Any], x8: jax.Array, *, n: jax.Array) -> jax.Array:
        return wide_layer(x8, params["w"]) if n > 0 and mode else x8

    with pytest.raises(UntraceableError, match="the value of n, which"):
        xla_fp8.explain(fn)("a", {"act": jnp.tanh, "times": 2, "w": W8}, X8, n=THREE)


def test_a_node_whose_class_refuses_none_is_no_obstacle() -> None:
    @jax.tree_util.register_pytree_node_class
    class Positive:
        def __init__(self, value: Any, scale: float) -> None:
            if not scale > 0:
                raise ValueError("scale must be positive")
            self.value, self.scale = value, scale

        def tree_flatten(self) -> tuple[tuple[Any, float], None]:
            return (self.value, self.scale), None

        @classmethod
        def tree_unflatten(cls, _: None, children: tuple[Any, float]) -> Positive:
            return cls(*children)

    def fn(x: Positive, w8: jax.Array) -> jax.Array:
        return wide_layer(x.value, w8, x.scale)

    assert_close(xla_fp8.rewrite(fn)(Positive(X8, 0.5), W8), wide_layer(X8, W8, 0.5))
    assert xla_fp8.explain(fn)(Positive(X8, 0.5), W8).rewritten


def test_errors_of_the_function_itself_are_not_taken_for_these() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        raise TypeError("mine")

    for call in (xla_fp8.explain(fn), xla_fp8.rewrite(fn), xla_fp8.jit(fn), xla_fp8.jit(fn).report):
        with pytest.raises(TypeError, match=r"^mine"):
            call(X8, W8)
