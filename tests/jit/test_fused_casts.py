"""Norms, activations and gates in front of a cast to FP8 become one kernel on a GPU, and nothing elsewhere."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import xla_fp8
import xla_fp8.tracing.lowering  # by which regions run
from tests.backends.quantize.test_lowering import lowered
from tests.fused_casts import (
    BF16,
    CASES,
    E4M3,
    F32,
    IMAGE,
    ROWS,
    Array,
    affine,
    cast,
    layer_norm,
    norm_and_silu,
    normal,
    of,
    rms,
)
from tests.sampling import sampled
from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import kernel, statistics
from xla_fp8.backends.fused_cast.problem import (
    Constant,
    FusedCast,
    Joined,
    Matrix,
    Node,
    Result,
    Statistics,
    Sums,
    Table,
)
from xla_fp8.backends.fused_cast.tiling import Parts, Tiling, most_spanned, parts_of, tiling_of
from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import choice
from xla_fp8.tracing.equations import bodies, is_literal
from xla_fp8.tracing.fused_cast_problem import implementation, problem_of
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed, fused_cast_p, is_region


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU; the kernels are not there, so that what is fused runs as plain JAX."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)


def fused(function: Any, *arguments: Any) -> list[FusedCast]:
    """The casts that the kernels of a rewritten function compute."""
    found = []
    for equation in _equations(jax.make_jaxpr(xla_fp8.rewrite(function))(*arguments)):
        if equation.primitive is fused_cast_p:
            described = problem_of(equation.params["jaxpr"])
            assert not isinstance(described, No)
            if isinstance(described[0], FusedCast):
                found.append(described[0])
    return found


def _equations(jaxpr: Any) -> list[Any]:
    inner = [
        e for equation in jaxpr.eqns for body in bodies(equation) for e in _equations(getattr(body, "jaxpr", body))
    ]
    return [*jaxpr.eqns, *inner]


def in_fp8(value: int) -> Result:
    return Result("tensor", (value,), np.dtype(E4M3))


def only(name: str) -> FusedCast:
    function, arguments = of(name)
    [problem] = fused(function, *arguments)
    return problem


def convolved(x: Array, w: Array) -> Array:
    """An FP8 convolution, which becomes a graph."""
    numbers, scale = ("NHWC", "OHWI", "NHWC"), 0.1
    return xla_fp8.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, lhs_scale=scale, rhs_scale=scale, out_dtype=BF16
    )


def in_f32(x: Array) -> Array:
    return x.astype(F32)


@pytest.mark.parametrize("name", sampled(CASES, 2))
def test_the_kernel_computes_what_the_program_means(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Pallas' interpreter; compared with the program in f32, of which the kernel leaves no rounding but the last."""
    function, arguments = of(name)
    monkeypatch.setattr(kernel, "run", functools.partial(kernel.run, interpret=True))
    jaxpr = cut_closed(jax.make_jaxpr(function)(*arguments), Options())
    *_, (index, equation) = [(i, e) for i, e in enumerate(jaxpr.eqns) if e.primitive is fused_cast_p]
    read = [atom for atom in equation.invars if not is_literal(atom)]
    inputs = core.jaxpr_as_fun(_jax_compat.with_equations(jaxpr, jaxpr.eqns[:index], read))(*arguments)
    [found] = implementation(equation.params["jaxpr"])(*inputs)
    wanted = function(*map(in_f32, arguments))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    ours, theirs = np.asarray(found, np.float32), np.asarray(wanted, np.float32)
    assert np.mean(ours != theirs) < 0.005
    assert np.linalg.norm(ours - theirs) < 0.01 * np.linalg.norm(theirs)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38])
def test_nan_stays_and_infinity_saturates(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = FusedCast(
        32,
        64,
        (Matrix(np.dtype(F32), 64),),
        (Node("max", (0, Constant(-1e38))), Node("min", (1, Constant(np.inf)))),
        (in_fp8(2),),
    )
    x = jnp.zeros((32, 64)).at[3, 5].set(value)
    [y] = kernel.run(problem, [x], interpret=True)
    y = y[3, 5].astype(F32)
    np.testing.assert_array_equal(y, np.clip(np.float32(value), -448, 448))


def test_elsewhere_the_program_keeps_every_bit() -> None:
    for name in CASES:
        function, arguments = of(name)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ours = xla_fp8.jit(function)(*arguments)
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (ours, jax.jit(function)(*arguments))))


