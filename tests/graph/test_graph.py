"""The graph string: parse, print, errors with positions, building and walking."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import OPS, TYPES, Graph, GraphError, GraphStringError, Node, lint

# Strings as XLA writes them (cudnn_fused_conv_rewriter_test.cc), with its sparse uids.
XLA_GRAPHS = [
    "11:[f8e4m3fn]conv();",
    "11:[f32]conv();23:[f8e4m3fn]invscale(11);",
    "11:[f32]conv();23:[f32]scale(11);25:[f32]scale(23);27:[f32]add(25);31:[f8e5m2]scale(27);",
    "11:[f32]conv();12:[f32]relu(11);13:[f32]min(12);14:[f8e4m3fn]scale(13);",
    "11:[f32]conv();12:[f32]min(11);13:[f32]scale(12);14:[f32]max(13,11);15:[f8e4m3fn]scale(14);",
    "11:[f32]conv();20:[f32]scale(11);21:[f32]relu(20);22:[f8e4m3fn]scale(21);23:[f32]amax(21);",
    "11:[f32]conv();3:[f32]scale(11);5:[f32]scale(11);4:[f8e4m3fn]add(3,5);",
    "8589934597:[bf16]conv();8589934600:[bf16]elu(8589934597);",
]


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any valid graph: each node takes earlier tensors as operands; uids and types are arbitrary."""
    uids = draw(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=12, unique=True))
    nodes = [Node(uids[0], draw(st.sampled_from(TYPES)), "conv")]
    for uid in uids[1:]:
        spec = draw(st.sampled_from([s for s in OPS.values() if s.name != "conv"]))
        tensors = st.sampled_from([n.uid for n in nodes if not n.is_aux])
        count = draw(st.sampled_from(spec.operand_counts))
        operands = draw(st.lists(tensors, min_size=count, max_size=count))
        nodes.append(Node(uid, draw(st.sampled_from(TYPES)), spec.name, tuple(operands)))
    return Graph(tuple(nodes))


@pytest.mark.parametrize("text", XLA_GRAPHS)
def test_reads_what_xla_writes(text: str) -> None:
    graph = Graph.parse(text)
    assert str(graph) == text
    assert graph.dialect == "xla"
    assert graph.output.uid == max((n for n in graph if n.op != "amax"), key=graph.nodes.index).uid


@given(graphs())
def test_round_trip(graph: Graph) -> None:
    assert Graph.parse(str(graph)) == graph
    assert str(Graph.parse(str(graph))) == str(graph)


@given(graphs(), st.data())
def test_damaged_text_is_an_error_or_another_graph(graph: Graph, data: st.DataObject) -> None:
    """Cut, insert, duplicate or swap: what is still read prints as it was written; the rest is a GraphStringError."""
    text = str(graph)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
    middle = data.draw(
        st.sampled_from(["", text[first:last] * 2, text[first:last][::-1]]) | st.text("0123456789:[](),;convf é\n\x00")
    )
    _reads_or_refuses(text[:first] + middle + text[last:])


@given(st.text())
@example("0" * 5000 + ":[f32]conv();")
@example("9" * 5000 + ":[f32]conv();")
@example("1:[f32]conv();\ud800")
@example("١:[f32]conv();")
def test_any_text_is_an_error_or_a_graph(text: str) -> None:
    _reads_or_refuses(text)


def _reads_or_refuses(text: str) -> None:
    try:
        result: Graph | GraphStringError = Graph.parse(text)
    except GraphStringError as error:
        result = error
    if isinstance(result, Graph):
        assert str(result) == text
    else:
        assert result.text == text
        assert 0 <= result.position <= len(text)
        assert len(str(result).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "message", "found_at"),
    [
        ("", "the graph is empty", ""),
        ("conv();", "expected a uid (a decimal number), found 'c'", "conv"),
        ("01:[f32]conv();", "a uid has no leading zeros", "01"),
        ("9223372036854775808:[f32]conv();", "this uid does not fit in 64 bits", "9223"),
        ("1[f32]conv();", "expected ':' after the uid, found '['", "[f32]"),
        ("1:[]conv();", "expected an element type, found ']'", "]conv"),
        ("1:[f32conv();", "expected ']' after the type, found '('", "();"),
        ("1:[f32]();", "expected an op name, found '('", "();"),
        ("1:[f32]conv;", "expected '(' after the op, found ';'", ";"),
        ("1:[f32]conv()", "expected ';' at the end of a node, found the end of the text", ""),
        ("1:[f32]conv(); 2:[f32]relu(1);", "expected a uid (a decimal number), found ' '", " 2"),
        ("1:[f32]conv();2:[f32]add(1;", "expected ',' or ')' after an operand, found ';'", ";"),
        ("1:[f32]conv();2:[f32]add(1,);", "expected a uid (a decimal number), found ')'", ");"),
        ("1:[f64]conv();", "unknown type 'f64'", "f64"),
        ("1:[f32]conv();2:[f32]swish(1);", "unknown op 'swish'; the ops are conv, scale", "swish"),
        ("1:[f32]relu(0);", "the first node must be conv, not relu", "relu"),
        ("1:[f32]conv();2:[f32]conv();", "a graph has one conv, its first node", "conv();"),
        ("1:[f32]conv();1:[f32]relu(1);", "uid 1 is taken by the node 1:[f32]conv()", "1:[f32]relu"),
        ("1:[f32]conv();2:[f32]add();", "add takes 1 or 2 operands inside the graph, not 0", "add"),
        ("1:[f32]conv();2:[f32]scale(1,1);", "scale takes 1 operand inside the graph, not 2", "scale"),
        ("1:[f32]conv();2:[f32]add(1,3);3:[f32]relu(1);", "operand 3 is not a node before this one", "3);3"),
        ("1:[f32]conv();2:[f32]relu(2);", "operand 2 is not a node before this one", "2);"),
        ("1:[f32]conv();2:[f32]amax(1);3:[f32]relu(2);", "operand 2 is amax, which leaves the graph", "2);"),
    ],
)
def test_errors_say_what_and_where(text: str, message: str, found_at: str) -> None:
    with pytest.raises(GraphStringError) as caught:
        Graph.parse(text)
    error = caught.value
    assert error.message.startswith(message)
    assert error.position == (text.rindex(found_at) if found_at else len(text))
    _, shown, caret = str(error).split("\n")
    assert shown == text
    assert caret == " " * error.position + "^"


