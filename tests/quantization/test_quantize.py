"""xla_fp8.quantize: its numbers to the last bit, for every algorithm, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

import xla_fp8
from tests.xla_options import environment
from xla_fp8.quantization.algorithms import Request, current_platform
from xla_fp8.quantization.numerics import ScaleRule

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
WIDE = [np.float32, ml_dtypes.bfloat16, np.float16]
RNG = np.random.default_rng(0)


def expected(
    x: np.ndarray,
    dtype: Any,
    kept: tuple[int, ...] = (),
    scale: Any = None,
    amax: Any = None,
    power_of_two: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(data, scale, amax of x) in NumPy, as docs/quantization.md has the arithmetic."""
    wide, largest = x.astype(np.float32), np.float32(LARGEST[dtype])
    reduced = tuple(d for d in range(x.ndim) if d not in kept)
    found = np.max(np.abs(wide), axis=reduced, keepdims=bool(kept), initial=0).astype(np.float32)
    with np.errstate(all="ignore"):
        if scale is not None:
            multiplier = np.float32(1) / np.float32(scale)
        else:
            a = np.asarray(found if amax is None else amax, np.float32)
            clamped = np.maximum(a, largest * np.float32(2.0**-126))
            multiplier = largest / clamped
            if power_of_two:
                multiplier = np.exp2(np.floor(np.log2(multiplier.astype(np.float64)))).astype(np.float32)
                scale = np.float32(1) / multiplier
            else:
                scale = clamped * np.float32(1 / largest)
            multiplier, scale = np.where(a == 0, 1, multiplier), np.where(a == 0, 1, scale)
        data = np.clip(wide * multiplier.astype(np.float32), -largest, largest).astype(dtype)
    return data, np.float32(scale), found


def same(a: Any, b: Any) -> None:
    """The same bits; NaNs are alike."""
    a, b = np.asarray(a), np.asarray(b)
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    np.testing.assert_array_equal(a.astype(np.float64), b.astype(np.float64))
    signs = [np.signbit(np.nan_to_num(c.astype(np.float32))) for c in (a, b)]
    np.testing.assert_array_equal(*signs)


def normal(shape: tuple[int, ...], wide: Any = np.float32, size: float = 1.0) -> np.ndarray:
    return np.asarray(RNG.normal(size=shape) * size).astype(wide)


# Kernels are tested in tests/backends/quantize and tests/hopper: they take no empty tensors, which are among these.
HERE = ["lax", "auto"]
SHAPES = [(), (7,), (1000,), (33, 65), (2, 1, 5, 7), (0,), (0, 4, 2)]


@pytest.mark.parametrize("algorithm", HERE)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_dynamic_scaling_has_the_documented_bits(algorithm: str, dtype: Any, wide: Any, power_of_two: bool) -> None:
    for shape in SHAPES:
        x = normal(shape, wide, 3.0)
        q, amax = xla_fp8.quantize(x, dtype, algorithm=algorithm, power_of_two=power_of_two, return_amax=True)
        data, scale, found = expected(x, dtype, power_of_two=power_of_two)
        same(q.data, data)
        same(q.scale, scale)
        same(amax, found)
        assert q.transposed is None


@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=6),
        elements=st.floats(width=32, allow_subnormal=False),
    ),
    st.sampled_from([E4M3, E5M2]),
    st.booleans(),
)
def test_any_numbers(x: np.ndarray, dtype: Any, power_of_two: bool) -> None:
    q = xla_fp8.quantize(x, dtype, power_of_two=power_of_two)
    data, scale, _ = expected(x, dtype, power_of_two=power_of_two)
    # XLA on CPUs flushes subnormal numbers, so where a product or data * scale is one they are not compared.
    same(q.scale, scale)
    with np.errstate(all="ignore"):
        product = np.abs(x * (np.float32(1) / scale))
    flushed = product < 2.0**-125
    same(np.where(flushed, 0, np.asarray(q.data)), np.where(flushed, 0, data))


@given(st.floats(2.0**-100, 2.0**120, width=32), st.sampled_from([E4M3, E5M2]))
def test_powers_of_two_leave_room(amax: float, dtype: Any) -> None:
    q = xla_fp8.quantize(np.float32([amax]), dtype, power_of_two=True)
    mantissa, _ = np.frexp(np.float64(q.scale))
    assert mantissa == 0.5
    assert float(q.scale) * LARGEST[dtype] * (1 + 2**-23) >= amax
    assert float(q.scale) * LARGEST[dtype] <= 2 * amax


