"""A rewritten module against the JAX function that it was lowered from: the same numbers on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8.backends.compare import TOLERANCES, compare
from xla_fp8.backends.executable import Executable
from xla_fp8.hlo import HloModule


def assert_same_numbers(
    module: HloModule,
    function: Callable[..., Any],
    arguments: Sequence[jax.ShapeDtypeStruct],
    *,
    seed: int = 0,
    working: str = "f32",
) -> None:
    """Runs both on the CPU, on random arrays of the shapes `arguments`; compares with the tolerance of `working`."""
    rng = np.random.default_rng(seed)
    # Scales are positive and not small, everything else is normal.
    values = [rng.normal(size=a.shape) if a.shape else 0.3 + np.abs(rng.normal()) for a in arguments]
    inputs = [np.asarray(jnp.asarray(value, a.dtype)) for value, a in zip(values, arguments, strict=True)]
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*inputs))]
    for found, want in zip(Executable(module, "cpu")(*inputs), wanted, strict=True):
        assert (found.dtype, found.shape) == (want.dtype, want.shape)
        difference = compare(want, found)
        assert TOLERANCES[working].accepts(difference, want.dtype), difference
