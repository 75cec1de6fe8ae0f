"""The kernel of statistics, and how the cast's kernel adds up what it made.

A program adds up some columns of a part of an image's rows, and then those of each group. It writes a number for each
group that it has columns of, which may be a piece of the group's:

    f32[sum, image, part, program across, slot]

There are so few of these that each program of the cast adds up those of its own groups. Nothing depends on the order in
which programs run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from xla_fp8.backends.fused_cast.arithmetic import Groups, Tiles, computed, operands_of
from xla_fp8.backends.fused_cast.loads import Place, loaded
from xla_fp8.backends.fused_cast.problem import Statistics, Sums, array_count
from xla_fp8.backends.fused_cast.tiling import Parts, most_spanned, parts_of
from xla_fp8.backends.protocol import No
from xla_fp8.backends.triton.launch import launch

NAME = "fused_cast_statistics"


def run(statistics: Statistics, operands: Sequence[jax.Array], interpret: bool = False) -> jax.Array:
    """The sums, in parts, as the cast's kernel reads them. Operands are as for that one.

    Raises:
        ValueError: `parts_of` says why there is no kernel.
    """
    parts = parts_of(statistics)
    if isinstance(parts, No):
        raise ValueError(parts.reason)
    programs, slots = _programs(statistics, parts), _slots(statistics, parts)
    (result,) = launch(
        functools.partial(_kernel, statistics, parts, interpret),
        operands,
        [((len(statistics.results) * programs * slots,), np.float32)],
        name=NAME,
        programs=programs,
        warps=parts.warps,
        interpret=interpret,
    )
    return result


def totals(statistics: Statistics, operands: Sequence[jax.Array], interpret: bool = False) -> list[jax.Array]:
    """The sums as f32[images, groups] each, for what is no fused cast.

    Raises:
        ValueError: `parts_of` says why there is no kernel.
    """
    written = run(statistics, operands, interpret)
    parts = parts_of(statistics)
    assert isinstance(parts, Parts), "an unsupported problem is not run"
    across, slots = _across(statistics, parts), _slots(statistics, parts)
    shape = (len(statistics.results), statistics.images, parts.count, across * slots)
    of_pieces = jnp.sum(written.reshape(shape), axis=2)
    # Which pieces are of a group, by program across and slot.
    column = np.arange(across)[:, None] * parts.columns
    group = (column // statistics.width + np.arange(slots)).reshape(-1)
    is_there = group * statistics.width < np.repeat(column + parts.columns, slots)
    of_group = is_there & (group == np.arange(statistics.groups)[:, None])
    most = of_group.sum(axis=1).max()
    places = np.argsort(~of_group, axis=1, kind="stable")[:, :most]
    is_own = np.take_along_axis(of_group, places, axis=1)
    return list(jnp.sum(jnp.where(is_own, of_pieces[..., places], 0), axis=-1))


def _across(statistics: Statistics, parts: Parts) -> int:
    return statistics.columns // parts.columns


def _programs(statistics: Statistics, parts: Parts) -> int:
    return statistics.images * parts.count * _across(statistics, parts)


def _slots(statistics: Statistics, parts: Parts) -> int:
    return _power_of_two(most_spanned(statistics.width, parts.columns))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _kernel(statistics: Statistics, parts: Parts, interpret: bool, *refs: Any) -> None:
    program, across = pl.program_id(0), _across(statistics, parts)
    column = lax.rem(program, across) * parts.columns
    height = parts.rows * parts.tiles
    first = lax.div(program, across) * (height * parts.steps)

    def added(step: Any, sums: Sequence[jax.Array]) -> list[jax.Array]:
        rows = tuple(first + step * height + i * parts.rows for i in range(parts.tiles))
        place = Place(rows, (column,), parts.rows, parts.columns, 32 * parts.warps, interpret)
        tiles = _summands(statistics, refs[:-1], place)
        return [functools.reduce(jnp.add, some, total) for total, some in zip(sums, tiles, strict=True)]

    zeros = [jnp.zeros((parts.rows, parts.columns), jnp.float32) for _ in statistics.results]
    sums = added(0, zeros) if parts.steps == 1 else lax.fori_loop(0, parts.steps, added, zeros)
    slots = _slots(statistics, parts)
    for number, total in enumerate(sums):
        by_group = _by_group(statistics, total, column, slots)
        at = (number * _programs(statistics, parts) + program) * slots
        triton.store(refs[-1].at[pl.ds(at, slots)], by_group)


def _by_group(statistics: Statistics, tile: jax.Array, column: Any, slots: int) -> jax.Array:
    """The sums of a tile's rows, and then of the columns of each group."""
    shape = (slots, tile.shape[1])
    group = lax.div(column + lax.broadcasted_iota(jnp.int32, shape, 1), statistics.width)
    is_own = group - lax.div(column, statistics.width) == lax.broadcasted_iota(jnp.int32, shape, 0)
    return jnp.sum(jnp.where(is_own, jnp.sum(tile, axis=0)[None, :], 0), axis=1)


def _summands(statistics: Statistics, arrays: Sequence[Any], place: Place) -> list[Tiles]:
    own = iter(arrays)
    values: list[Tiles] = [
        loaded(operand, tuple(itertools.islice(own, array_count(operand))), place) for operand in statistics.operands
    ]
    for node in statistics.nodes:
        values.append(computed(node, operands_of(node, values), place.interpret))
    return [values[result] for result in statistics.results]


def within(statistics: Statistics, arrays: Sequence[Any], place: Place) -> list[Tiles]:
    """The sums of a program of the cast that has all rows of an image and one or two whole groups, of arrays."""
    shape, count = (place.height, place.width), (place.own or place.width) // statistics.width
    group = lax.div(lax.broadcasted_iota(jnp.int32, (1, place.width), 1), statistics.width)
    found = []
    for [tile] in _summands(statistics, arrays, place):
        whole = jnp.broadcast_to(tile, shape)
        first, *others = (jnp.sum(jnp.where(group == i, whole, 0).reshape(-1)) for i in range(count))
        found.append([functools.reduce(lambda rest, other: jnp.where(group == 0, rest, other), others, first)])
    return found


def summed(operand: Sums, ref: Any, place: Place) -> Groups:
    """Sums of the groups to which columns of the cast's tiles belong."""
    statistics = operand.statistics
    parts = parts_of(statistics)
    assert isinstance(parts, Parts), "an unsupported problem is not run"
    across, width = _across(statistics, parts), statistics.width
    pieces = most_spanned(parts.columns, width)
    shape = (_power_of_two(most_spanned(width, place.width)), _power_of_two(pieces * parts.count))
    number = lax.broadcasted_iota(jnp.int32, shape, 1)
    image = operand.number * statistics.images + lax.div(place.rows[0], statistics.period)
    part = image * parts.count + lax.rem(number, parts.count)
    found = Groups()
    for column in place.columns:
        group = lax.div(column, width) + lax.broadcasted_iota(jnp.int32, shape, 0)
        tile = lax.div(group * width, parts.columns) + lax.div(number, parts.count)
        slot = group - lax.div(tile * parts.columns, width)
        is_there = (
            (group < statistics.groups) & (number < pieces * parts.count) & (tile * parts.columns < (group + 1) * width)
        )
        at = (part * across + tile) * _slots(statistics, parts) + slot
        numbers = triton.load(ref.at[jnp.where(is_there, at, 0)], mask=is_there, other=0.0)
        found.append(jnp.sum(numbers, axis=1, keepdims=True))
    return found
