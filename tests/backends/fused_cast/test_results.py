"""Fused casts of several results: tensors, numbers of rows, amaxes and sums by column."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.backends.fused_cast import programs
from tests.backends.fused_cast.programs import BF16, E4M3, F32, Builder, Program
from tests.backends.quantize.test_lowering import lowered
from xla_fp8.backends.fused_cast import kernel, tiling
from xla_fp8.backends.fused_cast.problem import Constant, FusedCast, Node, Result, Statistics, Sums, Table
from xla_fp8.backends.fused_cast.support import supports
from xla_fp8.backends.fused_cast.tiling import Tiling, tiling_of

ROUNDING = {"float8_e4m3fn": 0.03, "float8_e5m2": 0.06, "bfloat16": 0.003, "float16": 4e-4, "float32": 1e-5}
"""Of types, as a share of the norm."""


def check(problem: FusedCast) -> None:
    arrays = programs.arrays_of(problem)
    found = kernel.run(problem, arrays, interpret=True)
    for result, ours, theirs in zip(problem.results, found, programs.computed(problem, arrays), strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, result.dtype)
        error = np.linalg.norm(np.asarray(ours, np.float64) - theirs)
        assert error <= ROUNDING[result.dtype.name] * np.linalg.norm(theirs), result


@pytest.mark.parametrize(
    ("program", "rows", "columns"),
    [
        (programs.copy, 588, 320),
        (programs.gradient_of_gelu, 3 * 56 * 56, 96),
        (programs.gradient_of_gelu, 256, 2560),
        (programs.layer_norm, 49 * 8, 96),
        (programs.layer_norm, 512, 768),
        (programs.gradient_of_layer_norm, 1024, 320),
        (programs.gradient_of_layer_norm, 49 * 6, 768),
        (programs.gradient_of_layer_norm, 512, 1280),
        (programs.batch_norm_and_relu, 3 * 56 * 56, 64),
        (programs.gradient_of_relu, 3136, 256),
    ],
)
def test_results(program: Program, rows: int, columns: int) -> None:
    check(program(rows, columns))


@pytest.fixture
def few_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have programs that walk over many blocks."""
    monkeypatch.setattr(tiling, "_MULTIPROCESSORS", 2)


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("program", programs.PROGRAMS)
def test_programs_walk_unequally_far(program: Program) -> None:
    """Where the blocks of rows are not as many for each program."""
    problem = program(37 * 2**6, 96)
    tiling = tiling_of(problem)
    assert isinstance(tiling, Tiling)
    assert tiling.down < problem.rows // tiling.height
    assert problem.rows // tiling.height % tiling.down
    check(problem)


def test_values_of_fewer_numbers_than_a_tensor() -> None:
    """Are repeated in tensors and counted for each row in sums; those of rows are written once."""
    do = Builder(256, 128, programs.tensor(128), programs.by_row(256), programs.by_column(128), programs.NUMBER)
    row, column = do("mul", 1, 3), do("add", 2, 3)
    results = [kind(value) for kind in (programs.amax, programs.column_sum) for value in (row, column, 3)]
    tensors = [programs.of_dtype(value, F32) for value in (0, row, column, 3)]
    check(do.writing(*results, *tensors, programs.of_rows(row), programs.of_rows(3)))


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("rows", [512, 2**12])
@pytest.mark.parametrize("value", [np.nan, -np.inf, 3e38])
def test_an_amax_keeps_what_is_not_finite(value: float, rows: int) -> None:
    problem = programs.copy(rows, 64)
    [x] = programs.arrays_of(problem)
    tensor, amax, sums = kernel.run(problem, [x.at[rows - 3, 5].set(value)], interpret=True)
    x = x.at[rows - 3, 5].set(value).astype(F32)
    np.testing.assert_array_equal(amax, np.max(np.abs(np.asarray(x))))
    np.testing.assert_array_equal(np.isfinite(sums), np.isfinite(np.asarray(x)).all(0))
    assert abs(float(tensor[rows - 3, 5])) == 448 or np.isnan(value)


