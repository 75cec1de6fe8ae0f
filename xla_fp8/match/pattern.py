"""Patterns: immutable values that say what an instruction, and what is above it, must look like.

Three kinds make up the whole language: `Op` (an opcode and its operands), `AnyOf` (one of several patterns) and
`Through` (a pattern below any number of unary instructions). Every kind takes the same modifiers (`.with_one_user()`,
...), each of which returns a new pattern. A pattern prints as the expression that makes it, without the `m.`.

Patterns are compared by identity: two that print the same may hold different predicates.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias

from xla_fp8.hlo import HloAttributeError, HloInstruction, Layout, Shape
from xla_fp8.hlo.attributes import format_int_list, unquote
from xla_fp8.match.errors import PatternError

_MAX_TEXT = 4000
"""Longer patterns print cut off: one that uses a sub-pattern twice at every level would print exponentially long."""


@dataclasses.dataclass(frozen=True, eq=False)
class Requirement:
    """One question asked of an instruction.

    Attributes:
        text: how it prints, e.g. `.with_rank(2)`.
        expected: what it asks for, to be read after "expected".
        holds: the question.
        found: what the instruction has instead, to be read after "found"; None: the instruction itself is the answer.
        place: whether it prints as a modifier, or as the first or the last argument of the constructor.
    """

    text: str
    expected: str
    holds: Callable[[HloInstruction], bool]
    found: Callable[[HloInstruction], str] | None = None
    place: Literal["modifier", "first", "last"] = "modifier"

    def holds_for(self, instruction: HloInstruction) -> bool:
        """Asks. An instruction that lacks what is asked about (a shape, an attribute) does not qualify."""
        try:
            return bool(self.holds(instruction))
        except HloAttributeError:
            return False


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Pattern(abc.ABC):
    """What the kinds of pattern share: the modifiers.

    Attributes:
        requirements: asked in order, after opcode and operands match: a predicate may rely on those.
        extra_operands: (operand index, pattern) of `with_operand`.
        names: what the instruction is captured as.
        captures: capture name → how many times one match binds it at most.
        text: the pattern, printed.
    """

    requirements: tuple[Requirement, ...] = ()
    extra_operands: tuple[tuple[int, Pattern], ...] = ()
    names: tuple[str, ...] = ()
    captures: Mapping[str, int] = dataclasses.field(init=False, repr=False)
    text: str = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        # Eagerly, from the parts' own: nothing here then recurses, however deep the pattern.
        captures = dict(self.captures_of_parts())
        for _, extra in self.extra_operands:
            _add(captures, extra.captures)
        _add(captures, dict.fromkeys(self.names, 1))
        object.__setattr__(self, "captures", captures)
        modifiers = [f".with_operand({index}, {extra})" for index, extra in self.extra_operands]
        modifiers += [r.text for r in self.requirements if r.place == "modifier"]
        modifiers += [f".capture({quote(name)})" for name in self.names]
        text = self._head() + "".join(modifiers)
        object.__setattr__(self, "text", text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "...")

    @abc.abstractmethod
    def _head(self) -> str:
        """The text without modifiers."""

    @abc.abstractmethod
    def captures_of_parts(self) -> Mapping[str, int]:
        """`captures` without the own names and the extra operands."""

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    # ---------------------------------------------------------------- captures and operands

    def capture(self, name: str) -> Self:
        """Names the instruction, for `match["name"]`. A name used twice must be the same instruction both times."""
        if not isinstance(name, str) or not name:
            raise PatternError(f"a capture needs a name, not {name!r}")
        return dataclasses.replace(self, names=(*self.names, name))

    named = capture

    def with_operand(self, index: int, pattern: PatternLike) -> Self:
        """Operand `index` exists and matches `pattern`."""
        if not isinstance(index, int) or index < 0:
            raise PatternError(f"an operand index is 0, 1, ..., not {index!r}")
        return dataclasses.replace(self, extra_operands=(*self.extra_operands, (index, as_pattern(pattern))))

    def with_operand_count(self, count: int) -> Self:
        return self._require(
            f".with_operand_count({count})",
            counted(count, "operand"),
            lambda i: len(i.operands) == count,
            lambda i: counted(len(i.operands), "operand"),
        )

    def optionally(self, *wrappers: Wrapper) -> Pattern:
        """This pattern, or one of `wrappers` around it: `p.optionally(m.convert, m.bitcast)`."""
        if not wrappers:
            raise PatternError("optionally() needs the wrapper that may be there, for example optionally(m.convert)")
        wrapped = (*(as_pattern(wrapper(self)) for wrapper in wrappers), self)
        if all(isinstance(wrapper, Constructor) for wrapper in wrappers):
            names = ", ".join(map(str, wrappers))
            return AnyOf(wrapped, spelled=f"optional({names if len(wrappers) == 1 else f'({names})'}, {self})")
        return AnyOf(wrapped)

    # ---------------------------------------------------------------- shape

    def with_element_type(self, *types: str) -> Self:
        """The element type is one of `types` (XLA's names: "f32", "f8e4m3fn", ...)."""
        if not types or not all(isinstance(t, str) for t in types):
            raise PatternError('with_element_type() needs names of types, for example with_element_type("f32", "bf16")')
        return self._require(
            f".with_element_type({', '.join(map(quote, types))})",
            f"element type {either(types)}",
            lambda i: i.shape.element_type in types,
            lambda i: i.shape.element_type,
        )

    def with_shape(self, shape: Shape | str | Sequence[int]) -> Self:
        """The dimensions are these, or (for a Shape or its text, "f32[2,3]") the whole shape is, up to the layout."""
        if not isinstance(shape, (Shape, str)):
            dimensions = tuple(shape)
            return self._require(
                f".with_shape({dimensions})",
                f"dimensions [{','.join(map(str, dimensions))}]",
                lambda i: i.shape.is_array and i.shape.dimensions == dimensions,
                lambda i: str(i.shape.with_layout(None)),
            )
        wanted = (Shape.parse(shape) if isinstance(shape, str) else shape).with_layout(None)
        return self._require(
            f".with_shape({quote(str(wanted))})",
            f"shape {wanted}",
            lambda i: i.shape.compatible(wanted),
            lambda i: str(i.shape.with_layout(None)),
        )

    def with_shape_compatible_to(self, other: HloInstruction | Shape | str) -> Self:
        """The shape is that of `other` up to the layout."""
        return self.with_shape(other.shape if isinstance(other, HloInstruction) else other)

    def with_rank(self, rank: int) -> Self:
        return self._require(
            f".with_rank({rank})",
            f"rank {rank}",
            lambda i: i.shape.is_array and i.shape.rank == rank,
            lambda i: f"rank {i.shape.rank} ({i.shape.with_layout(None)})",
        )

    def with_layout(self, minor_to_major: Layout | Sequence[int]) -> Self:
        """The order of dimensions in memory, fastest first; a shape without a layout counts as row-major."""
        order = tuple(minor_to_major.minor_to_major if isinstance(minor_to_major, Layout) else minor_to_major)
        return self._require(
            f".with_layout({order})",
            f"layout {format_int_list(order)}",
            lambda i: i.shape.is_array and i.shape.minor_to_major == order,
            lambda i: f"layout {format_int_list(i.shape.minor_to_major)}",
        )

    def is_scalar(self) -> Self:
        """An array without dimensions."""
        return self._require(
            ".is_scalar()", "a scalar", lambda i: i.shape.is_scalar, lambda i: str(i.shape.with_layout(None))
        )

    def is_effective_scalar(self) -> Self:
        """An array of one element: `f32[]`, `f32[1,1]`."""
        return self._require(
            ".is_effective_scalar()",
            "one element",
            lambda i: i.shape.is_array and all(n == 1 for n in i.shape.dimensions),
            lambda i: str(i.shape.with_layout(None)),
        )

    # ---------------------------------------------------------------- users

    def with_one_user(self) -> Self:
        """One instruction uses it, in any number of operand slots."""
        return self._require(".with_one_user()", "one user", lambda i: i.user_count == 1, _users)

    def with_one_use(self) -> Self:
        """It is in one operand slot: `add(x, x)` uses x twice."""
        return self._require(
            ".with_one_use()",
            "one use",
            lambda i: i.user_count == 1 and i.use_count == 1,
            lambda i: f"{i.use_count} uses by {i.users[0].name}" if i.user_count == 1 else _users(i),
        )

    def with_users(self, count: int) -> Self:
        """That many instructions use it."""
        return self._require(f".with_users({count})", counted(count, "user"), lambda i: i.user_count == count, _users)

    # ---------------------------------------------------------------- anything else

    def where(self, predicate: Callable[[HloInstruction], bool], asks: str) -> Self:
        """`predicate(instruction)` holds. `asks` says what it asks, to be read after "expected": "a depthwise conv".

        It is asked only where opcode, operands and earlier modifiers match. An HloAttributeError counts as no.
        """
        if not callable(predicate) or not isinstance(asks, str):
            raise PatternError('where() needs a function of an instruction and what it asks: where(f, "an even rank")')
        return self._require(f".where({quote(asks)})", asks, predicate)

    with_predicate = where

    def with_attribute(self, name: str, value: str | int | bool | Sequence[int] | None = None) -> Self:
        """The attribute is there and, where `value` is given, has that text (strings without their quotes too)."""
        if not isinstance(name, str):
            raise PatternError(f"with_attribute() needs an attribute's name, not {name!r}")
        if value is None:
            return self._require(
                f".with_attribute({quote(name)})",
                f"attribute {name}",
                lambda i: i.has_attribute(name),
                lambda i: "none",
            )
        if isinstance(value, str):
            text = value
        elif isinstance(value, int):
            text = str(value).lower()
        else:
            text = format_int_list(tuple(value))

        def holds(instruction: HloInstruction) -> bool:
            found = instruction.attr(name)
            return found is not None and text in (found, unquote(found) if found.startswith('"') else found)

        printed = quote(value) if isinstance(value, str) else str(value)
        return self._require(
            f".with_attribute({quote(name)}, {printed})",
            f"{name}={text}",
            holds,
            lambda i: f"no {name}" if i.attr(name) is None else f"{name}={i.attr(name)}",
        )

    def with_comparison_direction(self, direction: str) -> Self:
        """A compare's direction: EQ, NE, GE, GT, LE or LT."""
        if direction not in ("EQ", "NE", "GE", "GT", "LE", "LT"):
            raise PatternError(f"{direction!r} is not a comparison direction: use EQ, NE, GE, GT, LE or LT")
        return self._require(
            f".with_comparison_direction({quote(direction)})",
            f"direction {direction}",
            lambda i: i.comparison_direction == direction,
            lambda i: f"direction {i.comparison_direction}",
        )

    def is_instruction(self, instruction: HloInstruction) -> Self:
        """It is this very instruction."""
        return self._require(f".is_instruction({instruction.name})", instruction.name, lambda i: i is instruction)

    def is_non_constant(self) -> Self:
        return self._require(".is_non_constant()", "something other than a constant", lambda i: i.opcode != "constant")

    def _require(
        self,
        text: str,
        expected: str,
        holds: Callable[[HloInstruction], bool],
        found: Callable[[HloInstruction], str] | None = None,
        place: Literal["modifier", "first", "last"] = "modifier",
    ) -> Self:
        requirement = Requirement(text, expected, holds, found, place)
        return dataclasses.replace(self, requirements=(*self.requirements, requirement))


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Op(Pattern):
    """An instruction with one of `opcodes` (none given: any) and, unless None, exactly these operands.

    Attributes:
        any_order: the two operands may be swapped.
        spelled: the constructor's name.
    """

    spelled: str
    opcodes: tuple[str, ...] = ()
    operands: tuple[Pattern, ...] | None = None
    any_order: bool = False

    def captures_of_parts(self) -> Mapping[str, int]:
        captures: dict[str, int] = {}
        for operand in self.operands or ():
            _add(captures, operand.captures)
        return captures

    def _head(self) -> str:
        arguments = [r.text for r in self.requirements if r.place == "first" and r.text]
        arguments += map(str, self.operands or ())
        arguments += [r.text for r in self.requirements if r.place == "last"]
        return f"{self.spelled}({', '.join(arguments)})" if arguments else self.spelled


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class AnyOf(Pattern):
    """The first of `alternatives` that matches (and agrees with the captures elsewhere)."""

    alternatives: tuple[Pattern, ...]
    spelled: str = ""

    def captures_of_parts(self) -> Mapping[str, int]:
        # One alternative is bound at a time, so a name in two of them is not bound twice.
        names = {name: 0 for alternative in self.alternatives for name in alternative.captures}
        return {name: max(a.captures.get(name, 0) for a in self.alternatives) for name in names}

    def _head(self) -> str:
        return self.spelled or f"any_of({', '.join(map(str, self.alternatives))})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Through(Pattern):
    """`inner` below zero or more unary instructions with an opcode of `opcodes`.

    Attributes:
        nearest: tries `inner` at the top first, rather than below as many wrappers as there are.
        rest: the same without modifiers, which are asked of the topmost instruction only.
    """

    opcodes: tuple[str, ...]
    inner: Pattern
    nearest: bool = False
    spelled: str = ""
    rest: Through = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        bare = not (self.requirements or self.extra_operands or self.names)
        rest = self if bare else Through(self.opcodes, self.inner, self.nearest, self.spelled)
        object.__setattr__(self, "rest", rest)

    def captures_of_parts(self) -> Mapping[str, int]:
        return self.inner.captures

    def _head(self) -> str:
        return self.spelled or f"through({quoted_tuple(self.opcodes)}, {self.inner})"


@dataclasses.dataclass(frozen=True)
class Constructor:
    """Makes patterns of one opcode: `convert()`, `convert(x)`. Where a pattern is wanted, `convert` alone will do.

    Attributes:
        name: in Python.
        opcode: in HLO; "" for any.
        arity: how many operands the opcode takes; None: any number.
        any_order: whether the operands may be swapped.
    """

    name: str
    opcode: str
    arity: int | None = None
    any_order: bool = False

    def __call__(self, *operands: PatternLike) -> Op:
        """Without operands: whatever they are. Raises PatternError for a number of operands the opcode cannot have."""
        if operands and self.arity is not None and len(operands) != self.arity:
            raise PatternError(f"{self.name} takes {counted(self.arity, 'operand')} or none, not {len(operands)}")
        opcodes = (self.opcode,) if self.opcode else ()
        return Op(self.name, opcodes, tuple(map(as_pattern, operands)) if operands else None, self.any_order)

    def __str__(self) -> str:
        return self.name


PatternLike: TypeAlias = Pattern | Callable[[], Pattern]
Wrapper: TypeAlias = Callable[[Pattern], Pattern]


def as_pattern(value: Any) -> Pattern:
    """`value` as a pattern: a constructor without its parentheses is one. Raises PatternError for what is none."""
    if callable(value):
        value = value()
    if not isinstance(value, Pattern):
        hint = f"; write m.constant_scalar({value})" if isinstance(value, (int, float)) else ""
        raise PatternError(f"expected a pattern, found {value!r}{hint}")
    return value


def quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def quoted_tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(map(quote, texts))}{',' if len(texts) == 1 else ''})"


def counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def either(texts: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`; what is named twice comes once."""
    *first, last = dict.fromkeys(texts)
    return f"{', '.join(first)} or {last}" if first else last


def _users(instruction: HloInstruction) -> str:
    names = [user.name for user in instruction.users]
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    if not names:
        return "no users (it is the root)" if instruction.is_root else "no users"
    return f"{counted(len(names), 'user')} ({shown})"


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