def test_jit_and_eager_and_vmap_have_the_same_bits() -> None:
    x = normal((5, 33, 17), ml_dtypes.bfloat16)
    eager = [xla_fp8.quantize(x[i]) for i in range(5)]
    jitted = [jax.jit(xla_fp8.quantize)(x[i]) for i in range(5)]
    mapped = jax.vmap(xla_fp8.quantize)(x)
    for i in range(5):
        same(eager[i].data, jitted[i].data)
        same(eager[i].scale, jitted[i].scale)
        same(mapped.data[i], eager[i].data)
        same(mapped.scale[i], eager[i].scale)
        same(mapped[i].dequantize(), eager[i].dequantize())


# The table of docs/quantization.md

INF, NAN = np.inf, np.nan
SPECIAL: dict[str, tuple[list[float], list[float], float]] = {
    "zeros": ([0.0, -0.0], [0.0, -0.0], 1.0),
    "NaN": ([1.0, NAN], [NAN, NAN], NAN),
    "infinity": ([1.0, -INF], [0.0, NAN], INF),
    "least amax": ([448 * 2.0**-126, 0.0], [448.0, 0.0], 2.0**-126),
    "below": ([2.0**-125, -(2.0**-126)], [2.0, -1.0], 2.0**-126),
    "largest": (
        [float(np.finfo(np.float32).max), 0.0],
        [448.0, 0.0],
        float(np.finfo(np.float32).max / np.float32(448)),
    ),
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("algorithm", HERE)
def test_special_values(case: str, algorithm: str) -> None:
    x, data, scale = SPECIAL[case]
    q, amax = xla_fp8.quantize(np.float32(x), algorithm=algorithm, return_amax=True)
    same(q.data, np.asarray(data, E4M3))
    np.testing.assert_allclose(q.scale, np.float32(scale), rtol=2**-23)
    same(amax, np.max(np.abs(np.float32(x))))
    power = xla_fp8.quantize(np.float32(x), algorithm=algorithm, power_of_two=True)
    same(np.isnan(power.data.astype(np.float32)), np.isnan(np.float32(data)))
    same(np.isfinite(power.scale), np.isfinite(np.float32(scale)))


def test_what_is_not_finite_is_nan_once_dequantized() -> None:
    for x in ([1.0, NAN, 3.0], [1.0, INF, 3.0]):
        assert np.isnan(xla_fp8.quantize(np.float32(x)).dequantize()).all()


@pytest.mark.parametrize("wide", [np.float32, ml_dtypes.bfloat16])
def test_subnormal_tensors_are_kept_or_flushed_as_a_whole(wide: Any) -> None:
    x = np.asarray([1e-39, -2e-39, 0], wide)
    q = xla_fp8.quantize(x)
    if float(q.scale) == 1:  # flushed: XLA on CPUs
        same(np.abs(q.data.astype(np.float32)), np.zeros(3, np.float32))
    else:
        same(q.data, (x.astype(np.float32) * np.float32(2.0**126)).astype(E4M3))
        assert float(q.scale) == 2.0**-126


def test_f16_subnormals_are_ordinary_numbers() -> None:
    x = np.asarray([2.0**-24, -(2.0**-23)], np.float16)
    q = xla_fp8.quantize(x)
    same(q.data, np.asarray([224, -448], E4M3))
    same(q.dequantize(jnp.float16), x)


def test_nothing() -> None:
    q, amax = xla_fp8.quantize(np.zeros((0, 3), np.float32), axis=1, layout="both", return_amax=True)
    assert (q.shape, q.scale.shape, q.transposed.shape) == ((0, 3), (1, 3), (3, 0))
    same(amax, np.zeros((1, 3), np.float32))
    same(q.scale, np.ones((1, 3), np.float32))


def test_eps() -> None:
    x = np.float32([1e-10, -2e-10])
    same(xla_fp8.quantize(x, eps=1e-6).scale, np.float32(1e-6) * np.float32(1 / 448))
    same(xla_fp8.quantize(x, eps=jnp.float32(1e-6)).scale, np.float32(1e-6) * np.float32(1 / 448))  # type: ignore[arg-type]
    same(xla_fp8.quantize(np.float32([3.0]), eps=1e-6).scale, np.float32(3) * np.float32(1 / 448))


# Scales and amaxes that are given


@pytest.mark.parametrize("algorithm", HERE)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("wide", WIDE)
def test_delayed_scaling_saturates_and_finds_the_amax(algorithm: str, dtype: Any, wide: Any) -> None:
    x = normal((17, 31), wide)
    for given_scale in (0.001, 0.3, 1e-7, 2.0**10):
        q, amax = xla_fp8.quantize(x, dtype, scale=given_scale, algorithm=algorithm, return_amax=True)
        data, scale, found = expected(x, dtype, scale=given_scale)
        same(q.data, data)
        same(q.scale, scale)
        same(amax, found)
    assert np.abs(np.asarray(xla_fp8.quantize(x, dtype, scale=1e-7).data, np.float32)).max() == LARGEST[dtype]


def test_delayed_infinity_saturates_and_nan_stays() -> None:
    q, amax = xla_fp8.quantize(np.float32([INF, -INF, 1.0]), scale=0.5, return_amax=True)
    same(q.data, np.asarray([448, -448, 2], E4M3))
    assert np.isinf(amax)
    q, amax = xla_fp8.quantize(np.float32([NAN, 1.0]), scale=0.5, return_amax=True)
    same(q.data, np.asarray([NAN, 2], E4M3))
    assert np.isnan(amax)


@pytest.mark.parametrize("amax", [0.5, 4.0, 100.0])
def test_a_known_amax(amax: float) -> None:
    x = normal((9, 9))
    q, own = xla_fp8.quantize(x, amax=amax, return_amax=True)
    data, scale, found = expected(x, E4M3, amax=amax)
    same(q.data, data)
    same(q.scale, scale)
    same(own, found)


def test_no_amax_is_looked_for_where_none_is_wanted() -> None:
    traced = jax.make_jaxpr(lambda x: xla_fp8.quantize(x, scale=2.0))(jnp.ones((4, 4)))
    assert "reduce_max" not in str(traced)


# Per channel


@pytest.mark.parametrize("algorithm", HERE)
@pytest.mark.parametrize("axis", [0, 1, -1, (0, 2), (2, 1, 0)])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_scale_for_each_channel(algorithm: str, axis: Any, power_of_two: bool) -> None:
    x = normal((3, 5, 4)) * np.float32([1, 100, 0.01])[:, None, None]
    q, amax = xla_fp8.quantize(x, axis=axis, power_of_two=power_of_two, algorithm=algorithm, return_amax=True)
    kept = tuple(sorted(a % 3 for a in ((axis,) if isinstance(axis, int) else axis)))
    data, scale, found = expected(x, E4M3, kept, power_of_two=power_of_two)
    same(q.data, data)
    same(q.scale, scale)
    same(amax, found)


def test_channel_scales_may_be_given_short_or_in_full() -> None:
    x, scales = normal((3, 5)), np.float32([0.1, 0.2, 0.3, 0.4, 0.5])
    short, full = xla_fp8.quantize(x, scale=scales, axis=1), xla_fp8.quantize(x, scale=scales[None], axis=-1)
    same(short.data, full.data)
    same(short.scale, scales[None])
    same(xla_fp8.quantize(x, amax=448 * scales, axis=1).data, expected(x, E4M3, amax=448 * scales[None])[0])


# Layouts


@pytest.mark.parametrize("algorithm", HERE)
@pytest.mark.parametrize("shape", [(4, 7), (2, 3, 5), (1, 1), (2, 0, 3)])
@pytest.mark.parametrize("options", [{}, {"scale": 0.1}, {"axis": 0}], ids=str)
def test_layouts(algorithm: str, shape: tuple[int, ...], options: Any) -> None:
    x = normal(shape)
    row = xla_fp8.quantize(x, algorithm=algorithm, **options)
    both = xla_fp8.quantize(x, layout="both", algorithm=algorithm, **options)
    only = xla_fp8.quantize(x, layout="transposed", algorithm=algorithm, **options)
    same(both.data, row.data)
    same(both.transposed, np.swapaxes(np.asarray(row.data), -1, -2))
    same(only.transposed, both.transposed)
    assert only.data is None
    assert only.shape == row.shape == both.shape == shape
    same(only.dequantize(), row.dequantize())


def test_an_input_that_lies_in_memory_in_another_order() -> None:
    from jax.experimental.layout import Format, Layout

    x = jnp.asarray(normal((6, 9)))
    other = jax.device_put(x, Format(Layout((1, 0)), x.sharding))
    assert other.format.layout.major_to_minor == (1, 0)
    q, of_other = xla_fp8.quantize(x, layout="both"), xla_fp8.quantize(other, layout="both")
    same(of_other.data, q.data)
    same(of_other.transposed, q.transposed)


# Meshes

SHARDED = """
import jax, jax.numpy as jnp, numpy as np, xla_fp8
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6)), jnp.float32)
want, want_amax = xla_fp8.quantize(x, return_amax=True)
q = jax.jit(xla_fp8.quantize)(jax.device_put(x, NamedSharding(mesh, P("i"))))
assert q.data.sharding.spec == P("i"), q.data.sharding
assert (q.data == want.data).all() and q.scale == want.scale

def local(x, axis_name):
    q, amax = xla_fp8.quantize(x, return_amax=True, axis_name=axis_name)
    return q, amax, xla_fp8.fake_quantize(x, axis_name=axis_name)

specs = dict(mesh=mesh, in_specs=P("i"))
q, amax, fake = jax.shard_map(
    lambda x: local(x, "i"), out_specs=(xla_fp8.Float8(P("i"), P()), P(), P("i")), **specs
)(x)
assert (q.data == want.data).all() and q.scale == want.scale and amax == want_amax
assert (fake == want.dequantize()).all()
delayed = jax.shard_map(
    lambda x: xla_fp8.quantize(x, scale=0.01, return_amax=True, axis_name="i")[1], out_specs=P(), **specs
)(x)
assert delayed == want_amax
scales = jax.shard_map(lambda x: xla_fp8.quantize(x).scale[None], out_specs=P("i"), **specs)(x)
assert scales.shape == (4,) and len(set(np.asarray(scales).tolist())) == 4

w = jnp.asarray(np.random.default_rng(1).normal(size=(6, 5)), jnp.float32)
def loss(x, w):
    return jnp.sum(jnp.sin(xla_fp8.fp8_dot(x, w)))
def sharded_loss(x, w):
    local = lambda x, w: jax.lax.psum(loss(x, w), "i")
    return jax.shard_map(local, mesh=mesh, in_specs=(P("i"), P()), out_specs=P())(x, w)
assert np.allclose(sharded_loss(x, w), loss(x, w), rtol=0.05)
grad = jax.jit(jax.grad(sharded_loss, (0, 1)))(x, w)
plain = jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w)
for a, b in zip(grad, plain):
    assert np.max(np.abs(a - b)) < 0.2 * np.max(np.abs(b)), (a, b)
second = jax.jit(jax.grad(lambda x, w: jnp.sum(jax.grad(sharded_loss)(x, w) ** 2)))(x, w)
assert np.isfinite(second).all()
print("fine")
"""


def test_a_sharded_tensor_has_one_amax() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHARDED], capture_output=True, text=True, env=environment(4), timeout=300, check=False
    )
    assert done.stdout == "fine\n", done.stderr


