"""Reading inputs: whatever bytes come, a module or a message with a place; never another exception."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from xla_fp8 import hlo
from xla_fp8.cli.errors import CliError
from xla_fp8.cli.inputs import Source, load
from xla_fp8.hlo import HloParseError
from xla_fp8.hlo.xla_process import XlaProcess

DUMPS = Path(__file__).resolve().parents[2] / "hlo_fixtures" / "dumps"
SMALL = sorted(path for path in DUMPS.glob("*.hlo") if path.stat().st_size < 20_000)


@pytest.fixture(scope="module")
def xla() -> Iterator[XlaProcess]:
    with XlaProcess() as process:
        yield process


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"", CliError, "empty"),
        (b" \n\n", CliError, "empty"),
        (b"\x1f\x8bno gzip", CliError, "gzip data is broken"),
        ("HloModule m".encode("utf-16"), CliError, "UTF-16"),
        (b"HloModule m\nENTRY \xff", HloParseError, r"in\.hlo:2:7: error: byte 0xff is not valid UTF-8"),
        (b"HloModule m\0", HloParseError, r"in\.hlo:1:12: error: .*NUL"),
        (b"\x0a\x05HloMo\x00", HloParseError, "expected|NUL"),
        (b"func.func @main() {}", HloParseError, r"in\.hlo:1:"),
    ],
    ids=["empty", "blank", "gzip", "utf16", "utf8", "nul", "almost-a-proto", "mlir"],
)
def test_bad_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xla: XlaProcess, data: bytes, error: type, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.hlo").write_bytes(data)
    with pytest.raises(error, match=message):
        load(Source("in.hlo"), xla)


def test_a_bad_proto(tmp_path: Path, xla: XlaProcess) -> None:
    path = tmp_path / "in.hlo.pb"
    path.write_bytes(b"\x0a\x03abc")
    with pytest.raises(CliError, match="not an HLO proto"):
        load(Source(str(path)), xla)


@pytest.mark.parametrize(
    ("name", "result"),
    [("a/x.hlo.pb.gz", "x.hlo"), ("x.pb", "x.hlo"), ("x.txt.gz", "x.txt"), ("x.hlo", "x.hlo"), ("-", "stdin.hlo")],
)
def test_output_name(name: str, result: str) -> None:
    assert Source(name).output_name == result


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A real dump with a part cut, swapped with another, duplicated, or with a bit flipped."""
    data = draw(st.sampled_from(SMALL)).read_bytes()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), min_size=4, max_size=4)))
    head, one, between, other, tail = (data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True))
    how = draw(st.sampled_from(["cut", "swap", "duplicate", "flip"]))
    if how == "cut":
        return head + between + other + tail
    if how == "swap":
        return head + other + between + one + tail
    if how == "duplicate":
        return head + one + one + between + other + tail
    at = min(cuts[0], len(data) - 1)
    return data[:at] + bytes([data[at] ^ 1 << draw(st.integers(0, 7))]) + data[at + 1 :]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(damaged())
def test_a_damaged_dump_is_read_or_rejected_with_a_place(tmp_path: Path, xla: XlaProcess, data: bytes) -> None:
    path = tmp_path / "damaged.hlo"
    path.write_bytes(data)
    outcome = read(Source(str(path)), xla)
    if isinstance(outcome, HloParseError):
        assert 1 <= outcome.line <= data.count(b"\n") + 1
        assert outcome.column >= 1
        assert str(outcome).startswith(f"{path}:{outcome.line}:{outcome.column}: error: ")
    elif isinstance(outcome, CliError):
        assert "empty" in str(outcome)  # everything was cut
    else:
        text, module = outcome
        assert hlo.to_text(module)
        assert xla.check(text).ok


def read(source: Source, xla: XlaProcess) -> tuple[str, hlo.HloModule] | HloParseError | CliError:
    """What `load` returns, or the error that it is allowed to raise."""
    try:
        return load(source, xla)
    except (HloParseError, CliError) as error:
        return error


BROKEN_LATER = """\
HloModule m

add.1 {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT add = f32[] add(a, b)
}

ENTRY main {
  x = f8e4m3fn[1,4,4,16] parameter(0)
  w = f8e4m3fn[16,1,1,16] parameter(1)
  xw = f32[1,4,4,16] convert(x)
  ww = f32[16,1,1,16] convert(w)
  conv = f32[1,4,4,16] convolution(xw, ww), window={size=1x1}, dim_labels=b01f_o01i->b01f
  zero = f32[] constant(0)
  ROOT sum = f32[] reduce(conv, zero), dimensions={0,1,2,3}, to_apply=add.1
}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "place", "message"),
    [
        ("window={size=1x1}", "window={1x1}", "14:3", "'1x1' is not part of a window"),
        ("dim_labels=b01f_o01i->b01f", "dim_labels b01f", "14:3", "convolution has no attribute 'dim_labels'"),
        ("constant(0)", "constant(none)", "15:3", "none"),
        ("to_apply=add.1", "to_apply=sum.1", "16:8", "there is no computation 'sum.1'"),
        ("to_apply=add.1", "to_apply", "16:8", "expected '=' after attribute name 'to_apply'"),
        ("f32[1,4,4,16] convert", "f32[1,4,4,15] convert", "12:3", "expected f32[1,4,4,16]"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "opt", "graph", "check", "run"])
def test_what_xla_was_not_asked_about_fails_with_a_place(
    cli, tmp_path: Path, command: str, right: str, wrong: str, place: str, message: str
) -> None:
    path = tmp_path / "broken.hlo"
    path.write_text(BROKEN_LATER.replace(right, wrong))
    done = cli(command, path, "--xla-verify=false", "--target=h200")
    first, line, caret = done.err.splitlines()[:3]
    assert first.startswith(f"{path}:{place}: ")
    assert message in first
    assert line == path.read_text().splitlines()[int(place.split(":")[0]) - 1]
    assert caret.index("^") == int(place.split(":")[1]) - 1
    # opt passes a module on that only the verifier rejects: a newer XLA may know better.
    assert done.status == (0 if "no pass was run" in first and len(done.err.splitlines()) == 3 else 1)
