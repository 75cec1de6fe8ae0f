"""Every constructor and every modifier: what it matches, what it does not, and how it prints."""

from __future__ import annotations

import inspect

import pytest

from xla_fp8 import match as m
from xla_fp8.match.pattern import Constructor

CONSTRUCTORS = sorted((name, value) for name, value in vars(m).items() if isinstance(value, Constructor))


def instruction_of(computation, opcode, arity):
    """An instruction of that opcode with `arity` operands; the parser does not ask whether it makes sense."""
    parameters = [f"p{i} = f32[2] parameter({i})" for i in range(arity)]
    body = "\n".join([*parameters, f"ROOT x = f32[2] {opcode}({', '.join(f'p{i}' for i in range(arity))})"])
    return computation(body).root


@pytest.mark.parametrize(("name", "constructor"), CONSTRUCTORS, ids=[name for name, _ in CONSTRUCTORS])
def test_every_opcode_constructor(computation, name, constructor):
    arity = 2 if constructor.arity is None else constructor.arity
    opcode = constructor.opcode or "negate"
    if opcode == "constant":
        found = computation("c = f32[] constant(1)").root
    else:
        found = instruction_of(computation, opcode, arity)
    assert name == constructor.name == str(constructor())
    assert m.match(found, constructor())
    assert m.match(found, constructor)
    operands = [m.parameter(i) for i in range(len(found.operands))]
    assert m.match(found, constructor(*operands))
    if operands:
        assert not m.match(found, constructor(m.negate(), *operands[1:]))
    if constructor.opcode:
        other = instruction_of(computation, "some-new-opcode", arity)
        assert not m.match(other, constructor(*operands))
        assert m.match(other, m.op("some-new-opcode"))


def test_a_constructor_is_named_as_xla_names_the_opcode():
    for name, constructor in CONSTRUCTORS:
        if name not in ("any", *(n for n, c in CONSTRUCTORS if c.any_order)):
            assert name.rstrip("_").replace("_", "-") == constructor.opcode


def test_a_wrong_number_of_operands_is_refused_when_the_pattern_is_built():
    with pytest.raises(m.PatternError, match=r"^multiply takes 2 operands or none, not 1$"):
        m.multiply(m.any())
    with pytest.raises(m.PatternError, match=r"^convert takes 1 operand or none, not 2$"):
        m.convert(m.any(), m.any())
    with pytest.raises(m.PatternError, match=r"expected a pattern, found 2; write m\.constant_scalar\(2\)"):
        m.multiply(m.any(), 2)


@pytest.mark.parametrize("opcode", ["add", "and", "maximum", "minimum", "multiply", "or", "xor"])
def test_any_order(computation, opcode):
    root = computation(
        f"""a = f32[2] parameter(0)
        b = f32[2] negate(a)
        x = f32[2] {opcode}(a, b)"""
    ).root
    any_order = getattr(m, f"{opcode}_any_order")
    in_order = getattr(m, f"{opcode}_" if opcode in ("and", "or") else opcode)
    assert m.match(root, any_order(m.parameter(), m.negate()))
    assert m.match(root, any_order(m.negate(), m.parameter()))
    assert not m.match(root, any_order(m.negate(), m.negate()))
    assert m.match(root, in_order(m.parameter(), m.negate()))
    assert not m.match(root, in_order(m.negate(), m.parameter()))


def test_parameter_number(computation):
    root = computation("p = f32[] parameter(3)").root
    assert m.match(root, m.parameter(3))
    assert not m.match(root, m.parameter(0))


def test_get_tuple_element(computation):
    root = computation(
        """p = (f32[], f32[2]) parameter(0)
        g = f32[2] get-tuple-element(p), index=1"""
    ).root
    assert m.match(root, m.get_tuple_element())
    assert m.match(root, m.get_tuple_element(m.parameter()))
    assert m.match(root, m.get_tuple_element(m.parameter(), index=1))
    assert m.match(root, m.get_tuple_element(index=1))
    assert not m.match(root, m.get_tuple_element(m.parameter(), index=0))
    assert not m.match(root, m.get_tuple_element(m.negate(), index=1))


