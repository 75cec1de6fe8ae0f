"""Where a graph stands in a module: the backend config of a convolution custom call."""

from __future__ import annotations

from xla_fp8.graph.errors import GraphError
from xla_fp8.graph.graph import Graph
from xla_fp8.hlo import HloInstruction

GRAPH_CALL_TARGET = "__cudnn$convForwardGraph"
"""XLA's target of a convolution with a graph (kCudnnConvForwardGraphCallTarget in cublas_cudnn.cc)."""


def graph_of(instruction: HloInstruction) -> Graph | None:
    """The graph of a custom call; None where it has none, or `instruction` is no custom call.

    Raises GraphError, which names the instruction, where the call has a string that is not a graph.
    """
    if instruction.opcode != "custom-call" or instruction.custom_call_target != GRAPH_CALL_TARGET:
        return None
    config = instruction.backend_config.get("cudnn_conv_backend_config")
    text = config.get("serialized_graph") if isinstance(config, dict) else None
    if not isinstance(text, str) or not text:
        return None
    try:
        return Graph.parse(text)
    except GraphError as error:
        raise GraphError(f"custom call %{instruction.name}: {error}") from error
