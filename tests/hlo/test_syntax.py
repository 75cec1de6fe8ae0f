"""Every form that hlo_lexer.cc and hlo_parser.cc accept: we read it, and XLA finds nothing lost in our print."""

from __future__ import annotations

import pytest

from xla_fp8 import _jax_compat, hlo
from xla_fp8.hlo.xla_process import XlaProcess

SUM = "sum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"

# Name -> text that jaxlib's parser takes.
ACCEPTED = {
    "percent signs": """HloModule m
ENTRY %e {
  %x = f32[2]{0} parameter(0)
  ROOT %y = f32[2]{0} negate(%x)
}
""",
    "no percent signs": """HloModule m
ENTRY e {
  x = f32[2]{0} parameter(0)
  ROOT y = f32[2]{0} negate(x)
}
""",
    "percent signs here and there": """HloModule m
ENTRY e {
  %x = f32[2] parameter(0)
  ROOT y = f32[2] negate(x)
}
""",
    "typed operands": """HloModule m
ENTRY e {
  x = f32[2]{0} parameter(0)
  ROOT y = f32[2] add(f32[2]{0} x, f32[2] %x)
}
""",
    "typed tuple operand": """HloModule m
ENTRY %e {
  %x = (f32[2]{0}, (s32[], pred[])) parameter(0)
  ROOT %y = f32[2]{0} get-tuple-element((f32[2]{0}, (s32[], pred[])) %x), index=0
}
""",
    "names with colons": """HloModule m:
ENTRY e: {
  x: = f32[2] parameter(0)
  ROOT y: = f32[2] negate(x:)
}
""",
    "nested instructions": """HloModule m
ENTRY e {
  ROOT y = f32[2] add(f32[2] parameter(0), multiply(f32[2] parameter(1), f32[2] parameter(2)))
}
""",
    "nested instructions of one opcode": """HloModule m
ENTRY e {
  x = f32[] parameter(0)
  ROOT y = add(negate(negate(x)), negate(f32[] negate(x)))
}
""",
    "nested computation": """HloModule m
ENTRY e {
  x = f32[4] parameter(0)
  z = f32[] constant(0)
  ROOT r = f32[] reduce(x, z), dimensions={0}, to_apply={
    a = f32[] parameter(0)
    b = f32[] parameter(1)
    ROOT s = add(a, b)
  }
}
""",
    "nested computations in a list": """HloModule m
other {
  ROOT c = f32[] parameter(0)
}
ENTRY e {
  i = s32[] parameter(0)
  x = f32[] parameter(1)
  ROOT r = f32[] conditional(i, x, x), branch_computations={other, {
    y = f32[] parameter(0)
    ROOT n = f32[] negate(y)
  }}
}
""",
    "nested computation in a nested computation": """HloModule m
ENTRY e {
  x = f32[4] parameter(0)
  ROOT f = f32[] fusion(x), kind=kLoop, calls={
    p = f32[4] parameter(0)
    z = f32[] constant(0)
    ROOT r = f32[] reduce(p, z), dimensions={0}, to_apply={
      a = f32[] parameter(0)
      b = f32[] parameter(1)
      ROOT s = add(a, b)
    }
  }
}
""",
    "comments everywhere": """/* before */ HloModule m // name
/* a
b */ENTRY/**/e { // open
  x = /*shape*/ f32[2]{0} parameter(/*number*/0) // x
  // a whole line
  ROOT /* root */ y = f32[2] add(/*index=0*/x, x /* twice */), /* c */ sharding={replicated}
} // end
""",
    "comment with a brace": """HloModule m
ENTRY e {
  ROOT x = f32[] parameter(0), sharding={replicated} // }
}
""",
    "ENTRY first": """HloModule m
ENTRY e {
  ROOT x = f32[] parameter(0)
}
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
""",
    "ENTRY in the middle": """HloModule m
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
ENTRY e {
  ROOT x = f32[] parameter(0)
}
c {
  ROOT t = f32[] parameter(0)
}
""",
    "no ENTRY": """HloModule m
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
e {
  ROOT x = f32[] parameter(0)
}
""",
    "no ROOT": """HloModule m
ENTRY e {
  x = f32[] parameter(0)
  y = f32[] negate(x)
}
""",
    "ROOT in the middle": """HloModule m
ENTRY e {
  x = f32[] parameter(0)
  ROOT y = f32[] negate(x)
  z = f32[] abs(x)
}
""",
    "no header": """sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
ENTRY e {
  ROOT x = f32[] parameter(0)
}
""",
    "no header, ENTRY first": """ENTRY e (x: f32[]) -> f32[] {
  ROOT x = f32[] parameter(0)
}
""",
    "a single instruction": """%y = f32[2,3] add(f32[2,3] %a, f32[2,3] %b)
""",
    "a single instruction, marked ROOT": """ROOT y = f32[2,3]{0,1} add(f32[2,3]{0,1} %a, f32[2,3] %b)
""",
    "a single instruction without operand names": """y = f32[2] add(f32[2], f32[2])
""",
    "a single instruction without its own name": """f32[2] multiply(f32[2] %a, f32[2] %a)
""",
    "a single instruction with a nested computation": """r = f32[] reduce(f32[4] x, f32[] z), dimensions={0},
  to_apply={ a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
""",
    "shapes left out": """HloModule m
ENTRY e {
  x = f32[2,3] parameter(0)
  y = f32[2,3] parameter(1)
  s = add(x, y)
  t = tanh(s)
  c = compare(t, y), direction=LT
  w = select(c, x, y)
  r = transpose(w), dimensions={1,0}
  ROOT q = tuple(r, c)
}
""",
    "several instructions on one line": """HloModule m ENTRY e { x = f32[2] parameter(0), sharding={replicated}
y = f32[2] negate(x) ROOT z = f32[2] add(x, y),
metadata={op_name="z"} w = f32[2] abs(x) }
""",
    "attributes over several lines": """HloModule m
ENTRY e {
  x = f32[2,3] parameter(0)
  ROOT y = f32[3,2] transpose(x),
    dimensions={
      1,
      0},
    metadata={op_name="a"
      op_type="b"}
}
""",
    "attributes that start with a comma": """HloModule m
ENTRY e {
  x = f32[2,3] parameter(0)
  ROOT y = f32[3,2] transpose(x)
    , dimensions={1,0}
}
""",
    "carriage returns": (
        "HloModule m\r\n\r\nENTRY e {\r\n  x = f32[2]{0} parameter(0)\r\n  ROOT y = f32[2]{0} negate(x)\r\n}\r\n"
    ),
    "tabs": (
        "HloModule m\n"
        "\n"
        "ENTRY e {\n"
        "\tx = f32[2]{0} parameter(0)\n"
        "\tROOT y = f32[2]{0} negate(x),\tsharding={replicated}\n"
        "}\n"
    ),
    "quotes and slashes in strings": r"""HloModule m
ENTRY e {
  ROOT x = f32[] parameter(0), metadata={op_name="a \"b\" // {c} \\" source_file="/* d */"}
}
""",
    "an escaped quote before the end of a line": r"""HloModule m
ENTRY e {
  x = f32[] parameter(0), metadata={op_name="a\""}
  ROOT y = f32[] negate(x), metadata={op_name="params[\'w\']"}
}
""",
    "a string over two lines": """HloModule m
ENTRY e {
  ROOT x = f32[] parameter(0), metadata={op_name="a
b"}
}
""",
    "an instruction's text inside a string": """HloModule m
ENTRY e {
  ROOT x = f32[] parameter(0), metadata={op_name="y = f32[] negate(x)"}
}
""",
    "a NUL character in a string": 'HloModule m\nENTRY e {\n  ROOT x = f32[] parameter(0), metadata={op_name="\0"}\n}',
    "JSON backend_config": """HloModule m
ENTRY e {
  ROOT x = f32[] custom-call(), custom_call_target="t", backend_config={"a":[1,{"b":"}"}],"url":"http://x/*"}
}
""",
    "string backend_config": r"""HloModule m
ENTRY e {
  ROOT x = f32[] custom-call(), custom_call_target="t", backend_config="{\"a\": 1}"
}
""",
    "frontend attributes": """HloModule m, frontend_attributes={a="b",mesh={m = #sdy.mesh<["x"=2]>}}
ENTRY e {
  ROOT x = f32[] parameter(0), frontend_attributes={k="v",j={"a":1}}
}
""",
    "nothing between commas": """HloModule m
ENTRY e {
  x = f32[] parameter(0)
  ROOT y = f32[] add(x, , x)
}
""",
    "sharding with spaces": """HloModule m
ENTRY e {
  ROOT x = f32[8,4] parameter(0), sharding={devices=[2,1] <= [2]}
}
""",
    "tuple sharding": """HloModule m
ENTRY e {
  x = f32[8] parameter(0)
  ROOT y = (f32[8], f32[8]) tuple(x, x), sharding={{replicated}, {devices=[2]<=[2]}}
}
""",
    "control predecessors": """HloModule m
ENTRY e {
  x = f32[] parameter(0)
  y = f32[] negate(x)
  ROOT z = f32[] abs(x), control-predecessors={%y, x}
}
""",
    "empty tuple and token": """HloModule m
ENTRY e {
  t = token[] after-all()
  u = () tuple()
  ROOT r = (token[], ()) tuple(t, u)
}
""",
    "index comments": """HloModule m
ENTRY e {
  %x = f32[] parameter(0)
  ROOT %t = (f32[], f32[], f32[], f32[], f32[], /*index=5*/f32[]) tuple(%x, %x, %x, %x, %x, /*index=5*/%x)
}
""",
    "dynamic dimensions": """HloModule m
ENTRY e {
  x = f32[<=4,3]{1,0} parameter(0)
  n = s32[] get-dimension-size(x), dimensions={0}
  ROOT y = f32[<=4,3] negate(x)
}
""",
    "unbounded dimensions": """HloModule m
ENTRY e {
  x = f32[?,3]{1,0} parameter(0)
  ROOT y = f32[?,3] negate(x)
}
""",
    "tiles and memory space": """HloModule m
ENTRY e {
  x = f32[8,128]{1,0:T(8,128)(2,1)S(5)} parameter(0)
  ROOT y = f32[8,128]{1,0:T(8,128)S(1)} copy(x)
}
""",
    "tiles with a star": """HloModule m
ENTRY e {
  ROOT x = f32[8,128]{1,0:T(*,128)} parameter(0)
}
""",
    "element size and tail padding": """HloModule m
ENTRY e {
  ROOT x = s4[8,128]{1,0:T(8,128)L(1024)E(4)} parameter(0)
}
""",
    "split configs": """HloModule m
ENTRY e {
  ROOT x = f32[8,128]{1,0:SC(0:4)} parameter(0)
}
""",
    "sparse layout": """HloModule m
ENTRY e {
  ROOT x = f32[8,8]{1,0:D(D,C)} parameter(0)
}
""",
    "layout of a scalar": """HloModule m
ENTRY e {
  ROOT x = f32[]{:T(128)} parameter(0)
}
""",
    "async sugar": """HloModule m
ENTRY e {
  x = f32[2]{0} parameter(0)
  s = ((f32[2]{0}), f32[2]{0}, s32[]) custom-call-start(x), custom_call_target="t"
  u = ((f32[2]{0}), f32[2]{0}, s32[]) custom-call-update(s)
  ROOT d = f32[2]{0} custom-call-done(u)
}
""",
    "async-start with calls": """HloModule m
wrapped {
  p = f32[2]{0} parameter(0)
  ROOT n = f32[2]{0} negate(p)
}, execution_thread="t"
ENTRY e {
  x = f32[2]{0} parameter(0)
  s = ((f32[2]{0}), f32[2]{0}, s32[]) async-start(x), async_execution_thread="t", calls=wrapped
  ROOT d = f32[2]{0} async-done(s)
}
""",
    "all-gather-start": """HloModule m
ENTRY e {
  x = f32[2]{0} parameter(0)
  s = (f32[2]{0}, f32[4]{0}) all-gather-start(x), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  ROOT d = f32[4]{0} all-gather-done(s)
}
""",
    "execution thread": """HloModule m
sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}, execution_thread="other"
ENTRY e {
  ROOT x = f32[] parameter(0)
}
""",
    "header attributes": """HloModule m, is_scheduled=true, input_output_alias={ {}: (0, {}, may-alias) },
  entry_computation_layout={(f32[2]{0})->f32[2]{0}}, replica_count=2, num_partitions=2
ENTRY e {
  x = f32[2]{0} parameter(0)
  ROOT y = f32[2]{0} negate(x)
}
""",
    "tables in free form": """HloModule m FileNames 1 "a.py" FunctionNames 1 "f" /* c */
FileLocations 1 {file_name_id=1, function_name_id=1 line=3
end_line=3 column=1 end_column=2} StackFrames 1 {file_location_id=1 parent_frame_id=1}
ENTRY e { ROOT x = f32[] parameter(0), metadata={stack_frame_id=1} }
""",
    "buffers": """HloModule m
ENTRY e {
  x = f32[2]{0} parameter(0)
  b = b(f32[2]{0}) custom-call(x), custom_call_target="Pin", output_to_operand_aliasing={{}: (0, {})}
  ROOT y = f32[2]{0} custom-call(b), custom_call_target="Unpin", output_to_operand_aliasing={{}: (0, {})}
}
""",
}


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_round_trip_of_every_form(text: str, xla: XlaProcess) -> None:
    module = hlo.parse(text)
    printed = hlo.to_text(module)
    assert hlo.to_text(hlo.parse(printed)) == printed
    original = xla.full_text(text)
    assert original.ok, original.message
    ours = xla.full_text(printed)
    assert ours.ok, f"{ours.message}\n{printed}"
    assert ours.text == original.text