def test_custom_call(computation):
    root = computation(
        """p = f32[] parameter(0)
        c = f32[] custom-call(p), custom_call_target="lapack_getrf\""""
    ).root
    assert m.match(root, m.custom_call())
    assert m.match(root, m.custom_call(m.parameter()))
    assert m.match(root, m.custom_call("lapack_getrf"))
    assert m.match(root, m.custom_call(("other", "lapack_getrf"), m.parameter(0)))
    assert not m.match(root, m.custom_call("other", m.parameter(0)))
    assert not m.match(root, m.custom_call("lapack_getrf", m.parameter(0), m.any()))


def test_op_takes_several_opcodes(computation):
    root = computation("p = f32[] parameter(0)\nx = f32[] negate(p)").root
    assert m.match(root, m.op("abs", "negate"))
    assert m.match(root, m.op())
    assert not m.match(root, m.op("abs", "add"))
    with pytest.raises(m.PatternError, match="opcodes in HLO spelling"):
        m.op(m.negate())


@pytest.mark.parametrize("direction", ["EQ", "NE", "GE", "GT", "LE", "LT"])
def test_compare(computation, direction):
    root = computation(f"p = f32[] parameter(0)\nx = pred[] compare(p, p), direction={direction}").root
    assert m.match(root, m.compare(m.any(), m.any()).with_comparison_direction(direction))
    other = "EQ" if direction == "NE" else "NE"
    assert not m.match(root, m.compare(m.any(), m.any()).with_comparison_direction(other))
    with pytest.raises(m.PatternError, match="use EQ, NE, GE, GT, LE or LT"):
        m.compare().with_comparison_direction("gt")


def test_optional(computation):
    body = computation(
        """p = bf16[] parameter(0)
        once = f32[] convert(p)
        twice = f16[] convert(once)"""
    )
    pattern = m.optional(m.convert, m.parameter().capture("x"))
    assert m.match(body.instruction("p"), pattern)["x"].name == "p"
    assert m.match(body.instruction("once"), pattern)["x"].name == "p"
    assert m.match(body.instruction("twice"), pattern) is None
    assert m.match(body.instruction("once"), m.parameter().optionally(m.bitcast, m.convert))
    assert str(pattern) == 'optional(convert, parameter.capture("x"))'
    # The wrapped form wins where both match.
    assert m.match(body.instruction("once"), m.optional(m.convert, m.any().capture("x")))["x"].name == "p"


def test_optional_takes_any_function_of_a_pattern(computation):
    root = computation("p = bf16[] parameter(0)\nc = f32[] convert(p)").root
    pattern = m.optional(lambda p: m.convert(p).with_element_type("f16"), m.parameter())
    assert not m.match(root, pattern)
    assert str(pattern) == 'any_of(convert(parameter).with_element_type("f16"), parameter)'
    with pytest.raises(m.PatternError, match=r"takes a constructor such as m\.convert first"):
        m.optional("convert", m.any())


def test_through(computation):
    body = computation(
        """p = f32[6] parameter(0)
        r = f32[2,3] reshape(p)
        t = f32[3,2] transpose(r), dimensions={1,0}
        n = f32[3,2] negate(t)
        c = f32[3,2] copy(n)"""
    )
    layers = ("reshape", "transpose", "copy")
    for name in ("p", "r", "t"):
        assert m.match(body.instruction(name), m.through(layers, m.parameter()))
    assert not m.match(body.root, m.through(layers, m.parameter()))
    # As far below as it matches; a modifier is asked of the topmost.
    assert m.match(body.instruction("t"), m.through(layers, m.any().capture("x")))["x"].name == "p"
    assert m.match(body.instruction("t"), m.through(layers, m.any()).capture("x"))["x"].name == "t"
    assert m.match(body.instruction("t"), m.through(layers, m.reshape().capture("x")))["x"].name == "r"
    assert m.match(body.instruction("t"), m.through(layers, m.parameter()).with_rank(2))
    assert not m.match(body.instruction("t"), m.through(layers, m.parameter()).with_rank(1))
    assert m.match(body.instruction("r"), m.through("reshape", m.parameter()))


