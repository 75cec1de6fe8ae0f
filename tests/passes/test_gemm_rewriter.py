"""gemm-rewriter: what it fuses keeps its numbers in every order of operands; its calls are read as they are written."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.same_numbers import assert_same_numbers
from tests.sampling import sampled
from xla_fp8 import hlo, passes
from xla_fp8.backends.executable import Executable
from xla_fp8.hlo import HloModule
from xla_fp8.matmul import MATMUL_TARGET, MatmulCall, MatmulError, matmul_of
from xla_fp8.passes import PipelineOptions
from xla_fp8.report import Report

PASSES = "call-inliner,simplify,gemm-rewriter,dce"
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
Array = jax.Array
SCALE = jax.ShapeDtypeStruct((), jnp.float32)


def f8(*shape: int, dtype: Any = E4M3) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def rewritten(function: Callable[..., Any], *arguments: Any, target: str = "h200") -> tuple[HloModule, Report]:
    module = hlo.parse(jax.jit(function, keep_unused=True).lower(*arguments).as_text("hlo"))
    report = passes.run(module, PASSES, target, options=PipelineOptions(verify_each=True))
    return module, report


def calls_of(module: HloModule) -> list[MatmulCall]:
    found = [matmul_of(i) for computation in module.computations for i in computation]
    return [call for call in found if call is not None]


def checked(
    function: Callable[..., Any], *arguments: jax.ShapeDtypeStruct, seed: int = 0, working: str = "f32"
) -> Report:
    """Rewrites, and checks that the numbers stay; returns the report."""
    module, report = rewritten(function, *arguments)
    assert_same_numbers(module, function, arguments, seed=seed, working=working)
    return report


def dequantized(x: Array, scale: Array) -> Array:
    return x.astype(jnp.float32) * scale


def saturated(y: Array, dtype: Any = E4M3) -> Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(y, -largest, largest).astype(dtype)


@pytest.mark.parametrize("spec", ["mk,kn->mn", "mk,nk->mn", "km,kn->mn", "km,nk->mn", "mk,kn->nm"])
@pytest.mark.parametrize("sizes", [{"m": 32, "k": 16, "n": 48}, {"m": 5, "k": 7, "n": 3}], ids=["multiples", "padded"])
def test_every_order_of_operands(spec: str, sizes: dict[str, int]) -> None:
    lhs, rhs = (f8(*(sizes[d] for d in side)) for side in spec.partition("->")[0].split(","))
    report = checked(lambda x, w, a, b: jnp.einsum(spec, dequantized(x, a), dequantized(w, b)), lhs, rhs, SCALE, SCALE)
    assert [entry.graph for entry in report.rewritten] == ["[f32]matmul()"]


@pytest.mark.parametrize(
    "spec",
    [
        "bmk,bkn->bmn",
        "mbk,knb->bmn",
        "bhmk,bhnk->bhmn",
        "bmhk,bnhk->bhmn",
        "abk,kcd->abcd",
        "mhd,hdn->mn",
        "abk,bkn->ban",
    ],
)
def test_batches_and_several_dimensions_of_a_kind(spec: str) -> None:
    sizes = dict(zip("abcdhkmn", (3, 4, 5, 6, 2, 16, 7, 32), strict=True))
    lhs, rhs = (f8(*(sizes[d] for d in side)) for side in spec.partition("->")[0].split(","))
    report = checked(lambda x, w, a, b: jnp.einsum(spec, dequantized(x, a), dequantized(w, b)), lhs, rhs, SCALE, SCALE)
    assert len(report.rewritten) == 1


EPILOGUES: dict[str, tuple[str, Callable[[Array, Array, Array, Array], Any]]] = {
    "bias": ("[f32]matmul(bias)", lambda y, bias, c, s: y + bias.astype(jnp.float32)),
    "matrix": ("[f32]matmul(matrix)", lambda y, bias, c, s: c + y),
    "both": ("[f32]matmul(bias,matrix)", lambda y, bias, c, s: y + c + bias.astype(jnp.float32)),
    "relu": ("[f32]matmul(bias,relu)", lambda y, bias, c, s: jax.nn.relu(y + bias.astype(jnp.float32))),
    "gelu": ("[f32]matmul(gelu_tanh)", lambda y, bias, c, s: jax.nn.gelu(y)),
    "e4m3": ("[f8e4m3fn]matmul()", lambda y, bias, c, s: saturated(y * s)),
    "relu e4m3": ("[f8e4m3fn]matmul(relu)", lambda y, bias, c, s: saturated(jax.nn.relu(y * s) / s)),
    "amax": ("[f8e4m3fn]matmul(amax)", lambda y, bias, c, s: (saturated(y / s), jnp.max(jnp.abs(y)))),
    "amax relu": (
        "[f8e4m3fn]matmul(relu,amax)",
        lambda y, bias, c, s: (saturated(jax.nn.relu(y) / s), jnp.max(jax.nn.relu(y))),
    ),
    "amax between scales": (
        "[f8e4m3fn]matmul(amax)",
        lambda y, bias, c, s: (saturated(y * s / s), jnp.max(jnp.abs(y * s))),
    ),
    "amax too early": (
        "[f32]matmul()",
        lambda y, bias, c, s: (saturated(jax.nn.relu(y) / s), jnp.max(jnp.abs(y))),
    ),
    "bias behind relu": ("[f32]matmul(relu)", lambda y, bias, c, s: jax.nn.relu(y) + bias.astype(jnp.float32)),
    "scale behind relu": ("[f32]matmul(relu)", lambda y, bias, c, s: jax.nn.relu(y) * s),
    "row bias": ("[f32]matmul()", lambda y, bias, c, s: y + c[:, :1]),
    "column scale": ("[f32]matmul()", lambda y, bias, c, s: y * bias.astype(jnp.float32)),
    "minus matrix": ("[f32]matmul()", lambda y, bias, c, s: y - c),
    "itself": ("[f32]matmul()", lambda y, bias, c, s: y + y),
    "square": ("[f32]matmul()", lambda y, bias, c, s: y * y),
    "leaky relu": ("[f32]matmul()", lambda y, bias, c, s: jax.nn.leaky_relu(y)),
    "relu6": ("[f32]matmul()", lambda y, bias, c, s: jax.nn.relu6(y)),
    "clip": ("[f32]matmul()", lambda y, bias, c, s: jnp.clip(y, -1, 1)),
    "product": ("[f32]matmul()", lambda y, bias, c, s: y * jax.nn.relu(y)),
    "amax taken twice": (
        "[f8e4m3fn]matmul(amax)",
        lambda y, bias, c, s: (saturated(y / s), jnp.max(jnp.abs(y)), jnp.max(jnp.abs(y.ravel())) * 2),
    ),
}


@pytest.mark.parametrize("rows", [16, 21])
@pytest.mark.parametrize("name", EPILOGUES)
def test_an_epilogue_keeps_its_numbers(name: str, rows: int) -> None:
    graph, epilogue = EPILOGUES[name]

    def program(x: Array, w: Array, a: Array, b: Array, s: Array, bias: Array, c: Array) -> Any:
        return epilogue(dequantized(x, a) @ dequantized(w, b), bias, c, s)

    bias, matrix = jax.ShapeDtypeStruct((24,), jnp.bfloat16), jax.ShapeDtypeStruct((rows, 24), jnp.float32)
    report = checked(program, f8(rows, 32), f8(32, 24), SCALE, SCALE, SCALE, bias, matrix)
    assert [entry.graph for entry in report.rewritten] == [graph]


def test_a_product_of_two_steps_is_told_in_the_words_of_cublas() -> None:
    def program(x: Array, w: Array) -> Any:
        y = x.astype(jnp.float32) @ w.astype(jnp.float32)
        return saturated(y * jax.nn.relu(y))

    (entry,) = checked(program, f8(16, 32), f8(32, 24)).rewritten
    assert (entry.graph, entry.rule) == ("[f32]matmul()", "cublas-epilogue")
    assert "(multiply) is, with what follows it, nothing that cuBLASLt computes" in entry.reason


def test_an_amax_is_not_that_of_padding() -> None:
    """Rows of padding are zero before the bias, and not behind it."""

    def program(x: Array, w: Array, bias: Array, s: Array) -> Any:
        y = x.astype(jnp.float32) @ w.astype(jnp.float32) + bias.astype(jnp.float32)
        return saturated(y * s), jnp.max(jnp.abs(y))

    arguments = f8(20, 32), f8(32, 24), jax.ShapeDtypeStruct((24,), jnp.bfloat16), SCALE
    (entry,) = checked(program, *arguments).rewritten
    assert (entry.graph, entry.rule) == ("[f32]matmul(bias)", "cublas-epilogue")
    assert "rows of padding" in entry.reason


@pytest.mark.parametrize(
    ("lhs", "rhs", "output", "stored"),
    [(E4M3, E5M2, E5M2, True), (E5M2, E4M3, E4M3, True), (E4M3, E4M3, E5M2, False), (E4M3, E4M3, E4M3, True)],
)
def test_an_fp8_result_is_stored_where_cublaslt_has_a_kernel(lhs: Any, rhs: Any, output: Any, stored: bool) -> None:
    report = checked(
        lambda x, w, s: saturated((x.astype(jnp.float32) @ w.astype(jnp.float32)) * s, output),
        *(f8(16, 32, dtype=lhs), f8(32, 16, dtype=rhs), SCALE),
    )
    (entry,) = report.rewritten
    assert str(entry.graph).startswith("[f8") is stored
    assert (entry.rule == "") is stored


def test_a_result_beyond_the_largest_value_saturates() -> None:
    def program(x: Array, w: Array) -> Array:
        return saturated(x.astype(jnp.float32) @ w.astype(jnp.float32))

    module, _ = rewritten(program, f8(16, 16), f8(16, 16))
    x = np.full((16, 16), 448, E4M3)
    (found,) = Executable(module, "cpu")(x, -x)
    assert (found.astype(np.float32) == -448).all()
    x[0, 0] = np.nan
    (found,) = Executable(module, "cpu")(x, -x)
    assert np.isnan(found[0].astype(np.float32)).all()


def test_it_runs_once_and_on_fuel() -> None:
    def program(x: Array, w: Array) -> Array:
        return saturated(jnp.matmul(saturated(jnp.matmul(x, w, preferred_element_type=jnp.float32)), w,
                                    preferred_element_type=jnp.float32))  # fmt: skip

    module, report = rewritten(program, f8(16, 16), f8(16, 16))
    assert len(report.rewritten) == 2
    text = hlo.to_text(module)
    again = passes.run(module, PASSES, "h200")
    assert not again.changed
    assert hlo.to_text(module) == text
    module = hlo.parse(jax.jit(program).lower(f8(16, 16), f8(16, 16)).as_text("hlo"))
    report = passes.run(module, PASSES, "h200", options=PipelineOptions(fuel=1))
    assert [entry.rule for entry in report.refused] == ["fuel"] * len(report.refused)


@pytest.mark.parametrize(("target", "rewrites"), [("a100", False), ("l40s", True), ("h100,cuda=11.8", False)])
def test_the_target_decides(target: str, rewrites: bool) -> None:
    _, report = rewritten(
        lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32), f8(16, 16), f8(16, 16), target=target
    )
    assert bool(report.rewritten) is rewrites
    assert [entry.rule for entry in report.refused] == ([] if rewrites else ["target"])


def test_gelu_needs_a_newer_cuda() -> None:
    def program(x: Array, w: Array) -> Array:
        return jax.nn.gelu(x.astype(jnp.float32) @ w.astype(jnp.float32))

    _, report = rewritten(program, f8(16, 16), f8(16, 16), target="h100,cuda=12.3")
    assert [entry.graph for entry in report.rewritten] == ["[f32]matmul()"]


def test_the_default_pipeline_leaves_dots_and_says_so() -> None:
    text = (
        jax.jit(lambda x, w: x.astype(jnp.float32) @ w.astype(jnp.float32)).lower(f8(16, 16), f8(16, 16)).as_text("hlo")
    )
    report = passes.run(hlo.parse(text), target="h200")
    assert not report.changed
    assert [(entry.rule, "gemm-rewriter" in entry.reason) for entry in report.refused] == [("dot", True)]


STEPS: tuple[Callable[[Array, Array, Array, Array], Array], ...] = (
    lambda y, s, bias, matrix: y * s.astype(y.dtype),
    lambda y, s, bias, matrix: y / s.astype(y.dtype),
    lambda y, s, bias, matrix: y + bias.astype(y.dtype),
    lambda y, s, bias, matrix: y + matrix.astype(y.dtype),
    lambda y, s, bias, matrix: jax.nn.relu(y),
    lambda y, s, bias, matrix: jax.nn.gelu(y),
    lambda y, s, bias, matrix: jax.nn.silu(y),
    lambda y, s, bias, matrix: y.astype(jnp.bfloat16),
    lambda y, s, bias, matrix: y.astype(jnp.float32),
    lambda y, s, bias, matrix: y + y,
)


@pytest.mark.parametrize("seed", sampled(range(40), 10))
def test_steps_in_any_order_keep_their_numbers(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.integers(len(STEPS), size=rng.integers(1, 5))
    output, has_amax = (None, E4M3, E5M2)[rng.integers(3)], rng.random() < 0.5
    types = [(jnp.float32, jnp.bfloat16, jnp.float16, E4M3)[rng.integers(4)] for _ in range(2)]
    rows, lhs = int(rng.choice([5, 16])), (E4M3, E5M2)[rng.integers(2)]

    def program(x: Array, w: Array, a: Array, s: Array, bias: Array, matrix: Array) -> Any:
        y = dequantized(x, a) @ w.astype(jnp.float32)
        for step in steps:
            y = STEPS[step](y, s, bias, matrix)
        stored = y if output is None else saturated(y / s.astype(y.dtype), output)
        return (stored, jnp.max(jnp.abs(y))) if has_amax else stored

    added = jax.ShapeDtypeStruct((24,), types[0]), jax.ShapeDtypeStruct((rows, 24), types[1])
    working = "bf16" if 7 in steps or jnp.bfloat16 in types else "f32"
    checked(program, f8(rows, 32, dtype=lhs), f8(32, 24), SCALE, SCALE, *added, seed=seed, working=working)


def test_layouts_of_a_compiled_module() -> None:
    """An operand is copied into row-major order; a result that is not is left."""
    text = """HloModule m

