"""Arithmetic of which XLA's Triton makes more instructions than there need be, as inline PTX.

`a * b + c` would be two instructions, as XLA lets Triton contract nothing, and two bf16 would become f32 in three.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton


def inline_ptx(text: str, *blocks: jax.Array, constraints: str, pack: int = 1) -> jax.Array:
    """An f32 block made element by element of blocks of its shape.

    Args:
        text: the instructions. The results of `pack` elements come first, $0 and on, then the blocks' elements.
        constraints: of registers, as LLVM has them.
    """
    result = jax.ShapeDtypeStruct(blocks[0].shape, jnp.float32)  # type: ignore[no-untyped-call]
    (made,) = triton.elementwise_inline_asm(
        text, args=list(blocks), constraints=constraints, pack=pack, result_shape_dtypes=[result]
    )
    return made


def fma(a: jax.Array, b: jax.Array, c: jax.Array, *, interpret: bool) -> jax.Array:
    """a * b + c of f32 blocks of one shape, with one rounding; interpreted, there may be two."""
    if interpret:
        return a * b + c
    return inline_ptx("fma.rn.f32 $0, $1, $2, $3;", a, b, c, constraints="=f,f,f,f")


def to_f32(block: jax.Array, *, interpret: bool) -> jax.Array:
    """A block of bf16, f16 or f32 as f32."""
    if interpret or block.dtype != jnp.bfloat16:
        return block.astype(jnp.float32)
    # A number of bf16 is the upper half of the same number in f32.
    text = "{ .reg .b32 bits; shl.b32 bits, $2, 16; mov.b32 $0, bits; and.b32 bits, $2, 0xffff0000; mov.b32 $1, bits; }"
    return inline_ptx(text, block, constraints="=f,=f,r", pack=2)