@pytest.mark.parametrize(
    ("constant", "value", "matches"),
    [
        ("f32[] constant(0.1)", 0.1, True),  # in f32, not in the f64 of Python
        ("bf16[] constant(0.1)", 0.1, True),
        ("f32[] constant(0.1)", 0.10001, False),
        ("f32[] constant(-0)", 0, True),
        ("f32[] constant(inf)", float("inf"), True),
        ("f16[] constant(inf)", 1e6, False),  # 1e6 overflows f16, and is not infinity
        ("f32[] constant(1)", 10**400, False),
        ("f32[] constant(nan)", float("nan"), True),
        ("f32[] constant(nan)", 0, False),
        ("f8e4m3fn[] constant(448)", 448, True),
        ("f8e5m2[] constant(57344)", 57344, True),
        ("s32[] constant(1)", 1, True),
        ("s32[] constant(0)", 0.5, False),
        ("u8[] constant(255)", -1, False),
        ("pred[] constant(true)", True, True),
        ("pred[] constant(false)", True, False),
        ("c64[] constant((1, 0))", 1, True),
        ("c64[] constant((1, 2))", 1, False),
        ("f32[1] constant({0})", 0, False),
        ("f32[] constant({...})", 0, False),
    ],
)
def test_constant_scalar(computation, constant, value, matches):
    assert bool(m.match(computation(f"c = {constant}").root, m.constant_scalar(value))) is matches


def test_constant_scalar_of_any_value(computation):
    assert m.match(computation("c = f32[] constant(3)").root, m.constant_scalar())
    assert m.match(computation("c = f32[] constant({...})").root, m.constant_scalar())
    assert not m.match(computation("c = f32[1] constant({3})").root, m.constant_scalar())
    assert not m.match(computation("p = f32[] parameter(0)").root, m.constant_scalar())


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("x = f32[] constant(6)", 6),
        ("x = f32[2,2] constant({ {6, 6}, {6, 6} })", 6),
        ("x = f32[2,2] constant({ {6, 6}, {6, 7} })", None),
        ("x = f32[2] constant({nan, nan})", float("nan")),
        ("x = f32[2] constant({...})", None),
        ("x = f32[0] constant({})", None),
        ("c = f32[] constant(6)\nx = f32[4] broadcast(c), dimensions={}", 6),
        ("c = f32[2] constant({6,7})\nx = f32[4,2] broadcast(c), dimensions={1}", None),
        ("c = f32[] constant(6)\nb = f32[4] broadcast(c), dimensions={}\nx = f32[2,2] reshape(b)", 6),
        ("c = f32[] constant(6)\nb = f32[4] broadcast(c), dimensions={}\nx = bf16[4] convert(b)", 6),
        ("c = f32[] constant(0.1)\nx = bf16[] convert(c)", 0.1),
        ("c = f32[] constant(1.7)\nx = s32[] convert(c)", 1),
        # Rounded to f8 on the way: 17 becomes 16.
        ("c = f32[] constant(17)\nd = f8e4m3fn[] convert(c)\nx = f32[] convert(d)", 16),
        ("c = f32[] constant(1)\nx = s32[] bitcast(c)", None),
        ("x = f32[] parameter(0)", None),
        (f"x = f32[1000] constant({{{', '.join(['6'] * 1000)}}})", 6),
        (f"x = f32[1000] constant({{{', '.join(map(str, range(1000)))}}})", None),
        (f"x = f32[1000] constant({{{', '.join(['6'] * 999)}, 7}})", None),
    ],
)
def test_constant_effective_scalar(computation, body, value):
    root = computation(body).root
    assert bool(m.match(root, m.constant_effective_scalar())) is (value is not None)
    assert bool(m.match(root, m.constant_effective_scalar(value or 0))) is (value is not None)
    assert not m.match(root, m.constant_effective_scalar(5))