@pytest.mark.parametrize("text", ACCEPTED.values(), ids=ACCEPTED.keys())
def test_every_form_verifies(text: str) -> None:
    hlo.verify(hlo.parse(text))


def test_unknown_opcodes_and_attributes_survive() -> None:
    line = "ROOT %y = f99[2]{0} quantum-teleport(%x), flux={a=[1,(2)] b}, mode=k_X, deep={{1},{}}"
    text = f"HloModule m\n\nENTRY %e (x: f32[2]) -> f99[2] {{\n  %x = f32[2]{{0}} parameter(0)\n  {line}\n}}\n\n"
    module = hlo.parse(text)
    hlo.verify(module)
    assert hlo.to_text(module) == text
    assert module.entry.root.attributes["flux"] == "{a=[1,(2)] b}"
    assert list(module.entry.root.attributes) == ["flux", "mode", "deep"]


def test_what_lone_instructions_become() -> None:
    module = hlo.parse("%y = f32[2,3]{0,1} add(f32[2,3]{0,1} %a, f32[2,3] %b)")
    assert module.name == "_"
    assert [i.name for i in module.entry] == ["a", "b", "y"]
    assert [p.parameter_number for p in module.entry.parameters] == [0, 1]
    assert module.attributes["entry_computation_layout"] == "{(f32[2,3]{1,0}, f32[2,3]{1,0})->f32[2,3]{1,0}}"


