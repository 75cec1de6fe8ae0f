"""From a graph call to cuDNN's operation graph: one cuDNN operation for each node, every intermediate value in f32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xla_fp8.backends.cudnn import library, rules
from xla_fp8.backends.cudnn.errors import CudnnUnsupportedError
from xla_fp8.backends.cudnn.geometry import Geometry, channels_last
from xla_fp8.graph import Node
from xla_fp8.target import GraphCall

_TYPES = {"f8e4m3fn": "FP8_E4M3", "f8e5m2": "FP8_E5M2", "f16": "HALF", "bf16": "BFLOAT16", "f32": "FLOAT"}


@dataclasses.dataclass(frozen=True)
class OperationGraph:
    """cuDNN's graph of a call, validated.

    The uid of a tensor is its position among the buffers of the call plus 1: operands first, then results.

    Attributes:
        graph: a `cudnn.pygraph` after `build_operation_graph`.
        buffers: how many tensors have a buffer.
    """

    graph: Any
    buffers: int


def build(call: GraphCall, **settings: Any) -> OperationGraph:
    """Builds the operation graph of `call`.

    Args:
        call: any graph call.
        settings: of `cudnn.pygraph`: `handle`, or `device_property` and `sm_version` where there is no device.

    Raises:
        CudnnMissingError: cuDNN is not installed.
        CudnnUnsupportedError: cuDNN cannot say such a convolution, or does not take the graph.
    """
    if any(d.base_dilation != 1 for d in call.window):
        raise CudnnUnsupportedError("the convolution dilates its input; cuDNN's FP8 graphs have forward convolutions")
    if any(d.reversal for d in call.window):
        raise CudnnUnsupportedError("the window is reversed; cuDNN's FP8 graphs have forward convolutions")
    if unknown := [s for s in call.operand_shapes if s.element_type not in _TYPES]:
        raise CudnnUnsupportedError(f"an operand is {unknown[0].element_type}, which cuDNN does not know")
    if twice := rules.f32_twice(call.graph):
        raise CudnnUnsupportedError(f"the convolution {twice}")
    return _Builder(call, settings).build()


class _Builder:
    def __init__(self, call: GraphCall, settings: Mapping[str, Any]) -> None:
        self.call = call
        self.geometry = Geometry.of(call)
        self.cudnn = library.cudnn()
        wide = self.cudnn.data_type.FLOAT
        self.graph = self.cudnn.pygraph(
            io_data_type=wide, intermediate_data_type=wide, compute_data_type=wide, **settings
        )
        self.results = (call.graph.output, *call.graph.aux_outputs)
        self.values: dict[int, Any] = {}

    def build(self) -> OperationGraph:
        graph = self.call.graph
        sides: dict[int, list[Any]] = {node.uid: [] for node in graph}
        image = self.operand(0, self.geometry.input)
        filter_ = self.operand(1, self.geometry.filter)
        for side in graph.side_operands():
            dims = {"scalar": self.ones, "vector": self.along_channels, "tensor": self.geometry.output}[side.kind]
            sides[side.node].append(self.operand(side.index, dims))
        try:
            for node in graph:
                if node.op == "conv":
                    value = self.convolution(image, filter_)
                else:
                    inputs = [*(self.values[uid] for uid in node.operands), *sides[node.uid]]
                    value = self.operation(node, inputs)
                self.values[node.uid] = value
            for node in self.results:
                self.store(node)
            self.graph.validate()
            self.graph.build_operation_graph()
        except (RuntimeError, ValueError, self.cudnn.cudnnGraphNotSupportedError) as error:
            raise CudnnUnsupportedError(one_line(error)) from error
        return OperationGraph(self.graph, len(self.call.operand_shapes) + len(self.results))

    @property
    def ones(self) -> tuple[int, ...]:
        return (1,) * self.geometry.rank

    @property
    def along_channels(self) -> tuple[int, ...]:
        return (1, self.geometry.output[1], *self.ones[2:])

    def operand(self, index: int, dims: Sequence[int]) -> Any:
        """The tensor of operand `index`."""
        type_ = getattr(self.cudnn.data_type, _TYPES[self.call.operand_shapes[index].element_type])
        return self.graph.tensor(
            name=f"operand{index}", dim=list(dims), stride=channels_last(dims), data_type=type_, uid=index + 1
        )

    def convolution(self, image: Any, filter_: Any) -> Any:
        geometry = self.geometry
        value = self.graph.conv_fprop(
            image,
            filter_,
            pre_padding=list(geometry.padding_low),
            post_padding=list(geometry.padding_high),
            stride=list(geometry.stride),
            dilation=list(geometry.dilation),
        )
        return self.typed(value, "f32")

    def operation(self, node: Node, inputs: list[Any]) -> Any:
        if node.op == "amax" and math.prod(self.geometry.output) == 1:
            # Its magnitude. cuDNN proposes plans for the reduction of one element too, and its runtime compiler then
            # fails on them (engine 7 of 9.19.0 and 9.28.1: compilationResult != NVRTC_SUCCESS).
            return self.typed(self.graph.abs(inputs[0]), "f32")
        if node.op == "amax":
            return self.graph.reduction(inputs[0], mode=self.cudnn.reduction_mode.AMAX)
        if node.op == "copy" and node.type == "f32":
            # Every value in the graph is f32, so the value itself gets the buffer. With an identity from f32 to f32 in
            # between, cuDNN 9.19.0 on an H200 returned a copy that was wrong; why is not known.
            return inputs[0]
        return self.typed(_OPERATIONS[node.op](self.graph, *inputs), "f32")

    def store(self, node: Node) -> None:
        """Gives a result its buffer: type, dimensions and strides."""
        value, type_ = self.values[node.uid], node.type
        dims = self.ones if node.op == "amax" else self.geometry.output
        if node.op == "amax":
            type_ = "f32"  # cuDNN reduces in f32 only; a narrower amax is converted behind the call
        elif type_ != "f32" and self.call.graph.users(node.uid):
            # What reads this node reads the value before rounding, so the stored one is a tensor of its own.
            value = self.graph.identity(value)
        index = len(self.call.operand_shapes) + self.results.index(node)
        self.typed(value, type_).set_output(True).set_uid(index + 1)
        value.set_dim(list(dims)).set_stride(channels_last(dims))

    def typed(self, tensor: Any, type_: str) -> Any:
        return tensor.set_data_type(getattr(self.cudnn.data_type, _TYPES[type_]))


def _add_scaled(graph: Any, value: Any, tensor: Any, scale: Any) -> Any:
    return graph.add(value, graph.mul(tensor, scale))


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "scale": lambda g, a, s: g.mul(a, s),
    "invscale": lambda g, a, s: g.div(a, s),
    "add": lambda g, a, b: g.add(a, b),
    "min": lambda g, a, b: g.min(a, b),
    "max": lambda g, a, b: g.max(a, b),
    "relu": lambda g, a: g.relu(a),
    "elu": lambda g, a: g.elu(a),
    "bias": lambda g, a, s: g.add(a, s),
    "channel_scale": lambda g, a, s: g.mul(a, s),
    "add_scaled": _add_scaled,
    "clamp": lambda g, a, low, high: g.min(g.max(a, low), high),
    "silu": lambda g, a: g.swish(a),
    "gelu_erf": lambda g, a: g.gelu(a),
    "gelu_tanh": lambda g, a: g.gelu_approx_tanh(a),
    "sigmoid": lambda g, a: g.sigmoid(a),
    "tanh": lambda g, a: g.tanh(a),
    "copy": lambda g, a: g.identity(a),
}
"""Each op but conv and amax: the graph, operands inside it, then side operands."""


def one_line(error: Exception) -> str:
    """cuDNN's message without line breaks."""
    return " ".join(str(error).split()) or type(error).__name__
