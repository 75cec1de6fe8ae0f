"""What the programs of benchmarks/hopper_jit.py lose on a tensor core alone, by a model of it: for any machine.

    PYTHONPATH=. python benchmarks/tensor_core_model.py

Every convolution of FP8 operands is summed as Hopper's tensor core does (32 products and the sum so far, aligned to the
largest and cut off 13 bits behind it); everything else is plain JAX. Prints, for each result, the share of equal
elements and the norm of the error relative to that of the result: what is larger on a GPU comes from somewhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hopper_jit
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STEP = 32
BITS = 13
PROGRAMS = ("scaled residual, bias, silu, copy", "loss and gradients")
plain_conv = hopper_jit.conv


def tensor_core_conv(x: jax.Array, w: jax.Array, wide: Any = jnp.float32, **options: Any) -> jax.Array:
    """`hopper_jit.conv`, of FP8 operands as a tensor core; NHWC by OHWI, stride 1, padding SAME, an odd filter."""
    if x.dtype.itemsize != 1 or w.dtype.itemsize != 1:
        return plain_conv(x, w, wide, **options)
    assert not options
    features, height, width, _ = w.shape
    padded = jnp.pad(x.astype(jnp.float32), ((0, 0), (height // 2,) * 2, (width // 2,) * 2, (0, 0)))
    _, rows, columns, _ = x.shape
    windows = jnp.concatenate(
        [padded[:, r : r + rows, c : c + columns] for r in range(height) for c in range(width)], axis=-1
    )

    def one_feature(filter_: jax.Array) -> jax.Array:
        products = windows * filter_
        total = jnp.zeros(products.shape[:-1])
        for start in range(0, products.shape[-1], STEP):
            addends = jnp.concatenate([total[..., None], products[..., start : start + STEP]], axis=-1)
            largest = jnp.max(jnp.abs(addends), axis=-1, keepdims=True)
            unit = jnp.exp2(jnp.floor(jnp.log2(jnp.where(largest == 0, 1, largest))) - BITS)
            total = jnp.sum(jnp.trunc(addends / unit) * unit, axis=-1)
        return total

    return jnp.moveaxis(lax.map(one_feature, w.astype(jnp.float32).reshape(features, -1)), 0, -1)


def results(function: Callable[..., Any], arguments: Any, conv: Callable[..., jax.Array]) -> list[np.ndarray]:
    """Of `function` with this convolution."""
    hopper_jit.conv = conv
    try:
        # A new function each time: JAX would find what it traced with the other convolution.
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(lambda *values: function(*values))(*arguments))]
    finally:
        hopper_jit.conv = plain_conv


def main() -> None:
    programs = hopper_jit.programs()
    for name in PROGRAMS:
        function, arguments = programs[name]
        pairs = zip(*(results(function, arguments, conv) for conv in (plain_conv, tensor_core_conv)), strict=True)
        for wanted, output in pairs:
            found = hopper_jit.near(wanted, output, 0.0)
            print(f"{name:36} {found['type']:16} equal {found['equal']:.4f} norm {found['norm']:.1e}", flush=True)


if __name__ == "__main__":
    main()
