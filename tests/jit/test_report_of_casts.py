"""The report says which casts to FP8 are kernels with what is in front of them, and why others are left to XLA."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xla_fp8
from tests.training_steps import PROGRAMS, step_of
from xla_fp8.backends.quantize import choice
from xla_fp8.report import Report

F32, BF16, E4M3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn
ARGUMENTS = (
    jax.ShapeDtypeStruct((2048, 256), BF16),
    jax.ShapeDtypeStruct((256, 128), E4M3),
    jax.ShapeDtypeStruct((256,), F32),
)
TOO_LITTLE = "3 operations on each element; with fewer than 5 XLA's own kernel is as fast"


def cast(y: jax.Array) -> jax.Array:
    return jnp.clip(y.astype(F32) * 0.5, -448, 448).astype(E4M3)  # cast


def rms(x: jax.Array, gain: jax.Array) -> jax.Array:
    wide = x.astype(F32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-5) * gain


def layer(x: jax.Array, w: jax.Array, gain: jax.Array) -> Any:
    normed = cast(rms(x, gain))
    y = jnp.dot(normed.astype(F32) * 2.0, w.astype(F32) * 3.0).astype(BF16)
    turned = x.T  # transpose
    return y, cast(x), cast(-x), cast(turned * jnp.tanh(turned))


@pytest.fixture(params=["explain", "jit"])
def report(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Report:
    """As on a Hopper GPU, whose kernels nobody runs here."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)
    explained = xla_fp8.explain(layer) if request.param == "explain" else xla_fp8.jit(layer).report
    return explained(*ARGUMENTS)


def line(marker: str) -> int:
    with open(__file__) as file:
        return next(number for number, text in enumerate(file, 1) if text.rstrip().endswith(f"# {marker}"))


def test_each_cast_has_a_kernel_or_a_reason(report: Report) -> None:
    assert [cast.types for cast in report.casts] == [("f8e4m3fn[2048,256]",)] * 3 + [("f8e4m3fn[256,2048]",)]
    assert report.casts[0].operations > 10
    assert [cast.operations for cast in report.casts[1:]] == [0, 0, 0]
    assert all(f"test_report_of_casts.py:{line('cast')}" in (cast.source or "") for cast in report.casts[1:])
    assert report.casts[0].reason == ""
    assert report.casts[1].reason == TOO_LITTLE
    assert "the result of a transpose" in report.casts[3].reason
    assert f"test_report_of_casts.py:{line('transpose')})" in report.casts[3].reason


def test_a_line_for_each_reason(report: Report) -> None:
    text = report.to_text()
    assert "casts to FP8: 1 by kernels with what is in front of them, 3 left to XLA" in text
    assert text.count("left to XLA (") == len(report.left_casts)
    assert "operations give" not in text
    assert "operations give f8e4m3fn[2048,256]" in report.to_text(everything=True)
    assert "1 rewritten, 0 refused" in text  # casts are no convolutions and no dots


def test_every_format_has_them(report: Report) -> None:
    assert json.loads(report.to_json())["casts"][1]["reason"] == TOO_LITTLE
    assert "### Casts to FP8" in report.to_markdown()
    assert report.to_markdown().count("XLA's own kernel is as fast") == 2  # of 3 and of 4 operations
    assert "left to XLA" in report.to_html()


def test_kernels_of_training_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)
    step, arguments = step_of("transformer")
    found = xla_fp8.explain(step)(*arguments)
    kernels = PROGRAMS["transformer"][2]
    assert sum(cast.operations > 0 for cast in found.casts) == len(kernels)
    [others] = [kernel for kernel in kernels if not kernel[0].startswith("float8")]
    [cast] = [cast for cast in found.casts if not cast.is_fp8]
    assert len(cast.types) == len(others)
    assert "(and 1 of other tensors and sums)" in found.casts_note


def test_elsewhere_nothing_is_said() -> None:
    found = xla_fp8.explain(layer)(*ARGUMENTS)
    assert found.casts == []
    assert "casts to FP8" not in found.to_text()
    assert "casts" not in found.to_dict()


def test_those_in_bodies_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)

    def scanned(x: jax.Array, w: jax.Array, gain: jax.Array) -> Any:
        return jax.lax.scan(lambda carry, _: (carry, cast(rms(x, gain))), 0, length=3)

    [found] = xla_fp8.explain(scanned)(*ARGUMENTS).casts
    assert found.operations > 10
