"""fused-dot-rewriter: dots as graphs keep their numbers, whatever their form; what becomes none stays as it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.same_numbers import assert_same_numbers
from xla_fp8 import hlo, passes
from xla_fp8.backends import cudnn, reference
from xla_fp8.backends.executable import Executable
from xla_fp8.backends.fastest import ChainBackend
from xla_fp8.backends.protocol import No
from xla_fp8.graph import Graph
from xla_fp8.hlo import HloModule, Shape, Window
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.passes import PipelineOptions
from xla_fp8.passes.fused_dot_rewriter import DOT_LABELS
from xla_fp8.report import Report
from xla_fp8.target import GraphCall, Target

E4M3, E5M2, BF16, F32 = jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.bfloat16, jnp.float32
Array = jax.Array
SCALE = jax.ShapeDtypeStruct((), F32)
H200 = Target.parse("h200")
EACH = PipelineOptions(verify_each=True)


def f8(*shape: int, dtype: Any = E4M3) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def module_of(function: Callable[..., Any], *arguments: Any) -> HloModule:
    return hlo.parse(jax.jit(function, keep_unused=True).lower(*arguments).as_text("hlo"))


def checked(
    function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct, working: str = "f32"
) -> tuple[HloModule, Report]:
    """Rewrites, and checks that the numbers stay."""
    module = module_of(function, *arguments)
    report = passes.run(module, None, H200, dialect="extended", options=EACH)
    assert_same_numbers(module, function, arguments, working=working)
    return module, report


def ops(report: Report) -> list[str]:
    """The steps of each graph, amax last."""
    return [",".join(node.op for node in Graph.parse(entry.graph or "")) for entry in report.rewritten]


def wide(x: Array, scale: Array, dtype: Any) -> Array:
    return x.astype(dtype) * scale.astype(dtype)


def quantized(y: Array, scale: Array) -> Array:
    return jnp.clip(y / scale.astype(y.dtype), -448, 448).astype(E4M3)


ROWS = {2: (96,), 3: (2, 48), 4: (2, 6, 8), 5: (2, 2, 4, 6)}


@pytest.mark.parametrize(
    ("rank", "order", "working"),
    [(2, "kn", "f32"), (2, "nk", "bf16"), (3, "kn", "bf16"), (3, "nk", "f32"), (4, "kn", "f32"), (5, "nk", "bf16")],
)
def test_a_layer_of_any_rank_is_one_call(rank: int, order: str, working: str) -> None:
    dtype = numpy_dtype(working)

    def layer(x: Array, w: Array, bias: Array, residual: Array, a: Array, b: Array, c: Array) -> tuple[Array, Array]:
        summed = ((rank - 1,), (0 if order == "kn" else 1,)), ((), ())
        y = jax.lax.dot_general(wide(x, a, dtype), wide(w, b, dtype), summed)
        y = jax.nn.gelu(y + bias) + residual
        return quantized(y, c), jnp.max(jnp.abs(y))

    rows, weights = ROWS[rank], f8(32, 48) if order == "kn" else f8(48, 32)
    bias, residual = jax.ShapeDtypeStruct((48,), dtype), jax.ShapeDtypeStruct((*rows, 48), dtype)
    arguments = f8(*rows, 32), weights, bias, residual, SCALE, SCALE, SCALE
    module, report = checked(layer, *arguments, working=working)
    assert ops(report) == ["conv,scale,scale,bias,gelu_tanh,add,invscale,amax"]
    wide_or_moved = [i.opcode for i in module.entry if i.opcode in ("transpose", "convert", "dot") and i.shape.rank > 1]
    assert wide_or_moved == (["transpose"] if order == "kn" else [])


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.silu, jax.nn.sigmoid])
def test_scales_by_column_and_fp8_residual(act: Callable[[Array], Array]) -> None:
    def layer(x: Array, w: Array, by_column: Array, residual: Array, a: Array, b: Array) -> Array:
        y = wide(x, a, F32) @ (w.astype(F32) * by_column) + wide(residual, b, F32)
        return quantized(act(y), a)

    vector = jax.ShapeDtypeStruct((48,), F32)
    _, report = checked(layer, f8(3, 32, 32), f8(32, 48), vector, f8(3, 32, 48), SCALE, SCALE)
    assert ops(report) == [f"conv,scale,channel_scale,add_scaled,{act.__name__},invscale"]


@pytest.mark.parametrize("permutation", [(0, 1, 2), (0, 2, 1), (2, 0, 1)])
def test_moves_behind_a_dot_do_not_end_its_graph(permutation: tuple[int, ...]) -> None:
    """A layer that flattens its input, and heads that are split off, with an amax and a residual behind the moves."""

    def layer(x: Array, w: Array, bias: Array, residual: Array, a: Array) -> tuple[Array, Array]:
        y = (x.astype(F32).reshape(96, 32) @ w.astype(F32) + bias).reshape(2, 48, 48)
        y = jax.nn.relu(y.transpose(permutation) + residual)
        return quantized(y, a), jnp.max(y)

    sizes = tuple((2, 48, 48)[d] for d in permutation)
    arguments = f8(2, 48, 32), f8(32, 48), jax.ShapeDtypeStruct((48,), F32), jax.ShapeDtypeStruct(sizes, F32), SCALE
    module, report = checked(layer, *arguments)
    assert ops(report) == ["conv,bias,add,relu,invscale,amax"]
    assert not any(i.opcode == "dot" for i in module.entry)


def test_a_dot_of_one_layer_feeds_the_next_in_fp8() -> None:
    def network(x: Array, w1: Array, w2: Array, a: Array) -> Array:
        hidden = quantized(jax.nn.gelu(wide(x, a, F32) @ w1.astype(F32)), a)
        return (wide(hidden, a, F32) @ w2.astype(F32)).astype(BF16)

    module, report = checked(network, f8(2, 48, 32), f8(32, 64), f8(64, 32), SCALE)
    assert ops(report) == ["conv,scale,gelu_tanh,invscale", "conv,scale"]
    assert all(shape.is_fp8 or shape.element_type == "u8" for i in list(module.entry)[:8] for shape in _arrays(i.shape))


def _arrays(shape: Shape) -> list[Shape]:
    return [s for s in (shape.tuple_shapes if shape.is_tuple else (shape,)) if s.rank]


def test_what_a_backend_refuses_is_left_exactly_as_it_was() -> None:
    def layer(x: Array, w: Array, a: Array) -> Array:
        return quantized((x.astype(F32) @ w.astype(F32)).reshape(2, 48, 48), a)

    module = module_of(layer, f8(96, 32), f8(32, 48), SCALE)
    before = hlo.to_text(module)
    asked: list[GraphCall] = []

    def supports(call: GraphCall) -> No:
        asked.append(call)
        return No("not today", advice="come back")

    target = dataclasses.replace(H200, supports=supports)
    report = passes.run(module, "fused-dot-rewriter", target, dialect="extended")
    assert not report.changed
    assert hlo.to_text(module) == before
    assert [(e.op, e.rule, e.reason, e.advice) for e in report.refused] == [
        ("dot", "backend", "not today", "come back")
    ]
    assert [call.is_dot for call in asked] == [True]

    # gemm-rewriter, behind it, finds the chain unharmed; of the dot the report has its word.
    behind = passes.run(
        module, "call-inliner,simplify,fused-dot-rewriter,gemm-rewriter,dce", target, dialect="extended"
    )
    assert [(e.graph or "")[:18] for e in behind.rewritten] == ["[f32]matmul()"]
    assert not behind.refused


def test_a_longer_graph_that_a_backend_refuses_leaves_the_shorter_one() -> None:
    def layer(x: Array, w: Array, a: Array) -> Array:
        return quantized((x.astype(F32) @ w.astype(F32)).reshape(2, 48, 48), a)

    def supports(call: GraphCall) -> Any:
        return No("ends in FP8") if call.output_shapes[0].is_fp8 else ChainBackend().supports(call, H200)

    module = module_of(layer, f8(96, 32), f8(32, 48), SCALE)
    passes.run(module, None, dataclasses.replace(H200, supports=supports), dialect="extended", options=EACH)
    x, w = (np.random.default_rng(i).normal(size=s).astype(E4M3) for i, s in enumerate([(96, 32), (32, 48)]))
    (found,) = Executable(module, "cpu")(x, w, np.float32(0.5))
    np.testing.assert_array_equal(found, jax.jit(layer)(x, w, 0.5))


@pytest.mark.parametrize(("target", "dialect"), [("h200", "xla"), ("b200", "extended"), ("l40s", "extended")])
def test_only_for_hopper_and_this_packages_backends(target: str, dialect: str) -> None:
    module = module_of(lambda x, w: x.astype(F32) @ w.astype(F32), f8(64, 32), f8(32, 48))
    report = passes.run(module, None, target, dialect=dialect)
    assert not report.changed
    assert [entry.rule for entry in report.refused] == ["dot"]


def test_fuel() -> None:
    def two(x: Array, w: Array) -> tuple[Array, Array]:
        return x.astype(F32) @ w.astype(F32), x.astype(F32) @ jnp.roll(w, 1).astype(F32)

    module = module_of(two, f8(64, 32), f8(32, 48))
    report = passes.run(module, "fused-dot-rewriter", H200, dialect="extended", options=PipelineOptions(fuel=1))
    assert len(report.rewritten) == 1
    (entry,) = report.refused
    assert (entry.rule, entry.advice) == ("fuel", "raise --fuel")
    assert entry.reason.endswith(" (dot) was left when the fuel ran out")


# -------------------------------------------------------------------- under jit


def normal(*shape: int, dtype: Any = F32) -> Array:
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), dtype)


def dense(x: Array, w: Array) -> Array:
    return jax.nn.relu(x.astype(F32) @ w.astype(F32)).astype(BF16)


def test_strict_takes_a_dot_and_the_report_has_its_line() -> None:
    x, w = normal(64, 32, dtype=E4M3), normal(32, 48, dtype=E4M3)
    fn = xla_fp8.jit(dense, strict=True)
    np.testing.assert_array_equal(fn(x, w), jax.jit(dense)(x, w))
    (entry,) = xla_fp8.explain(dense)(x, w).rewritten
    line = dense.__code__.co_firstlineno + 1
    assert (entry.op, entry.source) == ("dot", f"{__file__}:{line}")


@pytest.mark.parametrize(
    ("axes", "x_shape", "w_shape", "is_rewritten"),
    [
        ((0, None), (3, 32, 32), (32, 48), True),
        ((1, None), (32, 3, 32), (32, 48), True),
        ((0, 0), (3, 64, 32), (3, 32, 48), False),
    ],
)
def test_vmap(axes: Any, x_shape: tuple[int, ...], w_shape: tuple[int, ...], is_rewritten: bool) -> None:
    x, w = normal(*x_shape, dtype=E4M3), normal(*w_shape, dtype=E4M3)
    mapped = jax.vmap(dense, axes)
    assert bool(xla_fp8.explain(mapped)(x, w).rewritten) is is_rewritten
    found, wanted = xla_fp8.jit(mapped)(x, w), jax.jit(mapped)(x, w)
    np.testing.assert_allclose(found.astype(F32), wanted.astype(F32), rtol=1e-2)


def test_a_training_step_has_two_of_its_three_dots_in_graphs() -> None:
    """The gradient of the weights sums over rows, which are the last dimension of neither operand."""

    def loss(x: Array, w: Array) -> Array:
        return jnp.sum(xla_fp8.fp8_dot(x, w, (((2,), (0,)), ((), ()))) ** 2)

    x, w = normal(2, 32, 32), normal(32, 48)
    step = jax.grad(loss, (0, 1))
    report = xla_fp8.explain(step)(x, w)
    assert (len(report.rewritten), [entry.rule for entry in report.refused]) == (2, ["dot"])
    for found, wanted in zip(xla_fp8.jit(step)(x, w), jax.jit(step)(x, w), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(wanted))))


@pytest.mark.parametrize("rows", [(512,), (4, 128)])
def test_lowered_for_a_gpu_a_layer_is_one_kernel(rows: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")

    def layer(x: Array, w: Array, bias: Array, a: Array) -> tuple[Array, Array]:
        y = jax.nn.gelu(wide(x, a, BF16) @ w.astype(BF16) + bias)
        return quantized(y, a), jnp.max(jnp.abs(y))

    arguments = f8(*rows, 256), f8(256, 512), jax.ShapeDtypeStruct((512,), BF16), SCALE
    traced = jax.jit(xla_fp8.rewrite(layer, target="h200")).trace(*arguments)
    text = str(traced.lower(lowering_platforms=("cuda",)).as_text())
    assert text.count("@mosaic_gpu_v2") == 1
    assert "stablehlo.dot_general" not in text


# -------------------------------------------------------------------- backends


def dot_call(precision: tuple[str, ...] = ()) -> GraphCall:
    graph = Graph.parse("1:[f32]conv();2:[f32]scale(1);3:[bf16]bias(2);")
    shapes = ("f8e4m3fn[64,32]", "f8e4m3fn[48,32]", "f32[]", "f32[48]")
    operands, outputs = tuple(map(Shape.parse, shapes)), (Shape.parse("bf16[64,48]"),)
    return GraphCall(graph, operands, outputs, Window(()), DOT_LABELS, 1, precision)


def test_the_candidate_that_is_left_to_xla_is_a_dot() -> None:
    backend, call = ChainBackend(), dot_call()
    (config,) = backend.configs(call, H200)
    operands = [jax.ShapeDtypeStruct(s.dimensions, numpy_dtype(s.element_type)) for s in call.operand_shapes]
    text = jax.jit(backend.lower(call, config)).lower(*operands).as_text()
    assert "stablehlo.dot_general" in text
    assert "stablehlo.convolution" not in text
    assert "optimization_barrier" not in text
    assert not backend.configs(dot_call(("highest", "highest")), H200)


def test_cudnn_takes_no_dot_and_sends_none_to_bf16() -> None:
    for answer in (cudnn.support(dot_call(), H200), cudnn.support_by_rules(dot_call(), H200)):
        assert (answer.ok, answer.rule) == (False, "")


def test_the_reference_of_a_dot_is_a_product() -> None:
    x, w, bias = normal(64, 32, dtype=E4M3), normal(48, 32, dtype=E4M3), normal(48)
    (found,) = jax.jit(reference.implementation_of(dot_call()))(x, w, jnp.float32(0.5), bias)
    wanted = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T * 0.5 + np.asarray(bias, np.float64)
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=2**-8)