def test_nested_computations_become_computations_that_passes_can_walk() -> None:
    module = hlo.parse(ACCEPTED["nested computations in a list"])
    assert [c.name for c in module.computations] == ["other", "_", "e"]
    assert [c.name for c in module.entry.root.called_computations] == ["other", "_"]


def test_inferred_shapes() -> None:
    entry = hlo.parse(ACCEPTED["shapes left out"]).entry
    assert [str(i.shape.text_without_layout) for i in entry][2:] == [
        *("f32[2,3]", "f32[2,3]", "pred[2,3]", "f32[2,3]", "f32[3,2]", "(f32[3,2], pred[2,3])"),
    ]


# Text, line and column of the error, what it says, and the line shown.
REJECTED = {
    "empty": ("", 1, 1, "the text is empty"),
    "only a comment": ("// nothing\n", 2, 1, "the text is empty"),
    "a header alone": ("HloModule m\n", 2, 1, "no computations"),
    "no closing brace": ("HloModule m\nENTRY e {\n  x = f32[] parameter(0)\n", 4, 1, "not closed with '}'"),
    "no instructions": ("HloModule m\nENTRY e {\n}", 3, 1, "no instructions"),
    "an unknown operand": ("HloModule m\nENTRY e {\n  y = f32[] negate(x)\n}", 3, 20, "instruction does not exist: x"),
    "a name twice": (
        "HloModule m\nENTRY e {\n  x = f32[] parameter(0)\n  x = f32[] negate(x)\n}",
        4,
        3,
        "x is already defined",
    ),
    "a computation twice": (f"HloModule m\n{SUM}{SUM}", 7, 1, "sum is already defined"),
    "two roots": (
        "HloModule m\nENTRY e {\n  ROOT x = f32[] parameter(0)\n  ROOT y = f32[] negate(x)\n}",
        4,
        3,
        "only one ROOT",
    ),
    "two entries": (
        "ENTRY a {\n  x = f32[] parameter(0)\n}\nENTRY b {\n  x = f32[] parameter(0)\n}",
        4,
        1,
        "only one ENTRY",
    ),
    "an open string": (
        'HloModule m\nENTRY e {\n  x = f32[] parameter(0), metadata={op_name="a}\n}',
        3,
        45,
        "not closed",
    ),
    "an open brace": ("HloModule m\nENTRY e {\n  x = f32[] parameter(0), sharding={replicated\n}", 4, 2, "not closed"),
    "crossed brackets": (
        "HloModule m\nENTRY e {\n  x = f32[] parameter(0),\n  a={(})\n}",
        4,
        7,
        "expected ')', found '}'",
    ),
    "an attribute twice": (
        "HloModule m\nENTRY e {\n  x = f32[] parameter(0),\n  a=1, a=2\n}",
        4,
        8,
        "attribute 'a' already exists",
    ),
    "a bad parameter number": ("HloModule m\nENTRY e {\n  x = f32[] parameter(one)\n}", 3, 23, "parameter number"),
    "a bad dimension": (
        "HloModule m\nENTRY e {\n  x = f32[two] parameter(0)\n}",
        3,
        7,
        "'two' is not a dimension size",
    ),
    "a huge dimension": (
        f"HloModule m\nENTRY e {{\n  x = f32[{'9' * 5000}] parameter(0)\n}}",
        3,
        7,
        "not a dimension size",
    ),
    "a NUL character": ("HloModule m\nENTRY e {\n  x = f32[] \0parameter(0)\n}", 3, 13, "expects opcode"),
    "no opcode": ("HloModule m\nENTRY e {\n  x = f32[] \n}", 4, 1, "expects opcode"),
    "no operands": ("HloModule m\nENTRY e {\n  x = f32[] negate\n}", 4, 1, "expects '(' after opcode negate"),
    "more after a lone instruction": ("y = f32[] negate(f32[] x)\nfoo", 2, 1, "HloModule line missing"),
    "a parameter without a shape": ("HloModule m\nENTRY e {\n  x = parameter(0)\n}", 3, 7, "cannot infer shape"),
    "too many nested instructions": (f"ENTRY e {{\n  x = f32[] {'negate(' * 5000}\n}}", 2, 720, "nested more than 100"),
    "too many nested tuples": (f"ENTRY e {{\n  x = {'(' * 100000}\n}}", 2, 7, "nested more than 100"),
    "too many nested computations": (
        f"ENTRY e {{\n  {'x = f32[] call(), to_apply={ ' * 500}{'}' * 500}\n}}",
        2,
        2932,
        "nested more than 100",
    ),
}


