"""The rule of what is near enough behind several FP8 roundings, and maxima that keep NaN."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from xla_fp8 import _jax_compat, hlo
from xla_fp8.backends.compare import FP8_STEP, TOLERANCES, Tolerance, compare
from xla_fp8.backends.executable import Executable
from xla_fp8.backends.keep_nan import keep_nan

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
F32 = np.dtype(np.float32)
WANTED = np.random.default_rng(0).normal(size=4000).astype(np.float32)


def flipped(share: float, steps: int = 1) -> np.ndarray:
    """WANTED in FP8, with a share of the elements some steps larger."""
    bits = WANTED.astype(E4M3).view(np.uint8).copy()
    bits[: int(share * bits.size)] += steps
    return bits.view(E4M3)


def accepts(share: float, steps: int, roundings: float) -> bool:
    return TOLERANCES["f32"].accepts(compare(flipped(0), flipped(share, steps)), E4M3, roundings)


def test_two_steps_are_too_many_for_one_convolution_and_not_behind_another() -> None:
    assert accepts(0.003, 1, roundings=1)
    assert not accepts(0.003, 2, roundings=1)
    assert accepts(0.003, 2, roundings=2)


@pytest.mark.parametrize("roundings", [2, 3, 4])
def test_the_share_that_may_differ_is_the_root_of_the_one_before(roundings: int) -> None:
    share = TOLERANCES["f32"].fp8_share ** (0.5 ** (roundings - 1))
    limits = TOLERANCES["f32"].behind(roundings, E4M3)
    assert limits.share == pytest.approx(share)
    assert limits.norm == pytest.approx(FP8_STEP * share**0.5)
    # What flips that share of the elements is an error of the norm that the rounding before may leave.
    assert limits.share * FP8_STEP == pytest.approx(TOLERANCES["f32"].behind(roundings - 1, E4M3).norm)
    assert accepts(0.7 * share, 1, roundings)
    assert not accepts(1.2 * share, 1, roundings)
    assert not accepts(0.7 * share, 4, roundings), "the norm"


def test_wide_outputs_go_by_the_roundings_in_front() -> None:
    rule = TOLERANCES["f32"]
    off = compare(WANTED, WANTED * np.float32(1.005))
    assert off.norm == pytest.approx(0.005, rel=1e-3)
    assert not rule.accepts(off, F32, roundings=0)
    assert rule.accepts(off, F32, roundings=1)
    assert not rule.accepts(compare(WANTED, WANTED * np.float32(1.01)), F32, roundings=1)


def test_a_scale_that_is_wrong_is_noticed_behind_three_roundings() -> None:
    assert not TOLERANCES["f32"].accepts(compare(WANTED, WANTED * np.float32(1.05)), F32, roundings=3)


def test_behind_any_number_of_roundings_a_nan_on_one_side_and_other_types_are_refused() -> None:
    lost = WANTED.copy()
    lost[3] = np.nan
    assert not TOLERANCES["f32"].accepts(compare(WANTED, lost), F32, roundings=np.inf)
    ones = np.ones(3, np.int32)
    assert not TOLERANCES["f32"].accepts(compare(ones, ones + 1), ones.dtype, roundings=np.inf)


def test_a_tolerance_of_ones_own_knows_no_roundings() -> None:
    assert not Tolerance(0.001).accepts(compare(WANTED, WANTED * np.float32(1.005)), F32, roundings=np.inf)


@pytest.mark.parametrize("largest", [True, False])
def test_maxima_keep_nan(largest: bool) -> None:
    choose = jnp.max if largest else jnp.min
    x = np.full((2, 16, 16, 8), np.nan, np.float32)
    lowered = jax.jit(lambda x, n: (choose(jnp.abs(x)), jnp.max(n))).lower(x, np.arange(4))
    module = hlo.parse(_jax_compat.lowered_hlo_text(lowered))
    assert keep_nan(module) == 1, "not the maximum of integers"
    for first in (x, np.where(np.arange(8) == 3, np.nan, np.ones_like(x)).astype(np.float32)):
        found, other = Executable(module, "cpu")(first, np.arange(4, dtype=np.int32))
        assert np.isnan(found)
        assert other == 3
    found, _ = Executable(module, "cpu")(np.arange(x.size, dtype=np.float32).reshape(x.shape), np.zeros(4, np.int32))
    assert found == (x.size - 1 if largest else 0)
