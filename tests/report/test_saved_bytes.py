"""The bytes that a report says are saved: counted by hand for each way in which a graph may end."""

from __future__ import annotations

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.report import Report
from xla_fp8.report.report import readable

E4M3 = jnp.float8_e4m3fn
RESULT = 2 * 8 * 8 * 32
"""Elements of the convolution's result."""


def report_of(epilogue: Callable[[jax.Array], object], dtype: jnp.dtype = jnp.float32) -> Report:
    """The report of a convolution whose result is of that type, and what follows it."""

    def function(x: jax.Array, w: jax.Array) -> object:
        y = lax.conv_general_dilated(
            x.astype(dtype), w.astype(dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "OHWI", "NHWC")
        )
        return epilogue(y)

    shapes = jax.ShapeDtypeStruct((2, 8, 8, 16), E4M3), jax.ShapeDtypeStruct((32, 3, 3, 16), E4M3)
    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(function).lower(*shapes)))
    report = passes.run(module, target="h200", dialect="extended")
    assert len(report.rewritten) == 1
    return report


def quantized(y: jax.Array) -> jax.Array:
    return jnp.clip(y, -448, 448).astype(E4M3)


def with_copy(y: jax.Array) -> tuple[jax.Array, jax.Array]:
    return quantized(y * 2), y


@pytest.mark.parametrize(
    ("epilogue", "dtype", "saved"),
    [
        (lambda y: y, jnp.float32, 0),
        (lambda y: jax.nn.relu(y), jnp.float32, 2 * 4 * RESULT),
        (lambda y: quantized(jax.nn.relu(y) * 2), jnp.float32, 2 * 4 * RESULT),
        (lambda y: quantized(jax.nn.relu(y) * 2), jnp.bfloat16, 2 * 2 * RESULT),
        (lambda y: (quantized(y * 2), jnp.max(jnp.abs(y))), jnp.float32, 2 * 4 * RESULT),
        (with_copy, jnp.float32, 4 * RESULT),
        (lambda y: with_copy(jax.nn.relu(y)), jnp.float32, 2 * 4 * RESULT),
    ],
    ids=["nothing", "relu", "cast", "of bf16", "amax", "written beside", "another copy"],
)
def test_what_is_no_longer_written_and_read(epilogue: Callable[[jax.Array], object], dtype: type, saved: int) -> None:
    report = report_of(epilogue, jnp.dtype(dtype))
    assert report.rewritten[0].saved_bytes == report.saved_bytes == saved
    assert ("memory traffic" in str(report)) == (saved > 0)


def test_every_format_has_them() -> None:
    report = report_of(lambda y: quantized(jax.nn.relu(y) * 2))
    assert "saves 32.8 KB of memory traffic: results that are no longer written and read back\n" in str(report)
    assert json.loads(report.to_json())["rewritten"][0]["saved_bytes"] == 32768
    for page in (report.to_html(), report._repr_html_()):
        assert "saves 32.8 KB of memory traffic</p>" in page


@pytest.mark.parametrize(
    ("size", "text"), [(999, "999 bytes"), (1000, "1 KB"), (6_422_528, "6.42 MB"), (12_300_000_000, "12.3 GB")]
)
def test_readable(size: int, text: str) -> None:
    assert readable(size) == text
