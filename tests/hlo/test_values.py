"""The values that attributes hold: shapes, windows, dimension labels, metadata, stack frames, strings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_fp8 import hlo
from xla_fp8.hlo.attributes import quote, unquote
from xla_fp8.hlo.shape import UNBOUNDED, Layout, Shape

ARRAYS = st.builds(
    lambda element_type, sizes, order, tail: Shape(
        element_type, tuple(sizes), layout=Layout(tuple(order[: len(sizes)]), tail) if sizes or tail else None
    ),
    st.sampled_from(["f32", "bf16", "pred", "f8e4m3fn", "s4", "c128"]),
    st.lists(st.integers(0, 2**40), max_size=3),
    st.permutations(range(3)),
    st.sampled_from(["", ":T(8,128)", ":T(8,128)(2,1)S(5)", ":S(1)"]),
)
SHAPES = st.recursive(
    ARRAYS | st.just(Shape("token")), lambda inner: st.lists(inner, max_size=7).map(Shape.tuple), max_leaves=12
)


# ---------------------------------------------------------------- shapes


@given(SHAPES)
def test_shape_text_reads_back(shape: Shape) -> None:
    assert Shape.parse(str(shape)) == shape
    assert hash(Shape.parse(str(shape))) == hash(shape)


@given(SHAPES)
def test_layouts_do_not_matter_to_compatible(shape: Shape) -> None:
    bare = Shape.parse(shape.text_without_layout)
    assert "{" not in str(bare)
    assert shape.compatible(bare)
    assert bare.compatible(shape.with_default_layout())


@pytest.mark.parametrize(
    "text",
    [
        *("f32[]", "f32[2,3]{1,0}", "f32[<=4,3]", "f32[?,3]", "token[]", "opaque[]", "()", "b(f32[2]{0})"),
        *("(f32[2]{0}, (s32[], token[]))", "f32[8,128]{1,0:T(8,128)(2,1)L(2)E(4)S(5)}", "f32[2]{0:P(u8[16])}"),
        "(s32[], s32[], s32[], s32[], s32[], /*index=5*/s32[])",
    ],
)
def test_shape_forms(text: str) -> None:
    assert str(Shape.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["", "f32", "f32[", "f32[2", "f32[a]", "f32[2]{0", "(f32[]", "f32[2] x", "f32[2]{0,a}", "f32[-1]", "F32[2]"]
)
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(hlo.HloError):
        Shape.parse(text)


def test_shape_properties() -> None:
    shape = Shape.parse("f32[<=4,?,3]{0,1,2:T(8)}")
    assert (shape.rank, shape.dimensions, shape.dynamic) == (3, (4, UNBOUNDED, 3), (True, True, False))
    assert shape.is_array
    assert shape.is_dynamic
    assert shape.minor_to_major == (0, 1, 2)
    assert Shape.array("f32", (2, 3)).layout == Layout((1, 0))
    assert Shape.array("f32", (2, 3), layout=(0, 1)).element_count == 6
    assert not Shape.array("f32", (2, 3)).compatible(Shape.array("bf16", (2, 3)))
    assert Shape.array("f32", (2, 3)).same_dimensions(Shape.array("bf16", (2, 3)))
    assert Shape.array("f8e5m2").is_fp8
    assert Shape.array("f32").is_scalar
    assert str(Shape.parse("f32[<=4]{0}").with_element_type("s8")) == "s8[<=4]{0}"


# ---------------------------------------------------------------- windows and dimension labels

WINDOWS = st.lists(
    st.builds(
        hlo.WindowDimension,
        size=st.integers(1, 9),
        stride=st.integers(1, 4),
        padding_low=st.integers(-3, 9),
        padding_high=st.integers(-3, 9),
        window_dilation=st.integers(1, 3),
        base_dilation=st.integers(1, 3),
        reversal=st.booleans(),
    ),
    max_size=4,
).map(lambda dimensions: hlo.Window(tuple(dimensions)))


@given(WINDOWS)
def test_window_text_reads_back(window: hlo.Window) -> None:
    assert hlo.Window.parse(str(window)) == window


def test_window_text() -> None:
    text = "{size=3x5 stride=2x1 pad=1_0x-1_2 lhs_dilate=1x2 rhs_dilate=3x1 rhs_reversal=0x1}"
    window = hlo.Window.parse(text)
    assert str(window) == text
    assert window.dimensions[1] == hlo.WindowDimension(5, 1, -1, 2, 1, 2, True)
    assert hlo.Window.parse("{size=3}").dimensions == (hlo.WindowDimension(3),)
    assert hlo.Window.parse("{pad=1_1, size=3}") == hlo.Window.parse("{size=3 pad=1_1}")


@pytest.mark.parametrize("text", ["{size=3x3 stride=2}", "{size=a}", "{sise=3}", "{size=3 pad=1}", "{3x3}"])
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(hlo.HloAttributeError, match="window"):
        hlo.Window.parse(text)


@pytest.mark.parametrize(
    ("dimension", "input_size", "output_size"),
    [
        (hlo.WindowDimension(3), 8, 6),
        (hlo.WindowDimension(3, stride=2, padding_low=1, padding_high=1), 8, 4),
        (hlo.WindowDimension(3, window_dilation=2), 8, 4),
        (hlo.WindowDimension(3, base_dilation=2), 8, 13),
        (hlo.WindowDimension(9), 8, 0),
        (hlo.WindowDimension(1), 0, 0),
    ],
)
def test_output_size(dimension: hlo.WindowDimension, input_size: int, output_size: int) -> None:
    assert dimension.output_size(input_size) == output_size


@given(st.integers(0, 4).flatmap(lambda rank: st.tuples(*[st.permutations(range(rank + 2))] * 3)))
def test_dim_labels_read_back(orders: tuple[list[int], ...]) -> None:
    spatial = "".join(str(i) for i in range(len(orders[0]) - 2))
    lhs, rhs, output = (
        "".join((letters + spatial)[i] for i in order)
        for letters, order in zip(("bf", "io", "bf"), orders, strict=True)
    )
    labels = hlo.ConvolutionDimensionNumbers.parse(f"{lhs}_{rhs}->{output}")
    assert str(labels) == f"{lhs}_{rhs}->{output}"
    assert lhs[labels.input_batch_dimension] + lhs[labels.input_feature_dimension] == "bf"
    assert rhs[labels.kernel_input_feature_dimension] + rhs[labels.kernel_output_feature_dimension] == "io"
    assert output[labels.output_batch_dimension] + output[labels.output_feature_dimension] == "bf"
    for text, dimensions in (
        (lhs, labels.input_spatial_dimensions),
        (rhs, labels.kernel_spatial_dimensions),
        (output, labels.output_spatial_dimensions),
    ):
        assert "".join(text[d] for d in dimensions) == spatial


@pytest.mark.parametrize(
    "text", ["b01f", "b01f_01io", "b01f_01io->b01", "b00f_01io->b01f", "b02f_02io->b02f", "bf_ii->bf"]
)
def test_what_are_no_dim_labels(text: str) -> None:
    with pytest.raises(hlo.HloAttributeError, match="dim_labels"):
        hlo.ConvolutionDimensionNumbers.parse(text)


# ---------------------------------------------------------------- attributes, strings, metadata


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0")))
def test_quoted_strings_read_back(value: str) -> None:
    assert unquote(quote(value)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"a\"b\\c\n"', 'a"b\\c\n'),
        (r'"\303\244\x41"', "äA"),
        ("no quotes", "no quotes"),
        ('"ä"', "ä"),
        ('"\\\'"', "'"),
    ],
)
def test_unquote(text: str, value: str) -> None:
    assert unquote(text) == value


def test_attribute_map() -> None:
    text = 'a={1,{2}}, b="x, y", c=[2]<=[2], d=dim_0->out'
    attributes = hlo.AttributeMap.parse(f", {text}")
    assert list(attributes) == ["a", "b", "c", "d"]
    assert str(attributes) == text
    assert hlo.AttributeMap.parse("") == {}
    with pytest.raises(hlo.HloAttributeError):
        hlo.AttributeMap.parse("a=1 b=2")


def test_attributes_of_an_instruction_can_be_changed() -> None:
    module = hlo.parse('HloModule m\nENTRY e {\n  ROOT x = f32[2]{0} custom-call(), custom_call_target="t", api=1\n}')
    root = module.entry.root
    root.attributes["api"] = "2"
    root.attributes["sharding"] = "{replicated}"
    del root.attributes["custom_call_target"]
    assert hlo.instruction_text(root) == "x = f32[2]{0} custom-call(), api=2, sharding={replicated}"
    assert root.custom_call_target == ""
    assert root.sharding == "{replicated}"


def instruction(line: str) -> hlo.HloInstruction:
    return hlo.parse(f"HloModule m\nENTRY e {{\n  x = f32[2] parameter(0)\n  ROOT {line}\n}}").entry.root


def test_convenience_properties() -> None:
    call = instruction('y = f32[2] custom-call(x), custom_call_target="a\\"b", backend_config={"k":{"v":[1]}}')
    assert call.custom_call_target == 'a"b'
    assert call.backend_config == {"k": {"v": [1]}}
    assert instruction(r'y = f32[2] custom-call(x), backend_config="{\"k\": 1}"').backend_config == {"k": 1}
    assert instruction("y = f32[2] negate(x)").backend_config == {}
    assert instruction("y = pred[2] compare(x, x), direction=LT").comparison_direction == "LT"
    convolution = instruction("y = f32[2] convolution(x, x), feature_group_count=4")
    assert (convolution.feature_group_count, convolution.batch_group_count) == (4, 1)
    assert convolution.operand_precision == ()
    convolution = instruction("y = f32[2] convolution(x, x), operand_precision={highest, default}")
    assert convolution.operand_precision == ("highest", "default")
    add = instruction("y = f32[2] add(x, x)")
    assert (add.operand(0).user_count, add.operand(0).use_count) == (1, 2)


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("y = f32[2] custom-call(x), backend_config={oops}", "backend_config"),
        ('y = f32[2] custom-call(x), backend_config="[1]"', "backend_config"),
        ("y = f32[2] broadcast(x), dimensions={a}", "dimensions"),
        ("y = f32[2] convolution(x, x), feature_group_count=many", "feature_group_count"),
        ("y = f32[2] convolution(x, x)", "dim_labels"),
        ("y = pred[2] compare(x, x)", "comparison_direction"),
        ("y = f32[2] negate(x)", "parameter_number"),
        ("y = f32[2] call(x), to_apply=nothing", "to_apply"),
        ("y = f32[2] call(x)", "to_apply"),
        ('y = f32[2] negate(x), metadata={source_line="x"}', "metadata"),
        ("y = f32[2] negate(x), control-predecessors={nothing}", "control_predecessors"),
    ],
)
def test_broken_attributes_raise_when_read(line: str, name: str) -> None:
    with pytest.raises(hlo.HloAttributeError):
        getattr(instruction(line), name)


def test_metadata() -> None:
    text = 'metadata={op_type="add" op_name="jit(f)/a\\"b" source_file="m.py" source_line=12 profile_type={1}}'
    metadata = instruction(f"y = f32[2] negate(x), {text}").metadata
    assert metadata == hlo.OpMetadata('jit(f)/a"b', "add", "m.py", 12)
    assert instruction("y = f32[2] negate(x)").op_name == ""


# ---------------------------------------------------------------- stack frames

TABLES = """FileNames
1 "lib.py"
2 "user \\"q\\".py"

