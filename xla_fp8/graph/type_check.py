"""Checks a finished graph against the shapes of its custom call, and points out what XLA or cuDNN may not take."""

from __future__ import annotations

from collections.abc import Sequence

from xla_fp8.graph.errors import GraphTypeError
from xla_fp8.graph.graph import Graph, SideOperand
from xla_fp8.graph.ops import FP8_TYPES
from xla_fp8.hlo import ConvolutionDimensionNumbers, Shape
from xla_fp8.hlo.shape import FLOAT_TYPES


def type_check(
    graph: Graph,
    operands: Sequence[Shape] | None = None,
    output: Shape | None = None,
    dim_labels: ConvolutionDimensionNumbers | None = None,
) -> None:
    """Checks that `graph` is finished and, as far as they are given, that it fits its custom call.

    Args:
        graph: any graph.
        operands: shapes of all operands of the custom call: input, filter, then the side operands in node order.
        output: shape of result 0; side tensors must have its dimensions.
        dim_labels: of the convolution; with `output` it says how long a vector must be.

    Raises:
        GraphError: the graph has more than one tensor endpoint.
        GraphTypeError: wrong number of operands, an operand of the wrong rank, size or element type, or an output of
            another type than the graph's.
    """
    last = graph.output
    if output is not None and output.element_type != last.type:
        raise GraphTypeError(f"the output is {output}, but its node {last} has type {last.type}")
    if operands is None:
        return
    sides = graph.side_operands()
    if len(operands) != 2 + len(sides):
        uses = ", ".join(f"{s.kind} for {s.op} (node {s.node})" for s in sides)
        raise GraphTypeError(
            f"{graph} needs {2 + len(sides)} operands (input, filter{', ' if uses else ''}{uses}), not {len(operands)}"
        )
    features = output.dimensions[dim_labels.output_feature_dimension] if output and dim_labels else None
    for name, shape in zip(("input", "filter"), operands[:2], strict=True):
        if shape.element_type not in FP8_TYPES:
            raise GraphTypeError(f"the {name} must be {' or '.join(FP8_TYPES)}, not {shape}")
    for side in sides:
        if problem := _side_problem(side, operands[side.index], output, features):
            raise GraphTypeError(f"operand {side.index} ({operands[side.index]}), read by node {side.node}, {problem}")


def _side_problem(side: SideOperand, shape: Shape, output: Shape | None, features: int | None) -> str | None:
    if shape.element_type not in FLOAT_TYPES:
        return "must be of a floating-point type"
    if side.kind == "scalar" and not shape.is_scalar:
        return f"must be a scalar: {side.op} has one value for the whole tensor"
    if side.kind == "vector" and shape.rank != 1:
        return f"must have rank 1: {side.op} has one value for each output feature"
    if side.kind == "vector" and features is not None and shape.dimensions != (features,):
        return f"must have {features} elements, one for each output feature"
    if side.kind == "tensor" and output is not None and not shape.same_dimensions(output):
        return f"must have the dimensions of the output ({output})"
    if side.op == "add_scaled" and side.kind == "tensor" and shape.element_type not in FP8_TYPES:
        return f"must be {' or '.join(FP8_TYPES)}: add_scaled adds an FP8 tensor times its scale"
    return None


def lint(graph: Graph) -> list[str]:
    """What is unusual about the types of a valid graph, one sentence each; nothing for graphs that our passes write.

    XLA types every node with the program's wide type, and where an amax comes before the cast it gives the FP8 type to
    the amax (GraphString::ChangeDataType changes whichever node is last). Both are read here: values are f32 anyway.
    """
    output = graph.output
    findings = []
    for node in graph.nodes:
        if node.op == "amax" and node.type in FP8_TYPES:
            findings.append(f"node {node}: an amax of type {node.type} loses most of its precision")
        elif node is not output and not node.is_aux and node.type != "f32":
            findings.append(f"node {node}: every value is computed in f32, the type {node.type} is ignored")
    return findings