@pytest.mark.usefixtures("few_multiprocessors")
@pytest.mark.parametrize("adds_up", [False, True])
def test_programs_walk_within_an_image(adds_up: bool) -> None:
    """What all rows of an image have in common (sums of groups, a table by column, another by image) is found once."""
    rows, columns, period, width = 2048, 320, 512, 10
    image, by_column = programs.tensor(columns), Table(F32, columns, columns=((1, columns, 1),))
    by_image = dataclasses.replace(by_column, size=4 * columns, period=period, pitch=columns)
    statistics = Statistics(rows, columns, period, width, (image,), (Node("mul", (0, 0)),), (0, 1))
    operands = image, Sums(statistics, 0), by_column, by_image
    nodes = (
        Node("mul", (1, Constant(1 / (period * width)))),
        Node("mul", (4, 2)),
        Node("sub", (0, 5)),
        Node("add", (6, 3)),
    )
    results = [programs.of_dtype(7, BF16), *([programs.amax(7), programs.column_sum(7)] if adds_up else [])]
    problem = FusedCast(rows, columns, operands, nodes, tuple(results))
    tiling = tiling_of(problem)
    assert isinstance(tiling, Tiling)
    assert rows // period <= tiling.down < rows // tiling.height
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, columns)) + 3, BF16)
    gamma, shift = rng.normal(size=columns).astype(F32), rng.normal(size=4 * columns).astype(F32)
    found = kernel.run(problem, [x, x, jnp.asarray(gamma), jnp.asarray(shift)], interpret=True)
    grouped = np.asarray(x, np.float64).reshape(rows // period, period, columns // width, width)
    mean = np.broadcast_to(grouped.mean((1, 3), keepdims=True), grouped.shape).reshape(rows, columns)
    wanted = np.asarray(x, np.float64) - mean * gamma + np.repeat(shift.reshape(-1, columns), period, 0)
    np.testing.assert_allclose(np.asarray(found[0], np.float64), wanted, atol=0.05)
    if adds_up:
        np.testing.assert_allclose(found[1], np.abs(wanted).max(), rtol=1e-5)
        np.testing.assert_allclose(found[2], wanted.sum(0), atol=1e-2)


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("columns", [320, 768])
def test_kernels_lower_for_a_gpu(program: Program, columns: int) -> None:
    problem = program(12608, columns)
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in programs.arrays_of(problem)]
    text = lowered(lambda *arrays: kernel.run(problem, arrays), *shapes)
    assert text.count(f'name = "{kernel.NAME}"') == 1


def test_single_numbers_lower_for_a_gpu() -> None:
    """Though inline PTX is of blocks."""
    do = Builder(1024, 64, programs.tensor(64), programs.NUMBER, programs.NUMBER)
    scale = do("tanh", do("add", do("mul", 1, 2), do("max", do("exp", 1), 0.5)))
    problem = do.writing(programs.of_dtype(do("mul", 0, scale), E4M3))
    x, number = jax.ShapeDtypeStruct((1024, 64), BF16), jax.ShapeDtypeStruct((1,), F32)
    assert kernel.NAME in lowered(lambda *arrays: kernel.run(problem, arrays), x, number, number)


@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("columns", [96, 320, 768, 1280, 2560])
def test_every_row_and_column_is_a_programs(program: Program, columns: int) -> None:
    for rows in (49 * 8, 2048, 12608, 802816):
        tiling = tiling_of(program(rows, columns))
        assert isinstance(tiling, Tiling)
        assert rows % tiling.height == 0
        assert columns % tiling.width == 0
        # What programs add up is little beside the tensor; and none has nothing to do.
        assert tiling.down <= rows // tiling.height
        assert tiling.down * (columns // tiling.width) <= 132 * 12 or tiling.down == rows // tiling.height


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (Result("row", (0,), F32), "more than one number in a row"),
        (Result("tensor", (0,), np.dtype(jnp.float8_e4m3b11fnuz)), "float8_e4m3b11fnuz"),
    ],
)
def test_results_that_there_are_no_kernels_for(result: Result, reason: str) -> None:
    verdict = supports(Builder(1024, 64, programs.tensor(64)).writing(result, programs.of_dtype(0, E4M3)))
    assert not verdict.ok
    assert reason in verdict.reason


def test_rows_that_are_no_tiles() -> None:
    odd: list[Any] = [programs.copy(999, 64), programs.copy(1024, 100), programs.gradient_of_layer_norm(1024, 7 * 32)]
    assert [supports(problem).ok for problem in odd] == [False, False, True]
    table = Table(F32, 64 * 147, period=7, pitch=64, columns=((1, 64, 1),))
    do = Builder(1029, 64, programs.tensor(64), table)
    assert not supports(do.writing(programs.amax(do("mul", 0, 1)))).ok
