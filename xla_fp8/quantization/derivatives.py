"""What differentiation does at the border of FP8: it is refused, or passed straight through.

    refuse(x, what)           x; whoever differentiates gets DifferentiationError
    straight_through(v, x)    v; differentiates like x
    link(x)                   zeros; differentiates like x

A residual that is kept in FP8 has no tangent of use, so it is kept together with a `link` to the tensor that it was
made of: `straight_through(dequantized residual, link)` then has the derivative of a straight-through cast. The zeros
are a constant that nothing reads, so a compiled program does not hold them.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from xla_fp8.quantization.errors import DifferentiationError


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def refuse(x: jax.Array, what: str) -> jax.Array:
    """x, of any type. Differentiating it raises DifferentiationError, which says that `what` has no derivative."""
    return x


@refuse.defjvp
def _refuse_jvp(what: str, primals: Any, tangents: Any) -> NoReturn:
    raise DifferentiationError(what)


@jax.custom_jvp
def straight_through(value: jax.Array, x: jax.Array) -> jax.Array:
    """`value`, with the derivative of x (of the same shape)."""
    return value


@straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    value, x = primals
    return straight_through(value, x), tangents[1].astype(value.dtype)


@jax.custom_jvp
def link(x: jax.Array) -> jax.Array:
    """Zeros of x's shape and type, with the derivative of x."""
    return jnp.zeros_like(x)


@link.defjvp
def _link_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return link(*primals), tangents[0]
