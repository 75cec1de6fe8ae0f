"""dynamic-quantize-rewriter: what it rewrites keeps every bit, in every form, type and with special values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import xla_fp8
from tests.sampling import sampled
from tests.xla_options import QUICKLY
from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.backends.executable import Executable
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.hlo import HloModule
from xla_fp8.passes import PipelineOptions
from xla_fp8.quantize_call import QUANTIZE_TARGET, QuantizeCall, QuantizeCallError, quantize_call_of
from xla_fp8.report import Report

PASSES = "call-inliner,simplify,dynamic-quantize-rewriter,dce"
FIXTURES = Path(__file__).resolve().parents[2] / "hlo_fixtures" / "dynamic-quantize-rewriter"
Array = jax.Array
F32 = jnp.float32
SCALE = jax.ShapeDtypeStruct((), F32)

# ---------------------------------------------------------------- every choice of a quantization


def amax_abs(x: Array) -> Array:
    return jnp.max(jnp.abs(x)).astype(F32)


def amax_of_wide(x: Array) -> Array:
    return jnp.max(jnp.abs(x.astype(F32)))


def amax_of_range(x: Array) -> Array:
    return jnp.maximum(jnp.max(x), -jnp.min(x)).astype(F32)


def floor_maximum(amax: Array) -> Array:
    return jnp.maximum(amax, 1e-12)


def floor_where(amax: Array) -> Array:
    return jnp.where(amax > 0, amax, 1.0)


def no_floor(amax: Array) -> Array:
    return amax


def divided(x: Array, amax: Array, largest: float) -> tuple[Array, Array]:
    scale = amax / largest
    return x / scale, scale


def times_reciprocal(x: Array, amax: Array, largest: float) -> tuple[Array, Array]:
    scale = amax / largest
    return x * (1 / scale), scale


def times_multiplier(x: Array, amax: Array, largest: float) -> tuple[Array, Array]:
    multiplier = largest / amax
    return x * multiplier, 1 / multiplier


def clip(y: Array, largest: float) -> Array:
    return jnp.clip(y, -largest, largest)


def min_of_max(y: Array, largest: float) -> Array:
    return jnp.minimum(jnp.maximum(y, -largest), largest)


def max_of_min(y: Array, largest: float) -> Array:
    return jnp.maximum(jnp.minimum(y, largest), -largest)


AMAXES = (amax_abs, amax_of_wide, amax_of_range)
FLOORS = (floor_maximum, floor_where, no_floor)
SCALINGS = (divided, times_reciprocal, times_multiplier)
CLAMPS = (clip, min_of_max, max_of_min)
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
FORMATS = (jnp.float8_e4m3fn, jnp.float8_e5m2)


def quantization(
    amax: Callable[[Array], Array],
    floor: Callable[[Array], Array],
    scaling: Callable[[Array, Array, float], tuple[Array, Array]],
    clamp: Callable[[Array, float], Array],
    format: Any,
    x: Array,
) -> tuple[Array, Array]:
    largest = float(jnp.finfo(format).max)
    scaled, scale = scaling(x.astype(F32), floor(amax(x)), largest)
    return clamp(scaled, largest).astype(format), scale


# ---------------------------------------------------------------- comparing


def lowered(function: Callable[..., Any], *arguments: Any) -> str:
    return jax.jit(function, keep_unused=True).lower(*arguments).as_text("hlo")


def rewritten(text: str, pipeline: str = PASSES) -> tuple[HloModule, Report]:
    """Rewrites, asks StableHLO's verifier, and checks that a second run changes nothing."""
    module = hlo.parse(text)
    report = passes.run(module, pipeline, "h200", options=PipelineOptions(verify_each=True))
    after = hlo.to_text(module)
    _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(after))
    again = hlo.parse(after)
    assert not passes.run(again, pipeline, "h200").changed
    assert hlo.to_text(again) == after
    return module, report


def calls_of(module: HloModule) -> list[QuantizeCall]:
    found = [quantize_call_of(i) for computation in module.computations for i in computation]
    return [call for call in found if call is not None]


AS_WRITTEN = {"xla_disable_hlo_passes": "algsimp", "xla_allow_excess_precision": False}
"""XLA's simplifier makes x * (1 / s) of x / s where s divides several tensors, so that what a program computes depends
on what stands beside it, with the pass or without. With these flags it computes what it says."""


