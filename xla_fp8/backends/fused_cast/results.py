"""How the results of a program are stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.fused_cast.arithmetic import Tiles
from xla_fp8.backends.fused_cast.loads import Place
from xla_fp8.backends.fused_cast.problem import Result


def store(result: Result, tiles: Tiles, ref: Any, place: Place) -> None:
    """Writes the tiles of a value."""
    shape = (place.height, place.width)
    tiles = tiles * len(place.tiles) if len(tiles) == 1 else tiles
    for (row, column), tile in zip(place.tiles, tiles, strict=True):
        at = ref.at[pl.ds(row, place.height), pl.ds(column, place.width)]
        whole = jnp.broadcast_to(tile, shape)
        triton.store(at, _converted(whole, result.dtype, place.interpret), mask=place.mask(shape))


def _converted(x: jax.Array, dtype: np.dtype[Any], interpret: bool) -> jax.Array:
    """To FP8 saturating: as Triton's conversion does, with one instruction for two, which keeps NaN."""
    if interpret and dtype.itemsize == 1:
        largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)
