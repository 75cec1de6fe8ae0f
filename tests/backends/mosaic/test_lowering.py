"""The kernel lowers for a GPU that is not there: every family of configs, every epilogue; what Mosaic checks holds."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from jax.interpreters import mlir

from xla_fp8.backends.example_calls import POINTWISE, TYPES, graph_call
from xla_fp8.backends.mosaic.backend import MosaicBackend
from xla_fp8.backends.mosaic.configs import Config, shared_memory
from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of
from xla_fp8.backends.transpose import kernel as transpose
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall, Target

H200 = Target.parse("h200")
SCALE = "1:[f32]conv();2:[f8e4m3fn]scale(1);"
FULL = (
    "1:[f32]conv();2:[f32]scale(1);3:[f32]channel_scale(2);4:[f32]bias(3);5:[f32]silu(4);6:[f32]add_scaled(5);"
    "7:[f32]amax(6);8:[bf16]copy(6);9:[f8e4m3fn]invscale(6);"
)


def lowers(call: GraphCall, config: Config | None = None, precision: Any = "default") -> None:
    """Lowers to one kernel, with results as the call has them, and with the shared memory that the model of it says."""
    backend = MosaicBackend(precision)
    assert backend.supports(call, H200).ok, backend.supports(call, H200).reason
    config = config or backend.configs(call, H200)[0]
    function = backend.lower(call, config)
    shapes = [
        jax.ShapeDtypeStruct(shape.dimensions, numpy_dtype(shape.element_type))  # type: ignore[no-untyped-call]
        for shape in call.operand_shapes
    ]
    results = jax.eval_shape(function, *shapes)
    assert [(r.shape, r.dtype) for r in results] == [
        (shape.dimensions, numpy_dtype(shape.element_type)) for shape in call.output_shapes
    ]
    lowered = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",))
    assert str(lowered.as_text()).count("custom_call @mosaic_gpu") == 1
    epilogue = epilogue_of(call)
    assert isinstance(epilogue, Epilogue)
    assert shared_memory_of(lowered) == shared_memory(config, epilogue.footprint)


def shared_memory_of(lowered: Any) -> int:
    """Bytes that the kernel in a lowered program asks for at its launch."""

    def operations(operation: Any) -> Iterator[Any]:
        yield operation
        for region in operation.regions:
            for block in region.blocks:
                for inner in block.operations:
                    yield from operations(inner.operation)

    (kernel,) = (
        operation.attributes["mhlo.backend_config"]["module"].value_bytes
        for operation in operations(lowered.compiler_ir("stablehlo").operation)
        if operation.name == "stablehlo.custom_call" and "mosaic_gpu" in str(operation.attributes["call_target_name"])
    )
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        text = str(mlir.ir.Module.parse(kernel).operation.get_asm(enable_debug_info=False))
    launch = re.search(r"gpu\.launch\"\(([^)]*)\)", text)
    assert launch is not None
    *_, size = launch[1].split(", ")
    value = re.search(rf"{size} = .*value = (\d+) : i32", text)
    assert value is not None
    return int(value[1])


CONFIGS = {
    "square": Config(1, 8, 16, 128, 128, 4),
    "tall": Config(2, 16, 8, 64, 64, 4),
    "wide tile": Config(1, 8, 16, 256, 64, 3),
    "images": Config(128, 1, 1, 32, 32, 8),
    "row": Config(1, 1, 256, 96, 64, 4, delay=0),
    "column": Config(1, 128, 1, 160, 64, 4, delay=3),
    "columns": Config(1, 16, 16, 128, 64, 3, columns=32, side_slots=2),
    "pingpong": Config(1, 8, 16, 128, 64, 4, pingpong=True),
    "pingpong on 64 pixels": Config(1, 8, 8, 160, 64, 4, pingpong=True),
    "shared taps": Config(1, 16, 8, 128, 64, 4, taps=3),
    "shared taps of two images": Config(2, 8, 8, 64, 64, 4, columns=32, side_slots=2, taps=3),
    "shared taps of four images": Config(4, 8, 8, 64, 32, 4, columns=32, side_slots=2, taps=3, pingpong=True),
    "resident filter": Config(1, 8, 16, 64, 64, 3, columns=32, side_slots=2, resident=27),
    "resident filter of shared taps": Config(1, 8, 8, 64, 64, 4, resident=27, taps=3, pingpong=True),
    "promoted taps": Config(2, 8, 8, 128, 64, 3, columns=32, side_slots=2, promote=True, taps=3),
    "promote": Config(1, 8, 16, 128, 128, 3, promote=True),
    "promote in pieces": Config(1, 8, 16, 256, 64, 3, promote=True, pieces=2),
    "split": Config(1, 8, 16, 64, 128, 4, splits=3),
    "promoted split": Config(1, 8, 16, 64, 128, 4, promote=True, splits=9),
}


@pytest.mark.parametrize("graph", [SCALE, FULL], ids=["scale", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_of_configs(name: str, graph: str) -> None:
    lowers(graph_call(graph, batch=3, image=(17, 19), channels=160, features=176), CONFIGS[name])


@pytest.mark.parametrize("op", POINTWISE)
def test_every_op(op: str) -> None:
    lowers(graph_call(f"1:[f32]conv();2:[f32]{op}(1);3:[f32]amax(2);4:[bf16]scale(2);", features=48))


@pytest.mark.parametrize("type", TYPES)
def test_every_type_of_outputs_and_residuals(type: str) -> None:
    lowers(graph_call(f"1:[f32]conv();2:[f32]scale(1);3:[{type}]add(2);", side=type, features=80))


WINDOWS: dict[str, dict[str, Any]] = {
    "stride 2": {"window": "{size=3x3 stride=2x2 pad=0_1x0_1}"},
    "stride 2, odd channels": {"window": "{size=3x3 stride=2x2 pad=1_1x1_1}", "channels": 48, "image": (15, 17)},
    "stride 3 and 1": {"window": "{size=3x3 stride=3x1 pad=1_1x1_1}"},
    "patches": {"filter": (4, 4), "window": "{size=4x4 stride=4x4}"},
    "dilation": {"window": "{size=3x3 pad=2_2x3_3 rhs_dilate=2x3}"},
    "reversal": {"window": "{size=3x3 pad=1_1x1_1 rhs_reversal=1x1}"},
    "negative padding": {"window": "{size=3x3 pad=-1_-2x-2_-1}"},
    "gradient of stride 2": {"window": "{size=3x3 pad=1_2x1_2 lhs_dilate=2x2}"},
    "gradient of stride 2, odd sizes": {
        "window": "{size=3x3 pad=1_1x1_1 lhs_dilate=2x2}",
        "channels": 48,
        "features": 80,
        "image": (15, 17),
    },
    "gradient of 1x1 with stride 2": {"filter": (1, 1), "window": "{size=1x1 pad=0_1x0_1 lhs_dilate=2x2}"},
    "gradient of stride 2 in one dimension": {"window": "{size=3x3 pad=1_2x1_1 lhs_dilate=2x1}"},
    "gradient of patches": {"filter": (4, 4), "window": "{size=4x4 pad=3_3x3_3 lhs_dilate=4x4}"},
    "1-D": {"image": (40,), "filter": (5,)},
    "3-D": {"image": (4, 8, 8), "filter": (1, 3, 3)},
    "1x1": {"filter": (1, 1)},
    "NCHW": {"labels": "bf01_oi01->bf01"},
    "few channels": {"channels": 16, "features": 16},
    "e5m2": {"types": ("f8e5m2", "f8e5m2")},
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("precision", ["default", "highest"])
def test_every_kind_of_convolution(name: str, precision: Any) -> None:
    lowers(graph_call(SCALE, **WINDOWS[name]), precision=precision)


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("features", [80, 128])
def test_the_whole_epilogue_of_a_strided_gradient(features: int, precision: Any) -> None:
    window = "{size=3x3 pad=1_2x1_1 lhs_dilate=2x2}"
    lowers(graph_call(FULL, window=window, channels=160, features=features, image=(9, 12)), precision=precision)


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("size", [(64, 7, 512), (2, 64, 320), (1, 8, 1280), (64, 56, 64)], ids=str)
def test_the_first_config_of_shapes_in_use(size: tuple[int, int, int], precision: Any) -> None:
    batch, image, channels = size
    lowers(
        graph_call(SCALE, batch=batch, image=(image, image), channels=channels, features=channels), precision=precision
    )


@pytest.mark.parametrize(("channels", "count"), [(1024, 1), (256, 0)])
def test_a_large_filter_with_its_features_exchanged_is_transposed_by_a_kernel(channels: int, count: int) -> None:
    """As an input gradient has it; a small one by XLA, together with what makes it."""
    call = graph_call(SCALE, channels=channels, features=1024, filter=(1, 1), labels="b01f_i01o->b01f")
    backend = MosaicBackend()
    shapes = [
        jax.ShapeDtypeStruct(shape.dimensions, numpy_dtype(shape.element_type))  # type: ignore[no-untyped-call]
        for shape in call.operand_shapes
    ]
    function = backend.lower(call, backend.configs(call, H200)[0])
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(f'name = "{transpose.NAME}"') == count


def test_stages_whose_bytes_are_not_aligned() -> None:
    """With four taps a column, the boxes of seven stages end between two units of 1 KB, and what follows is aligned."""
    graph = "1:[f32]conv();2:[f32]bias(1);3:[f32]add(2);4:[f32]amax(3);"
    call = graph_call(graph, batch=64, image=(56, 56), channels=48, features=160, filter=(4, 3))
    lowers(call)  # six of them: with seven, 280 bytes too many
    odd = Config(1, 8, 8, 96, 64, 7, pingpong=True, taps=4, resident=12)
    assert odd.stages * odd.stage_bytes % 1024
    lowers(call, odd)


def test_amaxes_take_no_second_kernel() -> None:
    """All they need beside the kernel is zeros: one count, and one word of each amax."""
    graph = "1:[f32]conv();2:[f32]bias(1);3:[f32]amax(2);4:[f32]relu(2);5:[f32]amax(4);6:[f8e4m3fn]scale(4);"
    call = graph_call(graph, channels=128, features=128)
    backend = MosaicBackend()
    shapes = [
        jax.ShapeDtypeStruct(shape.dimensions, numpy_dtype(shape.element_type))  # type: ignore[no-untyped-call]
        for shape in call.operand_shapes
    ]
    function = backend.lower(call, backend.configs(call, H200)[0])
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    operations = set(re.findall(r"= stablehlo\.(\w+)", text))
    assert operations <= {"custom_call", "constant", "broadcast_in_dim", "reshape"}
    assert "tensor<3xi32>" in text
    assert text.count("red.relaxed.gpu.global.max.u32") == 2


def test_amaxes_of_a_batch_are_of_kernels_one_after_the_other() -> None:
    """Pallas makes one kernel of a batch, and all its parts would join in the same words."""
    call = graph_call("1:[f32]conv();2:[f32]amax(1);3:[f8e4m3fn]scale(1);", channels=128, features=128)
    backend = MosaicBackend()
    shapes = [
        jax.ShapeDtypeStruct((3, *shape.dimensions), numpy_dtype(shape.element_type))  # type: ignore[no-untyped-call]
        for shape in call.operand_shapes
    ]
    function = jax.vmap(backend.lower(call, backend.configs(call, H200)[0]))
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "stablehlo.while" in text


def test_shared_memory_is_counted_as_pallas_counts_it() -> None:
    """Six stages, two vectors and an amax in what is left: lowering refuses a byte too many."""
    graph = "1:[f32]conv();2:[f32]channel_scale(1);3:[f32]bias(2);4:[f8e4m3fn]relu(3);5:[f32]amax(3);"
    call = graph_call(graph, batch=20, image=(3, 40), channels=256, features=32)
    for config in MosaicBackend().configs(call, H200):
        lowers(call, config)