def assert_same_bits(
    original: HloModule, module: HloModule, *inputs: list[np.ndarray[Any, Any]], flags: dict[str, Any] = AS_WRITTEN
) -> None:
    """Runs both on each of `inputs`."""
    before, after = Executable(original, "cpu", flags), Executable(module, "cpu", flags)
    for arrays in inputs:
        for one, other in zip(before(*arrays), after(*arrays), strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            np.testing.assert_array_equal(_bits(one), _bits(other))


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def inputs_of_kind(kind: str, shapes: list[Any]) -> list[np.ndarray[Any, Any]]:
    """Arrays of normal numbers, with what `kind` says; scalars are 0.7."""
    rng = np.random.default_rng(len(kind))
    arrays = []
    factor = {"zeros": 0, "subnormal": 1e-39, "large": 1e30}.get(kind, 1)
    for shape in shapes:
        if np.prod(shape.shape) == 1:
            arrays.append(np.full(shape.shape, 0.7, shape.dtype))
            continue
        values = rng.normal(size=shape.shape) * 3
        if kind in ("nan", "inf", "-inf"):
            values.flat[1] = float(kind)
        largest = float(jnp.finfo(shape.dtype).max)
        values = np.where(np.isinf(values), values, np.clip(values * factor, -largest, largest))
        arrays.append(np.asarray(jnp.asarray(values, shape.dtype)))
    return arrays


KINDS = ("normal", "zeros", "nan", "inf", "-inf", "subnormal", "large")


def check(function: Callable[..., Any], *arguments: Any, simplified: bool = True) -> tuple[HloModule, Report]:
    """Rewrites, and compares on inputs of every kind; with `simplified` also as XLA compiles by default."""
    text = lowered(function, *arguments)
    module, report = rewritten(text)
    inputs = [inputs_of_kind(kind, list(arguments)) for kind in KINDS]
    if simplified:  # then LLVM optimizes what is compiled as by default
        assert_same_bits(hlo.parse(text), module, *inputs, flags=AS_WRITTEN | QUICKLY)
        assert_same_bits(hlo.parse(text), module, *inputs, flags={})
    else:
        assert_same_bits(hlo.parse(text), module, *inputs)
    return module, report


@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("floor", FLOORS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_arithmetic_keeps_its_bits(amax: Any, floor: Any, scaling: Any) -> None:
    function = functools.partial(quantization, amax, floor, scaling, clip, jnp.float8_e4m3fn)
    module, report = check(function, jax.ShapeDtypeStruct((24, 16), F32))
    assert [entry.rule for entry in report.rewritten] == [""]
    (call,) = calls_of(module)
    assert not call.scalars, "the amax is made outside"
    opcodes = {instruction.opcode for instruction in module.entry}
    assert opcodes == {"parameter", "custom-call", "get-tuple-element", "tuple"}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clamp", CLAMPS)
def test_every_type_and_clamp_keeps_its_bits(clamp: Any, dtype: Any, format: Any) -> None:
    function = functools.partial(quantization, amax_abs, floor_maximum, divided, clamp, format)
    module, _ = check(function, jax.ShapeDtypeStruct((24, 16), dtype))
    (call,) = calls_of(module)
    assert call.nodes[0].type == {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]


@pytest.mark.parametrize("between", [jnp.bfloat16, jnp.float16, F32], ids=lambda dtype: jnp.dtype(dtype).name)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_type_between_clamp_and_cast_keeps_its_bits(format: Any, dtype: Any, between: Any) -> None:
    def program(x: Array) -> Any:
        largest = float(jnp.finfo(format).max)
        scale = jnp.max(jnp.abs(x)) / jnp.asarray(largest, dtype)
        return jnp.clip(x / (scale / 2), -largest, largest).astype(between).astype(format)

    x = jax.ShapeDtypeStruct((24, 16), dtype)
    text = lowered(program, x)
    module, report = rewritten(text)
    assert len(report.rewritten) == 1
    # Without NaN, whose sign a convert may change.
    assert_same_bits(hlo.parse(text), module, inputs_of_kind("normal", [x]), inputs_of_kind("large", [x]))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_arithmetic_in_a_narrow_type_keeps_its_bits(dtype: Any) -> None:
    def program(x: Array) -> Any:
        scale = jnp.maximum(jnp.max(jnp.abs(x)), jnp.asarray(1e-4, dtype)) / jnp.asarray(448, dtype)
        return jnp.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn), scale

    module, _ = check(program, jax.ShapeDtypeStruct((24, 16), dtype))
    assert {node.type for node in calls_of(module)[0].nodes} == {"f16" if dtype == jnp.float16 else "bf16", "f8e4m3fn"}


@pytest.mark.parametrize("shape", [(5,), (2, 7), (3, 5, 7), (2, 3, 4, 5)], ids=str)
def test_every_rank(shape: tuple[int, ...]) -> None:
    def program(x: Array) -> Any:
        q, scale = quantization(amax_abs, floor_maximum, times_multiplier, clip, jnp.float8_e5m2, x)
        return (q, jnp.swapaxes(q, -1, -2), scale) if x.ndim > 1 else (q, scale)

    module, _ = check(program, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    stores = [node.op for node in calls_of(module)[0].results]
    assert stores == ["store", *(["store_transposed"] if len(shape) > 1 else []), "result"]


def test_flax_s_own() -> None:
    fp8_ops = pytest.importorskip("flax.linen").fp8_ops
    x, one, history = (jax.ShapeDtypeStruct(s, d) for s, d in (((24, 16), jnp.bfloat16), ((1,), F32), ((8,), F32)))
    for compute in (jnp.bfloat16, F32):
        for function in (fp8_ops.in_q_fwd, fp8_ops.in_qdq_fwd):
            module, _ = check(functools.partial(function, compute, jnp.float8_e4m3fn), x, one, history)
            assert [r.op for r in calls_of(module)[0].results] == ["store", "result"], "the amax comes with the cast"


# ---------------------------------------------------------------- random programs


@pytest.mark.parametrize("seed", sampled(range(40), 10))
def test_random_programs_keep_their_bits(seed: int) -> None:
    """Several quantizations in one program, of each other's results and of shared tensors, with shared scales."""
    rng = np.random.default_rng(seed)

    def pick(choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    dtype, plan = pick(DTYPES), []
    for _ in range(rng.integers(1, 4)):
        parts = [pick(c) for c in (AMAXES, FLOORS, SCALINGS, CLAMPS, FORMATS)]
        plan.append((parts, pick(("own", "given", "last")), rng.random(6) < 0.5))

    def program(x: Array, given: Array) -> Any:
        results: list[Array] = []
        scale = given
        for (amax, floor, scaling, clamp, format), source, (is_used, is_t, is_next, has_amax, is_wide, is_kept) in plan:
            largest = float(jnp.finfo(format).max)
            if source == "own":
                scaled, scale = scaling(x.astype(F32), floor(amax(x)), largest)
            else:
                scaled = x.astype(F32) / (given if source == "given" else scale)
            if is_wide:
                scaled = scaled.astype(jnp.bfloat16)
            q = clamp(scaled, largest).astype(format)
            results.append(q.T if is_t else q)
            results += [q, scale] if is_used else []
            results += [amax_abs(x)] if has_amax else []
            results += [-scaled] if is_kept else []
            x = (q.astype(F32) * scale).astype(dtype) if is_next else x
        return results

    module, _ = check(program, jax.ShapeDtypeStruct((24, 16), dtype), SCALE, simplified=False)
    assert len(calls_of(module)) >= 1


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.hlo")), ids=lambda path: path.stem)
def test_fixtures_keep_their_bits(path: Path) -> None:
    text = path.read_text()
    original = hlo.parse(text)
    if any(p.shape.is_dynamic for p in original.entry.parameters) or "replica_count" in text:
        pytest.skip("does not run on one CPU")
    # The graph of a convolution sums in another order than the convolution: both sides have it.
    head = (
        "call-inliner,simplify,conv-canonicalizer,conv-rewriter,cudnn-fused-conv-rewriter,conv-restorer,gemm-rewriter"
    )
    passes.run(original, head, "h200")
    module, _ = rewritten(hlo.to_text(original))
    assert_same_bits(original, module, random_inputs([p.shape for p in original.entry.parameters]))


# ---------------------------------------------------------------- where it may go wrong


def test_a_result_that_is_the_whole_module() -> None:
    """The cast is the root; then its transpose is."""

    def cast(x: Array) -> Array:
        return quantization(amax_abs, floor_maximum, divided, clip, jnp.float8_e4m3fn, x)[0]

    for function, op in ((cast, "store"), (lambda x: cast(x).T, "store_transposed")):
        module, _ = check(function, jax.ShapeDtypeStruct((24, 16), F32))
        assert [node.op for node in calls_of(module)[0].results] == [op]


def test_scales_of_each_other() -> None:
    """A scale that two amaxes share depends on another call's, which must not depend on it in turn."""

    def program(x: Array, y: Array) -> Any:
        scale = jnp.maximum(amax_abs(x), amax_abs(y)) / 448
        return [jnp.clip(z / scale, -448, 448).astype(jnp.float8_e4m3fn) for z in (x, y)] + [scale]

    module, _ = check(program, *[jax.ShapeDtypeStruct((24, 16), F32)] * 2)
    assert len(calls_of(module)) == 2


def test_what_is_left_without_fuel_says_so() -> None:
    module = hlo.parse((FIXTURES / "fuel.hlo").read_text())
    report = passes.run(module, "dynamic-quantize-rewriter", "h200", options=PipelineOptions(fuel=1))
    assert len(report.rewritten) == 1
    (entry,) = report.refused
    assert (entry.rule, entry.advice) == ("fuel", "raise --fuel")
    assert entry.reason.endswith(" (convert) was left when the fuel ran out")


def test_under_jit_it_is_the_reference_s() -> None:
    pipeline = (
        "call-inliner,simplify,conv-canonicalizer,conv-rewriter,cudnn-fused-conv-rewriter,conv-restorer,"
        "dynamic-quantize-rewriter,dce"
    )

    def layer(x: Array, w: Array, scale: Array) -> Any:
        labels = ("NHWC", "OHWI", "NHWC")
        y = lax.conv_general_dilated(x.astype(F32) * scale, w.astype(F32), (1, 1), "SAME", dimension_numbers=labels)
        q, y_scale = quantization(amax_abs, floor_maximum, divided, clip, jnp.float8_e4m3fn, y)
        return q, y_scale

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 8, 8, 16)), jnp.float8_e4m3fn)
    w = jnp.asarray(rng.normal(size=(32, 3, 3, 16)), jnp.float8_e4m3fn)
    arguments = x, w, jnp.float32(0.5)
    function = xla_fp8.jit(layer, passes=pipeline)
    graphs = [entry.graph for entry in function.report(*arguments).rewritten]
    assert len(graphs) == 2, "the convolution with its amax, and the cast"
    assert str(graphs[1]).startswith("1:[f32]x();2:[f32]scalar();")
    without = xla_fp8.jit(layer, passes=pipeline.replace("dynamic-quantize-rewriter,", ""))
    for one, other in zip(function(*arguments), without(*arguments), strict=True):
        np.testing.assert_array_equal(_bits(np.asarray(one)), _bits(np.asarray(other)))


