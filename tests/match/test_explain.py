"""What explain says, word by word."""

from __future__ import annotations

import pytest

from xla_fp8 import match as m

BODY = """p = f8e4m3fn[2,3] parameter(0)
s = f32[] parameter(1)
c = f32[2,3] convert(p)
n = f32[2,3] negate(c)
b = f32[2,3] broadcast(s), dimensions={}
mul = f32[2,3] multiply(n, b)
zero = f32[] constant(0)
zeros = f32[2,3] broadcast(zero), dimensions={}
relu = f32[2,3] maximum(mul, zeros)
w = f32[2,3] constant({...})
vector = f32[3] constant({1, 2, 3})
gt = pred[2,3] compare(relu, w), direction=GT
sel = f32[2,3] select(gt, relu, w)
call = (f32[2,3], f32[]) custom-call(sel), custom_call_target="other", window={size=3}
g = f32[2,3] get-tuple-element(call), index=0
r = f32[6] reshape(g)
ROOT t = (f32[6], f32[2,3]) tuple(r, c)"""

CONVERTED = m.convert(m.any())


@pytest.mark.parametrize(
    ("name", "pattern", "message"),
    [
        # The instruction itself.
        ("mul", m.add(), "mul: expected add, found mul (multiply)"),
        ("mul", m.op("add", "subtract"), "mul: expected add or subtract, found mul (multiply)"),
        ("call", m.get_tuple_element(), "call: expected get-tuple-element, found call (custom-call to other)"),
        ("g", m.custom_call("x"), "g: expected custom-call, found g (get-tuple-element)"),
        # An operand.
        ("mul", m.multiply(CONVERTED, m.any()), "operand 0 of mul: expected convert, found n (negate)"),
        ("mul", m.multiply(m.any(), CONVERTED), "operand 1 of mul: expected convert, found b (broadcast)"),
        # Deeper: the way to it.
        (
            "relu",
            m.maximum(m.multiply(CONVERTED, m.any()), m.any()),
            "operand 0 of mul: expected convert, found n (negate) [relu > mul > n]",
        ),
        # The number of operands.
        ("t", m.tuple(m.any()), "t: expected 1 operand, found 2 operands"),
        ("mul", m.any().with_operand(2, m.any()), "mul: expected an operand 2, found 2 operands"),
        ("p", m.any().with_operand_count(1), "p: expected 1 operand, found no operands"),
        # Modifiers, of the instruction and of an operand.
        ("c", m.any().with_element_type("f16", "bf16"), "c: expected element type f16 or bf16, found f32"),
        (
            "c",
            m.convert(m.any().with_element_type("f8e5m2")),
            "p, operand 0 of c: expected element type f8e5m2, found f8e4m3fn",
        ),
        ("c", m.any().with_rank(4), "c: expected rank 4, found rank 2 (f32[2,3])"),
        ("c", m.any().with_shape((3, 2)), "c: expected dimensions [3,2], found f32[2,3]"),
        ("c", m.any().with_shape("f32[3,2]"), "c: expected shape f32[3,2], found f32[2,3]"),
        ("c", m.any().with_layout((0, 1)), "c: expected layout {0,1}, found layout {1,0}"),
        ("c", m.any().is_scalar(), "c: expected a scalar, found f32[2,3]"),
        ("c", m.any().is_effective_scalar(), "c: expected one element, found f32[2,3]"),
        ("c", m.any().with_one_user(), "c: expected one user, found 2 users (n, t)"),
        ("w", m.any().with_users(1), "w: expected 1 user, found 2 users (gt, sel)"),
        ("t", m.any().with_one_user(), "t: expected one user, found no users (it is the root)"),
        ("vector", m.any().with_one_use(), "vector: expected one use, found no users"),
        ("c", m.any().where(lambda i: False, "a depthwise one"), "c: expected a depthwise one, found c (convert)"),
        ("gt", m.compare().with_comparison_direction("GE"), "gt: expected direction GE, found direction GT"),
        ("p", m.parameter(1), "p: expected parameter 1, found parameter 0"),
        ("g", m.get_tuple_element(index=1), "g: expected tuple index 1, found tuple index 0"),
        ("call", m.custom_call("mine"), "call: expected custom call target mine, found other"),
        (
            "call",
            m.any().with_attribute("window", "{size=1}"),
            "call: expected window={size=1}, found window={size=3}",
        ),
        ("call", m.any().with_attribute("flag", True), "call: expected flag=true, found no flag"),
        ("call", m.any().with_attribute("flag"), "call: expected attribute flag, found none"),
        (
            "vector",
            m.any().is_non_constant(),
            "vector: expected something other than a constant, found vector (constant f32[3])",
        ),
        # Constants.
        ("zero", m.constant_scalar(6), "zero: expected the scalar constant 6, found zero (constant 0)"),
        ("c", m.constant_scalar(), "c: expected a scalar constant, found c (convert)"),
        (
            "relu",
            m.maximum(m.any(), m.constant_effective_scalar(6)),
            "operand 1 of relu: expected the constant 6, found zeros (broadcast of the constant 0)",
        ),
        (
            "sel",
            m.select(m.any(), m.any(), m.constant_effective_scalar(0)),
            "operand 2 of sel: expected the constant 0, found w (constant whose value the dump leaves out)",
        ),
        ("vector", m.constant_effective_scalar(), "vector: expected a constant, found vector (constant f32[3])"),
        # any_of: the alternative that got deepest; all that failed at the same place.
        (
            "mul",
            m.any_of(m.add(CONVERTED, m.any()), m.multiply(CONVERTED, m.any())),
            "operand 0 of mul: expected convert, found n (negate)",
        ),
        ("mul", m.any_of(m.add(), m.subtract(), m.add()), "mul: expected add or subtract, found mul (multiply)"),
        ("mul", m.any_of(m.add(), m.abs_(), m.or_()), "mul: expected add, abs or or, found mul (multiply)"),
        ("n", m.optional(m.convert, m.parameter()), "n: expected convert or parameter, found n (negate)"),
        (
            "n",
            m.any_of(m.any().with_rank(1), m.any().with_rank(2).with_element_type("bf16")),
            "n: expected element type bf16, found f32",
        ),
        # Any order: the order in which one operand matches is the one that was meant.
        (
            "mul",
            m.multiply_any_order(m.effective_scalar(m.any()), CONVERTED),
            "operand 0 of mul: expected convert, found n (negate)",
        ),
        (
            "mul",
            m.multiply_any_order(CONVERTED, m.effective_scalar(m.any())),
            "operand 0 of mul: expected convert, found n (negate)",
        ),
        (
            "relu",
            m.maximum_any_order(m.constant_effective_scalar(6), m.multiply()),
            "operand 1 of relu: expected the constant 6, found zeros (broadcast of the constant 0)",
        ),
        # Neither operand matches in either order: the deeper.
        (
            "mul",
            m.multiply_any_order(m.negate(m.abs_()), m.exponential()),
            "operand 0 of n: expected abs, found c (convert) [mul > n > c]",
        ),
        # What was looked through is on the way.
        (
            "r",
            m.through("reshape", m.get_tuple_element(index=1)),
            "g, operand 0 of r: expected tuple index 1, found tuple index 0",
        ),
        (
            "relu",
            m.maximum(m.any(), m.effective_scalar(m.parameter())),
            "operand 0 of zeros: expected parameter, found zero (constant 0) [relu > zeros > zero]",
        ),
        # Captures.
        (
            "sel",
            m.select(m.any(), m.any().capture("x"), m.any().capture("x")),
            "sel: expected every 'x' to be the same instruction, found relu and w",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_explain(computation, name, pattern, message):
    instruction = computation(BODY).instruction(name)
    assert m.explain(instruction, pattern) == message
    assert m.match(instruction, pattern) is None


def test_nothing_to_explain_where_the_pattern_matches(computation):
    mul = computation(BODY).instruction("mul")
    assert m.explain(mul, m.multiply(m.negate(), m.effective_scalar(m.any()))) is None
    assert m.difference(mul, m.multiply) is None


def test_a_difference_has_parts(computation):
    body = computation(BODY)
    found = m.difference(body.instruction("relu"), m.maximum(m.multiply(m.any(), m.broadcast(m.constant())), m.any()))
    assert found.instruction is body.instruction("s")
    assert found.path == ((body.instruction("relu"), 0), (body.instruction("mul"), 1), (body.instruction("b"), 0))
    assert (found.expected, found.found, found.depth) == ("constant", "s (parameter)", 3)


def test_many_users_and_long_ways_are_shortened(computation):
    lines = ["p = f32[] parameter(0)", *(f"n{i} = f32[] negate({f'n{i - 1}' if i else 'p'})" for i in range(20))]
    lines += [f"q{i} = f32[] abs(p)" for i in range(5)]
    body = computation("\n".join(lines))
    assert m.explain(body.instruction("p"), m.any().with_one_user()) == (
        "p: expected one user, found 6 users (n0, q0, q1, q2, ...)"
    )
    pattern = m.constant()
    for _ in range(20):
        pattern = m.negate(pattern)
    assert m.explain(body.instruction("n19"), pattern) == (
        "operand 0 of n0: expected constant, found p (parameter) [n19 > n18 > n17 > n16 > ... > n1 > n0 > p]"
    )