ENTRY main {
  x = f8e4m3fn[16,32]{0,1} parameter(0)
  w = f8e4m3fn[48,32]{1,0} parameter(1)
  xw = f32[16,32]{0,1} convert(x)
  ww = f32[48,32]{1,0} convert(w)
  ROOT y = f32[16,48]{1,0} dot(xw, ww), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
"""
    module = hlo.parse(text)
    assert passes.run(module, PASSES, "h200").rewritten
    (call,) = (i for i in module.entry if i.opcode == "custom-call")
    assert [str(operand.shape) for operand in call.operands[:2]] == ["f8e4m3fn[16,32]{1,0}", "f8e4m3fn[48,32]{1,0}"]
    assert call.operand(0).opcode == "copy"
    report = passes.run(hlo.parse(text.replace("y = f32[16,48]{1,0}", "y = f32[16,48]{0,1}")), PASSES, "h200")
    assert [entry.rule for entry in report.refused] == ["layout"]


# ---------------------------------------------------------------- the call


def one_call() -> HloModule:
    def program(x: Array, w: Array, s: Array, bias: Array) -> Any:
        y = jax.nn.relu(x.astype(jnp.float32) @ w.astype(jnp.float32) + bias.astype(jnp.float32))
        return saturated(y * s), jnp.max(y)

    return rewritten(program, f8(16, 32), f8(32, 48), SCALE, jax.ShapeDtypeStruct((48,), jnp.bfloat16))[0]


def test_a_call_is_read_as_it_is_written() -> None:
    (call,) = calls_of(one_call())
    assert call.roles == ("lhs", "rhs", "lhs_scale", "rhs_scale", "bias", "result_scale")
    assert (call.has_bias, call.activation, call.has_amax, call.has_matrix) == (True, "relu", True, False)
    assert str(call) == "[f8e4m3fn]matmul(bias,relu,amax)"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"epilogue": "SILU"}, "SILU"),
        ({"alpha_real": 2}, "alpha 2"),
        ({"beta": 1}, "asks for 7"),
        ({"dot_dimension_numbers": {"lhs_contracting_dimensions": ["0", "1"]}}, "unpack"),
    ],
)
def test_a_call_that_is_not_understood_is_an_error_that_names_it(change: dict[str, Any], told: str) -> None:
    module = one_call()
    (call,) = (i for i in module.entry if i.opcode == "custom-call")
    config = call.backend_config
    config["gemm_backend_config"] = {**config["gemm_backend_config"], **change}
    call.attributes["backend_config"] = json.dumps(config)
    with pytest.raises(MatmulError, match=rf"%{call.name}.*{told}"):
        matmul_of(call)


def test_a_call_as_xla_prints_it_runs() -> None:
    """From a module after XLA's optimizations (jaxlib 0.11.2, H200): no batch, a workspace, more fields."""
    module = hlo.parse(f"""HloModule m

ENTRY main {{
  x = f8e4m3fn[16,32]{{1,0}} parameter(0)
  w = f8e4m3fn[48,32]{{1,0}} parameter(1)
  a = f32[] parameter(2)
  b = f32[] parameter(3)
  call = (f32[16,48]{{1,0}}, s8[4194304]{{0}}) custom-call(x, w, a, b), custom_call_target="{MATMUL_TARGET}", backend_config={{"operation_queue_id":"0","gemm_backend_config":{{"selected_algorithm":"0","alpha_real":1,"beta":0,"dot_dimension_numbers":{{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]}},"alpha_imag":0,"precision_config":{{"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"}},"epilogue":"DEFAULT","lhs_stride":"512","rhs_stride":"1536","grad_x":false,"grad_y":false,"damax_output":false,"autotune_workspace_size":"4194304","scale_mode":1}},"force_earliest_schedule":false}}
  ROOT y = f32[16,48]{{1,0}} get-tuple-element(call), index=0
}}
""")  # noqa: E501
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(16, 32)).astype(E4M3), rng.normal(size=(48, 32)).astype(E4M3)
    (found,) = Executable(module, "cpu")(x, w, np.float32(2), np.float32(3))
    np.testing.assert_allclose(found, 6 * x.astype(np.float32) @ w.astype(np.float32).T, rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- under jit


def layer(x: Array, w: Array, a: Array, b: Array, s: Array) -> tuple[Array, Array]:
    y = jax.nn.relu(dequantized(x, a) @ dequantized(w, b))
    return saturated(y / s), jnp.max(y)


def test_a_function_runs_with_it() -> None:
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=size), E4M3) for size in ((16, 32), (32, 16)))
    scales = [jnp.float32(v) for v in (0.5, 2.0, 0.25)]
    fast = xla_fp8.jit(layer, passes=PASSES, strict=True)
    for found, want in zip(fast(x, w, *scales), jax.jit(layer)(x, w, *scales), strict=True):
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(want, np.float32), rtol=1e-5)
    assert [entry.graph for entry in fast.report(x, w, *scales).rewritten] == ["[f8e4m3fn]matmul(relu,amax)"]


