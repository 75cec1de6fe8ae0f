"""A sum and the products that a step adds to it, as one operation of inline PTX.

An operation for each product would be the same machine code. But for each load XLA's Triton walks over all operations
that its value reaches, several times: of a few thousand of them it took minutes.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from xla_fp8.backends.triton.instructions import inline_ptx


def add_products(total: jax.Array, products: Sequence[tuple[jax.Array, jax.Array]], *, interpret: bool) -> jax.Array:
    """total + a * b + ..., one after the other and with one rounding each; interpreted, there may be two.

    Args:
        total: f32, as all factors, and of their shape.
        products: one or more pairs (a, b).
    """
    if interpret:
        for a, b in products:
            total = total + a * b
        return total
    factors = [factor for product in products for factor in product]
    # The result must not share a register with the factors that are read after it is written first: "&".
    return inline_ptx(ptx(len(products)), total, *factors, constraints="=&f,f" + ",f" * len(factors))


def ptx(products: int) -> str:
    """The instructions. $0 is the result, $1 the total, and the factors follow."""
    starts = ["$1", *["$0"] * (products - 1)]
    return "\n".join(f"fma.rn.f32 $0, ${2 * i + 2}, ${2 * i + 3}, {start};" for i, start in enumerate(starts))
