"""type_check: a graph against the operands and the output of its custom call."""

from __future__ import annotations

import pytest

from xla_fp8.graph import Graph, GraphError, GraphTypeError, type_check
from xla_fp8.hlo import ConvolutionDimensionNumbers, Shape

INPUT, FILTER = Shape.parse("f8e4m3fn[1,8,8,16]"), Shape.parse("f8e5m2[3,3,16,32]")
OUTPUT = Shape.parse("f8e4m3fn[1,8,8,32]")
LABELS = ConvolutionDimensionNumbers.parse("b01f_01io->b01f")
GRAPH = Graph.parse(
    "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]add(3);5:[f8e4m3fn]add_scaled(4);6:[f32]amax(4);"
)
SIDES = ("f32[]", "f32[32]", "bf16[1,8,8,32]", "f8e5m2[1,8,8,32]", "f32[]")


def check(*sides: str, first: Shape = INPUT, output: Shape = OUTPUT) -> None:
    type_check(GRAPH, [first, FILTER, *map(Shape.parse, sides)], output, LABELS)


def test_accepts_what_fits() -> None:
    type_check(GRAPH)
    type_check(GRAPH, [INPUT, FILTER, *map(Shape.parse, SIDES)])
    check(*SIDES)


@pytest.mark.parametrize(
    ("index", "shape", "message"),
    [
        (0, "f32[1]", r"operand 2 \(f32\[1\]\), read by node 2, must be a scalar"),
        (0, "s32[]", "must be of a floating-point type"),
        (1, "f32[16]", "operand 3 .*, read by node 3, must have 32 elements"),
        (1, "f32[]", "must have rank 1: bias has one value"),
        (2, "f32[32]", r"operand 4 .* must have the dimensions of the output \(f8e4m3fn\[1,8,8,32\]\)"),
        (3, "bf16[1,8,8,32]", "operand 5 .* must be f8e4m3fn or f8e5m2: add_scaled"),
        (4, "f32[32]", "operand 6 .*, read by node 5, must be a scalar"),
    ],
)
def test_refuses_a_wrong_side_operand(index: int, shape: str, message: str) -> None:
    sides = [*SIDES[:index], shape, *SIDES[index + 1 :]]
    with pytest.raises(GraphTypeError, match=message):
        check(*sides)


def test_counts_operands() -> None:
    with pytest.raises(GraphTypeError, match=r"needs 7 operands \(input, filter, scalar for scale \(node 2\), .*not 6"):
        check(*SIDES[:-1])
    with pytest.raises(GraphTypeError, match=r"needs 2 operands \(input, filter\), not 3"):
        type_check(Graph.conv(), [INPUT, FILTER, INPUT])


def test_input_is_fp8() -> None:
    with pytest.raises(GraphTypeError, match="the input must be f8e4m3fn or f8e5m2, not bf16"):
        check(*SIDES, first=INPUT.with_element_type("bf16"))


def test_output_has_its_node_s_type() -> None:
    with pytest.raises(GraphTypeError, match=r"the output is bf16.*5:\[f8e4m3fn\]add_scaled\(4\) has type f8e4m3fn"):
        check(*SIDES, output=OUTPUT.with_element_type("bf16"))


def test_one_endpoint() -> None:
    with pytest.raises(GraphError, match="2 tensor endpoints"):
        type_check(Graph.conv().append("relu", (1,)).append("tanh", (1,)))
