"""The matcher against a plain backtracking one, on random small programs and patterns."""

from __future__ import annotations

import dataclasses

from hypothesis import event, given, settings
from hypothesis import strategies as st

from xla_fp8 import hlo
from xla_fp8 import match as m


@dataclasses.dataclass(frozen=True)
class Spec:
    """A pattern as data, so that both matchers are made from the same thing."""

    kind: str
    parts: tuple[Spec, ...] = ()
    name: str | None = None
    one_user: bool = False


KINDS = {"any": 0, "parameter": 0, "negate": 1, "optional": 1, "through": 1, "effective": 1}
KINDS |= {"add": 2, "add_any_order": 2, "any_of": 2, "with_operand": 2}


def specs(depth=4):
    def of_kind(kind):
        return st.builds(
            Spec,
            st.just(kind),
            st.tuples(*[specs(depth - 1)] * KINDS[kind]),
            st.sampled_from([None, None, "x", "x", "y"]),
            st.sampled_from([False, False, False, True]),
        )

    return st.deferred(
        lambda: st.sampled_from([kind for kind, arity in KINDS.items() if depth or not arity]).flatmap(of_kind)
    )


def build(spec):
    parts = [build(part) for part in spec.parts]
    match spec.kind:
        case "optional":
            pattern = m.optional(m.negate, *parts)
        case "through":
            pattern = m.through("negate", *parts)
        case "effective":
            pattern = m.effective_scalar(*parts)
        case "with_operand":
            pattern = m.any().with_operand(0, parts[0]).with_operand(1, parts[1])
        case kind:
            pattern = getattr(m, kind)(*parts)
    if spec.one_user:
        pattern = pattern.with_one_user()
    return pattern.capture(spec.name) if spec.name else pattern


def backtrack(spec, instruction, bound):
    """Every extension of `bound` under which `spec` matches, in order of preference. Exponential, and obvious."""
    for more in backtrack_kind(spec, instruction, bound):
        if spec.one_user and instruction.user_count != 1:
            continue
        if spec.name is None:
            yield more
        elif more.get(spec.name, instruction) is instruction:
            yield {**more, spec.name: instruction}


def backtrack_kind(spec, instruction, bound):
    parts, operands = spec.parts, instruction.operands

    def both(one, other):
        for more in backtrack(parts[0], one, bound):
            yield from backtrack(parts[1], other, more)

    match spec.kind:
        case "any":
            yield bound
        case "parameter" if instruction.opcode == "parameter":
            yield bound
        case "negate" if instruction.opcode == "negate":
            yield from backtrack(parts[0], operands[0], bound)
        case "add" | "add_any_order" if instruction.opcode == "add":
            yield from both(*operands)
            if spec.kind == "add_any_order":
                yield from both(*reversed(operands))
        case "with_operand" if len(operands) == 2:
            yield from both(*operands)
        case "any_of":
            for part in parts:
                yield from backtrack(part, instruction, bound)
        case "optional":
            if instruction.opcode == "negate":
                yield from backtrack(parts[0], operands[0], bound)
            yield from backtrack(parts[0], instruction, bound)
        case "through":
            chain = [instruction]
            while chain[-1].opcode == "negate":
                chain.append(chain[-1].operand(0))
            for below in reversed(chain):
                yield from backtrack(parts[0], below, bound)
        case "effective":
            while True:
                if instruction.shape.element_count == 1:
                    yield from backtrack(parts[0], instruction, bound)
                if instruction.opcode != "copy":
                    break
                instruction = instruction.operand(0)


@st.composite
def programs(draw):
    """A few instructions, each on any of those before it."""
    lines = ["p = f32[] parameter(0)", "q = f32[] parameter(1)"]
    names = ["p", "q"]
    for i in range(draw(st.integers(1, 7))):
        opcode = draw(st.sampled_from(["add", "add", "negate", "copy"]))
        # Mostly the latest, so that programs are deep.
        operand = st.sampled_from([*names[-1:] * 3, *names])
        operands = [draw(operand) for _ in range(2 if opcode == "add" else 1)]
        lines.append(f"i{i} = f32[] {opcode}({', '.join(operands)})")
        names.append(f"i{i}")
    return hlo.parse("HloModule random\nENTRY main {\n" + "\n".join(lines) + "\n}").entry


@settings(max_examples=max(300, settings().max_examples))
@given(programs(), specs())
def test_the_same_matches_as_plain_backtracking(program, spec):
    pattern = build(spec)
    for instruction in program:
        expected = next(backtrack(spec, instruction, {}), None)
        found = m.match(instruction, pattern)
        assert (None if found is None else dict(found)) == expected, (str(pattern), repr(program.instructions))
        event("match" if found else "no match")

        difference = m.difference(instruction, pattern)
        assert (difference is None) is (expected is not None)
        if difference is not None:
            at = instruction
            for user, index in difference.path:
                assert at is user
                at = user.operand(index)
            assert at is difference.instruction
            assert f"expected {difference.expected}, found {difference.found}" in str(difference)
    assert str(m.evaluate_pattern(str(pattern))) == str(pattern)
