"""The arithmetic of a program, node by node, on lists of tiles.

Exponentials and reciprocals are the device's approximate ones (2 ulp in f32); XLA spends several instructions around
each for numbers that FP8 cannot tell apart. A sum with a product is one instruction, as XLA makes it elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8.backends.fused_cast.problem import Constant, Node
from xla_fp8.backends.triton.instructions import inline_ptx

Tiles = list[Any]
"""A value of a program: for each tile [R,B], or [1,B] where its rows are alike; where all tiles are alike one for all,
[R,1] or a number."""


class Groups(Tiles):
    """A number for each group that columns of a tile belong to, the first group at [0,0]: [G,1] for each tile."""


class Product(Tiles):
    """Products, and what they are of: a sum with them can be made of that."""

    factors: tuple[Tiles, Tiles]


Functions = Mapping[str, Callable[..., jax.Array]]


def operands_of(node: Node, values: Sequence[Tiles]) -> list[Tiles]:
    """What a node reads, of the values so far."""
    return [[jnp.float32(o.value)] if isinstance(o, Constant) else values[o] for o in node.operands]


def computed(node: Node, operands: Sequence[Tiles], interpret: bool) -> Tiles:
    """What a node computes, exactly where it is interpreted."""
    # Inline PTX is of blocks. What is a single number is computed exactly.
    is_number = all(tiles[0].ndim == 0 for tiles in operands)
    functions = {**_EXACT, **({} if interpret or is_number else _ON_DEVICE)}
    if node.op == "reduce_sum":  # tiles first: what threads hold is then exchanged once
        return [jnp.sum(functools.reduce(jnp.add, operands[0]), axis=1, keepdims=True)]
    if node.op in _REDUCED:
        within, join = _REDUCED[node.op]
        return [functools.reduce(join, (within(tile, axis=1, keepdims=True) for tile in operands[0]))]
    if node.op == "div" and _are_few(operands[1]):  # as graphs divide: by a reciprocal that is made once
        return _each(functions["mul"], [operands[0], [jnp.float32(1) / tile for tile in operands[1]]])
    if node.op in ("mul", "square"):
        product = Product(_each(functions[node.op], operands))
        product.factors = operands[0], operands[-1]
        return product
    if node.op in ("add", "add_any", "sub") and not interpret:
        contracted = _contracted(node.op, operands)
        if contracted is not None:
            return contracted
    if node.op == "integer_pow":
        return _each(functools.partial(lax.integer_pow, y=node.exponent), operands)
    return _each(functions[node.op], operands)


def _contracted(op: str, operands: Sequence[Tiles]) -> Tiles | None:
    """A sum with a product, or a difference, as one instruction; XLA lets Triton contract nothing.

    Of whole tiles alone: in numbers for rows and groups it would be few instructions, and a variance that is the
    difference of two products can be less than zero if only one is rounded.
    """
    left, right = operands
    if isinstance(left, Product) and not _are_few(left):
        return _each(functools.partial(_fma, negative=3 if op == "sub" else 0), [*left.factors, right])
    if isinstance(right, Product) and not _are_few(right):
        return _each(functools.partial(_fma, negative=1 if op == "sub" else 0), [*right.factors, left])
    return None


def _fma(*operands: jax.Array, negative: int = 0) -> jax.Array:
    """a * b + c, with the opposite of operand `negative`, 1 or 3: Triton would make 0 - x of it first."""
    shape = jnp.broadcast_shapes(*(operand.shape for operand in operands))
    text = "fma.rn.f32 $0, $1, $2, $3;"
    if negative:
        opposite = text.replace(f"${negative}", "opposite")
        text = f"{{ .reg .f32 opposite; neg.f32 opposite, ${negative}; {opposite} }}"
    return inline_ptx(text, *(jnp.broadcast_to(operand, shape) for operand in operands), constraints="=f,f,f,f")


def _each(function: Callable[..., jax.Array], operands: Sequence[Tiles]) -> Tiles:
    count = max(map(len, operands))
    spread = [tiles * count if len(tiles) == 1 else tiles for tiles in operands]
    return [function(*tiles) for tiles in zip(*spread, strict=True)]


def _are_few(tiles: Tiles) -> bool:
    """Whether a value is of fewer numbers than a program has elements."""
    return tiles[0].ndim < 2 or 1 in tiles[0].shape


def _with_nan(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A minimum or maximum that keeps NaN, which Triton's drop."""

    def kept(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(x != x, x, jnp.where(y != y, y, function(x, y)))

    return kept


_minimum, _maximum = _with_nan(jnp.minimum), _with_nan(jnp.maximum)


def _in_one_instruction(text: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The same on the device."""

    def kept(x: jax.Array, y: jax.Array) -> jax.Array:
        shape = jnp.broadcast_shapes(x.shape, y.shape)
        blocks = jnp.broadcast_to(x, shape), jnp.broadcast_to(y, shape)
        return inline_ptx(f"{text} $0, $1, $2;", *blocks, constraints="=f,f,f")

    return kept


_minimum_of_blocks, _maximum_of_blocks = _in_one_instruction("min.NaN.f32"), _in_one_instruction("max.NaN.f32")


def _of_row_with_nan(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same of rows, of which Triton drops NaN too."""

    def kept(tile: jax.Array, **options: Any) -> jax.Array:
        has_nan = jnp.max(jnp.where(tile != tile, jnp.float32(1), jnp.float32(0)), **options) > 0
        return jnp.where(has_nan, jnp.float32(jnp.nan), function(tile, **options))

    return kept


def _select(which: jax.Array, no: jax.Array, yes: jax.Array) -> jax.Array:
    return jnp.where(which, yes, no)


_EXACT: Functions = {
    "abs": jnp.abs,
    "add": jnp.add,
    "add_any": jnp.add,
    "clamp": lambda least, x, most: _minimum(_maximum(x, least), most),
    "copy": lambda x: x,
    "div": jnp.divide,
    "eq": jnp.equal,
    "erf": lax.erf,
    "erfc": lambda x: 1 - lax.erf(x),
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "ge": jnp.greater_equal,
    "gt": jnp.greater,
    "le": jnp.less_equal,
    "logistic": jax.nn.sigmoid,
    "lt": jnp.less,
    "max": _maximum,
    "min": _minimum,
    "mul": jnp.multiply,
    "ne": jnp.not_equal,
    "neg": jnp.negative,
    "one_minus_square": lambda x: 1 - x * x,
    "rsqrt": lax.rsqrt,
    "select_n": _select,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "stop_gradient": lambda x: x,
    "sub": jnp.subtract,
    "tanh": jnp.tanh,
}

_REDUCED: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "reduce_max": (_of_row_with_nan(jnp.max), _maximum),
    "reduce_min": (_of_row_with_nan(jnp.min), _minimum),
}


def _instruction(text: str) -> Callable[[jax.Array], jax.Array]:
    """A PTX instruction of one f32 operand."""

    return lambda x: inline_ptx(f"{text} $0, $1;", x, constraints="=r,r")


def _erfc(x: jax.Array) -> jax.Array:
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: 1.5e-7 off at most."""
    t = _reciprocal(1 + np.float32(0.3275911) * jnp.abs(x))
    polynomial = np.float32(1.061405429) * t
    for coefficient in (-1.453152027, 1.421413741, -0.284496736):
        polynomial = (polynomial + np.float32(coefficient)) * t
    polynomial += np.float32(0.254829592)
    positive = polynomial * t * _exp2(x * x * -_LOG2_E)
    return jnp.where(x < 0, 2 - positive, positive)


_exp2, _reciprocal = _instruction("ex2.approx.ftz.f32"), _instruction("rcp.approx.ftz.f32")
_LOG2_E = np.float32(1.4426950408889634)

_ON_DEVICE: Functions = {
    "div": lambda x, y: x * _reciprocal(y),
    "erf": lambda x: 1 - _erfc(x),
    "erfc": _erfc,
    "exp": lambda x: _exp2(x * _LOG2_E),
    "exp2": _exp2,
    "logistic": lambda x: _reciprocal(1 + _exp2(x * -_LOG2_E)),
    # Not the device's, which is 2^-11 off: 1 + tanh, as in gelu, is less than that where x is below -4.
    "tanh": lambda x: _fma(jnp.float32(-2), _reciprocal(1 + _exp2(x * (2 * _LOG2_E))), jnp.float32(1)),
    "one_minus_square": lambda x: _fma(x, x, jnp.float32(1), negative=1),
    "max": _maximum_of_blocks,
    "min": _minimum_of_blocks,
    "clamp": lambda least, x, most: _minimum_of_blocks(_maximum_of_blocks(x, least), most),
}
