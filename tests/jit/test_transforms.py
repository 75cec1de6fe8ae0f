"""Rewritten functions under grad, vmap, checkpoint, control flow and custom derivatives give what plain JAX gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from tests.jit.programs import F8, assert_close, conv, quantize, tensors, wide_layer

pytestmark = pytest.mark.unoptimized

X8, W8 = tensors()


def loss(x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    """Smooth in both scales; its epilogue reads the convolution twice."""
    y = conv(X8.astype(jnp.float32) * x_scale, W8.astype(jnp.float32) * w_scale)
    return jnp.mean(jnp.tanh(y * 1e-2) * jax.nn.relu(y))


SCALES = (jnp.float32(0.05), jnp.float32(0.03))


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        jax.value_and_grad,
        lambda f: jax.grad(f, argnums=(0, 1)),
        lambda f: lambda *a: jax.jvp(f, a, (jnp.float32(1), jnp.float32(2))),
        lambda f: lambda *a: jax.vjp(f, *a)[1](jnp.float32(3)),
        lambda f: lambda *a: jax.linearize(f, *a)[1](*a),
        lambda f: jax.hessian(f, argnums=(0, 1)),
        lambda f: jax.jacrev(jax.jacrev(f), argnums=1),
        lambda f: jax.jacfwd(jax.jacfwd(f), argnums=1),
        lambda f: jax.grad(jax.grad(jax.grad(f)), argnums=1),
    ],
    ids=["grad", "value_and_grad", "both", "jvp", "vjp", "linearize", "hessian", "revrev", "fwdfwd", "third"],
)
def test_derivatives(transform: Callable[..., Any]) -> None:
    wanted = jax.jit(transform(loss))(*SCALES)
    for make in (xla_fp8.rewrite, xla_fp8.jit):
        assert_close(jax.jit(transform(make(loss)))(*SCALES), wanted, rtol=1e-4, atol=1e-4)
        assert_close(jax.jit(make(transform(loss)))(*SCALES), wanted, rtol=1e-4, atol=1e-4)


def test_derivatives_operation_by_operation() -> None:
    assert_close(jax.value_and_grad(xla_fp8.rewrite(loss))(*SCALES), jax.value_and_grad(loss)(*SCALES), rtol=1e-4)


def test_derivative_of_the_tensors_themselves() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return (wide_layer(quantize(x, 1.0), quantize(w, 1.0), 1e-4) ** 2).mean()

    x, w = X8.astype(jnp.float32), W8.astype(jnp.float32)
    assert_close(jax.grad(xla_fp8.jit(fn), (0, 1))(x, w), jax.grad(fn, (0, 1))(x, w))


def test_forward_part_under_grad_is_still_rewritten() -> None:
    text = jax.jit(jax.grad(xla_fp8.rewrite(loss))).lower(*SCALES).as_text()
    assert "@xla_fp8_region" in text


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (0, 0), (1, None)])
def test_vmap(in_axes: tuple[int | None, ...]) -> None:
    rng = np.random.default_rng(3)
    args = []
    for tensor, axis in zip((X8, W8), in_axes, strict=True):
        shape = tensor.shape if axis is None else (*tensor.shape[:axis], 3, *tensor.shape[axis:])
        args.append(jnp.asarray(rng.normal(size=shape) * 20, F8))
    wanted = jax.vmap(wide_layer, in_axes)(*args)
    assert_close(jax.vmap(xla_fp8.jit(wide_layer), in_axes)(*args), wanted)
    assert_close(jax.jit(jax.vmap(xla_fp8.rewrite(wide_layer), in_axes))(*args), wanted)
    assert_close(xla_fp8.jit(jax.vmap(wide_layer, in_axes))(*args), wanted)


def test_vmap_of_grad_and_grad_of_vmap() -> None:
    scales = jnp.asarray([0.1, 0.2, 0.3])

    def total(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda s: jax.vmap(f, (0, None))(s, SCALES[1]).sum()

    fast = xla_fp8.rewrite(loss)
    for transform in (
        lambda f: jax.vmap(jax.grad(f), (0, None))(scales, SCALES[1]),
        lambda f: jax.grad(total(f))(scales),
    ):
        assert_close(transform(fast), transform(loss), rtol=1e-4)


def scanned(x8: jax.Array, w8: jax.Array) -> Any:
    def step(carry: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = wide_layer(carry, w8, scale)
        return quantize(y[..., :4], 1.0), jnp.max(jnp.abs(y))

    return lax.scan(step, x8, jnp.asarray([0.01, 0.02, 0.03]))


def looped(x8: jax.Array, w8: jax.Array) -> Any:
    def body(state: Any) -> Any:
        count, x = state
        return count + 1, quantize(wide_layer(x, w8)[..., :4], 1.0)

    return lax.while_loop(lambda state: state[0] < 3, body, (0, x8))


def branched(x8: jax.Array, w8: jax.Array) -> Any:
    on = x8.astype(jnp.float32).sum() > 0
    return lax.cond(on, wide_layer, lambda a, b: -wide_layer(a, b), x8, w8), lax.switch(
        1, [wide_layer, lambda a, b: wide_layer(a, b) * 2], x8, w8
    )


def checkpointed(x8: jax.Array, w8: jax.Array) -> Any:
    return jax.checkpoint(wide_layer)(x8, w8) + jax.checkpoint(lambda a: jnp.sin(wide_layer(a, w8)))(x8)


@pytest.mark.parametrize(("fn", "count"), [(scanned, 1), (looped, 1), (branched, 4), (checkpointed, 2)])
def test_bodies_are_rewritten(fn: Callable[..., Any], count: int) -> None:
    fast = xla_fp8.jit(fn)
    assert len(fast.report(X8, W8).rewritten) == count
    assert_close(fast(X8, W8), jax.jit(fn)(X8, W8), rtol=1e-4, atol=1e-4)
    assert_close(xla_fp8.rewrite(fn)(X8, W8), jax.jit(fn)(X8, W8), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.everything_saveable])
def test_grad_through_checkpoint_and_scan(policy: Any) -> None:
    def fn(scale: jax.Array) -> jax.Array:
        def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jax.checkpoint(lambda s: jnp.tanh(wide_layer(X8, W8, s) * carry), policy=policy)(scale)
            return carry + jnp.mean(y), jnp.mean(jax.nn.relu(y)) * x

        last, means = lax.scan(step, scale, jnp.arange(3.0))
        return last + means.sum()

    scale = jnp.float32(0.001)
    wanted = jax.grad(fn)(scale)
    for got in (
        jax.grad(xla_fp8.rewrite(fn))(scale),
        jax.grad(xla_fp8.jit(fn))(scale),
        xla_fp8.jit(jax.grad(fn))(scale),
    ):
        assert_close(got, wanted, rtol=1e-3)


@jax.custom_vjp
def trained(x: jax.Array, w: jax.Array) -> jax.Array:
    """A convolution with quantized operands whose gradients are quantized too."""
    return wide_layer(quantize(x, 1.0), quantize(w, 1.0), 1.0)


def trained_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    x8, w8 = quantize(x, 1.0), quantize(w, 1.0)
    return wide_layer(x8, w8, 1.0), (x8, w8)


def trained_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x8, w8 = saved
    g8 = g.astype(jnp.float8_e5m2)
    _, pull = jax.vjp(conv, x8.astype(jnp.float32), w8.astype(jnp.float32))
    dx, dw = pull(g8.astype(jnp.float32))
    return dx, dw


trained.defvjp(trained_forward, trained_backward)


def trained_loss(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.relu(trained(x, w)) ** 2)


def test_custom_vjp() -> None:
    x, w = X8.astype(jnp.float32), W8.astype(jnp.float32)
    fast = xla_fp8.jit(trained_loss)
    assert len(fast.report(x, w).rewritten) == 1
    assert_close(fast(x, w), trained_loss(x, w))
    wanted = jax.grad(trained_loss, (0, 1))(x, w)
    for transform in (lambda f: jax.grad(xla_fp8.rewrite(f), (0, 1)), lambda f: xla_fp8.jit(jax.grad(f, (0, 1)))):
        assert_close(transform(trained_loss)(x, w), wanted)
    # The input gradient is a stride-1 convolution of quantized tensors: it is rewritten whichever way round.
    assert len(xla_fp8.explain(jax.grad(trained_loss, (0, 1)))(x, w).rewritten) == 2
    inside = jax.jit(jax.grad(xla_fp8.rewrite(trained_loss), (0, 1))).lower(x, w).as_text()
    assert inside.count("func.func private @xla_fp8_region") == 2


def test_custom_vjp_has_no_forward_mode_here_either() -> None:
    x, w = X8.astype(jnp.float32), W8.astype(jnp.float32)
    with pytest.raises(TypeError, match=r"forward-mode|custom_vjp"):
        jax.jvp(xla_fp8.rewrite(trained_loss), (x, w), (x, w))


def test_custom_vjp_with_more_than_plain_operations() -> None:
    @jax.custom_vjp
    def fn(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 2, lambda _, c: c + wide_layer(X8, W8).mean() * x, x)

    fn.defvjp(lambda x: (fn(x), x), lambda x, g: (g * wide_layer(X8, W8).mean(),))
    x = jnp.float32(2.0)
    assert len(xla_fp8.explain(fn)(x).rewritten) == 1
    assert_close(xla_fp8.jit(fn)(x), fn(x))
    assert_close(jax.grad(xla_fp8.jit(fn))(x), jax.grad(fn)(x))


def test_custom_jvp_around_a_convolution() -> None:
    @jax.custom_jvp
    def fn(scale: jax.Array) -> jax.Array:
        return wide_layer(X8, W8, scale)

    @fn.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return fn(*primals), 7 * wide_layer(X8, W8, tangents[0])

    def total(scale: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(fn(scale) * 0.1))

    scale = jnp.float32(0.01)
    assert_close(xla_fp8.jit(total)(scale), total(scale))
    assert_close(jax.grad(xla_fp8.jit(total))(scale), jax.grad(total)(scale), rtol=1e-4)
    assert_close(jax.jvp(xla_fp8.jit(total), (scale,), (scale,)), jax.jvp(total, (scale,), (scale,)), rtol=1e-4)


def test_fake_quantization_through_custom_vjp() -> None:
    """Quantize-dequantize as a straight-through custom_vjp, as flax does it: the chain crosses its boundary."""

    @jax.custom_vjp
    def fake(x: jax.Array, scale: jax.Array) -> jax.Array:
        return quantize(x, 1 / scale).astype(jnp.float32) * scale

    fake.defvjp(lambda x, s: (fake(x, s), None), lambda _, g: (g, jnp.zeros(())))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return conv(fake(x, SCALES[0]), fake(w, SCALES[1])).sum()

    x, w = X8.astype(jnp.float32) * 0.1, W8.astype(jnp.float32) * 0.1
    assert len(xla_fp8.explain(fn)(x, w).rewritten) == 1
    assert_close(xla_fp8.jit(fn)(x, w), fn(x, w))
    assert_close(jax.grad(xla_fp8.jit(fn), (0, 1))(x, w), jax.grad(fn, (0, 1))(x, w))


def test_dynamic_scale_depends_on_the_convolution_itself() -> None:
    """amax of the output, through an operation that no region may hold, scales the output: not convex as one region."""

    def fn(x8: jax.Array, w8: jax.Array) -> Any:
        y = wide_layer(x8, w8)
        scale = 448 / lax.stop_gradient(lax.sort(jnp.max(jnp.abs(y), (0, 1, 2)))[-1])
        return quantize(y, scale), scale

    assert_close(xla_fp8.jit(fn)(X8, W8), jax.jit(fn)(X8, W8))


def test_two_convolutions_joined_through_a_callback() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        y = wide_layer(x8, w8)
        z = jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        return y + wide_layer(quantize(z[..., :4], 1.0), w8) + z

    fast = xla_fp8.jit(fn)
    assert len(fast.report(X8, W8).rewritten) == 2
    assert_close(fast(X8, W8), jax.jit(fn)(X8, W8))


def test_inputs_of_all_kinds_under_grad() -> None:
    def fn(scale: jax.Array, n: jax.Array, key: jax.Array) -> jax.Array:
        y = wide_layer(X8, W8, scale) * n
        return jnp.mean(y * jax.random.normal(key, y.shape))

    args = (jnp.float32(0.1), jnp.int32(3), jax.random.key(0))
    assert_close(jax.grad(xla_fp8.jit(fn))(*args), jax.grad(fn)(*args), rtol=1e-3)


def test_collectives_over_a_vmapped_axis() -> None:
    def fn(x8: jax.Array) -> jax.Array:
        y = wide_layer(x8, W8)
        return y - lax.pmean(y, "i")

    batch = jnp.stack([X8, X8[::-1]])
    wanted = jax.vmap(fn, axis_name="i")(batch)
    assert_close(jax.vmap(xla_fp8.rewrite(fn), axis_name="i")(batch), wanted)
    assert_close(xla_fp8.jit(jax.vmap(fn, axis_name="i"))(batch), wanted)


def test_checkify_and_custom_transforms_see_plain_equations() -> None:
    from jax.experimental import checkify

    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        y = wide_layer(x8, w8)
        checkify.check(jnp.isfinite(y).all(), "not finite")
        return y

    error, got = jax.jit(checkify.checkify(xla_fp8.rewrite(fn)))(X8, W8)
    error.throw()
    assert_close(got, wide_layer(X8, W8))


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        (jax.checkpoint_policies.nothing_saveable, 2),
        (jax.checkpoint_policies.everything_saveable, 1),
        (lambda primitive, *_, **__: primitive is lax.conv_general_dilated_p, 1),
        (lambda primitive, *_, **__: primitive is lax.dot_general_p, 2),
    ],
)
def test_checkpoint_policies_see_the_convolution(policy: Any, calls: int) -> None:
    def fn(scale: jax.Array, gain: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda s, g: jnp.sin(jnp.cumsum(wide_layer(X8, W8, s), 1) * g).mean(), policy=policy)(
            scale, gain
        )

    args = (jnp.float32(0.001), jnp.float32(0.5))
    grad = jax.jit(jax.value_and_grad(xla_fp8.rewrite(fn), argnums=1))
    assert grad.lower(*args).as_text().count("call @xla_fp8_region") == calls
    assert_close(grad(*args), jax.value_and_grad(fn, argnums=1)(*args), rtol=1e-3)
    both = jax.grad(xla_fp8.rewrite(fn), argnums=(0, 1))
    assert_close(jax.jit(both)(*args), jax.grad(fn, argnums=(0, 1))(*args), rtol=1e-3)