def test_effective_scalar(computation):
    body = computation(
        """s = bf16[] parameter(0)
        w = f32[] convert(s)
        b = f32[2,3] broadcast(w), dimensions={}
        r = f32[3,2] reshape(b)
        v = f32[3] parameter(1)
        vb = f32[2,3] broadcast(v), dimensions={1}"""
    )
    # No further than needed: the convert rounds.
    assert m.match(body.instruction("r"), m.effective_scalar(m.any().capture("s")))["s"].name == "w"
    assert m.match(body.instruction("r"), m.effective_scalar(m.parameter().capture("s")))["s"].name == "s"
    assert m.match(body.instruction("w"), m.effective_scalar(m.any().capture("s")))["s"].name == "w"
    assert not m.match(body.instruction("vb"), m.effective_scalar(m.any()))
    assert str(m.effective_scalar(m.any())) == "effective_scalar(any)"


X = """p = f32[2,3]{0,1} parameter(0)
s = f32[] parameter(1)
x = f32[2,3] add(p, p), some_attribute="text", dimensions={0,1}, count=3, flag=true
y = f32[2,3] negate(x)
one = f32[1,1] reshape(s)
ROOT t = (f32[2,3], f32[2,3], f32[1,1]) tuple(y, x, one)"""


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("x", m.any().with_element_type("f32"), m.any().with_element_type("bf16", "f16")),
        ("t", m.any(), m.any().with_element_type("f32")),
        ("x", m.any().with_shape((2, 3)), m.any().with_shape((3, 2))),
        ("x", m.any().with_shape("f32[2,3]{0,1}"), m.any().with_shape("bf16[2,3]")),
        ("t", m.any().with_shape("(f32[2,3], f32[2,3], f32[1,1])"), m.any().with_shape("(f32[2,3])")),
        ("x", m.any().with_rank(2), m.any().with_rank(1)),
        ("p", m.any().with_layout((0, 1)), m.any().with_layout((1, 0))),
        ("x", m.any().with_layout((1, 0)), m.any().with_layout((0, 1))),
        ("s", m.any().is_scalar(), m.any().with_rank(1)),
        ("one", m.any().is_effective_scalar(), m.any().is_scalar()),
        ("x", m.any(), m.any().is_effective_scalar()),
        ("p", m.any().with_one_user(), m.any().with_one_use()),
        ("s", m.any().with_one_use(), m.any().with_users(2)),
        ("x", m.any().with_users(2), m.any().with_one_user()),
        ("t", m.any().with_users(0), m.any().with_one_user()),
        ("x", m.any().with_operand(1, m.parameter()), m.any().with_operand(1, m.negate())),
        ("y", m.any().with_operand(0, m.add()), m.any().with_operand(1, m.any())),
        ("x", m.any().with_operand_count(2), m.any().with_operand_count(1)),
        ("x", m.any().where(lambda i: i.name == "x", "x"), m.any().where(lambda i: i.name == "y", "y")),
        ("x", m.any(), m.any().where(lambda i: i.comparison_direction == "GT", "a compare")),
        ("x", m.any().with_attribute("some_attribute"), m.any().with_attribute("other")),
        ("x", m.any().with_attribute("some_attribute", "text"), m.any().with_attribute("some_attribute", "tex")),
        ("x", m.any().with_attribute("some_attribute", '"text"'), m.any().with_attribute("other", "text")),
        ("x", m.any().with_attribute("dimensions", (0, 1)), m.any().with_attribute("dimensions", (1, 0))),
        ("x", m.any().with_attribute("count", 3), m.any().with_attribute("count", 4)),
        ("x", m.any().with_attribute("flag", True), m.any().with_attribute("flag", False)),
        ("x", m.any().is_non_constant(), m.any().with_comparison_direction("EQ")),
        ("x", m.any_of(m.add(), m.negate()).with_users(2), m.any_of(m.add(), m.negate()).with_users(3)),
    ],
    ids=lambda value: str(value)[:60],
)
def test_modifiers(computation, name, yes, no):
    found = computation(X).instruction(name)
    assert m.match(found, yes), m.explain(found, yes)
    assert not m.match(found, no)


