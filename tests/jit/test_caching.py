"""Traced and rewritten once; JAX's persistent cache hits in a second process and never returns another graph."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xla_fp8
from tests.jit.programs import assert_close, quantize, tensors, wide_layer
from xla_fp8 import _jax_compat
from xla_fp8.tracing import hlo_of_region, implementation, rewriting

pytestmark = pytest.mark.unoptimized

ROOT = Path(__file__).parents[2]

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
import xla_fp8
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hits" in event else None)
from jax import lax

@xla_fp8.jit
def fn(x8, w8):
    y = lax.conv_general_dilated(x8.astype(jnp.float32) * 0.5, w8.astype(jnp.float32), (1, 1), "SAME",
                                 dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return {epilogue}

x8 = jnp.asarray(np.arange(-72, 72).reshape(1, 6, 6, 4) / 8, jnp.float8_e4m3fn)
w8 = jnp.asarray(np.arange(-36, 36).reshape(3, 3, 4, 2) / 8, jnp.float8_e4m3fn)
assert len(fn.report(x8, w8).rewritten) == 1
x8.block_until_ready()
hits.clear()
print(float(fn(x8, w8).sum()), len(hits))
"""


def run(cache: Path, epilogue: str) -> tuple[float, int]:
    """Result and number of cache hits of a process that compiles one function."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(cache=str(cache), epilogue=epilogue)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONHASHSEED": str(len(list(cache.glob("*"))))},
    )
    assert done.returncode == 0, done.stderr
    value, hits = done.stdout.split()
    return float(value), int(hits)


def test_second_process_hits_the_cache_and_other_graphs_do_not(tmp_path: Path) -> None:
    first, hits = run(tmp_path, "jnp.maximum(y, 0)")
    assert hits == 0
    again, hits = run(tmp_path, "jnp.maximum(y, 0)")
    assert (again, hits > 0) == (first, True)
    other, _ = run(tmp_path, "jnp.tanh(y * 0.01)")
    assert other != first
    assert run(tmp_path, "jnp.maximum(y, 0)")[0] == first


def test_two_graphs_of_one_shape_are_never_confused() -> None:
    args = tensors()
    epilogues = [jax.nn.relu, jnp.tanh, lambda y: y * 2, lambda y: y + 2, lambda y: -y, jnp.abs, jax.nn.silu]

    def together(x8: jax.Array, w8: jax.Array) -> list[jax.Array]:
        return [epilogue(wide_layer(x8, w8)) for epilogue in epilogues]

    got = xla_fp8.jit(together)(*args)
    assert_close(got, jax.jit(together)(*args))
    for epilogue, wanted in zip(epilogues, got, strict=True):
        assert_close(xla_fp8.jit(lambda *a, epilogue=epilogue: epilogue(wide_layer(*a)))(*args), wanted)


def test_lowered_text_depends_on_nothing_but_the_program() -> None:
    def text() -> str:
        return str(xla_fp8.jit(lambda *a: jax.nn.relu(wide_layer(*a))).lower(*tensors()).as_text())

    assert text() == text()
    assert not re.search(r"0x[0-9a-f]{8,}|\b\d{12,}\b", text())


def test_second_call_neither_traces_nor_rewrites(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = []

    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        traces.append(x8.shape)
        return wide_layer(x8, w8)

    fast, eager = xla_fp8.jit(fn), xla_fp8.rewrite(fn)
    fast(*tensors())
    eager(*tensors())
    count = len(traces)
    monkeypatch.setattr(rewriting, "run", lambda *_, **__: pytest.fail("rewritten again"))
    fast(*tensors())
    eager(*tensors())
    assert len(traces) == count


def test_lowering_again_uses_the_rewritten_region(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = xla_fp8.jit(lambda x8, w8: wide_layer(x8, w8) + 1)
    traced = fast.trace(*tensors())
    traced.lower()
    monkeypatch.setattr(rewriting, "run", lambda *_, **__: pytest.fail("rewritten again"))
    traced.lower()
    assert jnp.isfinite(fast(*tensors())).all()


def test_repeated_layers_are_rewritten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    original = rewriting.run
    monkeypatch.setattr(rewriting, "run", lambda *args, **kwargs: runs.append(args) or original(*args, **kwargs))

    def net(x8: jax.Array, w8: jax.Array) -> jax.Array:
        for _ in range(3):
            x8 = quantize(jnp.sin(wide_layer(x8, w8, 0.375).sum(-1, keepdims=True)) * jnp.ones(4), 1.0)
        return x8

    lowered = xla_fp8.jit(net).lower(*tensors(batch=7))
    assert len(runs) == 1
    assert lowered.as_text().count("func.func private @xla_fp8_region") == 1
    assert lowered.as_text().count("call @xla_fp8_region") == 3
    assert_close(lowered.compile()(*tensors(batch=7)), jax.jit(net)(*tensors(batch=7)))


def test_layers_that_differ_in_a_scale_are_made_by_the_backend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels take scales as operands: a served network has other ones in each layer, and as many kernels as shapes."""
    made = []
    original = implementation._traced
    monkeypatch.setattr(implementation, "_traced", lambda *args: made.append(args) or original(*args))

    def net(x8: jax.Array, w8: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(wide_layer(x8, w8, scale) for scale in (0.375, 0.5, 0.625))

    arguments = tensors(batch=9)
    lowered = xla_fp8.jit(net, backend="reference").lower(*arguments)
    assert lowered.as_text().count("func.func private @xla_fp8_region") == 3
    assert len(made) == 1
    assert_close(lowered.compile()(*arguments), jax.jit(net)(*arguments))


def test_regions_of_a_function_are_lowered_together(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = []
    original = _jax_compat.lowered_hlo_text
    monkeypatch.setattr(_jax_compat, "lowered_hlo_text", lambda lowered: modules.append(1) or original(lowered))

    def net(x8: jax.Array, w8: jax.Array) -> list[jax.Array]:
        return [wide_layer(x8[:size], w8, 0.625) for size in (1, 2, 3)]

    fast = xla_fp8.jit(net)
    assert_close(fast(*tensors(batch=3)), jax.jit(net)(*tensors(batch=3)))
    assert len(modules) == 1
    assert len(fast.report(*tensors(batch=3)).rewritten) == 3
    assert len(modules) == 1


@pytest.mark.parametrize("broken", [False, True])
def test_regions_of_a_function_are_converted_together(monkeypatch: pytest.MonkeyPatch, broken: bool) -> None:
    together = []
    original = _jax_compat.hlo_functions_to_stablehlo

    def convert(text: str, names: tuple[str, ...]) -> dict[str, bytes]:
        together.append(len(names))
        if broken and len(names) > 1:
            raise RuntimeError("no such luck")
        return original(text, names)

    def net(x8: jax.Array, w8: jax.Array) -> list[jax.Array]:
        return [wide_layer(x8[:size], w8, 0.3125 + broken) for size in (1, 2, 3)]

    monkeypatch.setattr(_jax_compat, "hlo_functions_to_stablehlo", convert)
    lowered = xla_fp8.jit(net).lower(*tensors(batch=3))
    assert lowered.as_text().count("call @xla_fp8_region") == 3
    assert together == ([3, 1, 1, 1] if broken else [3])
    assert_close(lowered.compile()(*tensors(batch=3)), jax.jit(net)(*tensors(batch=3)))


def test_one_region_that_cannot_be_lowered_does_not_hurt_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    original = hlo_of_region._evaluated

    def evaluated(structure: hlo_of_region.Structure, *others: Any) -> Any:
        if structure.jaxpr.in_avals[0].shape[0] == 2:
            raise RuntimeError("no such luck")
        return original(structure, *others)

    def net(x8: jax.Array, w8: jax.Array) -> list[jax.Array]:
        return [wide_layer(x8[:size], w8, 0.875) for size in (1, 2, 3)]

    monkeypatch.setattr(hlo_of_region, "_evaluated", evaluated)
    with pytest.warns(xla_fp8.FallbackWarning, match="no such luck") as caught:
        text = xla_fp8.jit(net).lower(*tensors(batch=3)).as_text()
    assert len(caught) == 1
    assert text.count("call @xla_fp8_region") == 2