def test_error_shows_the_part_of_a_long_text_around_it() -> None:
    text = str(_chain(500)).replace("251:[f32]relu", "251:[f32]rule")
    with pytest.raises(GraphStringError) as caught:
        Graph.parse(text)
    _, shown, caret = str(caught.value).split("\n")
    assert shown.startswith("...")
    assert shown.endswith("...")
    assert shown[len(caret) - 1 :].startswith("rule(250);")


def test_every_graph_error_is_an_xla_fp8_error() -> None:
    assert issubclass(GraphStringError, GraphError)
    assert issubclass(GraphError, XlaFp8Error)


def test_append_numbers_nodes_in_order_of_creation() -> None:
    start = Graph.conv()
    graph = start.append("scale", (1,)).append("relu", (2,)).append("amax", (3,)).append("invscale", (3,))
    graph = graph.with_type(5, "f8e5m2")
    assert str(graph) == "1:[f32]conv();2:[f32]scale(1);3:[f32]relu(2);4:[f32]amax(3);5:[f8e5m2]invscale(3);"
    assert str(start) == "1:[f32]conv();", "a graph does not change"


def test_append_keeps_the_rules() -> None:
    with pytest.raises(GraphError, match=r"in graph node 2:\[f32\]relu\(7\): operand 7 is not a node before this one"):
        Graph.conv().append("relu", (7,))
    with pytest.raises(GraphError, match=r"relu takes 1 operand"):
        Graph.conv().append("relu", ())
    with pytest.raises(GraphError, match="at least its conv"):
        Graph(())
    with pytest.raises(GraphError, match="has no node 9"):
        Graph.conv().with_type(9, "f32")


def test_a_long_graph_is_read_and_walked() -> None:
    graph = _chain(20_000)
    assert Graph.parse(str(graph)) == graph
    assert graph.output.uid == 20_000


def _chain(count: int) -> Graph:
    return Graph((Node(1, "f32", "conv"), *(Node(uid, "f32", "relu", (uid - 1,)) for uid in range(2, count + 1))))


def test_walking() -> None:
    graph = Graph.parse(
        "1:[f32]conv();2:[f32]channel_scale(1);3:[f32]min(2);4:[f32]scale(3);5:[f32]max(4,2);6:[f32]amax(5);"
        "7:[f32]add_scaled(5);8:[f8e4m3fn]add(7);9:[bf16]copy(7);"
    )
    assert graph.dialect == "extended"
    assert graph.output == graph.node(8)
    assert [n.op for n in graph.aux_outputs] == ["amax", "copy"]
    assert [n.uid for n in graph.users(2)] == [3, 5]
    assert graph.users(8) == ()
    assert [(s.index, s.node, s.op, s.kind) for s in graph.side_operands()] == [
        (2, 2, "channel_scale", "vector"),
        (3, 3, "min", "tensor"),
        (4, 4, "scale", "scalar"),
        (5, 7, "add_scaled", "tensor"),
        (6, 7, "add_scaled", "scalar"),
        (7, 8, "add", "tensor"),
    ]
    with pytest.raises(GraphError, match="has no node 10"):
        graph.users(10)


def test_a_node_that_uses_another_twice_is_one_user() -> None:
    graph = Graph.parse("1:[f32]conv();2:[f32]add(1,1);")
    assert graph.users(1) == (graph.node(2),)
    assert graph.side_operands() == ()


def test_two_endpoints_have_no_output() -> None:
    graph = Graph.parse("1:[f32]conv();2:[f32]relu(1);3:[f32]tanh(1);")
    with pytest.raises(GraphError, match=r"2 tensor endpoints, 2:\[f32\]relu\(1\) and 3:\[f32\]tanh\(1\)"):
        _ = graph.output


def test_aux_outputs_do_not_use_up_the_output() -> None:
    assert Graph.parse("1:[f32]conv();2:[f32]amax(1);3:[bf16]copy(1);").output.uid == 1


def test_lint_names_what_is_unusual() -> None:
    assert lint(Graph.parse("1:[f32]conv();2:[bf16]amax(1);3:[bf16]copy(1);4:[f8e4m3fn]relu(1);")) == []
    assert lint(Graph.parse("1:[bf16]conv();2:[bf16]relu(1);")) == [
        "node 1:[bf16]conv(): every value is computed in f32, the type bf16 is ignored"
    ]
    [finding] = lint(Graph.parse("1:[f32]conv();2:[f8e4m3fn]amax(1);"))
    assert "an amax of type f8e4m3fn" in finding


def test_the_table_is_complete() -> None:
    assert [name for name, spec in OPS.items() if spec.dialect == "xla"] == (
        ["conv", "scale", "invscale", "add", "min", "max", "relu", "elu", "amax"]
    )
    assert [name for name, spec in OPS.items() if spec.dialect == "extended"] == (
        ["bias", "channel_scale", "add_scaled", "clamp", "silu", "gelu_erf", "gelu_tanh", "sigmoid", "tanh", "copy"]
    )
    assert all(spec.meaning for spec in OPS.values())