def test_axis_name_under_vmap() -> None:
    x = normal((3, 4, 5))
    q = jax.vmap(lambda x: xla_fp8.quantize(x, axis_name="i"), axis_name="i", out_axes=xla_fp8.Float8(0, None))(x)
    same(q.data, expected(x, E4M3)[0])
    same(q.scale, expected(x, E4M3)[1])


# Refusals


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones(3, np.int32), {}, r"float32, bfloat16, float16, not int32: convert it with astype first"),
        (np.ones(3, E4M3), {}, r"not float8_e4m3fn"),
        (np.ones(3, np.float32), {"dtype": jnp.float16}, "float8_e4m3fn or float8_e5m2, not to float16"),
        (np.ones(3, np.float32), {"dtype": jnp.float8_e4m3fnuz}, "not to float8_e4m3fnuz"),
        (
            np.ones(3, np.float32),
            {"algorithm": "fast"},
            "no algorithm 'fast': expected auto, lax, atomic, reduction, single_pass",
        ),
        (np.ones(0, np.float32), {"algorithm": "atomic"}, "'atomic' cannot quantize this: .*; algorithm='auto' can"),
        (np.ones(3, np.float32), {"layout": "column"}, "no layout 'column': expected row, transposed, both"),
        (np.ones(3, np.float32), {"layout": "both"}, r"last two dimensions, and x has shape \[3\]"),
        (np.ones(3, np.float32), {"axis": 1}, "axis=1: the tensor has 1 dimensions"),
        (np.ones((3, 3), np.float32), {"axis": (0, -2)}, "names a dimension twice"),
        (np.ones(3, np.float32), {"scale": 1.0, "amax": 1.0}, "leave amax="),
        (np.ones(3, np.float32), {"scale": 1.0, "power_of_two": True}, "leave amax="),
        (np.ones((3, 4), np.float32), {"scale": np.ones(4)}, r"scale has shape \[4\]: without axis="),
        (np.ones((3, 4), np.float32), {"amax": np.ones(3), "axis": 1}, r"must be \[4\] or \[1, 4\]"),
        (np.ones(3, np.float32), {"eps": 1e-40}, "would overflow"),
        (np.ones(3, np.float32), {"eps": np.inf}, "eps=inf"),
        (np.ones(3, np.float32), {"eps": 1e39}, r"eps=1e\+39: expected a number from 5.27e-36, .* to 3.4e\+38"),
    ],
)
def test_refusals_say_what_to_change(x: Any, options: Any, message: str) -> None:
    with pytest.raises(xla_fp8.QuantizationError, match=message):
        xla_fp8.quantize(x, **options)


