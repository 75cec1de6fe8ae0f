"""`xla-fp8 match`, `graph` and `passes`."""

from __future__ import annotations

from pathlib import Path

import pytest

from xla_fp8.passes import DEFAULT_PIPELINE, PASSES


def test_match_lists_instruction_captures_and_source(cli, plain: Path) -> None:
    done = cli("match", plain, "--pattern", 'm.add(m.any().capture("a"), m.any())')
    assert done.status == 0
    assert done.out.splitlines() == [
        "model.py:7: in main",
        '  %y = f32[2]{0} add(%x, %x), metadata={op_name="jit(f)/add" source_file="model.py" source_line=7}',
        "    a = %x = f32[2]{0} parameter(0)",
    ]


def test_no_match_says_what_came_nearest(cli, plain: Path) -> None:
    done = cli("match", plain, "--pattern", "m.add(m.negate(m.any()), m.any())")
    assert (done.status, done.out) == (1, "")
    assert done.err == f"{plain}: no match; the nearest: operand 0 of y: expected negate, found x (parameter)\n"


@pytest.mark.parametrize("pattern", ["m.add(", "__import__('os')", "m.nothing()", "1"])
def test_a_bad_pattern_is_wrong_usage(cli, plain: Path, pattern: str) -> None:
    done = cli("match", plain, "--pattern", pattern)
    assert done.status == 2
    assert "error: --pattern: " in done.err


def test_graph_draws_before_and_after(cli, scaled_conv: Path, tmp_path: Path) -> None:
    out = cli("graph", scaled_conv, "--target=h200").out
    assert "before:" in out
    assert "convolution f32[8,28,28,128]" in out
    assert "#1 conv" in out[out.index("after:") :]
    # The same from two files, as opt leaves them.
    rewritten = tmp_path / "rewritten.hlo"
    assert cli("opt", scaled_conv, "--target=h200", "-o", rewritten).status == 0
    assert cli("graph", rewritten, "--before", scaled_conv).out == out
    assert "before:" not in cli("graph", rewritten).out


def test_graph_writes_a_file(cli, scaled_conv: Path, tmp_path: Path) -> None:
    out = tmp_path / "graph.dot"
    assert cli("graph", scaled_conv, "--target=h200", "--format=dot", "-o", out).status == 0
    assert out.read_text().startswith("digraph")


def test_svg_needs_no_other_program(cli, scaled_conv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = cli("graph", scaled_conv, "--target=h200", "--format=svg")
    assert (done.status, done.out[:4]) == (0, "<svg")


def test_graph_of_a_directory_with_several_dumps_asks_for_one(cli, plain: Path, tmp_path: Path) -> None:
    for name in ("a.before_optimizations.txt", "b.before_optimizations.txt"):
        (tmp_path / name).write_bytes(plain.read_bytes())
    done = cli("graph", tmp_path)
    assert done.status == 1
    assert "name one of a.before_optimizations.txt, b.before_optimizations.txt" in done.err


def test_passes_lists_every_pass_in_order(cli) -> None:
    out = cli("passes").out
    listed = [line.split()[1] for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert listed == list(DEFAULT_PIPELINE)
    assert all(name in out for name in PASSES)


def test_passes_describes_one(cli) -> None:
    out = cli("passes", "dce").out
    assert out.startswith("dce: ")
    assert "Before::" in out
    assert cli("passes", "nothing").status == 2
