"""What the Mosaic backend takes, and what it says of what it does not take; that it is what "auto" means on Hopper."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from xla_fp8.backends import autotune
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.fastest import FastestBackend
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.backends.mosaic import kernel
from xla_fp8.backends.mosaic.backend import MosaicBackend, MosaicError
from xla_fp8.backends.mosaic.configs import Config
from xla_fp8.backends.protocol import Backend, Implementation, No
from xla_fp8.backends.registry import backends_for, choose
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.passes.conv_fp8_fallback import Fp8FallbackWarning
from xla_fp8.target import GraphCall, Target, advice_of, rule_of

H200 = Target.parse("h200")
SCALE = "1:[f32]conv();2:[f8e4m3fn]scale(1);"


def call(**changes: Any) -> GraphCall:
    return graph_call(SCALE, **changes)


def with_filter_type(type: str) -> GraphCall:
    base = call()
    operands = list(base.operand_shapes)
    operands[1] = operands[1].with_element_type(type)
    return dataclasses.replace(base, operand_shapes=tuple(operands))


def with_output_type(type: str) -> GraphCall:
    base = call()
    return dataclasses.replace(base, output_shapes=(base.output_shapes[0].with_element_type(type),))


SUPPORTED = {
    "NHWC": call(),
    "NCHW": call(labels="bf01_oi01->bf01"),
    "HWIO": call(labels="b01f_01io->b01f"),
    "1-D": call(image=(40,), filter=(3,)),
    "3-D that is 2-D": call(image=(4, 8, 8), filter=(1, 3, 3)),
    "1x1": call(filter=(1, 1)),
    "strided": call(window="{size=3x3 stride=2x2 pad=1_1x1_1}"),
    "dilated": call(window="{size=3x3 pad=2_2x2_2 rhs_dilate=2x2}"),
    "reversed": call(window="{size=3x3 pad=1_1x1_1 rhs_reversal=1x1}"),
    "negative padding": call(window="{size=3x3 pad=-1_-1x-1_-1}"),
    "dilated input": call(window="{size=3x3 pad=1_2x1_2 lhs_dilate=2x2}"),
    "few channels": call(channels=16, features=16),
    "many channels": call(channels=4096, features=4096),
    "odd channels": call(channels=208, features=1008),
    "e5m2": call(types=("f8e5m2", "f8e5m2")),
}


@pytest.mark.parametrize("name", SUPPORTED)
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_what_it_runs(name: str, precision: Any) -> None:
    backend = MosaicBackend(precision)
    assert backend.supports(SUPPORTED[name], H200).ok
    assert backend.configs(SUPPORTED[name], H200)


REFUSED = {
    "groups": (call(groups=2), "the kernel has no grouped convolutions, and this one has 2 groups"),
    "input channels": (call(channels=24), "rows of multiples of 16 bytes, and this convolution has 24 input channels"),
    "output channels": (call(features=8), "rows of multiples of 16 bytes, and this convolution has 8 output channels"),
    "dilated depth": (
        call(image=(4, 8, 8), filter=(1, 3, 3), window="{size=1x3x3 pad=0_0x1_1x1_1 lhs_dilate=2x1x1}"),
        "the kernel has two spatial dimensions, and this convolution has 3",
    ),
    "many phases": (
        call(window="{size=3x3 pad=1_1x1_1 lhs_dilate=16x16}"),
        "dilates its input by 16x16, which makes 256 phases; the kernel takes up to 64",
    ),
    "3-D": (
        call(image=(4, 8, 8), filter=(3, 3, 3)),
        "the kernel has two spatial dimensions, and this convolution has 3",
    ),
    "a place beyond 32 bits": (
        call(batch=2**31, image=(), filter=(), window="{}", labels="bf_oi->bf"),
        "counts places in 32 bits, and a dimension of this convolution has 2147483648",
    ),
    "empty": (call(batch=0), "a tensor without elements needs no kernel"),
    "bf16 filter": (with_filter_type("bf16"), "multiplies f8e4m3fn and f8e5m2, and the operands are f8e4m3fn and bf16"),
    "s8 output": (with_output_type("s8"), "the kernel stores f8e4m3fn, f8e5m2, bf16, f16, f32, not s8"),
    "f64 residual": (
        graph_call("1:[f32]conv();2:[f8e4m3fn]add(1);", side="f64"),
        "the kernel adds tensors of f8e4m3fn, f8e5m2, bf16, f16, f32, and add has one of f64",
    ),
    "many tensors": (
        graph_call("1:[f32]conv();" + "".join(f"{i}:[f32]add({i - 1});" for i in range(2, 30)), image=(64, 64)),
        "no tile fits the shared memory of a multiprocessor",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses_and_why(name: str) -> None:
    refused, reason = REFUSED[name]
    backend = MosaicBackend()
    verdict = backend.supports(refused, H200)
    assert not verdict.ok
    assert reason in verdict.reason
    assert not backend.configs(refused, H200)


def test_a_refusal_has_a_rule_where_xla_has_no_kernel_either() -> None:
    """Depthwise it has none, so the convolution runs in bf16; in groups of many channels the chain is left to it."""
    depthwise = MosaicBackend().supports(call(groups=64, channels=64, features=64), H200)
    assert "this one has 64 groups" in depthwise.reason
    assert (rule_of(depthwise), advice_of(depthwise)[:15]) == ("grouped-channels", "give each group")
    assert rule_of(MosaicBackend().supports(REFUSED["3-D"][0], H200)) == "spatial-dimensions"
    assert rule_of(MosaicBackend().supports(call(groups=2), H200)) == ""
    assert rule_of(MosaicBackend().supports(call(), Target.parse("a100"))) == "target"


def test_what_it_refuses_when_named_runs_in_bf16_and_is_told() -> None:
    def depthwise(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "OHWI", "NHWC")
        y = jax.lax.conv_general_dilated(
            *(x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME"),
            dimension_numbers=numbers,
            feature_group_count=16,
        )
        return jnp.clip(y, -448, 448).astype(jnp.float8_e4m3fn)

    shapes = [jax.ShapeDtypeStruct(s, jnp.float8_e4m3fn) for s in ((2, 8, 8, 16), (16, 3, 3, 1))]  # type: ignore[no-untyped-call]
    with pytest.warns(Fp8FallbackWarning, match="no grouped convolutions, and this one has 16 groups; it runs in bf16"):
        report = xla_fp8.jit(depthwise, backend="mosaic", target="h200").report(*shapes)
    assert "it runs in bf16" in str(report)


@pytest.mark.parametrize("target", ["a100", "l40s", "b200"])
def test_only_hopper_has_its_instruction(target: str) -> None:
    verdict = MosaicBackend().supports(call(), Target.parse(target))
    assert not verdict.ok
    assert "needs compute capability 9.0 (Hopper), and the target has" in verdict.reason


def test_mixed_types_need_jax_0_11() -> None:
    verdict = MosaicBackend().supports(call(types=("f8e4m3fn", "f8e5m2")), H200)
    if jax.__version_info__ >= (0, 11):
        assert verdict.ok
    else:
        assert f"JAX {jax.__version__} cannot multiply f8e4m3fn by f8e5m2 in a kernel" in verdict.reason


def test_lowering_what_is_refused_is_an_error_with_the_reason() -> None:
    with pytest.raises(MosaicError, match="does not run this convolution: the kernel has no grouped convolutions"):
        MosaicBackend().lower(call(groups=2), Config(1, 8, 16, 32, 32, 4))


def test_an_amax_of_an_fp8_type_saturates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the reference's does: a cast alone would make NaN of it."""

    def convolve(*_: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        return (jnp.zeros((2, 16, 16, 32), jnp.bfloat16),), (jnp.float32(1e6),)

    monkeypatch.setattr(kernel, "convolve", convolve)
    small = graph_call("1:[f32]conv();2:[f8e4m3fn]amax(1);3:[bf16]relu(1);")
    backend = MosaicBackend()
    function = backend.lower(small, backend.configs(small, H200)[0])
    _, amax = function(*(jnp.asarray(array) for array in random_inputs(small.operand_shapes)))
    assert (amax.dtype, float(amax)) == (jnp.float8_e4m3fn, 448.0)


def test_auto_on_a_gpu_asks_mosaic_first() -> None:
    chosen = choose(backends_for("auto", "cuda"), call(), H200)
    assert isinstance(chosen, FastestBackend)
    assert chosen.backends[0] == MosaicBackend()


def test_the_reasons_of_all_backends_are_told() -> None:
    refusing = [MosaicBackend(), *backends_for("xla", "cuda")]
    chosen = choose(refusing, call(groups=2), H200)
    assert isinstance(chosen, No)
    assert "mosaic: the kernel has no grouped convolutions" in chosen.reason
    assert "xla: " in chosen.reason


@dataclasses.dataclass(frozen=True)
class Refusing(MosaicBackend):
    """A backend whose no comes with advice."""

    def supports(self, call: GraphCall, target: Target) -> No:
        return No("too few channels", rule="channels", advice="add some")


@pytest.mark.parametrize("ask", [choose, lambda backends, *of: FastestBackend(tuple(backends)).supports(*of)])
def test_several_backends_pass_on_the_rule_and_the_advice_of_one(ask: Any) -> None:
    refusal = ask([MosaicBackend(), Refusing()], call(groups=2), H200)
    assert (refusal.ok, refusal.rule, refusal.advice) == (False, "channels", "add some")


def test_nothing_is_timed_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "force")
    monkeypatch.setattr(autotune, "tune", lambda *_: pytest.fail("timed"))
    backend: Backend = MosaicBackend()
    assert autotune.config_for(backend, call(), H200) == backend.configs(call(), H200)[0]


