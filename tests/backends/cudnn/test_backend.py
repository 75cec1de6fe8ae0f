"""What the cudnn backend refuses although cuDNN itself says yes."""

from __future__ import annotations

import pytest

from xla_fp8.backends.cudnn import backend, library
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.protocol import Yes
from xla_fp8.target import Target


@pytest.mark.parametrize(("copied", "ok"), [("f32", False), ("bf16", True), ("f16", True)])
def test_an_f32_copy_is_left_to_others(monkeypatch: pytest.MonkeyPatch, copied: str, ok: bool) -> None:
    """Every element of one was wrong on an H200, so its yes is not taken."""
    monkeypatch.setattr(library, "why_missing", lambda modules: None)
    monkeypatch.setattr(backend, "support", lambda call, target: Yes())
    call = graph_call(f"1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]scale(2);4:[{copied}]copy(2);")
    verdict = backend.CudnnBackend().supports(call, Target.parse("h200"))
    assert verdict.ok == ok
    assert ok or "f32 copy" in verdict.reason
