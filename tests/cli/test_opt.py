"""`xla-fp8 opt`: what it writes, where, and with which status."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.hlo import HloModule
from xla_fp8.hlo.xla_process import XlaAnswer, XlaProcess

GRAPH_TARGET = "__cudnn$convForwardGraph"


def test_writes_a_graph_to_a_file(cli, scaled_conv: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.hlo"
    done = cli("opt", scaled_conv, "--target=h200", "-o", out)
    assert (done.status, done.out, done.err) == (0, "", "")
    assert GRAPH_TARGET in out.read_text()


def test_a_module_without_fp8_comes_out_as_it_was(cli, plain: Path) -> None:
    done = cli("opt", plain)
    assert (done.status, done.out) == (0, plain.read_text())


def test_no_passes_only_prints(cli, scaled_conv: Path) -> None:
    done = cli("opt", scaled_conv, "--passes=")
    assert done.status == 0
    assert done.out == hlo.to_text(hlo.parse(scaled_conv.read_text()))


def test_what_it_writes_it_reads(cli, scaled_conv: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first.hlo", tmp_path / "second.hlo"
    assert cli("opt", scaled_conv, "--target=h200", "-o", first).status == 0
    assert cli("opt", first, "--target=h200", "-o", second).status == 0
    assert first.read_text() == second.read_text()


def test_pipe_to_pipe(scaled_conv: Path) -> None:
    command = [sys.executable, "-m", "xla_fp8", "opt", "-", "--target=h200", "-o", "-"]
    done = subprocess.run(command, input=scaled_conv.read_bytes(), capture_output=True, check=True)
    assert GRAPH_TARGET.encode() in done.stdout
    assert done.stderr == b""


def test_proto_and_gzip_read_as_text_does(cli, plain: Path, tmp_path: Path) -> None:
    proto = _jax_compat.hlo_text_to_proto(plain.read_text())
    (tmp_path / "module.pb").write_bytes(proto)
    wrapped = b"\x0a" + _varint(len(proto)) + proto  # HloProto: the module is field 1
    (tmp_path / "wrapped.hlo.pb.gz").write_bytes(gzip.compress(wrapped))
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress(plain.read_bytes()))
    results = [cli("opt", tmp_path / name) for name in ("module.pb", "wrapped.hlo.pb.gz", "text.txt.gz")]
    assert [done.status for done in results] == [0, 0, 0]
    assert _jax_compat.full_text(results[0].out) == _jax_compat.full_text(plain.read_text())
    assert results[1].out == results[0].out
    assert results[2].out == plain.read_text()


def _varint(number: int) -> bytes:
    digits = []
    while number >= 0x80:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def test_a_dump_directory(cli, plain: Path, tmp_path: Path) -> None:
    dumps, out = tmp_path / "dumps", tmp_path / "out"
    dumps.mkdir()
    for name in ("module_0001.jit_f.before_optimizations.txt", "module_0002.jit_g.before_optimizations.txt"):
        (dumps / name).write_bytes(plain.read_bytes())
    (dumps / "module_0001.jit_f.before_optimizations.hlo.pb").write_bytes(b"the text is taken instead")
    (dumps / "module_0001.jit_f.cpu_after_optimizations.txt").write_bytes(b"not taken")
    (dumps / "module_0001.jit_f.before_optimizations.dot").write_bytes(b"not taken")
    assert cli("opt", dumps, "-o", out).status == 0
    assert sorted(path.name for path in out.iterdir()) == [
        "module_0001.jit_f.before_optimizations.txt",
        "module_0002.jit_g.before_optimizations.txt",
    ]


def test_a_broken_input_does_not_stop_the_others(cli, plain: Path, tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.hlo", tmp_path / "out"
    bad.write_text("HloModule")
    done = cli("opt", bad, plain, "-o", out)
    assert done.status == 1
    assert "bad.hlo:1:" in done.err
    assert [path.name for path in out.iterdir()] == ["plain.hlo"]


def test_an_error_leaves_the_output_as_it_was(cli, tmp_path: Path) -> None:
    bad, out = tmp_path / "bad.hlo", tmp_path / "out.hlo"
    bad.write_text("HloModule m\n\nENTRY e {\n  ROOT x = f32[2 parameter(0)\n}\n")
    out.write_text("precious")
    done = cli("opt", bad, "-o", out)
    assert done.status == 1
    lines = done.err.splitlines()
    assert lines[0].startswith(f"{bad}:4:")
    assert lines[1] == "  ROOT x = f32[2 parameter(0)"
    assert lines[2].strip() == "^"
    assert out.read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.hlo", "out.hlo"]


@pytest.mark.parametrize("dies", [False, True], ids=["this jaxlib", "a jaxlib that dies of it"])
def test_text_that_can_kill_xla_is_rejected(cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    if dies:  # jaxlib 0.10 does, 0.12 says no and names the line behind
        crash = XlaAnswer(False, message="XLA's parser crashed while it parsed this text (SIGABRT)", crashed=True)
        monkeypatch.setattr(XlaProcess, "check", lambda self, text: crash)
    bad = tmp_path / "bad.hlo"
    bad.write_text("HloModule m\n\nENTRY e {\n  p = f32[2,3] parameter(0)\n  ROOT r = f32[5] reshape(p)\n}\n")
    done = cli("opt", bad)
    assert done.status == 1
    assert done.err.startswith(f"{bad}:5:8: error: " if dies else f"{bad}:")
    assert "elements" in done.err
    assert ("SIGABRT" in done.err) or not dies
    assert "Traceback" not in done.err


def test_xla_verify_off_reads_what_xla_does_not_know(cli, tmp_path: Path) -> None:
    new = tmp_path / "new.hlo"
    new.write_text("HloModule m\n\nENTRY e {\n  p = f32[2] parameter(0)\n  ROOT r = f32[2] from-the-future(p)\n}\n")
    done = cli("opt", new)
    assert done.status == 1
    assert "from-the-future" in done.err
    done = cli("opt", new, "--xla-verify=false")
    assert done.status == 0
    assert "from-the-future(p)" in done.out


def test_verify_input_refuses_what_xla_parses(cli, tmp_path: Path) -> None:
    odd = tmp_path / "odd.hlo"
    odd.write_text(
        "HloModule m\n\nENTRY e {\n  p = f32[2] parameter(0)\n  q = f32[3] parameter(1)\n"
        "  ROOT r = f32[2] add(p, q)\n}\n"
    )
    assert cli("opt", odd).status == 0
    done = cli("opt", odd, "--verify-input")
    assert done.status == 1
    assert done.err.startswith(f"{odd}:6:8: error: the operands are f32[2] and f32[3]")


UNSOUND = """\
HloModule m

