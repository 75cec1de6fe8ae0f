"""The kernel of a fused cast, in Triton through Pallas.

A program loads its tiles, computes node by node in registers, and stores the results.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xla_fp8.backends.fused_cast import parts, statistics
from xla_fp8.backends.fused_cast.arithmetic import Groups, Tiles, computed, operands_of
from xla_fp8.backends.fused_cast.loads import Place, loaded
from xla_fp8.backends.fused_cast.problem import FusedCast, Result, Sums, Tiling, tiling_of
from xla_fp8.backends.fused_cast.results import store_rows, store_tensor
from xla_fp8.backends.protocol import No
from xla_fp8.backends.triton.launch import launch

NAME = "fused_cast"


def run(problem: FusedCast, operands: Sequence[jax.Array], interpret: bool = False) -> list[jax.Array]:
    """Computes a fused cast.

    Args:
        operands: matrices as [rows, width], those of a `Joined` one after the other, and tables as [size]; those that
            statistics are of first.

    Returns:
        An array for each of the problem's results.

    Raises:
        ValueError: `supports` denies the problem.
    """
    tiling = tiling_of(problem)
    if isinstance(tiling, No):
        raise ValueError(tiling.reason)
    if problem.statistics is not None and tiling.own is None:
        own = problem.statistics.array_count
        sums = statistics.run(problem.statistics, operands[:own], interpret)
        operands = [sums, *operands[own:]]
    written = launch(
        functools.partial(_kernel, problem, tiling, interpret),
        operands,
        [_written(problem, tiling, result) for result in problem.results],
        name=NAME,
        programs=_programs(problem, tiling),
        warps=tiling.warps,
        interpret=interpret,
    )
    return [
        parts.whole(result, array) if result.kind in parts.KINDS else array
        for result, array in zip(problem.results, written, strict=True)
    ]


def _written(problem: FusedCast, tiling: Tiling, result: Result) -> tuple[tuple[int, ...], Any]:
    """Shape and type of what the kernel writes of a result."""
    columns = len(result.values) * problem.columns
    if result.kind == "row":
        return (problem.rows,), jnp.float32
    if result.kind == "amax":
        return (_programs(problem, tiling),), jnp.uint32
    if result.kind == "column_sum":
        return (tiling.down, columns), jnp.float32
    return (problem.rows, columns), result.dtype


def _programs(problem: FusedCast, tiling: Tiling) -> int:
    return tiling.down * _programs_across(problem, tiling)


def _programs_across(problem: FusedCast, tiling: Tiling) -> int:
    return problem.columns // tiling.width


def _kernel(problem: FusedCast, tiling: Tiling, interpret: bool, *refs: Any) -> None:
    program, across = pl.program_id(0), _programs_across(problem, tiling)
    first, down = lax.rem(program, across) * tiling.width, lax.div(program, across)
    columns = tuple(first + i * tiling.columns for i in range(tiling.tiles))
    inputs, outputs = refs[: -len(problem.results)], refs[-len(problem.results) :]

    def walked(block: Any, carried: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Stores what is stored block by block, and joins what is of all rows."""
        rows = tuple(block * tiling.height + i * tiling.rows for i in range(tiling.below))
        place = Place(rows, columns, tiling.rows, tiling.columns, 32 * tiling.warps, interpret, tiling.own)
        values, joined = _values(problem, inputs, place), []
        for result, so_far, ref in zip(problem.results, carried, outputs, strict=True):
            stored = [values[value] for value in result.values]
            if problem.statistics is not None:
                stored = [_by_column(tiles, problem.statistics.width, place) for tiles in stored]
            if result.kind == "tensor":
                for number, tiles in enumerate(stored):
                    store_tensor(tiles, ref, place, number * problem.columns)
            elif result.kind == "row":
                store_rows(stored[0], ref, place)
            joined.append(parts.joined(result, so_far, stored, place) if so_far else so_far)
        return joined

    carried = [parts.start(result, tiling) for result in problem.results]
    blocks = problem.rows // tiling.height
    if blocks == tiling.down:
        carried = walked(down, carried)
    else:
        steps = lax.div(blocks - down + (tiling.down - 1), tiling.down)
        carried = lax.fori_loop(0, steps, lambda i, so_far: walked(down + i * tiling.down, so_far), carried)
    for result, so_far, ref in zip(problem.results, carried, outputs, strict=True):
        if result.kind in parts.KINDS:
            starts = [i * problem.columns + column for i in range(len(result.values)) for column in columns]
            parts.store(result, so_far, ref, starts, down)


def _values(problem: FusedCast, inputs: Sequence[Any], place: Place) -> list[Tiles]:
    """The values of a block, by position."""
    refs = iter(inputs)
    sums = _sums(problem, refs, place)
    values: list[Tiles] = [
        sums[operand] if isinstance(operand, Sums) else loaded(operand, refs, place) for operand in problem.operands
    ]
    for node in problem.nodes:
        operands = operands_of(node, values)
        if any(isinstance(tiles, Groups) for tiles in operands):
            assert problem.statistics is not None
            if all(isinstance(tiles, Groups) or tiles[0].ndim == 0 for tiles in operands):
                values.append(Groups(computed(node, operands, place.interpret)))
                continue
            operands = [_by_column(tiles, problem.statistics.width, place) for tiles in operands]
        values.append(computed(node, operands, place.interpret))
    return values


def _sums(problem: FusedCast, refs: Iterator[Any], place: Place) -> dict[Sums, Tiles]:
    """Those of the statistics; `refs` goes on behind what they are made of."""
    if problem.statistics is None:
        return {}
    if place.own is not None:
        made = statistics.within(problem.statistics, refs, place)
        return {Sums(problem.statistics, number): tiles for number, tiles in enumerate(made)}
    ref = next(refs)
    return {o: statistics.summed(o, ref, place) for o in problem.operands if isinstance(o, Sums)}


def _by_column(tiles: Tiles, width: int, place: Place) -> Tiles:
    """Numbers of groups as numbers of columns; other tiles as they are."""
    if not isinstance(tiles, Groups):
        return tiles
    found = []
    for column, tile in zip(place.columns, tiles, strict=True):
        shape = (place.width, tile.shape[0])
        group = lax.div(column + lax.broadcasted_iota(jnp.int32, shape, 0), width) - lax.div(column, width)
        is_own = group == lax.broadcasted_iota(jnp.int32, shape, 1)
        found.append(jnp.sum(jnp.where(is_own, tile.reshape(1, -1), 0), axis=1)[None, :])
    return found
