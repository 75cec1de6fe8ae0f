"""The serialized graph inside a convolution custom call: parse, print, build, walk, type-check, draw."""

from __future__ import annotations

from xla_fp8.graph.custom_call import GRAPH_CALL_TARGET, graph_of
from xla_fp8.graph.drawing import draw
from xla_fp8.graph.errors import GraphError, GraphStringError, GraphTypeError
from xla_fp8.graph.graph import Graph, SideOperand
from xla_fp8.graph.node import Node
from xla_fp8.graph.ops import FP8_MAX, FP8_TYPES, OPS, TYPES, OpSpec
from xla_fp8.graph.type_check import lint, type_check

__all__ = [
    "FP8_MAX",
    "FP8_TYPES",
    "GRAPH_CALL_TARGET",
    "OPS",
    "TYPES",
    "Graph",
    "GraphError",
    "GraphStringError",
    "GraphTypeError",
    "Node",
    "OpSpec",
    "SideOperand",
    "draw",
    "graph_of",
    "lint",
    "type_check",
]
