"""Masks of loads and stores, of which some are known when a kernel is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

Mask = Any
"""A comparison that is made when the kernel runs; or True or False where it is known when the kernel is traced."""


def both(a: Mask, b: Mask) -> Mask:
    if a is False or b is False:
        return False
    if a is True:
        return b
    return a if b is True else a & b


def load(ref: Any, at: jax.Array, mask: Mask) -> jax.Array:
    """What is at some offsets; zeros where the mask, which may be True and not False, is not true."""
    if mask is True:
        return triton.load(ref.at[at])
    return triton.load(ref.at[at], mask=jnp.broadcast_to(mask, at.shape), other=0)
