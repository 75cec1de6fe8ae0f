"""What a quantization custom call computes, in plain JAX: each node of its string is the HLO operation of that name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8.graph import FP8_MAX
from xla_fp8.hlo import Shape, literal
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.quantize_call import RESULTS, Node, QuantizeCall


def run(call: QuantizeCall, operands: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """The results of `call`. Can be traced by jit.

    Args:
        operands: x, then the scalars.
    """
    x, *given = operands
    values = _values(call, given, x=x)
    return tuple(_result(node, values[node.operands[0]]) for node in call.results)


def scalars(call: QuantizeCall, amax: jax.Array | None, given: Sequence[jax.Array] = ()) -> dict[int, jax.Array]:
    """The scalar nodes of a call by their uids, as far as they follow from the amax of x, f32, and scalar operands."""
    return _values(call, given, amax=amax)


def _values(
    call: QuantizeCall, given: Sequence[jax.Array], x: jax.Array | None = None, amax: jax.Array | None = None
) -> dict[int, jax.Array]:
    """Of the nodes but results, by uid, as far as they follow from scalar operands and from x or its amax."""
    values: dict[int, jax.Array] = dict(zip((node.uid for node in call.scalars), given, strict=False))
    for node in call.nodes:
        if node.op == "x" and x is not None:
            values[node.uid] = x
        elif node.op == "amax" and amax is not None:
            values[node.uid] = amax.astype(numpy_dtype(node.type))
        elif node.op == "constant":
            values[node.uid] = _constant(node)
        elif node.operands and node.op not in RESULTS and all(uid in values for uid in node.operands):
            inputs = [values[uid] for uid in node.operands]
            if x is not None and call.is_tensor(node.uid):
                inputs = [jnp.broadcast_to(value, x.shape) for value in inputs]
            values[node.uid] = _compute(node, inputs)
    return values


def _constant(node: Node) -> jax.Array:
    return jnp.asarray(literal.parse(node.literal, Shape(node.type)))


def _result(node: Node, value: jax.Array) -> jax.Array:
    if node.op == "result":
        return value
    largest = jnp.asarray(FP8_MAX[node.type], value.dtype)
    row = lax.clamp(-largest, value, largest).astype(numpy_dtype(node.type))
    return jnp.swapaxes(row, -1, -2) if node.op == "store_transposed" else row


def _compute(node: Node, inputs: Sequence[jax.Array]) -> jax.Array:
    if node.op == "convert":
        return lax.convert_element_type(inputs[0], numpy_dtype(node.type))
    if node.op == "bitcast_convert":
        return lax.bitcast_convert_type(inputs[0], numpy_dtype(node.type))
    if node.op in _REDUCTIONS:
        start, computation = _REDUCTIONS[node.op]
        value = lax.abs(inputs[0]) if node.op == "amax" else inputs[0]
        reduced: jax.Array = lax.reduce(value, np.asarray(start, value.dtype), computation, tuple(range(value.ndim)))
        return reduced
    return _OPS[node.op](*inputs)


_REDUCTIONS: Mapping[str, tuple[float, Callable[..., jax.Array]]] = MappingProxyType(
    {"amax": (-np.inf, lax.max), "reduce_max": (-np.inf, lax.max), "reduce_min": (np.inf, lax.min)}
)

_OPS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {
        "negate": lax.neg,
        "abs": lax.abs,
        "floor": lax.floor,
        "ceil": lax.ceil,
        "is_finite": lax.is_finite,
        "not": lax.bitwise_not,
        "add": lax.add,
        "subtract": lax.sub,
        "multiply": lax.mul,
        "divide": lax.div,
        "maximum": lax.max,
        "minimum": lax.min,
        "and": lax.bitwise_and,
        "or": lax.bitwise_or,
        "xor": lax.bitwise_xor,
        "shift_left": lax.shift_left,
        "shift_right_logical": lax.shift_right_logical,
        "eq": lax.eq,
        "ne": lax.ne,
        "lt": lax.lt,
        "le": lax.le,
        "gt": lax.gt,
        "ge": lax.ge,
        "select": lax.select,
        "clamp": lax.clamp,
    }
)