def test_modifiers_that_take_an_instruction(computation):
    body = computation(X)
    x, y, s = (body.instruction(name) for name in "xys")
    assert m.match(x, m.any().is_instruction(x))
    assert not m.match(y, m.any().is_instruction(x))
    assert m.match(x, m.any().with_shape_compatible_to(body.instruction("p")))
    assert not m.match(x, m.any().with_shape_compatible_to(s))


def test_a_modifier_returns_a_new_pattern(computation):
    root = computation("p = f32[] parameter(0)").root
    plain = m.parameter()
    strict = plain.with_element_type("bf16").capture("x")
    assert m.match(root, plain)
    assert not m.match(root, strict)
    assert str(plain) == "parameter"
    with pytest.raises(AttributeError):
        plain.names = ("y",)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: m.any().capture(""), "a capture needs a name"),
        (lambda: m.any().with_operand(-1, m.any()), "an operand index is 0, 1"),
        (lambda: m.any().with_element_type(), "needs names of types"),
        (lambda: m.any().optionally(), "needs the wrapper that may be there"),
        (lambda: m.any().where("x", "y"), "needs a function of an instruction and what it asks"),
        (lambda: m.parameter(m.any()), "takes its number, not any"),
        (lambda: m.any_of(), "at least one alternative"),
        (lambda: m.through((), m.any()), "takes opcodes in HLO spelling first"),
        (lambda: m.constant_scalar("0"), "takes a number, not '0'"),
        (lambda: m.any().with_attribute(1, 2), "needs an attribute's name, not 1"),
        (lambda: m.custom_call((1,)), "takes targets as text, not 1"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_write_instead(make, message):
    with pytest.raises(m.PatternError, match=message):
        make()


@pytest.mark.parametrize(
    "text",
    [
        "multiply(convert(any), broadcast(constant_scalar(0)))",
        'any_of(add_any_order(any, negate), op("new-op", "newer-op")).capture("x")',
        'custom_call("target", any).with_one_user()',
        'custom_call(("a", "b"))',
        "get_tuple_element(parameter(0), index=1)",
        'through(("reshape",), any.with_shape((2, 3)).with_layout((1, 0)))',
        "optional((convert, bitcast), any.with_operand(1, abs_).with_operand_count(2))",
        'compare(any, constant_effective_scalar(0.5)).with_comparison_direction("GT")',
        'any.with_attribute("dimensions", (0, 1)).with_attribute("x").with_attribute("y", "\\"z\\"")',
        'effective_scalar(any.with_element_type("f32", "bf16").is_scalar())',
        "constant_scalar",
        "any.with_shape((2,))",
    ],
)
def test_a_pattern_prints_as_the_expression_that_makes_it(text):
    pattern = m.evaluate_pattern(text)
    assert str(pattern) == repr(pattern) == text


def test_a_pattern_that_would_print_exponentially_long_is_cut_off():
    pattern = m.any()
    for _ in range(200):
        pattern = m.add(pattern, pattern)
    assert len(str(pattern)) == 4000
    assert str(pattern).endswith("...")


def test_everything_public_has_a_name_in_all():
    public = {n for n, v in vars(m).items() if not n.startswith("_") and not inspect.ismodule(v) and n != "annotations"}
    assert public == set(m.__all__)
