"""`xla-fp8 check`, `doctor` and `cache`: what they print and with which status they end."""

from __future__ import annotations

import json
import re
from pathlib import Path

import jax
import pytest

from xla_fp8.backends import cache, call_text
from xla_fp8.backends.cudnn import deviceless, library
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.cli import doctor
from xla_fp8.cli.main import main

FIXTURES = Path(__file__).resolve().parents[2] / "hlo_fixtures"
GOOD = str(FIXTURES / "cudnn-fused-conv-rewriter/scale_x_w.hlo")
DEPTHWISE = str(FIXTURES / "cudnn-fused-conv-rewriter/depthwise.hlo")


def test_check_says_yes_and_who_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", GOOD, "--target=h200", "--xla-verify=false"]) == 0
    out = capsys.readouterr().out
    assert "scale_x_w.hlo on h200" in out
    assert "yes conv_general_dilated" in out
    assert "1:[f32]conv();" in out
    assert "cuDNN" in out


def test_check_says_no_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", DEPTHWISE, "--target=h200", "--xla-verify=false"]) == 1
    out = capsys.readouterr().out
    assert "1 input channel in each of 16 groups" in out


def test_check_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", GOOD, DEPTHWISE, "--target=h200", "--xla-verify=false", "--format=json"]) == 1
    good, bad = json.loads(capsys.readouterr().out)
    assert good["ok"]
    assert not bad["ok"]
    assert bad["rule"] == "grouped-channels"
    assert bad["graph"].startswith("1:[f32]conv();")


def test_check_asks_about_the_graphs_of_a_rewritten_module(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rewritten = str(tmp_path / "depthwise.opt.hlo")
    common = ["--target=h200", "--xla-verify=false"]
    assert main(["opt", DEPTHWISE, "-o", rewritten, "--supports=any", *common]) == 0
    assert main(["check", DEPTHWISE, "--format=json", *common]) == 1
    (before,) = json.loads(capsys.readouterr().out)
    assert main(["check", rewritten, "--format=json", *common]) == 1
    (after,) = json.loads(capsys.readouterr().out)
    assert after == {**before, "file": rewritten}


def test_check_tells_the_source_line_and_who_answered(capsys: pytest.CaptureFixture[str]) -> None:
    fixture = str(FIXTURES / "explain/source_lines.hlo")
    main(["check", fixture, "--target=h200", "--xla-verify=false", "--supports=rules", "--format=json"])
    entry = json.loads(capsys.readouterr().out)[0]
    assert re.fullmatch(r".*\.py:\d+", entry["source"])
    assert entry["answered_by"].startswith("rules made with cuDNN")


def test_check_of_a_target_without_fp8_asks_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", GOOD, "--target=a100", "--xla-verify=false"]) == 0
    assert "no FP8 graph" in capsys.readouterr().out


def test_check_with_rules_where_cudnn_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "why_missing", lambda *_: "nvidia-cudnn-frontend is not installed")
    assert main(["check", GOOD, "--target=h200", "--xla-verify=false"]) == 0
    assert "rules made with cuDNN" in capsys.readouterr().out


def test_check_asks_whom_supports_names(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviceless, "shared", lambda: pytest.fail("cuDNN was asked"))
    assert main(["check", DEPTHWISE, "--target=h200", "--xla-verify=false", "--supports=rules"]) == 1
    out = capsys.readouterr().out
    assert "1 input channel in each of 16 groups" in out
    assert "rules made with cuDNN" in out
    assert "asked for by name" in out


def test_check_must_ask_somebody(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", GOOD, "--supports=any"]) == 2
    assert "invalid choice: 'any'" in capsys.readouterr().err
    assert main(["check", GOOD, "--supports=rules", "--device-properties=gpu.json"]) == 2
    assert "--device-properties is for cuDNN, and --supports=rules does not ask it" in capsys.readouterr().err


def test_check_reads_device_properties_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["check", GOOD, f"--device-properties={tmp_path / 'none.json'}"]) == 1
    assert "none.json: error: No such file" in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    out = capsys.readouterr().out
    assert status == 0, out
    assert "jaxlib " in out
    assert "works   reference: agrees with the reference" in out
    if library.why_missing(("cudnn", "jax_tvm_ffi")):
        assert library.PIP_LINE in out


@pytest.mark.parametrize("plugin", ["", "jax-cuda12-plugin"])
def test_the_doctor_names_the_plugin_for_gpus_where_there_is_none(
    plugin: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is a GPU here")
    monkeypatch.setattr(doctor, "_version", lambda name: "1.0" if name == plugin else "")
    assert main(["doctor"]) == 0
    (mosaic,) = (line for line in capsys.readouterr().out.splitlines() if "missing mosaic" in line)
    assert ("pip install 'jax[cuda13]'" in mosaic) == (not plugin)


def test_cache_show_clear_path(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FP8_CACHE_DIR", str(tmp_path))
    assert main(["cache", "path"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path)
    assert main(["cache", "show"]) == 0
    assert "0 choices" in capsys.readouterr().out
    key = {"call": call_text.encode(graph_call("1:[f8e4m3fn]conv();")), "device": "NVIDIA H200"}
    cache.store(cache.Choice(key, "eng4_k24=3", 50.0, 150.0, 9, 3.0, "2026-01-01T00:00:00+00:00"))
    cache.store(cache.Choice({"call": "old"}, "x", 1.0, None, 1, 0.0, "2025-01-01T00:00:00+00:00"))
    assert main(["cache", "show"]) == 0
    out = capsys.readouterr().out
    assert "NVIDIA H200: eng4_k24=3, 50.0 us, 3.00x the heuristic's choice" in out
    assert "1:[f8e4m3fn]conv();  f8e4m3fn[2,16,16,32] x f8e4m3fn[32,3,3,32]" in out
    assert "a call that this version does not read" in out
    assert main(["cache", "show", "--format=json"]) == 0
    assert [choice["config"] for choice in json.loads(capsys.readouterr().out)] == ["x", "eng4_k24=3"]
    assert main(["cache", "clear"]) == 0
    assert "2 choices deleted" in capsys.readouterr().out
    assert list(cache.choices()) == []
