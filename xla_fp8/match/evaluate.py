"""A pattern written on the command line: a Python expression, read without ever being run as Python.

The expression may name what makes patterns (`m.convert` or `convert`), call it, and use modifiers, numbers, strings,
tuples and lists. Everything else (other names and attributes, operators, lambdas, comprehensions) is refused by name.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

from xla_fp8.errors import XlaFp8Error
from xla_fp8.match import builders, constructors
from xla_fp8.match.errors import PatternError
from xla_fp8.match.pattern import Constructor, Pattern, as_pattern

MODIFIERS = frozenset(
    (
        *("capture", "named", "optionally", "with_operand", "with_operand_count", "with_element_type", "with_shape"),
        *("with_rank", "with_layout", "is_scalar", "is_effective_scalar", "with_one_user", "with_one_use"),
        *("with_users", "with_attribute", "with_comparison_direction", "with_shape_compatible_to", "is_non_constant"),
    )
)
"""What an expression may call on a pattern: every modifier that takes no Python object."""

BUILDERS = (
    *("any_of", "constant_effective_scalar", "constant_scalar", "custom_call", "effective_scalar", "get_tuple_element"),
    *("op", "optional", "parameter", "through"),
)

_CONSTANTS = {"inf": math.inf, "nan": math.nan}


def vocabulary() -> dict[str, Any]:
    """Name → what makes patterns."""
    table = {name: value for name, value in vars(constructors).items() if isinstance(value, Constructor)}
    return table | {name: getattr(builders, name) for name in BUILDERS}


def evaluate_pattern(text: str) -> Pattern:
    """Reads `m.multiply(m.convert(m.any()), m.broadcast(m.constant_scalar(0)))`; the `m.` may be left out.

    Raises PatternError, with a caret under the place, for text that is not a pattern.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval")
        reader = _Reader(text.strip(), vocabulary())
        return reader.pattern(tree.body)
    except SyntaxError as error:
        line = (error.text or text).rstrip("\n")
        raise PatternError(f"not a Python expression: {error.msg}", line, max(0, (error.offset or 1) - 1)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise PatternError(f"cannot be read: {error or 'nested too deeply'}", text[:80]) from None


class _Reader:
    """Walks the syntax tree of one expression."""

    def __init__(self, text: str, names: Mapping[str, Any]) -> None:
        self.lines = text.splitlines()
        self.names = names

    def pattern(self, node: ast.expr) -> Pattern:
        value = self.value(node)
        try:
            return as_pattern(value)
        except XlaFp8Error as error:
            raise self.error(node, str(error)) from None

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = self.value(operand)
                if isinstance(value, (int, float)):
                    return -value
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                return tuple(self.value(element) for element in elements)
            case ast.Name(id=name):
                return self.named(node, name)
            case ast.Attribute(value=ast.Name(id="m"), attr=name):
                return self.named(node, name)
            case ast.Attribute(attr=name):
                raise self.error(node, f".{name} is not called: write .{name}(...)", at_end=True)
            case ast.Call(func=ast.Attribute(value=owner, attr=name)) if not _is_m(owner):
                return self.call(node, self.modifier(node.func, owner, name))
            case ast.Call():
                return self.call(node, self.value(node.func))
        raise self.error(
            node,
            f"{_NODE_NAMES.get(type(node), type(node).__name__)} cannot be part of a pattern; "
            "it is made of calls, names of m, numbers, strings and tuples",
        )

    def named(self, node: ast.expr, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if name in _CONSTANTS and isinstance(node, ast.Name):
            return _CONSTANTS[name]
        close = _closest(name, self.names)
        raise self.error(node, f"m has no {name!r}" + (f"; did you mean {close!r}?" if close else ""), at_end=True)

    def modifier(self, node: ast.expr, owner: ast.expr, name: str) -> Any:
        if name in ("where", "with_predicate", "is_instruction"):
            raise self.error(node, f".{name}() takes a Python object, so it works in Python only", at_end=True)
        if name not in MODIFIERS:
            close = _closest(name, MODIFIERS)
            hint = f"; did you mean .{close}()?" if close else ""
            raise self.error(node, f"a pattern has no modifier {name!r}{hint}", at_end=True)
        return getattr(self.pattern(owner), name)

    def call(self, node: ast.Call, function: Any) -> Any:
        if not callable(function):
            raise self.error(node, f"{function!r} cannot be called")
        arguments = [self.value(argument) for argument in node.args]
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            if keyword.arg is None:
                raise self.error(keyword.value, "** cannot be part of a pattern")
            keywords[keyword.arg] = self.value(keyword.value)
        try:
            return function(*arguments, **keywords)
        except (XlaFp8Error, TypeError, ValueError) as error:
            raise self.error(node, str(error)) from None

    def error(self, node: ast.expr, message: str, at_end: bool = False) -> PatternError:
        """The message with a caret at the node, or (an attribute) at the name that ends it."""
        line, column = node.lineno, node.col_offset
        if at_end and isinstance(node, ast.Attribute):
            line, column = node.end_lineno or line, (node.end_col_offset or column) - len(node.attr.encode())
        shown = self.lines[line - 1]
        # Offsets count bytes of UTF-8.
        return PatternError(message, shown, len(shown.encode()[:column].decode(errors="ignore")))


_NODE_NAMES: dict[type[ast.expr], str] = {
    ast.Lambda: "a lambda",
    ast.BinOp: "an operator",
    ast.BoolOp: "an operator",
    ast.Compare: "a comparison",
    ast.Subscript: "indexing",
    ast.JoinedStr: "an f-string",
    ast.Starred: "a * argument",
    ast.NamedExpr: "an assignment",
    ast.IfExp: "a conditional",
    ast.ListComp: "a comprehension",
    ast.GeneratorExp: "a comprehension",
    ast.Dict: "a dict",
    ast.Await: "await",
    ast.Constant: "this constant",
}


def _is_m(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "m"


def _closest(name: str, names: Any) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, names, n=1)), None)
