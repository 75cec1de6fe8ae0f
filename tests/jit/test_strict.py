"""Strict: no FP8 convolution or dot stays unnoticed, wherever it stands and whatever transforms the function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.custom_partitioning import custom_partitioning

import xla_fp8
from tests.jit.programs import assert_close, conv, quantize, tensors, wide_layer
from xla_fp8.report import Report

pytestmark = pytest.mark.unoptimized

X8, W8 = tensors()


def in_linear_call(x8: jax.Array, w8: jax.Array) -> jax.Array:
    def forward(tensors: tuple[jax.Array, jax.Array], y: jax.Array) -> jax.Array:
        return wide_layer(*tensors) * y

    def transposed(tensors: tuple[jax.Array, jax.Array], g: jax.Array) -> jax.Array:
        return (wide_layer(*tensors) * g).sum()

    return jax.custom_derivatives.linear_call(forward, transposed, (x8, w8), jnp.float32(2))


def in_composite(x8: jax.Array, w8: jax.Array) -> jax.Array:
    return lax.composite(wide_layer, "tests.layer")(x8, w8)


def in_custom_partitioning(x8: jax.Array, w8: jax.Array) -> jax.Array:
    fn = custom_partitioning(wide_layer)
    fn.def_partition(
        infer_sharding_from_operands=lambda *_: None,
        partition=lambda *_: None,
        sharding_rule="b h w c, k l c o -> b h w o",
    )
    return fn(x8, w8)


def in_metadata(x8: jax.Array, w8: jax.Array) -> jax.Array:
    from jax.experimental.xla_metadata import set_xla_metadata

    with set_xla_metadata(key="value"):
        return wide_layer(x8, w8)


def wide(x8: jax.Array, w8: jax.Array) -> tuple[jax.Array, jax.Array]:
    return x8.astype(jnp.float32), w8.astype(jnp.float32) * 0.5


def outside_of_scan(x8: jax.Array, w8: jax.Array) -> jax.Array:
    x, w = wide(x8, w8)
    return lax.scan(lambda c, _: (c + conv(x, w), None), jnp.zeros((2, 6, 6, 8)), None, length=2)[0]


def outside_of_cond(x8: jax.Array, w8: jax.Array) -> jax.Array:
    return lax.cond(True, conv, lambda x, w: x[..., :1] * jnp.ones(8), *wide(x8, w8))


def outside_of_while(x8: jax.Array, w8: jax.Array) -> jax.Array:
    x, w = wide(x8, w8)
    return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, conv(x, w)), (0, jnp.zeros((2, 6, 6, 8))))[1]


def outside_of_checkpoint(x8: jax.Array, w8: jax.Array) -> jax.Array:
    return jax.checkpoint(conv)(*wide(x8, w8))


def outside_of_custom_vjp(x8: jax.Array, w8: jax.Array) -> jax.Array:
    @jax.custom_vjp
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return conv(x, w)

    fn.defvjp(lambda x, w: (conv(x, w), (x, w)), lambda saved, g: saved)
    return fn(*wide(x8, w8))


def inside_of_checkpoint(x8: jax.Array, w8: jax.Array) -> jax.Array:
    return conv(*jax.checkpoint(wide)(x8, w8))


def before_a_barrier(x8: jax.Array, w8: jax.Array) -> jax.Array:
    return conv(*lax.optimization_barrier(wide(x8, w8)))


def before_a_name(x8: jax.Array, w8: jax.Array) -> jax.Array:
    x, w = wide(x8, w8)
    return conv(checkpoint_name(x, "x"), checkpoint_name(w, "w"))


@pytest.mark.parametrize(
    ("fn", "rule", "reason"),
    [
        (in_linear_call, "not-plain", "it stands inside of a linear_call"),
        (in_composite, "not-plain", "it stands inside of a composite"),
        (in_custom_partitioning, "not-plain", "it stands inside of a custom_partitioning"),
        (in_metadata, "not-plain", "it stands under compute_on or set_xla_metadata"),
        (outside_of_scan, "dequantized-elsewhere", "dequantized outside of the scan"),
        (outside_of_cond, "dequantized-elsewhere", "dequantized outside of the cond"),
        (outside_of_while, "dequantized-elsewhere", "dequantized outside of the while"),
        (outside_of_checkpoint, "dequantized-elsewhere", "dequantized outside of the remat"),
        (outside_of_custom_vjp, "dequantized-elsewhere", "dequantized outside of the custom_vjp_call"),
        (inside_of_checkpoint, "dequantized-elsewhere", "dequantized inside of the remat"),
        (before_a_barrier, "dequantized-elsewhere", "dequantized before the optimization_barrier"),
        (before_a_name, "dequantized-elsewhere", "dequantized before the name"),
    ],
)
def test_what_no_region_has_is_counted_and_raises(fn: Callable[..., jax.Array], rule: str, reason: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xla_fp8.FallbackWarning)
        report = xla_fp8.explain(fn)(X8, W8)
        assert [(entry.rule, entry.is_fp8) for entry in report.refused] == [(rule, True)]
        assert reason in report.refused[0].reason
        assert report.refused[0].advice
        assert report.rewritten == []
        with pytest.raises(xla_fp8.NotRewrittenError, match=reason):
            xla_fp8.jit(fn, strict=True)(X8, W8)
        assert_close(xla_fp8.jit(fn)(X8, W8), jax.jit(fn)(X8, W8))


def test_a_region_fed_from_outside_is_told_to_dequantize_inside() -> None:
    def fn(xs: jax.Array, w8: jax.Array) -> jax.Array:
        w = w8.astype(jnp.float32)
        return lax.map(lambda x8: conv(x8.astype(jnp.float32), w), xs)

    (entry,) = xla_fp8.explain(fn)(jnp.stack([X8] * 2), W8).refused_fp8
    assert entry.rule == "operand-not-fp8"
    assert "in the same body (of a scan" in entry.advice


def test_what_was_never_fp8_is_no_loss_in_any_body() -> None:
    def fn(x8: jax.Array, w8: jax.Array, a: jax.Array) -> Any:
        y = lax.scan(lambda c, _: (c @ c, None), a, None, length=2)[0]
        return wide_layer(x8, w8), lax.composite(lambda a: a @ a, "tests.square")(y)

    a = jnp.eye(3)
    report = xla_fp8.explain(fn)(X8, W8, a)
    assert [entry.is_fp8 for entry in report.refused] == [False, False]
    assert_close(xla_fp8.jit(fn, strict=True)(X8, W8, a), jax.jit(fn)(X8, W8, a))


def test_a_function_that_needs_values_raises() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        return wide_layer(x8, w8) if x8.astype(jnp.float32).max() > 0 else w8

    with pytest.raises(xla_fp8.NotRewrittenError, match=r"needs the value of x8, .*test_strict\.py:\d+: return wide"):
        xla_fp8.rewrite(fn, strict=True)(X8, W8)


def test_batching_that_undoes_a_rewrite_raises_and_is_told() -> None:
    """The scale is another one for each example, which a graph cannot say."""
    args = (jnp.stack([X8] * 3), W8, jnp.arange(3.0))
    axes = (0, None, 0)
    for make in (xla_fp8.jit, xla_fp8.rewrite):
        with pytest.raises(xla_fp8.NotRewrittenError, match=r"programs\.py:\d+: .* scales by a vector"):
            jax.vmap(make(wide_layer, strict=True), axes)(*args)
        with pytest.raises(xla_fp8.NotRewrittenError, match="scales by a vector"):
            jax.jit(jax.vmap(make(wide_layer, strict=True), axes)).lower(*args)
        reports: list[Report] = []
        got = jax.vmap(make(wide_layer, report=reports.append), axes)(*args)
        assert_close(got, jax.vmap(wide_layer, axes)(*args))
        assert [(len(r.rewritten), [e.rule for e in r.refused]) for r in reports] == [
            (1, []),
            (0, ["scale-not-scalar"]),
        ]


def test_batching_that_keeps_a_rewrite_passes_and_is_told() -> None:
    reports: list[Report] = []
    args = (jnp.stack([X8] * 3), W8)
    fast = xla_fp8.jit(wide_layer, strict=True, report=reports.append)
    for _ in range(2):
        assert_close(jax.vmap(fast, (0, None))(*args), jax.vmap(wide_layer, (0, None))(*args))
    assert [len(report.rewritten) for report in reports] == [1, 1]


def test_the_printed_report_has_the_batched_region(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XLA_FP8_REPORT", "1")
    jax.vmap(xla_fp8.jit(wide_layer), (0, None, 0))(jnp.stack([X8] * 3), W8, jnp.arange(3.0))
    printed = capsys.readouterr().err
    assert printed.count("xla_fp8: wide_layer\n") == 1
    assert printed.count("xla_fp8: wide_layer, after a transformation\n") == 1
    assert "0 rewritten, 1 refused" in printed


def test_backward_convolutions_of_a_custom_vjp_raise_and_are_told() -> None:
    @jax.custom_vjp
    def layer(x8: jax.Array, w: jax.Array) -> jax.Array:
        return wide_layer(x8, quantize(w, 1.0))

    def backward(saved: Any, g: jax.Array) -> Any:
        x, w = (tensor.astype(jnp.float32) for tensor in saved)
        _, pull = jax.vjp(conv, x, w)
        return None, pull(quantize(g, 1.0).astype(jnp.float32))[1]

    layer.defvjp(lambda x8, w: (layer(x8, w), (x8, quantize(w, 1.0))), backward)

    def loss(w: jax.Array, x8: jax.Array) -> jax.Array:
        return layer(x8, w).mean()

    args = (W8.astype(jnp.float32), X8)
    assert_close(xla_fp8.jit(loss, strict=True)(*args), jax.jit(loss)(*args))
    reports: list[Report] = []
    assert_close(jax.grad(xla_fp8.jit(loss, report=reports.append))(*args), jax.grad(loss)(*args))
    told = [entry.rule for report in reports[1:] for entry in report.refused_fp8]
    assert told == ["filter-gradient"]
    with pytest.raises(xla_fp8.NotRewrittenError, match="filter gradient"):
        jax.grad(xla_fp8.jit(loss, strict=True))(*args)
    with pytest.raises(xla_fp8.NotRewrittenError, match="filter gradient"):
        xla_fp8.jit(jax.grad(loss), strict=True)(*args)


def test_the_weight_gradient_of_a_dot_raises_as_a_filter_gradient_does() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(xla_fp8.fp8_dot(x, w) ** 2)

    w, x = jnp.ones((32, 16)), jnp.ones((64, 32))
    assert_close(xla_fp8.jit(loss, strict=True)(w, x), jax.jit(loss)(w, x))
    for step in (jax.grad(xla_fp8.jit(loss, strict=True)), xla_fp8.jit(jax.grad(loss), strict=True)):
        with pytest.raises(xla_fp8.NotRewrittenError, match="as the gradient of weights does"):
            step(w, x)


def batched_by_hand() -> Callable[..., jax.Array]:
    @jax.custom_batching.custom_vmap
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        return wide_layer(x8, w8)

    @fn.def_vmap
    def rule(size: int, batched: Any, x8: jax.Array, w8: jax.Array) -> tuple[jax.Array, bool]:
        assert batched == [True, False]
        return wide_layer(x8.reshape(-1, *x8.shape[2:]), w8).reshape(size, *x8.shape[1:4], -1), True

    return lambda x8, w8: fn(x8, w8) + 1


def test_custom_vmap_is_rewritten_inside_and_so_is_its_rule() -> None:
    fn = batched_by_hand()
    xs = jnp.stack([X8] * 3)
    for make in (xla_fp8.jit, xla_fp8.rewrite):
        fast = make(fn, strict=True)
        assert len(fast.report(X8, W8).rewritten) == 1
        assert_close(fast(X8, W8), wide_layer(X8, W8) + 1)
        over = jax.vmap(fast, (0, None))
        assert_close(over(xs, W8), jax.vmap(fn, (0, None))(xs, W8))
        assert jax.jit(over).lower(xs, W8).as_text().count("call @xla_fp8_region") == 1


def test_sequential_vmap_is_rewritten() -> None:
    xs = jnp.stack([X8] * 3)
    fn = jax.custom_batching.sequential_vmap(wide_layer)
    over = jax.vmap(xla_fp8.jit(fn, strict=True), (0, None))
    assert_close(over(xs, W8), jax.vmap(fn, (0, None))(xs, W8))
    assert "call @xla_fp8_region" in jax.jit(over).lower(xs, W8).as_text()


def test_jvp_of_a_custom_vmap() -> None:
    @jax.custom_batching.custom_vmap
    def fn(scale: jax.Array) -> jax.Array:
        return wide_layer(X8, W8, scale)

    @fn.def_vmap
    def rule(size: int, batched: Any, scales: jax.Array) -> tuple[jax.Array, bool]:
        return jax.vmap(lambda s: wide_layer(X8, W8, s))(scales), True

    scales = jnp.arange(3.0)
    for transform in (
        lambda f: jax.jvp(f, (scales[1],), (scales[2],)),
        lambda f: jax.vmap(lambda s: jax.jvp(f, (s,), (s,)))(scales),
        lambda f: jax.jvp(jax.vmap(f), (scales,), (scales,)),
    ):
        assert_close(transform(xla_fp8.rewrite(fn)), transform(fn))