def test_a_float8_is_not_quantized_again() -> None:
    with pytest.raises(xla_fp8.QuantizationError, match=r"Float8 already; x\.astype"):
        xla_fp8.quantize(xla_fp8.quantize(np.ones(3, np.float32)))


def test_a_scale_is_made_by_arithmetic_that_kernels_can_repeat() -> None:
    """Nothing but elementwise operations and bit casts, the same under jit: what a Pallas kernel can trace."""
    jaxpr = jax.make_jaxpr(ScaleRule(jnp.dtype(E4M3), power_of_two=True).of_amax)(jnp.float32(1))
    names = {equation.primitive.name for equation in jaxpr.eqns}
    assert names <= {"max", "div", "bitcast_convert_type", "and", "ne", "eq", "select_n", "broadcast_in_dim", "jit"}


def test_requests_are_values() -> None:
    def request() -> Request:
        rule = ScaleRule(jnp.dtype(E4M3))
        return Request((2, 3), np.dtype(np.float32), rule, (), "row", "", False, current_platform())

    assert request() == request()
    assert hash(request()) == hash(request())


def test_pallas_is_imported_by_kernels_alone() -> None:
    program = """
import sys
import jax.numpy as jnp
import xla_fp8
xla_fp8.quantize(jnp.ones((4, 4)))
print("jax.experimental.pallas" in sys.modules)
"""
    on_a_cpu = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=on_a_cpu, check=False)
    assert done.stdout == "False\n", done.stderr


# Derivatives


def test_differentiating_raises_and_says_what_to_use() -> None:
    x = jnp.ones((3, 3))
    advice = r"(?s)xla_fp8.quantize has no derivative.*fp8_dot.*fp8_conv.*fake_quantize.*stop_gradient"
    for function in (
        lambda x: jnp.sum(xla_fp8.quantize(x).dequantize()),
        jax.jit(lambda x: jnp.sum(xla_fp8.quantize(x, scale=1.0).dequantize())),
        lambda x: lax.scan(lambda c, x: (c + jnp.sum(xla_fp8.quantize(x) + 0), None), 0.0, x)[0],
        jax.checkpoint(lambda x: xla_fp8.quantize(x).scale),
    ):
        with pytest.raises(xla_fp8.DifferentiationError, match=advice):
            jax.grad(function)(x)
        with pytest.raises(xla_fp8.DifferentiationError):
            jax.jvp(function, (x,), (x,))


def test_what_is_stopped_may_be_quantized() -> None:
    gradient = jax.grad(lambda x: jnp.sum(x * xla_fp8.quantize(lax.stop_gradient(x))))(jnp.float32([1.0, 2.0]))
    same(gradient, np.float32([1.0, 2.0]))