def test_operands_of_a_norm() -> None:
    """Of groups the kernel has sums of a kernel in front of it; where a row is normalized it makes them itself."""
    problem = only("group norm and silu")
    image, *sums, gamma, beta, scale = sorted(problem.operands, key=lambda o: type(o).__name__)
    assert image == Matrix(np.dtype(BF16), 320)
    statistics = problem.statistics
    assert statistics is not None
    assert (statistics.period, statistics.width, statistics.images, statistics.groups) == (256, 10, 2, 32)
    assert statistics.operands == (image,)
    assert statistics.nodes == (Node("mul", (0, 0)),)
    assert sorted(statistics.results) == [0, 1]
    assert sums == [Sums(statistics, 0), Sums(statistics, 1)]
    assert gamma == beta == Table(np.dtype(F32), 320, period=0, pitch=320, columns=((1, 320, 1),))
    assert scale == Table(np.dtype(F32), 1)
    assert not problem.reduces

    problem = only("group norm of one image")
    assert problem.statistics is not None
    assert (problem.statistics.period, problem.statistics.width) == (512, 20)

    for name in ("group norm of Flax", "group norm of Flax, of one image"):
        problem = only(name)
        assert problem.statistics is not None
        assert sum(isinstance(operand, Table) and operand.size > 1 for operand in problem.operands) == 1  # gamma

    problem = only("layer norm")
    assert [type(operand) for operand in problem.operands] == [Matrix, Table, Table, Table]
    assert problem.reduces

    problem = only("behind a concatenation")
    assert Joined((Matrix(np.dtype(BF16), 320), Matrix(np.dtype(BF16), 160))) in problem.operands

    problem = only("gate")
    assert problem.operands[:2] == (Matrix(np.dtype(BF16), 640, 0), Matrix(np.dtype(BF16), 640, 320))


