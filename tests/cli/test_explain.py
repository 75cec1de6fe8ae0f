"""`xla-fp8 explain`: an entry for each convolution and dot, in four formats."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

KEYS = {"instruction", "op", "source", "reason", "advice", "graph"}


def test_json_has_two_lists_of_entries(cli, scaled_conv: Path) -> None:
    done = cli("explain", scaled_conv, "--target=h200", "--format=json")
    report = json.loads(done.out)
    assert done.status == 0
    assert set(report) == {"rewritten", "refused"}
    (entry,) = report["rewritten"]
    assert entry.keys() >= KEYS
    assert (entry["instruction"], entry["op"], entry["source"]) == ("conv", "convolution", None)
    assert entry["graph"].startswith("1:[f32]conv();")
    assert report["refused"] == []


def test_json_of_a_refusal_has_source_reason_and_advice(cli, refused: Path) -> None:
    report = json.loads(cli("explain", refused, "--target=a100", "--format=json").out)
    (entry,) = report["refused"]
    assert (entry["instruction"], entry["source"], entry["graph"]) == ("conv", "model.py:42", None)
    assert "compute capability" in entry["reason"]
    assert entry["advice"]


def test_text_shows_the_source_line_and_the_advice(cli, refused: Path) -> None:
    done = cli("explain", refused, "--target=a100")
    assert done.status == 0
    first, second = done.out.splitlines()[:2]
    assert first.split()[:3] == ["refused", "conv", "model.py:42"]
    assert second.split()[0] == "advice:"
    assert "\x1b" not in done.out
    assert "note:" not in done.out


def test_strict_fails_on_a_refused_convolution(cli, refused: Path, scaled_conv: Path, plain: Path) -> None:
    assert cli("explain", refused, "--target=a100", "--strict").status == 1
    assert cli("explain", scaled_conv, "--target=h200", "--strict").status == 0
    assert cli("explain", plain, "--strict").status == 0


def test_strict_fails_on_a_refused_quantization_where_its_pass_is_named(cli, tmp_path: Path) -> None:
    path = tmp_path / "cast.hlo"
    path.write_text(
        "HloModule m\n\nENTRY e {\n  x = f32[8,8] parameter(0)\n  s = f32[] parameter(1)\n"
        "  ss = f32[8,8] broadcast(s), dimensions={}\n  y = f32[8,8] multiply(x, ss)\n"
        "  ROOT z = f8e4m3fn[8,8] convert(y)\n}\n"
    )
    assert cli("explain", path, "--passes=dynamic-quantize-rewriter", "--strict").status == 1
    assert cli("explain", path, "--strict").status == 0


def test_a_dump_without_metadata_is_told_how_to_get_it(cli, scaled_conv: Path) -> None:
    out = cli("explain", scaled_conv, "--target=h200").out
    assert "lowered.as_text('hlo', debug_info=True)" in out


def test_all_says_why_where_there_is_no_fp8(cli, tmp_path: Path) -> None:
    path = tmp_path / "dot.hlo"
    path.write_text(
        "HloModule m\n\nENTRY e {\n  a = f32[2,3] parameter(0)\n  b = f32[3,4] parameter(1)\n"
        "  ROOT product = f32[2,4] dot(a, b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n}\n"
    )
    short, full = cli("explain", path).out, cli("explain", path, "--all").out
    assert "not FP8    product" in short
    assert "advice:" not in short
    assert "advice:" in full


def test_color_always_paints(cli, refused: Path) -> None:
    assert "\x1b[1;31mrefused\x1b[0m" in cli("explain", refused, "--target=a100", "--color=always").out


def test_markdown_is_a_table(cli, refused: Path) -> None:
    out = cli("explain", refused, "--target=a100", "--format=markdown").out
    (row,) = [line for line in out.splitlines() if "`conv`" in line]
    assert row.startswith("| `conv` | `model.py:42` | ")
    assert row.count("|") - row.count("\\|") == 5


class _Page(HTMLParser):
    """Collects what a page loads from elsewhere, and checks that tags are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href") and (value or "")[0] != "#"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("several", [False, True])
def test_html_is_one_page_that_needs_nothing_else(
    cli, refused: Path, scaled_conv: Path, tmp_path: Path, several: bool
) -> None:
    out = tmp_path / "report.html"
    inputs = [refused, scaled_conv] if several else [refused]
    assert cli("explain", *inputs, "--target=a100", "--format=html", "-o", out).status == 0
    page = _Page()
    page.feed(out.read_text())
    page.close()
    assert page.open == []
    assert page.loads == []
    assert "model.py:42" in out.read_text()


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_of_several_inputs_those_without_convolutions_and_dots_are_counted(
    cli, scaled_conv: Path, tmp_path: Path, format: str
) -> None:
    empty = tmp_path / "empty.hlo"
    empty.write_text("HloModule m\n\nENTRY e {\n  ROOT x = f32[2] parameter(0)\n}\n")
    out = cli("explain", empty, scaled_conv, empty, f"--format={format}").out
    assert str(empty) not in out
    assert str(scaled_conv) in out
    assert out.splitlines()[-1] == "2 of 3 modules have no convolutions and no dots; --all shows them"
    everything = cli("explain", empty, scaled_conv, empty, f"--format={format}", "--all").out
    assert everything.count(str(empty)) == 2
    assert cli("explain", empty, empty).out == "2 of 2 modules have no convolutions and no dots; --all shows them\n"
    assert "of 1" not in cli("explain", empty).out


def test_several_inputs_are_told_apart(cli, refused: Path, scaled_conv: Path) -> None:
    out = cli("explain", refused, scaled_conv, "--target=a100").out
    assert [line for line in out.splitlines() if line.startswith("==")] == [f"== {refused}", f"== {scaled_conv}"]
    report = json.loads(cli("explain", refused, scaled_conv, "--target=a100", "--format=json").out)
    assert [entry["file"] for entry in report["refused"]] == [str(refused), str(scaled_conv)]
