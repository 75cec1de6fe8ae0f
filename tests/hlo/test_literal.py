"""Literals of every element type, read as XLA reads them."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xla_fp8 import hlo
from xla_fp8.hlo import literal
from xla_fp8.hlo.xla_process import XlaProcess

INTEGERS = ("s2", "s4", "s8", "s16", "s32", "s64", "u2", "u4", "u8", "u16", "u32", "u64")
FLOATS = ("f16", "bf16", "f32", "f64", "f4e2m1fn", *hlo.shape.FP8_TYPES)


def constant(shape: str, text: str) -> np.ndarray:
    value = hlo.parse(f"c = {shape} constant({text})").entry.root.constant_value()
    assert value is not None
    return value


def values_of(element_type: str) -> np.ndarray:
    """Some values of the type, its extremes among them."""
    dtype = literal.numpy_dtype(element_type)
    if element_type in INTEGERS:
        info = ml_dtypes.iinfo(dtype)
        return np.array([int(info.min), int(info.max), 1, int(info.max) // 2], dtype)
    if element_type == "f8e8m0fnu":
        return np.array([0.125, 1.0, 2.0**100], dtype)  # powers of two only
    info = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        return np.array([float(info.max), float(info.min), float(info.smallest_normal), 0.75, 1.0, 2.5]).astype(dtype)


@pytest.mark.parametrize("element_type", INTEGERS + FLOATS)
def test_what_xla_prints_of_what_we_print_reads_back(element_type: str, xla: XlaProcess) -> None:
    values = values_of(element_type)
    text = ", ".join(literal.format_scalar(value, element_type) for value in values)
    shape = f"{element_type}[{len(values)}]{{0}}"
    assert constant(shape, f"{{{text}}}").tobytes() == values.tobytes()
    answer = xla.full_text(f"HloModule m\nENTRY e {{\n  ROOT c = {shape} constant({{{text}}})\n}}")
    assert answer.ok, answer.message
    printed = re.search(r" constant\((.*)\)", answer.text)
    assert printed is not None
    from_xla = constant(shape, printed[1])
    assert from_xla.tobytes() == values.tobytes()
    assert printed[1] == f"{{{text}}}"


@pytest.mark.parametrize(
    ("shape", "text", "expected"),
    [
        ("pred[]", "true", True),
        ("pred[3]{0}", "{true, 0, 2}", [True, False, True]),
        ("s32[]", "-5", -5),
        ("u64[]", "18446744073709551615", 18446744073709551615),
        ("u64[]", "-1", 18446744073709551615),
        ("s64[]", "18446744073709551615", -1),
        ("f32[]", "-inf", -np.inf),
        ("f32[]", "1e-45", np.float32(1e-45)),
        ("f32[2,2]{1,0}", "{ { 1, 2 }, { 3, 4 } }", [[1, 2], [3, 4]]),
        ("f32[2,2]{1,0}", "{ { /*i0=0*/ 1, 2 }, { 3, 4.5e0 } }", [[1, 2], [3, 4.5]]),
        ("f32[0]{0}", "{}", []),
        ("f32[2,0]{1,0}", "{{}, {}}", [[], []]),
        ("c64[]", "(1, -2)", 1 - 2j),
        ("c128[2]{0}", "{(1.5, 2), (-inf, 0)}", [1.5 + 2j, complex(-np.inf, 0)]),
        ("bf16[]", "1.0078125", 1.0078125),
        ("f8e4m3fn[]", "448", 448),
        ("f8e8m0fnu[]", "0.5", 0.5),
    ],
)
def test_values(shape: str, text: str, expected: object) -> None:
    value = constant(shape, text)
    assert value.shape == hlo.Shape.parse(shape).dimensions
    assert value.dtype == literal.numpy_dtype(hlo.Shape.parse(shape).element_type)
    np.testing.assert_array_equal(value.astype(np.asarray(expected).dtype), expected)


@pytest.mark.parametrize("text", ["nan", "-nan", "nan(0x123)", "-nan(0x7fffff)"])
def test_nan_with_and_without_payload(text: str, xla: XlaProcess) -> None:
    assert np.isnan(constant("f32[]", text))
    assert xla.check(f"HloModule m\nENTRY e {{\n  ROOT c = f32[] constant({text})\n}}").ok


@pytest.mark.parametrize(
    ("shape", "text", "message"),
    [
        ("u8[]", "300", "not a literal of u8"),
        ("u8[]", "-1", "not a literal of u8"),
        ("s4[]", "9", "not a literal of s4"),
        ("s32[]", "1.5", "not a literal of s32"),
        ("f32[]", "1e39", "out of the range of f32"),
        ("f8e4m3fn[]", "500", "out of the range of f8e4m3fn"),
        ("f32[3]{0}", "{1, 2}", "needs 3 elements, found 2"),
        ("f32[4]{0}", "1", "needs 4 elements, found 1"),
        ("f32[]", "one", "not a literal of f32"),
        ("c64[]", "1", "needs 1 elements, found 0"),
        ("q7[]", "1", "element type q7 are not supported"),
    ],
)
def test_what_does_not_fit_is_refused(shape: str, text: str, message: str) -> None:
    with pytest.raises(hlo.HloAttributeError, match=re.escape(message)):
        constant(shape, text)


def test_what_has_no_value() -> None:
    entry = hlo.parse(
        "HloModule m\nENTRY e {\n  x = f32[2] parameter(0)\n  e = f32[9] constant({...})\n"
        "  t = (f32[], s32[]) constant((1, 2))\n  ROOT y = f32[2] negate(x)\n}"
    ).entry
    assert [i.constant_value() for i in entry] == [None] * 4
    assert [i.is_elided_constant for i in entry] == [False, True, False, False]


@given(st.floats(width=32), st.sampled_from(FLOATS))
def test_format_scalar_reads_back(number: float, element_type: str) -> None:
    dtype = literal.numpy_dtype(element_type)
    with np.errstate(all="ignore"):
        value = np.float64(number).astype(dtype)
    text = literal.format_scalar(number, element_type)
    if np.isfinite(np.float64(value)):
        assert constant(f"{element_type}[]", text).tobytes() == value.tobytes()
    else:
        assert text in ("inf", "-inf", "nan") or np.isinf(number)


@pytest.mark.parametrize(
    ("value", "element_type", "text"),
    [
        *((True, "pred", "true"), (False, "pred", "false"), (3, "s32", "3"), (-1, "s4", "-1"), (1.0, "f32", "1")),
        *((0.1, "f32", "0.1"), (448.0, "f8e4m3fn", "448"), (-57344.0, "f8e5m2", "-5.7e+04"), (1 / 3, "bf16", "0.334")),
        *((float("inf"), "f32", "inf"), (float("-inf"), "bf16", "-inf"), (float("nan"), "f16", "nan")),
    ],
)
def test_format_scalar(value: float, element_type: str, text: str) -> None:
    assert literal.format_scalar(value, element_type) == text