def test_for_a_gpu_it_is_the_chain_that_xla_matches() -> None:
    """XLA's GPU compiler aborts where it meets the call itself before its layout assignment."""
    arguments = f8(16, 32), f8(32, 16), SCALE, SCALE, SCALE
    traced = xla_fp8.jit(layer, passes=PASSES, target="h200").trace(*arguments)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" not in text
    assert text.count("stablehlo.dot_general") == 1
    assert "optimization_barrier" not in text


@pytest.mark.parametrize(("scale", "type_"), [(jnp.bfloat16, "bf16"), (jnp.float32, "f32")])
def test_the_chain_rounds_no_scale(scale: Any, type_: str) -> None:
    def program(x: Array, w: Array, a: Array) -> Array:
        return ((x.astype(jnp.float32) @ w.astype(jnp.float32)) * a.astype(scale)).astype(jnp.bfloat16)

    (call,) = calls_of(rewritten(program, f8(16, 32), f8(32, 16), SCALE)[0])
    assert (call.scale_type, call.output_shapes[0].element_type) == (type_, "bf16")
    traced = xla_fp8.jit(program, passes=PASSES, target="h200").trace(f8(16, 32), f8(32, 16), SCALE)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    (dot,) = (line for line in text.splitlines() if "dot_general" in line)
    assert dot.rstrip().endswith(f"tensor<16x16x{type_}>") or f"tensor<16x16x{type_}>" in dot