FunctionNames
1 "helper"
2 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=5}
2 {file_name_id=2 function_name_id=2 line=20 end_line=21 column=1 end_column=5}

StackFrames
1 {file_location_id=2 parent_frame_id=1}
2 {file_location_id=1 parent_frame_id=2}
3 {file_location_id=9 parent_frame_id=1}
4 {file_location_id=1 parent_frame_id=5}
"""


@pytest.fixture(scope="module")
def with_tables() -> hlo.HloModule:
    lines = "".join(f"  n{i} = f32[] negate(x), metadata={{stack_frame_id={i}}}\n" for i in range(1, 7))
    return hlo.parse(f"HloModule m\n\n{TABLES}\n\nENTRY e {{\n  x = f32[] parameter(0)\n{lines}}}\n")


def test_parent_frame_ids_are_printed_one_too_high(with_tables: hlo.HloModule) -> None:
    user, library = hlo.SourceLocation('user "q".py', 20, "main"), hlo.SourceLocation("lib.py", 10, "helper")
    assert with_tables.tables.stack(1) == [user]
    assert with_tables.tables.stack(2) == [library, user]
    assert str(library) == "lib.py:10"


def test_broken_tables_end_quietly(with_tables: hlo.HloModule) -> None:
    tables = with_tables.tables
    assert tables.stack(3) == []  # a location that is not there
    assert tables.stack(6) == []  # a frame that is not there
    assert tables.stack(4) == [hlo.SourceLocation("lib.py", 10, "helper")]  # a frame that is its own parent
    assert tables.location(0) is None
    assert not hlo.StackFrameTables()


def test_source_location_of_instructions(with_tables: hlo.HloModule) -> None:
    assert str(with_tables.source_location(with_tables.entry.instruction("n2"))) == "lib.py:10"
    assert with_tables.source_location(with_tables.entry.instruction("n6")) is None
    assert with_tables.source_location(with_tables.entry.instruction("x")) is None
    assert hlo.to_text(with_tables).count(TABLES.strip()) == 1
