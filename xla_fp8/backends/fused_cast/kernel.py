"""The kernel of a fused cast, in Triton through Pallas.

A program loads its tiles, computes node by node in registers, and stores the results.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xla_fp8.backends.fused_cast import parts, statistics
from xla_fp8.backends.fused_cast.arithmetic import Groups, Tiles, computed, operands_of
from xla_fp8.backends.fused_cast.loads import Place, stored, table, wide
from xla_fp8.backends.fused_cast.problem import (
    REDUCTIONS,
    FusedCast,
    Joined,
    Matrix,
    Result,
    Sums,
    Table,
    Tiling,
    array_count,
    tiling_of,
)
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
    arrays = iter(refs[: -len(problem.results)])
    outputs = refs[-len(problem.results) :]
    of_statistics = _of_statistics(problem, arrays, tiling)
    of_operands = [tuple(itertools.islice(arrays, array_count(operand))) for operand in problem.operands]

    def place_of(block: Any) -> Place:
        rows = tuple(block * tiling.height + i * tiling.rows for i in range(tiling.below))
        return Place(rows, columns, tiling.rows, tiling.columns, 32 * tiling.warps, interpret, tiling.own)

    def fetched(block: Any) -> list[Tiles]:
        """What a block loads of tensors, as it is in memory."""
        place = place_of(block)
        pairs = zip(problem.operands, of_operands, strict=True)
        return [stored(o, own, place) if isinstance(o, Matrix | Joined) else [] for o, own in pairs]

    def walked(block: Any, tensors: list[Tiles], carried: list[list[jax.Array]]) -> list[list[jax.Array]]:
        """Stores what is stored block by block, and joins what is of all rows."""
        place = place_of(block)
        values, joined = _values(problem, of_operands, tensors, known, place), []
        for result, so_far, ref in zip(problem.results, carried, outputs, strict=True):
            results = [values[value] for value in result.values]
            if result.kind == "tensor":
                for number, tiles in enumerate(results):
                    store_tensor(tiles, ref, place, number * problem.columns)
            elif result.kind == "row":
                store_rows(results[0], ref, place)
            joined.append(parts.joined(result, so_far, results, place) if so_far else so_far)
        return joined

    blocks = problem.rows // tiling.height
    steps = (
        blocks // tiling.down if blocks % tiling.down == 0 else lax.div(blocks - down + tiling.down - 1, tiling.down)
    )

    def block_of(i: Any) -> Any:
        return down * steps + i if problem.statistics is not None else down + i * tiling.down

    def step(i: Any, carried: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return walked(block_of(i), fetched(block_of(i)), carried)

    def ahead(i: Any, state: tuple[list[Tiles], list[list[jax.Array]]]) -> Any:
        """As `step`, of tensors that are loaded, while the next block's are on their way."""
        following = fetched(block_of(i + 1))
        return following, walked(block_of(i), *state)

    carried = [parts.start(result, tiling) for result in problem.results]
    known: dict[int, Tiles] = {}
    if blocks != tiling.down and problem.reduces:  # of whole rows there is no room in registers for another block
        known = _known(problem, of_statistics, of_operands, place_of(block_of(0)))
        carried = lax.fori_loop(0, steps, step, carried)
    else:
        tensors = fetched(block_of(0))  # before what is known: all are on their way at once
        known = _known(problem, of_statistics, of_operands, place_of(block_of(0)))
        if blocks != tiling.down:
            tensors, carried = lax.fori_loop(0, steps - 1, ahead, (tensors, carried))
        carried = walked(block_of(steps - 1), tensors, carried)
    for result, so_far, ref in zip(problem.results, carried, outputs, strict=True):
        if result.kind in parts.KINDS:
            starts = [i * problem.columns + column for i in range(len(result.values)) for column in columns]
            parts.store(result, so_far, ref, starts, down)


def _values(
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


def _of_statistics(problem: FusedCast, arrays: Iterator[Any], tiling: Tiling) -> list[Any]:
    """The arrays that come first: what the statistics are made of, or what their kernel has made."""
    if problem.statistics is None:
        return []
    return list(itertools.islice(arrays, 1 if tiling.own is None else problem.statistics.array_count))


def _known(
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