def test_statistics_of_a_tensor_that_graphs_do_not_make() -> None:
    """Numbers for each channel of each image are added by both kernels, of a large tensor; a small one XLA makes."""

    def network(x: Array, w: Array, t: Array) -> Array:
        y = convolved(x, w)
        return norm_and_silu(y + t[:, None, None])

    for images, is_added in ((32, True), (1, False), (2, False)):
        shapes = ((images, 64, 64, 64), E4M3), ((64, 3, 3, 64), E4M3), ((images, 64), BF16)
        [problem] = fused(network, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
        assert problem.statistics is not None
        of_images = Table(np.dtype(BF16), images * 64, period=4096, pitch=64, columns=((1, 64, 1),))
        for operands in (problem.operands, problem.statistics.operands):
            assert Matrix(np.dtype(BF16), 64) in operands
            assert (of_images in operands) == is_added


def test_statistics_that_others_read_are_another_kernels() -> None:
    def both(x: Array) -> tuple[Array, Array]:
        grouped = x.astype(F32).reshape(2, 256, 32, 10)
        mean, square = grouped.mean((1, 3), keepdims=True), (grouped * grouped).mean((1, 3), keepdims=True)
        normed = (grouped - mean) * jax.lax.rsqrt(square - mean * mean + 1e-5)
        return cast(jax.nn.silu(normed).reshape(x.shape)), square

    [problem] = fused(both, normal(IMAGE))
    text = lowered(xla_fp8.rewrite(both), normal(IMAGE))
    assert text.count(f'name = "{statistics.NAME}"') == 2
    assert problem.statistics is not None
    assert len(problem.statistics.results) == 1
    assert any(isinstance(operand, Table) and operand.is_by_group for operand in problem.operands)


def test_as_many_rows_as_columns() -> None:
    """A vector of as many numbers is still one of columns; also what is computed of it outside."""
    weight = affine(320)

    def norm(x: Array, gamma: Array) -> Array:
        return cast(layer_norm(x, {"gamma": 1 + gamma, "beta": weight["beta"]}))

    [problem] = fused(norm, normal((320, 320)), jnp.asarray(weight["gamma"]))
    assert sum(isinstance(operand, Table) and bool(operand.columns) for operand in problem.operands) == 2


def test_what_xla_keeps() -> None:
    def bare(x: Array) -> Array:
        return cast(jax.nn.relu(x))

    def of_f32(x: Array) -> Array:
        return cast(layer_norm(x, affine(320)))

    def transposed(x: Array) -> Array:
        return norm_and_silu(x.transpose(0, 2, 1, 3))

    def unsaturated(x: Array) -> Array:
        return (layer_norm(x, affine(320)).astype(F32) * 2).astype(E4M3)

    def of_other_operations(x: Array) -> Array:
        return cast(jnp.sin(x) * jax.nn.silu(x) + jnp.cos(x) * 3)

    assert not fused(bare, normal(ROWS))
    assert not fused(of_f32, normal(ROWS, F32))
    assert not fused(transposed, normal(IMAGE))
    assert not fused(unsaturated, normal(ROWS))
    assert not fused(of_other_operations, normal(ROWS))
    assert not fused(norm_and_silu, normal((1, 2, 2, 320)))


def test_one_result_of_many_is_read() -> None:
    """A barrier makes several results, of which a cast reads one; another one is FP8, which no kernel reads."""

    def twice(x: Array, other: Array) -> tuple[Array, Array]:
        first = rms(x)
        other, first = jax.lax.optimization_barrier((other, first))
        return first, rms(other)

    x = normal(ROWS)
    assert len(fused(twice, x, x + 1)) == 2


def test_only_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(ROWS)
    for options in ({"backend": "reference"}, {"passes": "cudnn-fused-conv-rewriter"}):
        jaxpr = jax.make_jaxpr(xla_fp8.rewrite(rms, **options))(x)
        assert not any(equation.primitive is fused_cast_p for equation in _equations(jaxpr))
    monkeypatch.undo()
    assert not choice.takes_fused("cpu")
    assert choice.takes_fused("cuda") == (jax.device_count() == 1)


def test_a_graph_keeps_its_epilogue() -> None:
    """The activation and cast behind a convolution are its graph's; the norm in front of the next one is a kernel."""

    def network(x: Array, w: Array) -> tuple[Array, Array]:
        y = convolved(x, w)
        y = y + jnp.arange(64, dtype=BF16)
        return cast(jax.nn.gelu(y * 2)), norm_and_silu(y + 1)

    x, w = normal((2, 32, 32, 64)).astype(E4M3), normal((64, 3, 3, 64)).astype(E4M3)
    equations = _equations(jax.make_jaxpr(xla_fp8.rewrite(network))(x, w))
    assert sum(equation.primitive is fused_cast_p for equation in equations) == 1
    assert sum(map(is_region, equations)) == 1


def test_transformations() -> None:
    x = normal((3, *ROWS))
    together, apart = jax.vmap(xla_fp8.rewrite(rms))(x), jnp.stack([rms(each) for each in x])
    np.testing.assert_array_equal(np.asarray(together, np.float32), np.asarray(apart, np.float32))


@pytest.mark.parametrize("name", CASES)
def test_it_lowers_for_a_gpu(name: str) -> None:
    function, arguments = of(name)
    text = lowered(xla_fp8.rewrite(function), *arguments)
    assert text.count(f'name = "{kernel.NAME}"') == 1
    problem = only(name)
    tiling = tiling_of(problem)
    assert isinstance(tiling, Tiling)
    # The mean that a variance is of is a sum of its own.
    of_means = name == "group norm by variance"
    of_casts = problem.statistics is not None and tiling.own is None
    assert text.count(f'name = "{statistics.NAME}"') == of_means + of_casts


def test_parts_of_statistics() -> None:
    """All rows are in one part, loads are of 16 bytes, and there are few parts to be added up."""
    for images, period, columns, width in (
        (2, 4096, 320, 10),
        (16, 4096, 960, 30),
        (2, 64, 2560, 80),
        (1, 2**18, 128, 4),
        (3, 49 * 2**10, 96, 3),
    ):
        image = Matrix(np.dtype(BF16), columns)
        statistics = Statistics(images * period, columns, period, width, (image,), (), (0,))
        parts = parts_of(statistics)
        assert isinstance(parts, Parts)
        assert parts.count * parts.steps * parts.tiles * parts.rows == period
        assert columns % parts.columns == 0
        assert parts.rows * parts.columns == 32 * parts.warps * 8
        assert parts.count <= 32
    assert isinstance(parts_of(Statistics(98, 320, 49, 10, (Matrix(np.dtype(BF16), 320),), (), (0,))), No)


def test_tiles_of_small_images() -> None:
    """One program has whole groups of an image; of large ones they are cut."""
    for images, period, columns, own in (
        (2, 64, 1280, 40),
        (2, 256, 640, 40),
        (2, 64, 1920, 120),
        (8, 256, 1280, 40),
        (16, 256, 1280, None),
        (16, 256, 2560, None),
        (2, 256, 320, None),
        (2, 1024, 640, None),
        (2, 144, 1280, None),
    ):
        image = Matrix(np.dtype(BF16), columns)
        statistics = Statistics(images * period, columns, period, columns // 32, (image,), (), (0,))
        problem = FusedCast(
            images * period,
            columns,
            (image, Sums(statistics, 0)),
            (Node("sub", (0, 1)),),
            (in_fp8(2),),
        )
        tiling = tiling_of(problem)
        assert isinstance(tiling, Tiling)
        assert tiling.own == own
        assert own is None or tiling.rows == period


def test_pieces_of_groups() -> None:
    for size in range(1, 50):
        for by in range(1, 50):
            spanned = [(start + by - 1) // size - start // size + 1 for start in range(0, size * by, by)]
            assert max(spanned) <= most_spanned(size, by) <= max(spanned) + 1


def test_tiles() -> None:
    for rows, columns, reduces in ((65536, 320, True), (128, 1280, True), (2048, 2048, True), (512, 96, False)):
        nodes = (Node("reduce_sum", (0,)), Node("mul", (0, 1))) if reduces else (Node("square", (0,)),)
        problem = FusedCast(rows, columns, (Matrix(np.dtype(BF16), columns),), nodes, (in_fp8(len(nodes)),))
        tiling = tiling_of(problem)
        assert isinstance(tiling, Tiling)
        assert rows % tiling.rows == 0
        assert columns % (tiling.columns * tiling.tiles) == 0
        assert tiling.tiles * tiling.columns == columns or not reduces
    odd = FusedCast(512, 100, (Matrix(np.dtype(BF16), 100),), (Node("square", (0,)),), (in_fp8(1),))
    assert isinstance(tiling_of(odd), No)
    nodes = (Node("reduce_sum", (0,)), Node("mul", (0, 1)))
    wide = FusedCast(2048, 4096, (Matrix(np.dtype(BF16), 4096),), nodes, (in_fp8(2),))
    assert isinstance(tiling_of(wide), No)  # a tile of few rows of 128 elements, too few for the threads
