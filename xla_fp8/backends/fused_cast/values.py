"""The values of a kernel's program: those that are the same in all its blocks, and those of a block."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from xla_fp8.backends.fused_cast import statistics
from xla_fp8.backends.fused_cast.arithmetic import Groups, Tiles, computed, operands_of
from xla_fp8.backends.fused_cast.loads import Place, table, wide
from xla_fp8.backends.fused_cast.problem import REDUCTIONS, FusedCast, Sums, Table


def of_program(
    problem: FusedCast, of_statistics: Sequence[Any], of_operands: Sequence[Sequence[Any]], place: Place
) -> dict[int, Tiles]:
    """The values that are the same in all blocks of a program: sums, tables, and what is made of them alone.

    Where all of a row is in registers there is no room for numbers of its columns.
    """
    of_images = problem.statistics
    made: list[Tiles] = []
    if of_images is not None and place.own is not None:
        made = statistics.within(of_images, of_statistics, place)
    known: dict[int, Tiles] = {}
    for i, (operand, own) in enumerate(zip(problem.operands, of_operands, strict=True)):
        if isinstance(operand, Sums):
            known[i] = made[operand.number] if made else statistics.summed(operand, of_statistics[0], place)
        elif isinstance(operand, Table) and _is_alike(operand, problem):
            known[i] = table(operand, own, place)
    by_column = functools.partial(_by_column, width=of_images.width if of_images is not None else 1, place=place)
    values = [known.get(i, []) for i in range(len(problem.operands))]
    for i, node in enumerate(problem.nodes, start=len(values)):
        if node.op not in REDUCTIONS and all(o in known for o in node.operands if isinstance(o, int)):
            operands = operands_of(node, values)
            # There are few numbers of groups: they are such as long as what they meet is of groups too, or one number.
            are_groups = any(isinstance(tiles, Groups) for tiles in operands)
            if are_groups and not all(isinstance(tiles, Groups) or tiles[0].ndim == 0 for tiles in operands):
                operands, are_groups = [by_column(tiles) for tiles in operands], False
            found = computed(node, operands, place.interpret)
            known[i] = Groups(found) if are_groups else found
        values.append(known.get(i, []))
    return {i: by_column(tiles) for i, tiles in known.items()}


def _is_alike(operand: Table, problem: FusedCast) -> bool:
    """Whether all rows of a program read the same numbers, and these are kept."""
    if problem.reduces and operand.columns:
        return False
    return operand.period == 0 or (problem.statistics is not None and operand.period > 1)


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


def of_block(
    problem: FusedCast,
    of_operands: Sequence[Sequence[Any]],
    tensors: Sequence[Tiles],
    known: Mapping[int, Tiles],
    place: Place,
) -> list[Tiles]:
    """The values of a block, by position.

    Args:
        tensors: of each operand what `stored` has loaded.
        known: values that are the same in all blocks of a program.
    """
    values: list[Tiles] = []
    for i, (operand, own) in enumerate(zip(problem.operands, of_operands, strict=True)):
        if i in known:
            values.append(known[i])
        else:
            values.append(table(operand, own, place) if isinstance(operand, Table) else wide(tensors[i], place))
    for node in problem.nodes:
        found = known.get(len(values))
        values.append(computed(node, operands_of(node, values), place.interpret) if found is None else found)
    return values
