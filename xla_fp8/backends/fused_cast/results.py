"""How tensors and numbers of rows are stored: all of a block's, at once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.fused_cast.arithmetic import Tiles
from xla_fp8.backends.fused_cast.loads import Place


def store_tensor(tiles: Tiles, ref: Any, place: Place, first: int) -> None:
    """Writes a value to the places of its tiles, `first` columns further on, in the reference's type."""
    for (row, column), tile in zip(place.tiles, place.whole(tiles), strict=True):
        at = ref.at[pl.ds(row, place.height), pl.ds(first + column, place.width)]
        triton.store(at, _converted(tile, ref.dtype, place.interpret), mask=place.mask(tile.shape))


def store_rows(tiles: Tiles, ref: Any, place: Place) -> None:
    """Writes a value with a number for each row. Of programs beside each other the first one does."""
    of_rows = tiles * len(place.rows) if len(tiles) == 1 else tiles
    for row, tile in zip(place.rows, of_rows, strict=True):
        numbers = jnp.broadcast_to(tile, (place.height, 1)).reshape(place.height)
        is_first = jnp.broadcast_to(place.columns[0] == 0, (place.height,))
        triton.store(ref.at[pl.ds(row, place.height)], numbers, mask=is_first)


def _converted(x: jax.Array, dtype: np.dtype[Any], interpret: bool) -> jax.Array:
    """To FP8 saturating: as Triton's conversion does, with one instruction for two, which keeps NaN."""
    if interpret and dtype.itemsize == 1:
        largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)
