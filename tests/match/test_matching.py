"""Captures, shared sub-patterns, find_all, and what a search costs."""

from __future__ import annotations

import pytest

from xla_fp8 import hlo
from xla_fp8 import match as m

SWISH = """x = f32[2] parameter(0)
y = f32[2] parameter(1)
sx = f32[2] logistic(x)
xsx = f32[2] multiply(x, sx)
sxx = f32[2] multiply(sx, x)
ysx = f32[2] multiply(y, sx)
ROOT t = (f32[2], f32[2], f32[2]) tuple(xsx, sxx, ysx)"""


def test_a_match_is_a_mapping_of_captures(computation):
    root = computation(SWISH).instruction("xsx")
    found = m.match(root, m.multiply(m.any().capture("a"), m.any().named("b")))
    assert found is not None
    assert found.instruction is root
    assert dict(found) == {"a": root.operand(0), "b": root.operand(1)}
    assert found.get("c") is None
    assert str(found) == "xsx, a=x, b=sx"
    with pytest.raises(KeyError, match="nothing is captured as 'c'; captured: a, b"):
        found["c"]


def test_a_match_without_captures_is_true(computation):
    found = m.match(computation(SWISH).root, m.tuple())
    assert found
    assert len(found) == 0


def test_a_name_used_twice_must_be_the_same_instruction(computation):
    body = computation(SWISH)
    swish = m.multiply_any_order(m.any().capture("x"), m.logistic(m.any().capture("x")))
    assert m.match(body.instruction("xsx"), swish)["x"].name == "x"
    assert m.match(body.instruction("sxx"), swish)["x"].name == "x"
    assert m.match(body.instruction("ysx"), swish) is None


def test_a_name_used_twice_makes_the_search_try_the_other_alternatives(computation):
    body = computation(
        """a = f32[] parameter(0)
        b = f32[] parameter(1)
        ab = f32[] add(a, b)
        bb = f32[] add(b, b)
        ROOT x = f32[] multiply(ab, bb)"""
    )
    either = m.add_any_order(m.any().capture("p"), m.any().capture("q"))
    # The left add alone would bind p to a; only the right one rules that out.
    found = m.match(body.root, m.multiply(either, m.add(m.any().capture("p"), m.any())))
    assert (found["p"].name, found["q"].name) == ("b", "a")
    found = m.match(body.root, m.multiply(m.any_of(m.any().capture("z"), either), m.add(m.any().capture("p"), m.any())))
    assert "z" in found


def test_one_pattern_object_used_twice_is_two_patterns_unless_it_captures(computation):
    body = computation(SWISH)
    anything = m.any()
    assert m.match(body.instruction("ysx"), m.multiply(anything, m.logistic(anything)))
    captured = m.any().capture("x")
    assert not m.match(body.instruction("ysx"), m.multiply(captured, m.logistic(captured)))


def test_only_captures_of_the_alternative_that_matched_are_bound(computation):
    root = computation(SWISH).instruction("sx")
    pattern = m.any_of(m.negate(m.any().capture("n")), m.logistic(m.any().capture("l")))
    assert list(m.match(root, pattern)) == ["l"]


def test_several_names_for_one_instruction(computation):
    root = computation(SWISH).instruction("sx")
    found = m.match(root, m.logistic().capture("a").capture("b"))
    assert found["a"] is found["b"] is root


def test_a_name_cannot_be_an_instruction_and_its_operand(computation):
    root = computation(SWISH).instruction("sx")
    assert not m.match(root, m.logistic(m.any().capture("a")).capture("a"))


def test_two_patterns_for_one_operand_must_both_match(computation):
    root = computation(SWISH).instruction("sx")
    pattern = m.logistic(m.parameter()).with_operand(0, m.any().with_element_type("f32").capture("x"))
    assert m.match(root, pattern)["x"].name == "x"
    assert not m.match(root, pattern.with_operand(0, m.parameter(1)))


def test_a_predicate_may_rely_on_opcode_operands_and_earlier_modifiers(computation):
    asked = []
    pattern = m.logistic(m.parameter(1)).where(lambda i: asked.append(i) or True, "anything")
    assert not m.match(computation(SWISH).instruction("sx"), pattern)
    pattern = m.logistic(m.parameter(0)).with_element_type("bf16").where(lambda i: asked.append(i) or True, "anything")
    assert not m.match(computation(SWISH).instruction("sx"), pattern)
    assert asked == []


def test_an_instruction_whose_shape_the_text_leaves_out_has_no_shape_to_match(computation):
    root = computation("p = f32[2] parameter(0)\nx = some-new-opcode(p)").root
    assert m.match(root, m.op("some-new-opcode"))
    assert not m.match(root, m.any().with_rank(1))
    assert "no shape" in m.explain(root, m.any().with_rank(1))


