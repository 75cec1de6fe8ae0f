"""NaN and infinity, original and rewritten: what docs/numbers.md says of them."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.backends.executable import Executable

NAN, INF = np.nan, np.inf
# Of 16 channels: all ones, all zeros, half of each, and twelve ones with four minus ones.
PIXELS = np.array([[1] * 16, [0] * 16, [1] * 8 + [0] * 8, [1] * 12 + [-1] * 4], np.float32)
FILTER = np.ones((1, 16, 16), jnp.float8_e4m3fn)


@functools.cache
def programs(wide: type, activation: str | None) -> tuple[Executable, Executable]:
    """A program of x, the filter and two scales with an e4m3 output and amax: before and after the pipeline."""

    def function(x: jax.Array, w: jax.Array, x_scale: jax.Array, y_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        return xla_fp8.conv_general_dilated(
            *(x, w, (1,), "VALID"), dimension_numbers=("NWC", "WIO", "NWC"), preferred_element_type=wide,
            lhs_scale=x_scale, activation=activation, out_scale=y_scale, out_dtype=jnp.float8_e4m3fn, return_amax=True,
        )  # fmt: skip

    scale = jax.ShapeDtypeStruct((), jnp.float32)
    shapes = (
        jax.ShapeDtypeStruct((1, *PIXELS.shape), jnp.float8_e4m3fn),
        jax.ShapeDtypeStruct(FILTER.shape, FILTER.dtype),
    )
    text = _jax_compat.lowered_hlo_text(jax.jit(function).lower(*shapes, scale, scale))
    module = hlo.parse(text)
    assert passes.run(module, target="h200", dialect="extended").changed
    return Executable(hlo.parse(text), "cpu"), Executable(module, "cpu")


def outputs(x_scale: float, y_scale: float, first: float, wide: type, activation: str | None) -> list[list[float]]:
    """e4m3 outputs and amax for each pixel, before and after the pipeline; `first` replaces the first input."""
    x = PIXELS[None].copy()
    x[0, 0, 0] = first
    arrays = (x.astype(jnp.float8_e4m3fn), FILTER, np.float32(x_scale), np.float32(y_scale))
    results = [program(*arrays) for program in programs(wide, activation)]
    return [[*y.astype(np.float32)[0, :, 0], float(amax)] for y, amax in results]


CASES = {
    # x_scale, y_scale, first input: what both programs make of it
    "finite": ((1, 1, 1), [16, 0, 8, 8, 16]),
    "saturates": ((100, 1, 1), [448, 0, 448, 448, 1600]),
    "nan_input": ((1, 1, NAN), [NAN, 0, 8, 8, NAN]),
    "nan_scale": ((NAN, 1, 1), [NAN, NAN, NAN, NAN, NAN]),
    "zero_scale": ((0, 1, 1), [0, 0, 0, 0, 0]),
    "infinite_output_scale": ((1, INF, 1), [448, NAN, 448, 448, 16]),
    "nan_output_scale": ((1, NAN, 1), [NAN, NAN, NAN, NAN, 16]),
}


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("wide", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_both_programs_agree(case: str, wide: type, activation: str | None) -> None:
    arguments, expected = CASES[case]
    for result in outputs(*arguments, wide, activation):
        np.testing.assert_array_equal(result, expected)


def test_an_infinite_input_scale_makes_nan_of_fewer_sums() -> None:
    original, rewritten = outputs(INF, 1, 1, jnp.float32, None)
    np.testing.assert_array_equal(original, [448, NAN, NAN, NAN, NAN])
    np.testing.assert_array_equal(rewritten, [448, NAN, 448, 448, NAN])
