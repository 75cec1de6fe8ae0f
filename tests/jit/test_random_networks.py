"""Differential test: random networks of FP8 convolutions mean the same under jax.jit and under xla_fp8.jit.

`make test` runs 200 of them, always the same; with XLA_FP8_NIGHTLY=1 it is 2,000 others each time. A failure names its
seed: `XLA_FP8_SEED=n` runs that one again.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Sequence
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import given, settings

import xla_fp8
from tests.jit.random_networks import Layer, NetworkBuilder, networks
from tests.random_programs import E4M3, E5M2
from tests.sampling import sampled
from tests.xla_options import QUICKLY
from xla_fp8.backends.compare import TOLERANCES, compare

SHARDS = 8
NIGHTLY = settings.default.max_examples > 1000
EXAMPLES = (2000 if NIGHTLY else 200) // SHARDS
# Clipping leaves little of a large sum but its rounding error; a wrong scale or operand is wrong by more than this.
TOLERANCE = {type: dataclasses.replace(t, relative=max(t.relative, 1e-3)) for type, t in TOLERANCES.items()}
Arrays = list[np.ndarray[Any, Any]]


@pytest.mark.parametrize("shard", sampled(range(SHARDS), 2))
def test_network_means_the_same(shard: int) -> None:
    seed = int(os.environ.get("XLA_FP8_SEED", random.getrandbits(32) if NIGHTLY else shard))
    try:
        hypothesis.seed(seed)(settings(max_examples=EXAMPLES)(given(layers=networks())(check)))()
    except Exception as error:
        error.add_note(f"seed {seed}: XLA_FP8_SEED={seed} runs the same examples again")
        raise


def check(layers: Sequence[Layer]) -> None:
    wide = layers[0].program.wide
    builder = NetworkBuilder(layers, wide, None)
    jax.eval_shape(builder.network)
    operands = builder.made
    ours = run(xla_fp8.jit, layers, wide, operands)
    plain = run(jax.jit, layers, wide, operands)
    if failure(layers, ours, plain, operands) is None:
        return
    # Layer by layer: quantized tensors that came out a step apart go into the next layers alike.
    plain = run(jax.jit, layers, wide, operands, ours[0])
    reason = failure(layers, ours, plain, operands)
    assert reason is None, reason


def run(
    jit: Any, layers: Sequence[Layer], wide: str, operands: Arrays, quantized: Arrays | None = None
) -> tuple[Arrays, Arrays]:
    """The quantized tensors and the other results of a network."""
    function = jit(lambda *arguments: NetworkBuilder(layers, wide, *arguments).network(), compiler_options=QUICKLY)
    results: tuple[Arrays, Arrays] = jax.tree.map(np.asarray, function(operands, quantized))
    return results


def failure(
    layers: Sequence[Layer], ours: tuple[Arrays, Arrays], plain: tuple[Arrays, Arrays], operands: Arrays
) -> str | None:
    """What differs by more than it may."""
    wide = layers[0].program.wide
    exact: Arrays | None = None
    for index, (result, original) in enumerate(zip(itertools.chain(*ours), itertools.chain(*plain), strict=True)):
        difference = compare(original, result)
        if TOLERANCE[wide].accepts(difference, original.dtype):
            continue
        if wide != "f32":  # rounding errors may be most of a result: then the nearer one to f32 is right
            exact = exact or [*itertools.chain(*run(jax.jit, layers, "f32", operands, ours[0]))]
            errors = [np.abs(numbers(array) - numbers(exact[index])) for array in (original, result)]
            if np.mean(errors[1]) <= np.mean(errors[0]):
                continue
        return f"result {index}: {difference}"
    return None


def numbers(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """In f64; what a bare cast to FP8 made NaN or infinity of as the step beyond the largest value that it is."""
    wide = array.astype(np.float64)
    if array.dtype not in STEPS_BEYOND:
        return wide
    return np.where(np.isfinite(wide), wide, np.copysign(STEPS_BEYOND[array.dtype], wide))


STEPS_BEYOND = {np.dtype(E4M3): 480.0, np.dtype(E5M2): 65536.0}
