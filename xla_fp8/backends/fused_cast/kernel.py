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

from xla_fp8.backends.fused_cast import statistics
from xla_fp8.backends.fused_cast.arithmetic import Groups, Tiles, computed, operands_of
from xla_fp8.backends.fused_cast.loads import Place, loaded
from xla_fp8.backends.fused_cast.problem import FusedCast, Sums, Tiling, tiling_of
from xla_fp8.backends.fused_cast.results import store
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
    results = launch(
        functools.partial(_kernel, problem, tiling, interpret),
        operands,
        [((problem.rows, problem.columns), result.dtype) for result in problem.results],
        name=NAME,
        programs=problem.rows // tiling.rows * _programs_across(problem, tiling),
        warps=tiling.warps,
        interpret=interpret,
    )
    return list(results)


def _programs_across(problem: FusedCast, tiling: Tiling) -> int:
    return problem.columns // ((tiling.own or tiling.columns) * tiling.tiles)


def _kernel(problem: FusedCast, tiling: Tiling, interpret: bool, *refs: Any) -> None:
    program, across = pl.program_id(0), _programs_across(problem, tiling)
    row = lax.div(program, across) * tiling.rows
    first = lax.rem(program, across) * (tiling.own or tiling.columns) * tiling.tiles
    columns = tuple(first + i * tiling.columns for i in range(tiling.tiles))
    place = Place((row,), columns, tiling.rows, tiling.columns, interpret, tiling.own)
    rest = iter(refs)
    sums = _sums(problem, rest, place)
    values: list[Tiles] = [
        sums[operand] if isinstance(operand, Sums) else loaded(operand, rest, place) for operand in problem.operands
    ]
    for node in problem.nodes:
        operands = operands_of(node, values)
        if any(isinstance(tiles, Groups) for tiles in operands):
            assert problem.statistics is not None
            if all(isinstance(tiles, Groups) or tiles[0].ndim == 0 for tiles in operands):
                values.append(Groups(computed(node, operands, interpret)))
                continue
            operands = [_by_column(tiles, problem.statistics.width, place) for tiles in operands]
        values.append(computed(node, operands, interpret))
    for result, ref in zip(problem.results, rest, strict=True):
        store(result, values[result.value], ref, place)


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
