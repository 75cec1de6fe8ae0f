"""xla_fp8.dot_general: values, scales by channel, copies that are read, the chain that it writes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from xla_fp8 import Float8

pytestmark = pytest.mark.unoptimized

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


NUMBERS: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = [
    ((((1,), (0,)), ((), ())), (5, 16), (16, 7)),
    ((((0,), (0,)), ((), ())), (16, 5), (16, 7)),
    ((((1,), (1,)), ((), ())), (5, 16), (7, 16)),
    ((((2,), (1,)), ((0,), (0,))), (3, 5, 16), (3, 16, 7)),
    ((((0, 2), (1, 0)), ((), ())), (4, 5, 16), (16, 4, 7)),
    ((((1,), (2,)), ((2,), (0,))), (5, 16, 3), (3, 7, 16)),
    ((((0,), (0,)), ((), ())), (16, 5, 2), (16, 7, 3)),
    ((((0,), (0,)), ((), ())), (16,), (16,)),
    (((((), ()), ((), ()))), (3,), (4,)),
]


@pytest.mark.parametrize(("numbers", "left", "right"), NUMBERS, ids=str)
@pytest.mark.parametrize("scales", ["tensor", "channel"])
@pytest.mark.parametrize("layout", ["row", "transposed", "both"])
def test_it_is_the_dot_of_what_the_operands_stand_for(
    numbers: Any, left: Any, right: Any, scales: str, layout: str
) -> None:
    if layout != "row" and min(len(left), len(right)) < 2:
        layout = "row"
    operands = []
    for side, shape in enumerate((left, right)):
        free = [d for d in range(len(shape)) if d not in numbers[0][side]]
        axis = free if scales == "channel" and free else None
        operands.append(xla_fp8.quantize(normal(*shape), axis=axis, layout=layout))
    y = jax.jit(xla_fp8.dot_general, static_argnums=2)(*operands, numbers)
    expected = lax.dot_general(operands[0].dequantize(), operands[1].dequantize(), numbers)
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


def test_one_number_may_stand_for_a_sequence_of_one() -> None:
    """As in jax.lax.dot_general."""
    x, w = normal(3, 5, 16), normal(3, 16, 7)
    for number in (int, np.int64):
        numbers: Any = ((number(2), number(1)), (number(0), [number(0)]))
        plain = (((2,), (1,)), ((0,), (0,)))
        for axis in (None, 1):
            q, p = xla_fp8.quantize(x, axis=axis), xla_fp8.quantize(w)
            np.testing.assert_array_equal(xla_fp8.dot_general(q, p, numbers), xla_fp8.dot_general(q, p, plain))
        np.testing.assert_array_equal(xla_fp8.fp8_dot(x, w, numbers), xla_fp8.fp8_dot(x, w, plain))


@pytest.mark.parametrize("dtype", [jnp.int32, E4M3], ids=["int32", "e4m3"])
def test_out_scale_is_not_rounded_to_integers_or_fp8(dtype: Any) -> None:
    x, w = jnp.full((2, 8), 2, dtype), jnp.full((8, 3), 4, dtype)
    numbers = (((1,), (0,)), ((), ()))
    y = xla_fp8.dot_general(x, w, numbers, out_scale=0.3, out_dtype=jnp.float32)
    np.testing.assert_allclose(y, np.full((2, 3), 64 * 0.3), rtol=1e-6)
    q = xla_fp8.dot_general(x, w, numbers, out_scale=1e-4, out_dtype=E5M2)
    np.testing.assert_allclose(q.dequantize(), np.full((2, 3), 64), rtol=0.13)
    kept = xla_fp8.dot_general(x, w, numbers, out_scale=0.5)
    assert kept.dtype == dtype
    np.testing.assert_array_equal(kept.astype(jnp.float32), 32)


def test_a_scale_along_what_is_contracted_is_refused() -> None:
    x, w = xla_fp8.quantize(normal(4, 8), axis=1), xla_fp8.quantize(normal(8, 3), axis=0)
    numbers = (((1,), (0,)), ((), ()))
    with pytest.raises(
        xla_fp8.QuantizationError, match="lhs has a scale for each index of dimension 1, which is contr"
    ):
        xla_fp8.dot_general(x, xla_fp8.quantize(normal(8, 3)), numbers)
    with pytest.raises(xla_fp8.QuantizationError, match="rhs has a scale"):
        xla_fp8.dot_general(xla_fp8.quantize(normal(4, 8)), w, numbers)


@pytest.mark.parametrize(
    ("numbers", "told"),
    [
        ((((-1,), (0,)), ((), ())), r"lhs_contracting of \(-1,\)"),
        ((((1,), (2,)), ((), ())), r"rhs_contracting of \(2,\)"),
        ((((0,), (0,)), ((), ())), r"dimensions to have the same shape, got \(4,\) and \(6,\)"),
    ],
)
def test_wrong_dimension_numbers_are_told_as_they_were_given(numbers: Any, told: str) -> None:
    lhs, rhs = (xla_fp8.quantize(jnp.ones(shape), layout="transposed", axis=1) for shape in ((4, 6), (6, 5)))
    with pytest.raises(TypeError, match=told):
        xla_fp8.dot_general(lhs, rhs, numbers)


def test_result_types_scale_and_amax() -> None:
    x, w = xla_fp8.quantize(normal(4, 8)), xla_fp8.quantize(normal(8, 3))
    numbers = (((1,), (0,)), ((), ()))
    y = x @ w
    assert xla_fp8.dot_general(x, w, numbers, preferred_element_type=jnp.bfloat16).dtype == jnp.bfloat16
    q, amax = xla_fp8.dot_general(x, w, numbers, out_scale=4.0, out_dtype=E4M3, return_amax=True)
    np.testing.assert_array_equal(amax, jnp.max(jnp.abs(y)))
    assert isinstance(q, Float8)
    np.testing.assert_array_equal(q.data, xla_fp8.saturating_cast(y * 4, E4M3))
    assert q.scale == 0.25
    saturated = xla_fp8.dot_general(x, w, numbers, out_scale=1e9, out_dtype=E5M2)
    assert jnp.max(jnp.abs(saturated.unscaled())) == 57344
    np.testing.assert_array_equal(xla_fp8.dot_general(x, w, numbers, out_scale=2.0), y * 2)
    assert xla_fp8.dot_general(x, w, numbers, out_dtype=jnp.float16).dtype == jnp.float16
    with pytest.raises(xla_fp8.QuantizationError, match="out_scale must be one number"):
        xla_fp8.dot_general(x, w, numbers, out_scale=jnp.ones(3))


def test_a_float8_and_an_array() -> None:
    x, w = normal(4, 8), xla_fp8.quantize(normal(8, 3))
    numbers = (((1,), (0,)), ((), ()))
    for dtype in (jnp.float32, jnp.bfloat16):
        y = xla_fp8.dot_general(x.astype(dtype), w, numbers)
        np.testing.assert_array_equal(y, lax.dot_general(x.astype(dtype), w.dequantize(dtype), numbers))
    np.testing.assert_array_equal(xla_fp8.dot_general(x, x.T, numbers), lax.dot_general(x, x.T, numbers))
    gradient = jax.grad(lambda x: jnp.sum(xla_fp8.dot_general(x, w, numbers)))(x)
    np.testing.assert_allclose(gradient, jnp.broadcast_to(w.dequantize().sum(1), x.shape), rtol=1e-6)


def dot_of(layout: str, numbers: Any) -> tuple[Any, Any]:
    """The dot equation, and what its lhs is made of."""
    x, w = xla_fp8.quantize(normal(16, 5), layout=layout), xla_fp8.quantize(normal(16, 7))
    jaxpr = jax.make_jaxpr(lambda x, w: xla_fp8.dot_general(x, w, numbers))(x, w)
    return next(e for e in jaxpr.eqns if e.primitive.name == "dot_general"), jaxpr


def test_the_copy_is_read_whose_contracted_dimension_is_last() -> None:
    numbers = (((0,), (0,)), ((), ()))
    for layout, shape, contracted in (("row", (16, 5), (0,)), ("both", (5, 16), (1,)), ("transposed", (5, 16), (1,))):
        equation, jaxpr = dot_of(layout, numbers)
        assert equation.invars[0].aval.shape == shape
        assert equation.params["dimension_numbers"][0][0] == contracted
        assert "transpose[" not in str(jaxpr)


def test_the_chain() -> None:
    """convert, times a scalar, on both sides; the rest behind the dot: what XLA's gemm-rewriter matches."""
    x, w = xla_fp8.quantize(normal(32, 16)), xla_fp8.quantize(normal(16, 48))

    def function(x: Float8, w: Float8, scale: jax.Array) -> Any:
        numbers = (((1,), (0,)), ((), ()))
        return xla_fp8.dot_general(x, w, numbers, out_scale=scale, out_dtype=E4M3, return_amax=True)

    text = jax.jit(function).lower(x, w, jnp.float32(2)).as_text("hlo")
    names = [line.split(" = ")[1].split(" ", 1)[1].split("(")[0] for line in text.splitlines() if " = " in line]
    order = [name for name in names if name in ("convert", "multiply", "dot", "clamp", "reduce")]
    assert sorted(order) == sorted(["convert", "multiply"] * 2 + ["dot", "multiply", "clamp", "convert", "reduce"])
    assert order.index("dot") == 4