def test_find_all_in_program_order(computation):
    body = computation(SWISH)
    assert [found.instruction.name for found in m.find_all(body, m.multiply())] == ["xsx", "sxx", "ysx"]
    assert [found.instruction.name for found in m.find_all(body.module, m.logistic)] == ["sx"]


def test_find_all_looks_at_every_computation_of_a_module():
    module = hlo.parse(
        """HloModule two
        f { p = f32[] parameter(0)
          ROOT n = f32[] negate(p) }
        ENTRY main { q = f32[] parameter(0)
          ROOT c = f32[] call(q), to_apply=f }"""
    )
    assert [found.instruction.name for found in m.find_all(module, m.any())] == ["p", "n", "q", "c"]


def test_find_all_sees_rewrites_made_between_matches(computation):
    body = computation(
        """p = f32[2] parameter(0)
        n1 = f32[2] negate(p)
        n2 = f32[2] negate(n1)
        n3 = f32[2] negate(n2)
        ROOT x = f32[2] abs(n3)"""
    )
    seen = []
    for found in m.find_all(body, m.negate(m.negate(m.any().capture("x")))):
        seen.append(found.instruction.name)
        body.replace_all_uses_with(found.instruction, found["x"])
        body.remove_dead()
    # negate(negate(p)) went away under n3, which matches no more; n1 went with it.
    assert seen == ["n2"]
    assert [i.name for i in body] == ["p", "n3", "x"]


# ---------------------------------------------------------------- cost: counted in questions asked, not in time


class Counter:
    """A predicate that counts how often it is asked."""

    def __init__(self, answer=True):
        self.asked = 0
        self.answer = answer

    def __call__(self, instruction):
        self.asked += 1
        return self.answer


def tower(computation, height):
    """add(x, x) on add(x, x) on ...: 2 ** height ways from the root to the parameter."""
    lines = ["a0 = f32[] parameter(0)", *(f"a{i} = f32[] add(a{i - 1}, a{i - 1})" for i in range(1, height + 1))]
    return computation("\n".join(lines)).root


@pytest.mark.parametrize("answer", [True, False])
@pytest.mark.parametrize("function", [m.match, m.explain])
def test_an_any_order_chain_on_a_tower_of_doublings(computation, answer, function):
    root = tower(computation, 40)
    count = Counter(answer)
    pattern = m.parameter().where(count, "nothing")
    for _ in range(40):
        pattern = m.add_any_order(pattern, m.any().where(count, "nothing"))
    assert (function(root, pattern) is not None) is (answer is (function is m.match))
    assert count.asked <= 2 * 40


def test_one_pattern_object_nested_in_itself_both_ways(computation):
    root = tower(computation, 40)
    count = Counter()
    pattern = m.parameter().where(count, "nothing")
    for _ in range(40):
        pattern = m.add_any_order(pattern, pattern)
    assert m.match(root, pattern)
    assert count.asked == 1


@pytest.mark.parametrize("function", [m.match, m.explain])
def test_an_any_order_chain_that_fails_at_the_far_end(computation, function):
    lines = ["a0 = f32[] parameter(0)"]
    lines += [f"b{i} = f32[] negate(a{i - 1})\na{i} = f32[] add(a{i - 1}, b{i})" for i in range(1, 41)]
    count = Counter()
    pattern = m.constant()
    for _ in range(40):
        pattern = m.add_any_order(m.any().where(count, "nothing"), pattern)
    function(computation("\n".join(lines)).root, pattern)
    assert count.asked <= 2 * 40


def test_any_of_any_of_any_of(computation):
    root = tower(computation, 40)
    count = Counter(False)
    pattern = m.any().where(count, "nothing")
    for _ in range(40):
        pattern = m.any_of(m.add(pattern, m.any()), m.add(m.any(), pattern), pattern)
    assert not m.match(root, pattern)
    assert count.asked <= 41


def test_a_shared_capture_at_both_ends_of_a_chain(computation):
    """The capture takes two values, whatever the number of ways to the bottom."""
    root = tower(computation, 40)
    count = Counter()
    pattern = m.any().capture("x")
    for i in range(40):
        pattern = m.add_any_order(pattern, m.any().where(count, "nothing").capture(f"y{i}"))
    pattern = m.any_of(m.add(pattern, m.any().capture("x")), pattern)
    assert m.match(root, pattern)["x"].name == "a0"
    assert count.asked <= 2 * 41


def test_patterns_and_programs_of_any_depth(computation):
    depth = 5000
    lines = ["a0 = f32[] parameter(0)", *(f"a{i} = f32[] negate(a{i - 1})" for i in range(1, depth + 1))]
    root = computation("\n".join(lines)).root
    pattern = m.parameter().capture("bottom")
    for _ in range(depth):
        pattern = m.negate(pattern)
    assert m.match(root, pattern)["bottom"].name == "a0"
    assert m.difference(root, m.negate(pattern)).depth == depth
    assert m.match(root, m.through("negate", m.parameter().capture("bottom")))["bottom"].name == "a0"
