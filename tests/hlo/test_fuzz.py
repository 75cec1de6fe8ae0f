"""Damaged text: parts of every dump are cut, swapped, doubled and flipped.

`hlo.parse` returns a module or raises HloParseError, never anything else, and takes whatever XLA's parser takes. What
it took prints, and what it printed reads back.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from xla_fp8 import hlo
from xla_fp8.hlo.xla_process import XlaProcess

DUMPS = Path(__file__).resolve().parents[2] / "hlo_fixtures" / "dumps"
TOKEN_RE = re.compile(r'"(?:[^"\\]|\\.)*"|[\w.\-%]+|\s+|.', re.S)
# Few for each file, so that all of them take well under a minute; the nightly run has more.
FEW = settings.get_profile(settings.get_current_profile_name()).max_examples // 2
SOME = settings(max_examples=FEW, suppress_health_check=list(HealthCheck))


@functools.cache
def tokens(name: str, size: int = 30_000) -> tuple[str, ...]:
    """The tokens of a dump; of a large one its beginning, up to the end of a line."""
    data = (DUMPS / name).read_bytes()
    text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
    return tuple(TOKEN_RE.findall(text if len(text) <= size else text[: text.rindex("\n", 0, size)] + "\n}\n"))


NAMES = sorted(path.name for suffix in (".hlo", ".hlo.gz") for path in DUMPS.glob(f"*{suffix}"))
PLACES = st.floats(0, 1, exclude_max=True)


@st.composite
def damaged(draw: st.DrawFn, name: str) -> str:
    """The dump's text after one to three changes."""
    parts = list(tokens(name))
    for _ in range(draw(st.integers(1, 3))):
        first, second = sorted(int(draw(PLACES) * len(parts)) for _ in range(2))
        length = draw(st.sampled_from([1, 2, 3, 8, 40]))
        match draw(st.sampled_from(["cut", "cut off", "swap", "double", "move", "flip", "insert"])):
            case "cut":
                del parts[first : first + length]
            case "cut off":
                del parts[second:]
            case "swap":
                parts[first], parts[second] = parts[second], parts[first]
            case "double":
                parts[first:first] = parts[first : first + length]
            case "move":
                parts[first:first] = parts[second : second + length]
            case "flip":
                token = parts[first]
                at = int(draw(PLACES) * len(token))
                parts[first] = (
                    token[:at] + chr(ord(token[at]) ^ draw(st.sampled_from([1, 2, 4, 16, 32]))) + token[at + 1 :]
                )
            case "insert":
                parts.insert(
                    first, draw(st.sampled_from(['"', "\\", "/*", "//", "\0", "é", "{", ")", "ROOT", "%", "\n"]))
                )
        parts = parts or [" "]
    return "".join(parts)


def parse_or_refuse(text: str) -> hlo.HloModule | None:
    """The module, or None where the text is refused as it should be."""
    try:
        return hlo.parse(text, "damaged.hlo")
    except hlo.HloParseError as refusal:
        error = refusal
    assert error.line_text == text.split("\n")[error.line - 1]
    assert 1 <= error.column <= len(error.line_text) + 1
    return None


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@SOME
def test_parse_raises_nothing_but_its_own_error(name: str, data: st.DataObject) -> None:
    module = parse_or_refuse(data.draw(damaged(name)))
    if module is None:
        return
    printed = hlo.to_text(module)
    assert hlo.to_text(hlo.parse(printed)) == printed
    with contextlib.suppress(hlo.HloVerifyError):
        hlo.verify(module)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@SOME
def test_what_xla_accepts_is_accepted_and_keeps_its_meaning(name: str, xla: XlaProcess, data: st.DataObject) -> None:
    text = data.draw(damaged(name))
    module = parse_or_refuse(text)
    answer = xla.full_text(text)
    if not answer.ok:
        return
    assert module is not None
    ours = xla.full_text(hlo.to_text(module))
    assert ours.ok, ours.message
    if "..." not in text:  # jaxlib 0.10 fills elided constants with other numbers each time
        assert ours.text == answer.text


@given(st.text(alphabet='HloModule ENTRY x=f32[](){},"%/*\n0123->:', max_size=60))
@example("HloModule m " + "(" * 10_000)
@example("x = " + "(" * 10_000 + ")" * 10_000 + " tuple()")
@example("x = f32[] " + "negate(" * 10_000)
@example("HloModule m, a=" + "{" * 10_000)
@example("ENTRY e { x = f32[] parameter(" + "9" * 10_000 + ") }")
@example("HloModule m FileNames " + "1 " * 10_000)
@example("HloModule m ENTRY e { x = f32[]{" + "1," * 10_000 + "} parameter(0) }")
def test_any_text(text: str) -> None:
    module = parse_or_refuse(text)
    if module is not None:
        hlo.to_text(module)
