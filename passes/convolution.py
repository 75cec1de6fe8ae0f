"""Convolutions as passes see them: is it FP8, what XLA calls it, and the parts of its custom call."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

from xla_fp8.graph import GRAPH_CALL_TARGET, Graph
from xla_fp8.hlo import ConvolutionDimensionNumbers, HloInstruction, Shape, Window, WindowDimension
from xla_fp8.hlo.attributes import quote
from xla_fp8.passes.base import Refusal, described
from xla_fp8.passes.dequantization import Dequantized, fed_by_fp8, filter_channel, find_dequantized
from xla_fp8.target import Target

FORWARD = "__cudnn$convForward"
BACKWARD_INPUT = "__cudnn$convBackwardInput"
BACKWARD_FILTER = "__cudnn$convBackwardFilter"
CONVOLUTION_TARGETS = (FORWARD, BACKWARD_INPUT, BACKWARD_FILTER)

CANONICAL_LABELS = {
    1: ConvolutionDimensionNumbers("b0f", "o0i", "b0f"),
    2: ConvolutionDimensionNumbers("b01f", "o01i", "b01f"),
    3: ConvolutionDimensionNumbers("b012f", "o012i", "b012f"),
}
"""NHWC input and output, OHWI filter: the one layout that FP8 convolutions have on the GPU."""


def backend_config(serialized_graph: str | None = None) -> str:
    """The backend_config of a convolution custom call, in XLA's compact JSON (CudnnConvBackendConfig)."""
    config: dict[str, object] = {
        "activation_mode": "kNone",
        "conv_result_scale": 1,
        "side_input_scale": 0,
        "leakyrelu_alpha": 0,
    }
    if serialized_graph is not None:
        config["serialized_graph"] = serialized_graph
    return json.dumps({"cudnn_conv_backend_config": config}, separators=(",", ":"))


WORKSPACE = Shape.array("u8", (0,))
"""Result of every convolution custom call: its size is not known before an algorithm is chosen."""


def dequantized_operands(convolution: HloInstruction) -> tuple[Dequantized, Dequantized] | Refusal:
    """The FP8 tensors and scales behind both operands of a convolution, or the first thing that is not one."""
    found: list[Dequantized] = []
    for index, channel in ((0, None), (1, filter_channel(convolution.dim_labels))):
        operand = find_dequantized(convolution.operand(index), channel)
        if isinstance(operand, Refusal):
            side = "input" if index == 0 else "filter"
            if not fed_by_fp8(convolution.operand(index)):
                return Refusal(
                    "operand-not-fp8",
                    f"the {side} comes from {described(operand.instruction)} and from no FP8 tensor",
                    f"quantize the {side} too: to float8_e4m3fn or float8_e5m2, with a scale",
                    operand.instruction,
                )
            return dataclasses.replace(operand, reason=f"the {side}: {operand.reason}")
        found.append(operand)
    return found[0], found[1]


def unsupported_form(convolution: HloInstruction, may_dilate: bool) -> Refusal | None:
    """Why a convolution has no forward FP8 form, whatever its operands are; None where it has one.

    Args:
        may_dilate: whether one over a dilated input is a form, for a backend to judge (`takes_dilated_input`).
    """
    rank = convolution.dim_labels.spatial_rank
    shapes = [o.shape for o in convolution.operands] + [result_shape(convolution)]

    def refuse(rule: str, what: str, advice: str) -> Refusal:
        return Refusal(rule, f"{described(convolution, 'convolution')} {what}", advice, convolution)

    if rank not in CANONICAL_LABELS:
        return refuse("rank", f"has {rank} spatial dimensions", "use 1 to 3 spatial dimensions")
    if any(shape.is_dynamic for shape in shapes):
        return refuse("dynamic-shape", "has a dynamic shape", "give it static shapes")
    if any(0 in shape.dimensions for shape in shapes):
        return refuse("empty", "has an operand or result without elements", "nothing to gain: there is no work in it")
    if convolution.batch_group_count > 1:
        return refuse(
            "batch-groups",
            f"has batch_group_count={convolution.batch_group_count}: the filter gradient of a grouped convolution, "
            "which no FP8 graph computes",
            "keep the cotangent of this convolution in high precision",
        )
    if not may_dilate and any(d.base_dilation != 1 for d in convolution.window):
        return refuse(
            "transposed-convolution",
            "dilates its input (lhs_dilate): a transposed convolution, or the input gradient of a strided one; cuDNN's "
            "FP8 graphs have only forward convolutions",
            "use stride 1, or keep the cotangent of this convolution in high precision",
        )
    if any(d.padding_low < 0 or d.padding_high < 0 for d in convolution.window):
        return refuse("negative-padding", "has negative padding", "slice the input instead")
    result = result_shape(convolution).element_type
    if result_shape(convolution).is_fp8:
        return refuse(
            "fp8-result",
            f"accumulates in {result}: its result is FP8 with neither scale nor clamp",
            "ask for a wide result (preferred_element_type=jnp.float32), then scale, clamp and convert",
        )
    if result not in ("f32", "bf16", "f16"):
        return refuse(
            "wide-type",
            f"computes in {result}; the fused convolution computes in f32",
            "compute it in float32, bfloat16 or float16",
        )
    return None


def takes_dilated_input(target: Target, extended: bool) -> bool:
    """Whether a backend is asked about convolutions over a dilated input: XLA's own graphs, cuDNN's, have none."""
    return extended and target.supports is not None