def test_candidates_are_traced_outside_the_program_that_is_lowered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its traces, axis names and settings would reach into the kernel, whose grid has axis names of its own."""
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "force")
    monkeypatch.setenv("XLA_FP8_CACHE_DIR", str(tmp_path))
    backend = MosaicBackend(platforms=("cpu", "cuda"))
    shapes = [
        jax.ShapeDtypeStruct(shape.dimensions, numpy_dtype(shape.element_type))  # type: ignore[no-untyped-call]
        for shape in call().operand_shapes
    ]
    texts = []

    def tune(backend: Backend, call: GraphCall, configs: Sequence[Config]) -> list[autotune.Timing]:
        for config in configs[:2]:
            traced = jax.jit(backend.lower(call, config)).trace(*shapes)
            texts.append(str(traced.lower(lowering_platforms=("cuda",)).as_text()))
        return [autotune.Timing(config, float(i)) for i, config in enumerate(configs)]

    def program(x: jax.Array) -> jax.Array:
        autotune.config_for(backend, call(), H200)
        return x + jax.lax.axis_index("block")

    monkeypatch.setattr(autotune, "tune", tune)
    jax.make_jaxpr(jax.vmap(program, axis_name="block"))(np.zeros(3))
    assert [text.count("custom_call @mosaic_gpu") for text in texts] == [1, 1]


def test_precisions_are_different_backends() -> None:
    assert MosaicBackend("highest") != MosaicBackend()
    assert repr(MosaicBackend("highest")) != repr(MosaicBackend())
    assert all(config.promote for config in MosaicBackend("highest").configs(call(), H200))


# Through jit, lowered for a GPU that is not there.


def layer(x: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jax.lax.conv_general_dilated(
        x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
    )
    y = jax.nn.silu(y * scale)
    return jnp.clip(y, -448, 448).astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(y))


ARGUMENTS = (
    np.zeros((2, 14, 14, 64), jnp.float8_e4m3fn),
    np.zeros((64, 3, 3, 64), jnp.float8_e4m3fn),
    np.float32(1),
)


def text_for_cuda(function: Any, *arguments: Any, **options: Any) -> str:
    traced = xla_fp8.jit(function, **options).trace(*arguments)
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())


def test_jit_lowers_to_the_kernel() -> None:
    text = text_for_cuda(layer, *ARGUMENTS)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.convolution" not in text


@pytest.mark.parametrize(("size", "stride", "image"), [(3, 2, 16), (3, 2, 15), (1, 2, 14), (4, 4, 16), (3, 1, 14)])
def test_input_gradients_of_any_stride_lower_to_one_kernel(size: int, stride: int, image: int) -> None:
    """The cotangent is quantized, so the gradient is an FP8 convolution over it; with a stride, over zeros too."""
    w = np.zeros((size, size, 64, 96), jnp.float8_e4m3fn)

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=numbers)

    def gradient(dy: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        x = jnp.zeros((2, image, image, 64))
        _, pull = jax.vjp(lambda x: forward(x, w.astype(jnp.float32)), x)
        dx: jax.Array = pull(dy.astype(jnp.float32) * scale)[0]
        return dx.astype(jnp.bfloat16)

    out = -(-image // stride)
    arguments = np.zeros((2, out, out, 96), jnp.float8_e4m3fn), w, np.float32(1)
    text = text_for_cuda(gradient, *arguments)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "stablehlo.convolution" not in text
    (entry,) = xla_fp8.jit(gradient).report(*arguments).rewritten
    assert entry.graph == "1:[f32]conv();2:[bf16]scale(1);"


def test_scan_and_vmap_lower_to_one_kernel() -> None:
    x, w, scale = ARGUMENTS

    def scanned(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
        return jax.lax.scan(lambda x, _: layer(x, w, scale), x, None, length=4)

    for text in (
        text_for_cuda(scanned, x, w, scale),
        text_for_cuda(jax.vmap(layer, (0, None, None)), np.zeros((3, *x.shape), x.dtype), w, scale),
    ):
        assert text.count("custom_call @mosaic_gpu") == 1
        assert "stablehlo.convolution" not in text


@pytest.mark.skipif(jax.__version_info__[:2] == (0, 11), reason="JAX 0.11 numbers the kernels of a process")
def test_the_same_program_lowers_to_the_same_text() -> None:
    """JAX's compilation cache finds it again in another process."""
    jax.clear_caches()  # type: ignore[no-untyped-call]  # what other tests have traced has other source lines
    first = text_for_cuda(layer, *ARGUMENTS)
    jax.clear_caches()  # type: ignore[no-untyped-call]
    assert text_for_cuda(layer, *ARGUMENTS) == first


@dataclasses.dataclass(frozen=True)
class Recording(MosaicBackend):
    """Remembers the configs that it lowered."""

    lowered: list[object] = dataclasses.field(default_factory=list, hash=False)

    def lower(self, call: GraphCall, config: object) -> Implementation:
        self.lowered.append(config)
        return super().lower(call, config)


@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_the_precision_of_the_convolution_is_that_of_the_kernel(precision: str) -> None:
    def asking(x: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        with jax.default_matmul_precision(precision):
            return layer(x, w, scale)

    backend = Recording(name=f"recording {precision}")
    text_for_cuda(asking, *ARGUMENTS, backend=backend)
    assert [config.promote for config in backend.lowered if isinstance(config, Config)] == [precision == "highest"]


def test_only_the_highest_precision_of_both_operands_costs_time() -> None:
    def promotes(*precision: str) -> bool:
        asking = dataclasses.replace(call(), operand_precision=precision)
        (promote,) = {config.promote for config in MosaicBackend().configs(asking, H200)}
        return promote

    assert promotes("highest", "highest")
    assert not promotes()
    assert not promotes("high", "high")
    assert not promotes("highest", "default")