ENTRY e {
  p = f8e4m3fn[2] parameter(0)
  q = f8e4m3fn[3] parameter(1)
  ROOT r = f8e4m3fn[2] add(p, q)
}

"""


def test_a_module_that_xla_takes_but_no_pass_can_trust_passes_through(cli, tmp_path: Path) -> None:
    path = tmp_path / "unsound.hlo"
    path.write_text(UNSOUND)
    for arguments in ([], ["--passes=dce"]):
        done = cli("opt", path, *arguments)
        assert (done.status, done.out) == (0, UNSOUND)
        assert done.err.startswith(f"{path}:6:8: warning: no pass was run, because the module is not sound: the ope")
        assert done.err.endswith("\n  ROOT r = f8e4m3fn[2] add(p, q)\n       ^\n")
    done = cli("explain", path)
    assert (done.status, done.out) == (1, "")
    assert done.err.startswith(f"{path}:6:8: error: the operands are f8e4m3fn[2] and f8e4m3fn[3]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--passes=dce,no-such-pass"], "no-such-pass"),
        (["--target=gtx"], "unknown target 'gtx'"),
        (["--fuel=-1"], "whole number"),
        (["--xla-verify=maybe"], "true or false"),
        (["--print-after=nothing"], "unknown pass 'nothing'"),
        (["--dialect=cuda"], "cuda"),
        (["-", "-"], "only once"),
    ],
)
def test_wrong_usage(cli, plain: Path, arguments: list[str], message: str) -> None:
    done = cli("opt", plain, *arguments)
    assert done.status == 2
    assert message in done.err


def test_two_inputs_with_one_name_are_not_written_over_each_other(cli, plain: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / plain.name
    other.parent.mkdir()
    other.write_bytes(plain.read_bytes())
    done = cli("opt", plain, other, "-o", tmp_path / "out")
    assert done.status == 2
    assert "would both be written" in done.err


def test_fail_if_unchanged(cli, plain: Path, scaled_conv: Path) -> None:
    assert cli("opt", scaled_conv, "--target=h200", "--fail-if-unchanged").status == 0
    done = cli("opt", plain, "--fail-if-unchanged")
    assert (done.status, done.out) == (1, plain.read_text())
    assert "changed nothing" in done.err


def test_fuel_stops_the_rewriting(cli, scaled_conv: Path) -> None:
    done = cli("opt", scaled_conv, "--target=h200", "--fuel=0")
    assert done.status == 0
    assert " convolution(" in done.out


def test_printing_around_passes(cli, scaled_conv: Path) -> None:
    done = cli("opt", scaled_conv, "--target=h200", "--print-before=dce", "--print-after=simplify,dce")
    assert [line for line in done.err.splitlines() if line.startswith("//")] == [
        "// after simplify",
        "// before dce",
        "// after dce",
    ]
    everything = cli("opt", scaled_conv, "--target=h200", "--print-before-all", "--print-after-all").err
    assert everything.count("// before ") == everything.count("// after ") == len(passes.DEFAULT_PIPELINE)


def test_report_statistics_and_times(cli, scaled_conv: Path) -> None:
    done = cli("opt", scaled_conv, "--target=h200", "--report", "--stats", "--time-passes", "-o", "/dev/null")
    assert done.status == 0
    assert "rewritten  conv" in done.err
    assert "1 rewritten, 0 refused" in done.err
    assert "rewrites by cudnn-fused-conv-rewriter  1" in done.err
    assert "total" in done.err
    assert "\x1b" not in done.err


def test_color_always_paints_the_report(cli, scaled_conv: Path) -> None:
    done = cli("opt", scaled_conv, "--target=h200", "--report", "--color=always", "-o", "/dev/null")
    assert "\x1b[1;32mrewritten\x1b[0m" in done.err


def test_a_convolution_call_without_its_operands_is_an_error_that_names_it(cli, tmp_path: Path) -> None:
    """XLA's parser and verifier take custom calls with any operands."""
    path = tmp_path / "call.hlo"
    path.write_text(
        "HloModule m\n\nENTRY e {\n  x = f8e4m3fn[1,8,8,16]{3,2,1,0} parameter(0)\n"
        "  y = (f32[1,8,8,16]{3,2,1,0}, u8[0]{0}) custom-call(x), window={size=1x1}, dim_labels=b01f_o01i->b01f, "
        'custom_call_target="__cudnn$convForward"\n'
        "  ROOT z = f32[1,8,8,16]{3,2,1,0} get-tuple-element(y), index=0\n}\n"
    )
    done = cli("opt", path)
    assert done.status == 1
    assert "y: custom-call has no operand 1" in done.err


def test_a_pass_that_breaks_the_module_writes_nothing(
    cli, scaled_conv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = passes.run

    def broken(module: HloModule, *arguments: object, **options: object) -> object:
        report = real(module, *arguments, **options)
        module.entry.instruction("conv").attributes["window"] = "{size=3x}"
        return report

    monkeypatch.setattr(passes, "run", broken)
    out = tmp_path / "out.hlo"
    done = cli("opt", scaled_conv, "--target=h200", "-o", out)
    assert done.status == 1
    assert "rejects the result" in done.err
    assert not out.exists()


def test_a_result_that_only_stablehlo_rejects_is_not_written(
    cli, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = passes.run

    def broken(module: HloModule, *arguments: object, **options: object) -> object:
        report = real(module, *arguments, **options)
        root = module.entry.root
        root.shape = root.shape.with_dimensions((3,))  # add(f32[2], f32[2]) -> f32[3]: XLA's parser takes it
        del module.attributes["entry_computation_layout"]
        report.changed = True
        return report

    monkeypatch.setattr(passes, "run", broken)
    done = cli("opt", plain, "-o", tmp_path / "out.hlo")
    assert done.status == 1
    assert "StableHLO" in done.err