# ---------------------------------------------------------------- the call

GOOD = (
    "1:[bf16]x();2:[bf16]amax(1);3:[f32]convert(2);4:[f32]scalar();5:[f32]maximum(3,4);6:[f32]convert(1);"
    "7:[f32]divide(6,5);8:[f8e4m3fn]store(7);9:[f8e4m3fn]store_transposed(7);10:[f32]result(5);"
)


def test_a_string_is_read_as_it_is_written() -> None:
    call = QuantizeCall.parse(GOOD)
    assert str(call) == GOOD
    assert hash(call) == hash(QuantizeCall.parse(GOOD))
    assert [node.uid for node in call.scalars] == [4]
    shapes = call.result_shapes(hlo.Shape.array("bf16", (2, 3, 5)))
    assert [str(shape) for shape in shapes] == ["f8e4m3fn[2,3,5]{2,1,0}", "f8e4m3fn[2,5,3]{2,1,0}", "f32[]"]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("1:[bf16]x()", "1:[bf16]y()", "x is the first node"),
        ("2:[bf16]amax(1)", "2:[bf16]log(1)", "unknown op"),
        ("2:[bf16]amax(1)", "2:[bf16]amax(3)", "no node before"),
        ("2:[bf16]amax(1)", "2:[f32]amax(1)", "operands of types bf16"),
        ("2:[bf16]amax(1)", "2:[bf16]amax(1,1)", "takes 1 operand"),
        ("2:[bf16]amax(1)", "2:[bf16]amax( 1)", "operands of amax are uids"),
        ("2:[bf16]amax(1);", "2:[bf16]amax(1)", "offset 12"),
        ("4:[f32]scalar()", "5:[f32]scalar()", "expected uid 4"),
        ("4:[f32]scalar()", "4:[f64]scalar()", "type f64"),
        ("4:[f32]scalar()", "4:[f32]constant(1,2)", "one number"),
        ("6:[f32]convert(1)", "6:[f32]abs(1)", "a tensor goes through"),
        ("8:[f8e4m3fn]store(7)", "8:[f8e4m3fn]store(5)", "takes a tensor"),
        ("8:[f8e4m3fn]store(7)", "8:[f8e4m3fnuz]store(7)", "stores f8e4m3fn"),
        ("9:[f8e4m3fn]store_transposed(7)", "9:[f8e4m3fn]store_transposed(8)", "leaves the call"),
        (";8:[f8e4m3fn]store(7);9:[f8e4m3fn]store_transposed(7);10:", ";8:", "no node stores"),
    ],
)
def test_a_string_that_is_none_is_an_error_that_says_where(old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(QuantizeCallError, match=told):
        QuantizeCall.parse(GOOD.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("custom-call(x, s)", "custom-call(x)", "asks for a tensor of bf16, f32"),
        ("(f8e4m3fn[4,6], f8e4m3fn[6,4], f32[])", "(f8e4m3fn[4,6], f8e4m3fn[6,4])", "the string makes"),
        ("quantize_backend_config", "other_config", "no serialized_graph"),
    ],
)
def test_a_call_that_does_not_fit_its_string_is_an_error_that_names_it(old: str, new: str, told: str) -> None:
    config = QuantizeCall.parse(GOOD).backend_config
    call = f'custom-call(x, s), custom_call_target="{QUANTIZE_TARGET}", backend_config={config}'
    text = f"""HloModule m

ENTRY main {{
  x = bf16[4,6] parameter(0)
  s = f32[] parameter(1)
  ROOT q = (f8e4m3fn[4,6], f8e4m3fn[6,4], f32[]) {call}
}}
"""
    assert quantize_call_of(hlo.parse(text).entry.root) == QuantizeCall.parse(GOOD)
    with pytest.raises(QuantizeCallError, match=rf"%q: .*{told}"):
        quantize_call_of(hlo.parse(text.replace(old, new)).entry.root)


