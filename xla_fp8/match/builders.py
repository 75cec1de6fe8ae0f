"""Patterns that need more than an opcode and operands: constants, alternatives, things to look through."""

from __future__ import annotations

from typing import Any

from xla_fp8.hlo import HloInstruction
from xla_fp8.match.constants import UNIFORM, describe, format_value, is_value, uniform_value
from xla_fp8.match.errors import PatternError
from xla_fp8.match.pattern import (
    AnyOf,
    Constructor,
    Op,
    Pattern,
    PatternLike,
    Through,
    Wrapper,
    as_pattern,
    either,
    quote,
    quoted_tuple,
)

_CUSTOM_CALL = Constructor("custom_call", "custom-call")
_GET_TUPLE_ELEMENT = Constructor("get_tuple_element", "get-tuple-element", 1)


def op(*opcodes: str) -> Op:
    """An instruction with one of these opcodes, in HLO spelling; without any, any instruction."""
    for opcode in opcodes:
        if not isinstance(opcode, str):
            raise PatternError(f"op() takes opcodes in HLO spelling, found {opcode!r}")
    return Op(f"op({', '.join(quote(o) for o in opcodes)})" if opcodes else "any", opcodes)


def parameter(number: int | None = None) -> Op:
    """A parameter; with `number`, that one."""
    pattern = Op("parameter", ("parameter",))
    if number is None:
        return pattern
    if not isinstance(number, int):
        raise PatternError(f"parameter takes its number, not {number!r}")
    return pattern._require(
        str(number),
        f"parameter {number}",
        lambda i: i.parameter_number == number,
        lambda i: f"parameter {i.parameter_number}",
        place="first",
    )


def get_tuple_element(operand: PatternLike | None = None, index: int | None = None) -> Op:
    """A get-tuple-element; with `index`, of that element."""
    pattern = _GET_TUPLE_ELEMENT() if operand is None else _GET_TUPLE_ELEMENT(operand)
    if index is None:
        return pattern
    return pattern._require(
        f"index={index}",
        f"tuple index {index}",
        lambda i: i.tuple_index == index,
        lambda i: f"tuple index {i.tuple_index}",
        place="last",
    )


def custom_call(*arguments: Any) -> Op:
    """A custom call: `custom_call()`, `custom_call("target")`, `custom_call(("a", "b"), operand...)`.

    Args:
        arguments: first, if it is text or a tuple of texts, the target or targets; then patterns for the operands
            (none: whatever they are).
    """
    targets: list[str] = []
    if arguments and isinstance(arguments[0], str):
        targets, arguments = [arguments[0]], arguments[1:]
    elif arguments and isinstance(arguments[0], (list, tuple)):
        targets, arguments = [*arguments[0]], arguments[1:]
    for target in targets:
        if not isinstance(target, str):
            raise PatternError(f"custom_call takes targets as text, not {target!r}")
    pattern = _CUSTOM_CALL(*arguments)
    if not targets:
        return pattern
    return pattern._require(
        quote(targets[0]) if len(targets) == 1 else quoted_tuple(targets),
        f"custom call target {either(targets)}",
        lambda i: i.custom_call_target in targets,
        lambda i: i.custom_call_target or "none",
        place="first",
    )


def constant_scalar(value: float | None = None) -> Op:
    """A constant of rank 0; with `value`, that one once rounded to its type (see constants.is_value)."""
    return _constant("constant_scalar", "scalar constant", value, only_scalars=True)


def constant_effective_scalar(value: float | None = None) -> Op:
    """An array, of any rank, of one constant value: see constants.uniform_value for what is looked through."""
    return _constant("constant_effective_scalar", "constant", value, only_scalars=False)


def _constant(spelled: str, what: str, value: float | None, only_scalars: bool) -> Op:
    if value is not None and not isinstance(value, (int, float)):
        raise PatternError(f"{spelled} takes a number, not {value!r}")

    def holds(instruction: HloInstruction) -> bool:
        if only_scalars and not (instruction.opcode == "constant" and instruction.shape.is_scalar):
            return False
        if only_scalars and value is None:
            return True
        found = uniform_value(instruction)
        return found is not None and (value is None or is_value(found, value, instruction.shape.element_type))

    def found(instruction: HloInstruction) -> str:
        if instruction.is_elided_constant:
            return f"{instruction.name} (constant whose value the dump leaves out)"
        held = uniform_value(instruction)
        if held is None or instruction.opcode == "constant":
            return describe(instruction)
        return f"{instruction.name} ({instruction.opcode} of the constant {format_value(held)})"

    text = "" if value is None else str(value)
    expected = f"a {what}" if value is None else f"the {what} {text}"
    return Op(spelled)._require(text, expected, holds, found, place="first")


def any_of(*alternatives: PatternLike) -> AnyOf:
    """One of `alternatives`; the first that matches wins."""
    if not alternatives:
        raise PatternError("any_of() needs at least one alternative")
    return AnyOf(tuple(map(as_pattern, alternatives)))


def optional(wrapper: Wrapper | list[Wrapper], pattern: PatternLike) -> Pattern:
    """`pattern`, or `wrapper` (or one of several) around it: `optional(m.convert, p)`. The wrapped form wins."""
    wrappers = wrapper if isinstance(wrapper, (list, tuple)) else [wrapper]
    for given in wrappers:
        if not callable(given):
            raise PatternError(f"optional() takes a constructor such as m.convert first, not {given!r}")
    return as_pattern(pattern).optionally(*wrappers)


def through(opcodes: Any, pattern: PatternLike) -> Through:
    """`pattern` below any number of unary instructions of these opcodes (HLO spelling), as far below as it matches."""
    names = [opcodes] if isinstance(opcodes, str) else [*opcodes]
    if not names or not all(isinstance(n, str) for n in names):
        raise PatternError('through() takes opcodes in HLO spelling first, for example ("reshape", "transpose")')
    return Through(tuple(names), as_pattern(pattern))


def effective_scalar(pattern: PatternLike) -> Through:
    """An array, of any rank, whose elements all are one value, and `pattern` where that value is one element.

    Looks through broadcast, reshape, transpose, copy, bitcast and convert, no further than it must: of
    `broadcast(convert(s))` it takes the convert, whose rounding is part of the value, unless `pattern` wants another.
    """
    inner = as_pattern(pattern)
    return Through(
        tuple(sorted(UNIFORM)), inner.is_effective_scalar(), nearest=True, spelled=f"effective_scalar({inner})"
    )
