"""What differentiation does at the border of FP8: it is refused, or passed straight through.

    refuse(x, what)           x; whoever differentiates gets DifferentiationError
    straight_through(v, x)    v; differentiates like x
    link(x)                   zeros; differentiates like x

A residual that is kept in FP8 has no tangent of use, so it is kept together with a `link` to the tensor that it was
made of: `straight_through(dequantized residual, link)` then has the derivative of a straight-through cast. Nothing
reads the zeros, so a compiled program does not hold them.

The last two are primitives and not jax.custom_jvp, because the partial evaluation of jax.lax.scan forgets custom rules:
a second derivative through a loop would be zero, without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from xla_fp8.quantization.errors import DifferentiationError


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def refuse(x: jax.Array, what: str) -> jax.Array:
    """x, of any type. Differentiating it raises DifferentiationError, which says that `what` has no derivative."""
    return x


@refuse.defjvp
def _refuse_jvp(what: str, primals: Any, tangents: Any) -> NoReturn:
    raise DifferentiationError(what)


straight_through_p = core.Primitive("xla_fp8_straight_through")
link_p = core.Primitive("xla_fp8_link")


def straight_through(value: jax.Array, x: jax.Array) -> jax.Array:
    """`value`, with the derivative of x (of the same shape)."""
    result: jax.Array = straight_through_p.bind(value, x)  # type: ignore[no-untyped-call]
    return result


def link(x: jax.Array) -> jax.Array:
    """Zeros of x's shape and type, with the derivative of x."""
    result: jax.Array = link_p.bind(x)  # type: ignore[no-untyped-call]
    return result


def _straight_through_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    value, x = primals
    _, tangent = tangents
    result = straight_through(value, x)
    if type(tangent) is ad.Zero:
        return result, ad.Zero(jax.typeof(result).to_tangent_aval())
    return result, tangent.astype(result.dtype)


def _straight_through_batch(arguments: Sequence[Any], dims: Sequence[Any]) -> tuple[Any, int]:
    size = next(a.shape[d] for a, d in zip(arguments, dims, strict=True) if d is not None)
    fronted = [
        jnp.broadcast_to(a, (size, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)
        for a, d in zip(arguments, dims, strict=True)
    ]
    return straight_through(*fronted), 0


def _link_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return link(*primals), tangents[0]


for _primitive, _value in ((straight_through_p, lambda value, x: value), (link_p, jnp.zeros_like)):
    _primitive.def_impl(_value)  # type: ignore[no-untyped-call]
    _primitive.def_abstract_eval(lambda aval, *_: aval)  # type: ignore[no-untyped-call]
    mlir.register_lowering(_primitive, mlir.lower_fun(_value, multiple_results=False))
ad.primitive_jvps[straight_through_p] = _straight_through_jvp
ad.primitive_jvps[link_p] = _link_jvp
batching.primitive_batchers[straight_through_p] = _straight_through_batch
batching.primitive_batchers[link_p] = lambda arguments, dims: (link(*arguments), dims[0])