def test_every_op_of_the_table_is_one_of_the_reference_s() -> None:
    """Each scalar op, computed through a call, is HLO's on numbers that tell them apart."""
    from xla_fp8.backends import reference_quantize
    from xla_fp8.quantize_call import COMPARISONS, SCALAR_OPS

    unusual = {"convert", "bitcast_convert"}
    for op, count in SCALAR_OPS.items():
        if op in unusual:
            continue
        integers = op in ("and", "or", "xor", "not", "shift_left", "shift_right_logical")
        type_ = "u32" if integers else "f32"
        of = "pred" if op in (*COMPARISONS, "is_finite") else type_
        types = ["pred", type_, type_] if op == "select" else [type_] * count
        scalars = "".join(f"{i + 2}:[{t}]scalar();" for i, t in enumerate(types))
        uids = ",".join(str(i + 2) for i in range(count))
        at = count + 2
        call = QuantizeCall.parse(
            f"1:[f32]x();{scalars}{at}:[{of}]{op}({uids});{at + 1}:[f8e4m3fn]store(1);{at + 2}:[{of}]result({at});"
        )
        numbers = {"f32": [1.5, -2.25, 0.75], "u32": [6, 3, 1], "pred": [True, True, True]}
        arrays = [
            jnp.asarray(numbers[t][i], {"f32": jnp.float32, "u32": jnp.uint32, "pred": bool}[t])
            for i, t in enumerate(types)
        ]
        _, found = reference_quantize.run(call, [jnp.ones(3), *arrays])
        assert found == EXPECTED[op], op


EXPECTED: dict[str, Any] = {
    "negate": -1.5,
    "abs": 1.5,
    "floor": 1.0,
    "ceil": 2.0,
    "is_finite": True,
    "not": np.uint32(2**32 - 7),
    "add": -0.75,
    "subtract": 3.75,
    "multiply": -3.375,
    "divide": np.float32(1.5) / np.float32(-2.25),
    "maximum": 1.5,
    "minimum": -2.25,
    "and": 2,
    "or": 7,
    "xor": 5,
    "shift_left": 48,
    "shift_right_logical": 0,
    "eq": False,
    "ne": True,
    "lt": False,
    "le": False,
    "gt": True,
    "ge": True,
    "select": -2.25,
    "clamp": 0.75,
}