@pytest.mark.parametrize(("text", "line", "column", "message"), REJECTED.values(), ids=REJECTED.keys())
def test_errors_say_where(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(hlo.HloParseError) as caught:
        hlo.parse(text, "dump.hlo")
    error = caught.value
    assert message in error.message
    assert (error.filename, error.line, error.column) == ("dump.hlo", line, column)
    assert error.line_text == text.split("\n")[line - 1]
    first, shown, caret = str(error).split("\n")
    assert first == f"dump.hlo:{line}:{column}: error: {error.message}"
    at = caret.index("^")
    if column <= len(error.line_text) and len(error.line_text) < 160:
        assert shown[at] == error.line_text[column - 1]


def test_a_long_line_is_shown_around_the_error() -> None:
    text = f"ENTRY e {{\n  x = f32[] parameter(0)\n  y = tuple({'x, ' * 9998}missing, {'x, ' * 9998}x)\n}}"
    with pytest.raises(hlo.HloParseError) as caught:
        hlo.parse(text)
    _, shown, caret = str(caught.value).split("\n")
    assert len(shown) < 200
    assert shown[caret.index("^") :].startswith("missing")


ELEMENTS = """HloModule m

ENTRY e {
  p = (f32[2]{0}, (s32[3]{0}, f32[4]{0})) parameter(0)
  p_0 = f32[2]{0} get-tuple-element(p), index=0
  a = f32[2]{0} negate(f32[2]{0} p#0)
  b = f32[2]{0} add(p#0, a)
  c = (s32[3]{0}, f32[4]{0}) copy(%p#1)
  ROOT d = s32[3]{0} negate(c#0)
}
"""


def test_elements_of_tuples_written_with_a_number_sign() -> None:
    """What --xla_dump_to writes since jaxlib 0.12; older ones cannot read it, so they are not asked."""
    module = hlo.parse(ELEMENTS)
    hlo.verify(module)
    made = {i.name: (i.operand(0).name, i.tuple_index) for i in module.entry if i.opcode == "get-tuple-element"}
    # One for each element, made before its first use; the text's own p_0 keeps its name.
    assert made == {"p_0": ("p", 0), "p_0.1": ("p", 0), "p_1": ("p", 1), "c_0": ("c", 0)}
    assert [i.name for i in module.entry.instruction("p_0.1").users] == ["a", "b"]
    assert hlo.to_text(hlo.parse(hlo.to_text(module))) == hlo.to_text(module)
    if tuple(map(int, _jax_compat.jaxlib_version().split(".")[:2])) >= (0, 12):
        assert _jax_compat.full_text(hlo.to_text(module)) == _jax_compat.full_text(ELEMENTS)


@pytest.mark.parametrize(
    ("operand", "message"),
    [("c#7", "c has no element 7"), ("q#0", "does not exist: q"), ("b#0", "b has no element 0"), ("c#", "expects")],
)
def test_elements_that_are_not_there(operand: str, message: str) -> None:
    with pytest.raises(hlo.HloParseError, match=message):
        hlo.parse(ELEMENTS.replace("c#0", operand))
