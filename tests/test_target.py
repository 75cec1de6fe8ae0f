"""Targets: what the names and fields mean, and the guards of FP8 convolutions with their messages."""

from __future__ import annotations

import pytest

from xla_fp8.target import Target, TargetError


@pytest.mark.parametrize(
    ("text", "capability", "cuda", "cudnn"),
    [
        ("h100", (9, 0), (13, 0), (9, 19)),
        ("h200", (9, 0), (13, 0), (9, 19)),
        ("b200", (10, 0), (13, 0), (9, 19)),
        ("l40s", (8, 9), (13, 0), (9, 19)),
        ("A100", (8, 0), (13, 0), (9, 19)),
        ("cc=9.0,cuda=12.4,cudnn=9.1", (9, 0), (12, 4), (9, 1)),
        ("cc=8.9", (8, 9), (13, 0), (9, 19)),
        ("l40s, cudnn=9.7", (8, 9), (13, 0), (9, 7)),
        ("cc=9,cuda=12", (9, 0), (12, 0), (9, 19)),
    ],
)
def test_parse(text: str, capability: tuple[int, ...], cuda: tuple[int, ...], cudnn: tuple[int, ...]) -> None:
    target = Target.parse(text)
    assert (target.compute_capability, target.cuda, target.cudnn) == (capability, cuda, cudnn)


@pytest.mark.parametrize("text", ["", "h300", "cc=nine", "cc=9.0,driver=5", "h200,h100", "cuda=", "=9.0"])
def test_what_is_not_a_target_is_told_what_is(text: str) -> None:
    with pytest.raises(TargetError, match=r"one of h100|a version like 9\.0"):
        Target.parse(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h200", None),
        ("b200", None),
        ("l40s", None),
        ("l40s,cudnn=9.8", None),
        ("l40s,cudnn=9.7", "8.9 need cuDNN 9.8 or newer; the target has 9.7"),
        ("h200,cudnn=8.8", "need cuDNN 8.9 or newer; the target has 8.8"),
        ("h200,cudnn=8.9", None),
        ("h200,cuda=11.8", "need CUDA 12.0 or newer; the target has 11.8"),
        ("a100", "need compute capability 9.0 (Hopper), or 8.9 with cuDNN 9.8 or newer; the target has 8.0"),
    ],
)
def test_guards(text: str, message: str | None) -> None:
    refusal = Target.parse(text).fp8_convolution_refusal()
    assert refusal is None if message is None else message in (refusal or "")


def test_default_target_is_h200_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("xla_fp8.target._local_compute_capability", lambda: None)
    assert Target.default().compute_capability == (9, 0)
    monkeypatch.setattr("xla_fp8.target._local_compute_capability", lambda: (8, 9))
    assert Target.default().compute_capability == (8, 9)
