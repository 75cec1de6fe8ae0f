"""The kernel of a fused cast, in Triton through Pallas.

A program loads its tiles, computes node by node in registers, and stores the results. Of several blocks of rows it
loads the next one while it computes one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from xla_fp8.backends.fused_cast import parts, statistics
from xla_fp8.backends.fused_cast.arithmetic import Tiles
from xla_fp8.backends.fused_cast.loads import Place, stored
from xla_fp8.backends.fused_cast.problem import FusedCast, Joined, Matrix, Result, array_count
from xla_fp8.backends.fused_cast.results import store_rows, store_tensor
from xla_fp8.backends.fused_cast.tiling import Tiling, tiling_of
from xla_fp8.backends.fused_cast.values import of_block, of_program
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
        values, joined = of_block(problem, of_operands, tensors, known, place), []
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
    is_even = blocks % tiling.down == 0
    steps = blocks // tiling.down if is_even else lax.div(blocks - down + tiling.down - 1, tiling.down)

    def block_of(i: Any) -> Any:
        return down * steps + i if problem.statistics is not None else down + i * tiling.down

    def step(i: Any, carried: list[list[jax.Array]]) -> list[list[jax.Array]]:
        return walked(block_of(i), fetched(block_of(i)), carried)

    def ahead(i: Any, state: tuple[list[Tiles], list[list[jax.Array]]]) -> Any:
        """As `step`, of tensors that are loaded, while the next block's are on their way."""
        following = fetched(block_of(i + 1))
        return following, walked(block_of(i), *state)

    carried = [parts.start(result, tiling) for result in problem.results]
    if blocks != tiling.down and problem.reduces:  # of whole rows there is no room in registers for another block
        known = of_program(problem, of_statistics, of_operands, place_of(block_of(0)))
        carried = lax.fori_loop(0, steps, step, carried)
    else:
        tensors = fetched(block_of(0))  # before what is known: all are on their way at once
        known = of_program(problem, of_statistics, of_operands, place_of(block_of(0)))
        if blocks != tiling.down:
            tensors, carried = lax.fori_loop(0, steps - 1, ahead, (tensors, carried))
        carried = walked(block_of(steps - 1), tensors, carried)
    for result, so_far, ref in zip(problem.results, carried, outputs, strict=True):
        if result.kind in parts.KINDS:
            starts = [i * problem.columns + column for i in range(len(result.values)) for column in columns]
            parts.store(result, so_far, ref, starts, down)


def _of_statistics(problem: FusedCast, arrays: Iterator[Any], tiling: Tiling) -> list[Any]:
    """The arrays that come first: what the statistics are made of, or what their kernel has made."""
    if problem.statistics is None:
        return []
    return list(itertools.islice(arrays, 1 if tiling.own is None else problem.statistics.array_count))
