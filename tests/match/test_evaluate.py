"""evaluate_pattern: what it reads, and that it runs nothing else."""

from __future__ import annotations

import pytest

from xla_fp8 import match as m
from xla_fp8.errors import XlaFp8Error
from xla_fp8.match import builders, evaluate
from xla_fp8.match.pattern import Pattern


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("m.any()", "any"),
        ("m.any", "any"),
        ("any", "any"),
        ("  m.convert(m.any)\n", "convert(any)"),
        ("m.add(\n  m.any(),\n  m.any(),\n)", "add(any, any)"),
        ('m.multiply(m.convert(m.any().capture("x")), m.broadcast(m.constant_scalar(-1.5)))', None),
        ("m.constant_scalar(-inf)", "constant_scalar(-inf)"),
        ("m.constant_scalar(value=0)", "constant_scalar(0)"),
        ("m.constant_scalar(None)", "constant_scalar"),
        ('m.through(["reshape", "copy"], m.any)', 'through(("reshape", "copy"), any)'),
        ("m.optional(m.convert, m.any)", "optional(convert, any)"),
        ("m.get_tuple_element(m.any(), index=1)", "get_tuple_element(any, index=1)"),
        ('m.any().with_attribute("flag", True)', 'any.with_attribute("flag", True)'),
        ("any.with_rank(2)", "any.with_rank(2)"),
    ],
)
def test_reads(text, printed):
    assert str(m.evaluate_pattern(text)) == (printed or text.replace("m.", "").replace("any()", "any"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m.convrt(m.any)", "m has no 'convrt'; did you mean 'convert'?\nm.convrt(m.any)\n  ^"),
        ("m.zzzz", "m has no 'zzzz'\nm.zzzz\n  ^"),
        (
            "any.is_scaler()",
            "a pattern has no modifier 'is_scaler'; did you mean .is_scalar()?\nany.is_scaler()\n    ^",
        ),
        ("m.any().with_rank", ".with_rank is not called: write .with_rank(...)\nm.any().with_rank\n        ^"),
        ("m.add(m.any)", "add takes 2 operands or none, not 1\nm.add(m.any)\n^"),
        ("m.negate(0)", "expected a pattern, found 0; write m.constant_scalar(0)\nm.negate(0)\n^"),
        ("m.any().where(1)", ".where() takes a Python object, so it works in Python only\nm.any().where(1)\n        ^"),
        ("3", "expected a pattern, found 3; write m.constant_scalar(3)\n3\n^"),
        ("m.add(m.any,\n  m.zzzz)", "m has no 'zzzz'\n  m.zzzz)\n    ^"),
        ("any.capture('é').foo()", "a pattern has no modifier 'foo'\nany.capture('é').foo()\n                 ^"),
        ("m.add(m.any, **m)", "** cannot be part of a pattern\nm.add(m.any, **m)\n               ^"),
        ("add(any", "not a Python expression: '(' was never closed\nadd(any\n   ^"),
        ("", "not a Python expression: invalid syntax\n\n^"),
    ],
)
def test_errors_point_at_the_place(text, message):
    with pytest.raises(m.PatternError) as caught:
        m.evaluate_pattern(text)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "m.__class__",
        "m.__dict__",
        "m.any.__class__",
        "m.any().__class__()",
        "m.any().__class__.__bases__",
        "m.any()._require('a', 'b', m.any)",
        "m.convert.__call__(m.any)",
        "m.convert.opcode",
        "m.match.solver",
        "m.match(m.any, m.any)",
        "m.evaluate_pattern('m.any')",
        "m.PatternError('x')",
        "m.Pattern()",
        "m.m.any()",
        "open('/etc/passwd')",
        "print",
        "m",
        "m()",
        "lambda: m.any()",
        "(lambda: m.any())()",
        "[m.any() for x in (1,)]",
        "m.any() if 1 else m.any()",
        "m.any()[0]",
        "f'{m.any()}'",
        "m.op('a' * 1000)",
        "m.op(*('a', 'b'))",
        "(x := m.any())",
        "m.any() or m.any()",
        "{'a': 1}",
        "m.any; m.any",
        "import os",
        "x = m.any()",
        "b'bytes'",
        "1j",
        "...",
        "await m.any()",
        "yield",
        "m.any().where(m.any, 'x')",
        "m.any().with_predicate(m.any, 'x')",
        "m.any().is_instruction(1)",
        "m.any()()",
        "'text'()",
        "-m.any()",
        "not m.any()",
        "m.any().capture(1)",
        "m.any().with_shape(1)",
        "m.any().with_shape('f32[')",
        "m.constant_scalar(1, 2, 3)",
        "m.constant_scalar(nope=1)",
        "m.any(\0)",
        "9" * 5000,
        "(" * 500 + ")" * 500,
        "-" * 5000 + "1",
        "m.negate(" * 80 + "m.any" + ")" * 80 + ".foo()",
        "m.any" + ".with_one_user()" * 5000,
    ],
    ids=lambda text: text[:40],
)
def test_refuses_everything_else(text):
    with pytest.raises(m.PatternError):
        m.evaluate_pattern(text)


def test_every_modifier_is_reachable_or_left_out_on_purpose():
    methods = {name for name in dir(Pattern) if not name.startswith("_") and callable(getattr(Pattern, name))}
    assert methods - {"captures_of_parts"} == evaluate.MODIFIERS | {"where", "with_predicate", "is_instruction"}


def test_every_builder_is_reachable():
    functions = {n for n, v in vars(builders).items() if getattr(v, "__module__", "") == builders.__name__}
    assert {name for name in functions if not name.startswith("_")} == set(evaluate.BUILDERS)


def test_the_error_is_one_of_ours():
    assert issubclass(m.PatternError, XlaFp8Error)