def create_graph_call(
    replaced: HloInstruction,
    form: Mapping[str, str],
    graph: Graph,
    operands: Sequence[HloInstruction],
    output_shapes: Sequence[Shape],
) -> HloInstruction:
    """The custom call that carries `graph`, beside the convolution or dot that it is to replace.

    Args:
        form: its attributes that say what convolution it is.
    """
    assert replaced.parent is not None
    attributes = {**form, "custom_call_target": quote(GRAPH_CALL_TARGET)}
    for name in ("operand_precision", "frontend_attributes", "metadata"):
        if value := replaced.attr(name):
            attributes[name] = value
    attributes["backend_config"] = backend_config(str(graph))
    shape = Shape.tuple([*output_shapes, WORKSPACE])
    return replaced.parent.create("custom-call", shape, operands, name=f"{replaced.name}.graph", attributes=attributes)


def result_shape(convolution: HloInstruction) -> Shape:
    """The array a convolution makes, whether an HLO convolution or a custom call with its workspace."""
    return convolution.shape.tuple_shapes[0] if convolution.shape.is_tuple else convolution.shape


# -------------------------------------------------------------------- what XLA calls it (conv_rewriter.cc)


@dataclasses.dataclass(frozen=True)
class BackwardForm:
    """A convolution as the gradient that it is: target, operands, window and dim labels of its custom call."""

    target: str
    lhs: HloInstruction
    rhs: HloInstruction
    window: Window
    dim_labels: ConvolutionDimensionNumbers


def swap_input_and_output(labels: ConvolutionDimensionNumbers) -> ConvolutionDimensionNumbers:
    """Labels of a convolution ↔ those of the input gradient that it is: the filter's features change places too."""
    return ConvolutionDimensionNumbers(labels.output, labels.rhs.translate(str.maketrans("io", "oi")), labels.lhs)


def swap_filter_and_output(labels: ConvolutionDimensionNumbers) -> ConvolutionDimensionNumbers:
    """Labels of a convolution ↔ those of the filter gradient that it is: the input's batch is its features."""
    return ConvolutionDimensionNumbers(
        labels.lhs.translate(str.maketrans("bf", "fb")),
        labels.output.translate(str.maketrans("bf", "io")),
        labels.rhs.translate(str.maketrans("io", "bf")),
    )


def match_backward_input(convolution: HloInstruction) -> BackwardForm | None:
    """The input gradient that XLA would see: a reversed filter, or a dilated input with a 1x1 filter."""
    if convolution.feature_group_count > 1 or convolution.batch_group_count > 1:
        return None
    labels, window, reverse = convolution.dim_labels, convolution.window, convolution.operand(1)
    spatial = labels.kernel_spatial_dimensions
    reversed_filter = reverse.opcode == "reverse" and sorted(reverse.dimensions) == sorted(spatial)
    dilated = any(d.base_dilation != 1 for d in window)
    if not reversed_filter and not (dilated and all(d.size == 1 for d in window)):
        return None
    if any(d.stride != 1 or d.window_dilation != 1 or d.reversal for d in window):
        return None
    rhs = reverse.operand(0) if reversed_filter else reverse
    dims = []
    for index, old in enumerate(window):
        low = old.size - 1 - old.padding_low
        if low < 0:
            return None
        unpadded = convolution.shape.dimensions[labels.output_spatial_dimensions[index]]
        output = convolution.operand(0).shape.dimensions[labels.input_spatial_dimensions[index]]
        total = old.size + old.base_dilation * (output - 1) - unpadded
        high = _closest(low, total - low, total - low + old.base_dilation - 1)
        if high < 0:
            return None
        dims.append(WindowDimension(old.size, old.base_dilation, low, high))
    swapped = swap_input_and_output(labels)
    return BackwardForm(BACKWARD_INPUT, convolution.operand(0), rhs, Window(tuple(dims)), swapped)


def match_backward_filter(convolution: HloInstruction) -> BackwardForm | None:
    """The filter gradient that XLA would see: batch and features swapped, a window as large as an image.

    XLA goes by sizes alone, so it takes a forward convolution whose filter is larger than its result (one that makes
    a vector of a last small image) for one too. Their input still has its batch in front of its features.
    """
    if convolution.feature_group_count > 1 or convolution.batch_group_count > 1:
        return None
    labels, window = convolution.dim_labels, convolution.window
    if labels.input_batch_dimension < labels.input_feature_dimension:
        return None
    lhs, rhs, result = convolution.operand(0).shape, convolution.operand(1).shape, convolution.shape
    sizes = [
        (rhs.dimensions[k], result.dimensions[o])
        for k, o in zip(labels.kernel_spatial_dimensions, labels.output_spatial_dimensions, strict=True)
    ]
    if (
        lhs.dimensions[labels.input_batch_dimension] == result.dimensions[labels.output_batch_dimension]
        and rhs.dimensions[labels.kernel_output_feature_dimension] == result.dimensions[labels.output_feature_dimension]
        and all(kernel <= output for kernel, output in sizes)
    ):
        return None
    if any(d.stride != 1 or d.base_dilation != 1 or d.padding_low < 0 or d.reversal for d in window):
        return None
    small = sum(kernel <= output for kernel, output in sizes)
    if (not sizes or small > 0) and all(d.window_dilation == 1 for d in window):
        return None
    dims = []
    for index, old in enumerate(window):
        filter_size = result.dimensions[labels.output_spatial_dimensions[index]]
        input_size = lhs.dimensions[labels.input_spatial_dimensions[index]]
        least = filter_size + (old.size - 1) * old.window_dilation - input_size - old.padding_low
        high = _closest(old.padding_low, least, least + old.window_dilation - 1)
        if high < 0:
            return None
        dims.append(WindowDimension(filter_size, old.window_dilation, old.padding_low, high))
    swapped = swap_filter_and_output(labels)
    return BackwardForm(BACKWARD_FILTER, convolution.operand(0), convolution.operand(1), Window(tuple(dims)), swapped)


def _closest(wanted: int, least: int, most: int) -> int:
    return min(max(wanted, least), most)
