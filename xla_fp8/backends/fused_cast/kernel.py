"""The kernel of a fused cast, in Triton through Pallas.

A program loads its tiles, computes node by node in registers, and stores FP8. Exponentials and reciprocals are the
device's approximate ones (2 ulp in f32), and so is tanh (2^-11); XLA spends several instructions around each for
numbers that FP8 cannot tell apart. The conversion to FP8 saturates and keeps NaN by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.fused_cast.problem import (
    Constant,
    FusedCast,
    Matrix,
    Node,
    Operand,
    Sums,
    Table,
    Tiling,
    tiling_of,
)
from xla_fp8.backends.protocol import No

NAME = "fused_cast"

Tiles = list[Any]
"""A value of a program: [R,B] for each tile, or [1,B] where rows are alike; one [R,1] or number where tiles are."""


class Groups(Tiles):
    """A number for each group that columns of a tile belong to, the first group at [0,0]: [G,1] for each tile."""


Functions = Mapping[str, Callable[..., jax.Array]]


def run(problem: FusedCast, operands: Sequence[jax.Array], interpret: bool = False) -> jax.Array:
    """Computes a fused cast.

    Args:
        operands: matrices as [rows, width], those of a `Joined` one after the other, and tables as [size].

    Returns:
        [rows, columns], of the problem's type.

    Raises:
        ValueError: `supports` denies the problem.
    """
    tiling = tiling_of(problem)
    if isinstance(tiling, No):
        raise ValueError(tiling.reason)
    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    # Inside shard_map results vary over the mesh axes that the operands vary over; Pallas wants that said.
    varying = jax.typeof(operands[0]).manual_axis_type
    result: jax.Array = pl.pallas_call(
        functools.partial(_kernel, problem, tiling, interpret),
        out_shape=jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            (problem.rows, problem.columns), problem.dtype, manual_axis_type=varying
        ),
        grid=(problem.rows // tiling.rows * _programs_across(problem, tiling),),
        in_specs=[everywhere] * len(operands),
        out_specs=everywhere,
        compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=1),
        interpret=interpret,
        name=NAME,
    )(*operands)
    return result


def _programs_across(problem: FusedCast, tiling: Tiling) -> int:
    return problem.columns // (tiling.columns * tiling.tiles)


def _kernel(problem: FusedCast, tiling: Tiling, interpret: bool, *refs: Any) -> None:
    program, across = pl.program_id(0), _programs_across(problem, tiling)
    row = lax.div(program, across) * tiling.rows
    first = lax.rem(program, across) * tiling.columns
    columns = [first + i * tiling.columns for i in range(tiling.tiles)]
    rest = iter(refs)
    values = [_loaded(operand, rest, row, columns, tiling) for operand in problem.operands]
    functions = {**_EXACT, **({} if interpret else _APPROXIMATE)}
    widths = {operand.width for operand in problem.operands if isinstance(operand, Sums)}
    for node in problem.nodes:
        operands = [[jnp.float32(o.value)] if isinstance(o, Constant) else values[o] for o in node.operands]
        if any(isinstance(tiles, Groups) for tiles in operands):
            if all(isinstance(tiles, Groups) or tiles[0].ndim == 0 for tiles in operands):
                values.append(Groups(_computed(node, operands, functions)))
                continue
            [width] = widths
            operands = [_by_column(tiles, columns, width, tiling) for tiles in operands]
        values.append(_computed(node, operands, functions))
    for column, tile in zip(columns, values[problem.result], strict=True):
        place = refs[-1].at[pl.ds(row, tiling.rows), pl.ds(column, tiling.columns)]
        triton.store(place, _saturated(tile, problem.dtype, interpret))


# Loads and the cast


def _loaded(operand: Operand, refs: Iterator[Any], row: Any, columns: Sequence[Any], tiling: Tiling) -> Tiles:
    if isinstance(operand, Table):
        return _table(operand, next(refs), row, columns, tiling)
    if isinstance(operand, Sums):
        return _sums(operand, next(refs), row, columns, tiling)
    if isinstance(operand, Matrix):
        ref, first = next(refs), operand.first
        return [_tile(ref, row, first + column, tiling) for column in columns]
    parts = [(next(refs), part.width) for part in operand.parts]
    return [_tile_of(parts, row, column, tiling) for column in columns]


def _sums(operand: Sums, ref: Any, row: Any, columns: Sequence[Any], tiling: Tiling) -> Groups:
    groups, width = _groups_of_tile(operand.width, tiling.columns), 1 << (operand.width - 1).bit_length()
    place = lax.broadcasted_iota(jnp.int32, (groups, width), 1)
    image = lax.div(row, operand.period) * operand.groups
    found = Groups()
    for column in columns:
        group = lax.div(column, operand.width) + lax.broadcasted_iota(jnp.int32, (groups, width), 0)
        is_there = (group < operand.groups) & (place < operand.width)
        at = ref.at[jnp.where(is_there, (image + group) * operand.width + place, 0)]
        numbers = triton.load(at, mask=is_there, other=0.0)
        found.append(jnp.sum(numbers.astype(jnp.float32), axis=1, keepdims=True))
    return found


def _groups_of_tile(width: int, columns: int) -> int:
    """To how many groups columns of a tile belong at most, as a power of two."""
    if columns % width == 0:
        return columns // width
    most = 1 if width % columns == 0 else (columns + width - 2) // width + 1
    return 1 << (most - 1).bit_length()


def _by_column(tiles: Tiles, columns: Sequence[Any], width: int, tiling: Tiling) -> Tiles:
    """Numbers of groups as numbers of columns; other tiles as they are."""
    if not isinstance(tiles, Groups):
        return tiles
    found = []
    for column, tile in zip(columns, tiles, strict=True):
        shape = (tiling.columns, tile.shape[0])
        group = lax.div(column + lax.broadcasted_iota(jnp.int32, shape, 0), width) - lax.div(column, width)
        is_own = group == lax.broadcasted_iota(jnp.int32, shape, 1)
        found.append(jnp.sum(jnp.where(is_own, tile.reshape(1, -1), 0), axis=1)[None, :])
    return found


def _tile(ref: Any, row: Any, column: Any, tiling: Tiling) -> jax.Array:
    tile: jax.Array = triton.load(ref.at[pl.ds(row, tiling.rows), pl.ds(column, tiling.columns)])
    return tile.astype(jnp.float32)


def _tile_of(parts: Sequence[tuple[Any, int]], row: Any, column: Any, tiling: Tiling) -> jax.Array:
    """A tile of matrices beside each other; it lies within one of them."""
    (ref, width), *others = parts
    if not others:
        return _tile(ref, row, column, tiling)
    tile: jax.Array = lax.cond(
        column < width,
        lambda: _tile(ref, row, column, tiling),
        lambda: _tile_of(others, row, column - width, tiling),
    )
    return tile


def _table(operand: Table, ref: Any, row: Any, columns: Sequence[Any], tiling: Tiling) -> Tiles:
    if operand.period == 1:
        return [triton.load(ref.at[pl.ds(row, tiling.rows)]).astype(jnp.float32)[:, None]]
    start = lax.div(row, operand.period) * operand.pitch if operand.period else jnp.int32(0)
    if not operand.columns:
        return [triton.load(ref.at[start]).astype(jnp.float32)]
    places = [ref.at[_places(operand, start, column, tiling.columns)] for column in columns]
    return [triton.load(place).astype(jnp.float32)[None, :] for place in places]


def _places(operand: Table, start: Any, column: Any, size: int) -> Any:
    """Where in a table the numbers of `size` columns from `column` are."""
    if operand.is_by_column:
        return pl.ds(start + column, size)
    at = column + lax.iota(jnp.int32, size)
    places = jnp.full((size,), start, jnp.int32)
    for stride, extent, step in operand.columns:
        places += lax.rem(lax.div(at, jnp.int32(stride)), jnp.int32(extent)) * jnp.int32(step)
    return places


def _saturated(x: jax.Array, dtype: np.dtype[Any], interpret: bool) -> jax.Array:
    """The cast of what exceeds the type's largest number, or not. Triton's saturates, with one instruction for two."""
    if interpret:
        largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


# Arithmetic


def _computed(node: Node, operands: Sequence[Tiles], functions: Functions) -> Tiles:
    if node.op in _REDUCED:
        within, join = _REDUCED[node.op]
        return [functools.reduce(join, (within(tile, axis=1, keepdims=True) for tile in operands[0]))]
    if node.op == "div" and _are_few(operands[1]):  # as graphs divide: by a reciprocal that is made once
        return _each(functions["mul"], [operands[0], [jnp.float32(1) / tile for tile in operands[1]]])
    if node.op == "integer_pow":
        return _each(functools.partial(lax.integer_pow, y=node.exponent), operands)
    return _each(functions[node.op], operands)


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
    "rsqrt": lax.rsqrt,
    "select_n": _select,
    "sqrt": jnp.sqrt,
    "square": jnp.square,
    "stop_gradient": lambda x: x,
    "sub": jnp.subtract,
    "tanh": jnp.tanh,
}

_REDUCED: dict[str, tuple[Callable[..., jax.Array], Callable[..., jax.Array]]] = {
    "reduce_max": (jnp.max, _maximum),
    "reduce_min": (jnp.min, _minimum),
    "reduce_sum": (jnp.sum, jnp.add),
}


def _instruction(text: str) -> Callable[[jax.Array], jax.Array]:
    """A PTX instruction of one f32 operand."""

    def function(x: jax.Array) -> jax.Array:
        (result,) = triton.elementwise_inline_asm(
            f"{text} $0, $1;",
            args=[x],
            constraints="=r,r",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],  # type: ignore[no-untyped-call]
        )
        return result

    return function


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

_APPROXIMATE: Functions = {
    "div": lambda x, y: x * _reciprocal(y),
    "erf": lambda x: 1 - _erfc(x),
    "erfc": _erfc,
    "exp": lambda x: _exp2(x * _LOG2_E),
    "exp2": _exp2,
    "logistic": lambda x: _reciprocal(1 + _exp2(x * -_LOG2_E)),
    "tanh": triton.approx_tanh,
}
