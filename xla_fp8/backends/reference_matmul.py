"""What an FP8 matmul custom call computes, in plain JAX: the reference, and the chain that XLA's GPU compiler matches.

The numerics are the reference backend's (`reference.py`): everything in f32 at precision HIGHEST, every step in the
order of `xla_fp8.matmul`, a store to FP8 saturates, NaN is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_fp8.backends.reference import amax, gelu_tanh, store
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.matmul import MatmulCall


def run(call: MatmulCall, operands: Sequence[jax.Array], fusible: bool = False) -> tuple[jax.Array, ...]:
    """The results of `call`, without the workspace. Can be traced by jit.

    Args:
        operands: as `call.roles` names them.
        fusible: write it as the chain of which XLA's GPU compiler makes this call itself, where it can. Then it
            is XLA's to compute, and no reference.
    """
    given = dict(zip(call.roles, operands, strict=True))
    type_ = _chain_type(call) if fusible else jnp.dtype(jnp.float32)
    lhs, rhs, *scales = (given[role].astype(type_) for role in ("lhs", "rhs", "lhs_scale", "rhs_scale"))
    if fusible:
        value = _product(call, lhs * scales[0], rhs * scales[1], lax.Precision.DEFAULT)
    else:
        # On a GPU, XLA would make a cuBLASLt call of a dot of converted FP8 operands.
        lhs, rhs = lax.optimization_barrier((lhs, rhs))  # type: ignore[no-untyped-call]
        value = _product(call, lhs, rhs, lax.Precision.HIGHEST) * scales[0] * scales[1]
    for addend in ("bias", "matrix"):
        if addend in given:
            value = value + given[addend].astype(type_)
    if call.activation == "relu":
        value = lax.max(value, jnp.zeros_like(value))
    elif call.activation == "gelu_tanh":
        value = jax.nn.gelu(value) if fusible else gelu_tanh(value)  # XLA matches jax.nn's spelling
    results = [value * given["result_scale"].astype(type_) if call.has_result_scale else value]
    if call.has_amax:
        # XLA matches the plain reduction.
        largest = lax.reduce(jnp.abs(value), jnp.zeros((), type_), lax.max, tuple(range(value.ndim)))
        results.append(largest if fusible else amax(value))
    return tuple(store(r, shape.element_type) for r, shape in zip(results, call.output_shapes, strict=True))


def _chain_type(call: MatmulCall) -> jnp.dtype[Any]:
    """What the chain for XLA computes in: its matcher takes a wide result's type from there, and the scales'.

    f32 where that would round a scale; XLA then stores f32, and converts behind the call.
    """
    return numpy_dtype(call.scale_type if call.output_shapes[0].element_type == call.scale_type else "f32")


def _product(call: MatmulCall, lhs: jax.Array, rhs: jax.Array, precision: lax.Precision) -> jax.Array:
    batch = tuple(range(call.batch_rank))
    if call.operand_precision == ("highest", "highest"):
        precision = lax.Precision.HIGHEST
    return lax.dot_general(
        lhs,
        rhs,
        (((call.lhs_contracting,), (call.rhs_contracting,)), (batch, batch)),
        precision=precision,
        preferred_element_type=lhs.dtype,
    )
