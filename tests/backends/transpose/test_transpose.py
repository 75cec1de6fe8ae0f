"""Transposes of FP8 tensors by the kernel: interpreted, bit for bit those of lax; lowered without a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from xla_fp8.backends.transpose import kernel
from xla_fp8.backends.transpose.exchange import Exchange, exchange_of, kernel_exchange
from xla_fp8.backends.transpose.primitive import PRIMITIVE, transpose

pytestmark = pytest.mark.unoptimized

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
CASES = {
    "one tile": ((128, 128), (1, 0)),
    "whole tiles": ((256, 384), (1, 0)),
    "smaller than a tile": ((16, 48), (1, 0)),
    "rows left over": ((272, 128), (1, 0)),
    "columns left over": ((128, 320), (1, 0)),
    "batch": ((3, 144, 80), (0, 2, 1)),
    "filter": ((32, 3, 3, 144), (3, 1, 2, 0)),
    "batch of filters": ((2, 2, 16, 5, 160), (0, 1, 4, 3, 2)),
    "rows of two dimensions": ((2, 4, 8, 160), (0, 3, 1, 2)),
    "columns of two dimensions": ((48, 3, 16), (1, 2, 0)),
    "dimensions of 1": ((1, 48, 1, 1, 32, 1), (4, 3, 0, 2, 5, 1)),
}


def every_byte(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    numbers = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    return jax.lax.bitcast_convert_type(jnp.asarray(numbers), dtype)


def assert_same_bytes(found: jax.Array, wanted: jax.Array) -> None:
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    np.testing.assert_array_equal(np.asarray(found).view(np.uint8), np.asarray(wanted).view(np.uint8))


def struct(shape: tuple[int, ...], dtype: Any = E4M3) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


def for_cuda(function: Any, *shapes: Any) -> str:
    return str(jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text())


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_as_lax_transposes(name: str, dtype: Any) -> None:
    """NaN with other bits, zeros of both signs: it moves bytes."""
    shape, permutation = CASES[name]
    x = every_byte(shape, dtype)
    found = exchange_of(shape, permutation)
    assert found is not None
    wanted = x.transpose(permutation)
    assert_same_bytes(kernel.run(found, x, interpret=True).reshape(wanted.shape), wanted)


@pytest.mark.parametrize("shape", [(32, 3, 3, 144), (32, 1, 5, 48), (144, 2, 1, 16)])
def test_reversed_windows(shape: tuple[int, ...]) -> None:
    """Of the filter of an input gradient; reversed along a dimension of 1 nothing moves."""
    x, permutation = every_byte(shape, E4M3), (3, 1, 2, 0)
    found = exchange_of(shape, permutation, (1, 2))
    assert found is not None
    assert found.is_mirrored
    wanted = jax.lax.rev(x, (1, 2)).transpose(permutation)
    assert_same_bytes(kernel.run(found, x, interpret=True).reshape(wanted.shape), wanted)


@pytest.mark.parametrize(
    ("shape", "permutation", "mirrored"),
    [
        ((64, 3, 3, 32), (3, 1, 2, 0), (1,)),  # half of a window
        ((64, 3, 3, 32), (3, 1, 2, 0), (0,)),
        ((64, 3, 3, 32), (3, 1, 2, 0), (0, 1, 2)),
        ((64, 32), (1, 0), (0,)),
        ((4, 64, 32), (0, 2, 1), (0,)),
        ((4, 64, 32), (0, 2, 1), (1,)),
    ],
)
def test_what_else_is_reversed_is_none(
    shape: tuple[int, ...], permutation: tuple[int, ...], mirrored: tuple[int, ...]
) -> None:
    assert exchange_of(shape, permutation) is not None
    assert exchange_of(shape, permutation, mirrored) is None


def test_reversals_go_along_wherever_it_runs() -> None:
    shape, order = (2, 352, 3, 3, 336), {"permutation": (3, 1, 2, 0), "mirrored": (1, 2)}
    x = every_byte(shape, E4M3)
    wanted = jax.lax.rev(x, (2, 3)).transpose(0, 4, 2, 3, 1)
    batched: Any = jax.vmap(lambda x: transpose(x, **order))
    assert kernel.NAME in for_cuda(batched, struct(shape))
    assert_same_bytes(batched(x), wanted)
    assert_same_bytes(jax.jit(batched)(x), wanted)
    with jax.disable_jit():
        assert_same_bytes(batched(x), wanted)
    back: Any = jax.vjp(lambda x: transpose(x, **order), x[0])[1]
    assert_same_bytes(back(wanted[0])[0], x[0])


@pytest.mark.parametrize(
    ("shape", "permutation", "found"),
    [
        ((64, 32), (1, 0), Exchange(1, 64, 1, 32)),
        ((64, 3, 5, 32), (3, 1, 2, 0), Exchange(1, 64, 15, 32)),
        ((64, 1, 1, 32), (3, 1, 2, 0), Exchange(1, 64, 1, 32)),
        ((2, 3, 64, 32), (0, 1, 3, 2), Exchange(6, 64, 1, 32)),
        ((2, 3, 64, 32), (3, 0, 1, 2), Exchange(1, 384, 1, 32)),
        ((64, 32), (0, 1), None),
        ((1, 32), (1, 0), None),
        ((4, 8, 16, 32), (0, 2, 1, 3), None),  # the innermost dimension stays
        ((4, 8, 16, 32), (3, 2, 1, 0), None),  # what is between is transposed as well
        ((4, 8, 16, 32), (1, 3, 2, 0), None),
    ],
)
def test_which_transposes_are_exchanges(
    shape: tuple[int, ...], permutation: tuple[int, ...], found: Exchange | None
) -> None:
    assert exchange_of(shape, permutation) == found


def test_which_exchanges_the_kernel_makes() -> None:
    assert kernel_exchange((1024, 1024), (1, 0), E4M3) is not None
    assert kernel_exchange((1024, 1024), (1, 0), np.dtype(jnp.bfloat16)) is None
    assert kernel_exchange((1024, 1008), (1, 0), E4M3) is None  # too few elements
    assert kernel_exchange((1048, 1024), (1, 0), E4M3) is None  # rows of which 16 bytes would be of two
    assert kernel_exchange((1 << 16, 1 << 15), (1, 0), E4M3) is None  # offsets of more than 32 bits


@pytest.mark.parametrize("shape", [(1024, 1024), (65536, 320), (1040, 1296), (1280, 3, 3, 1280), (16, 256, 8, 160)])
def test_lowers_for_a_gpu_that_is_not_there(shape: tuple[int, ...]) -> None:
    permutation = (len(shape) - 1, *range(1, len(shape) - 1), 0)
    assert kernel.NAME in for_cuda(lambda x: transpose(x, permutation), struct(shape))


def test_batches() -> None:
    function = jax.vmap(lambda x: transpose(x, (1, 0)), in_axes=1)
    assert kernel.NAME in for_cuda(function, struct((1024, 2, 1024)))
    x = every_byte((1024, 2, 1024), E4M3)
    assert_same_bytes(jax.jit(function)(x), x.transpose(1, 2, 0))


def test_a_batch_along_the_innermost_dimension_is_left_to_lax() -> None:
    """That is of no rows that the kernel could load."""
    function = jax.vmap(lambda x: transpose(x, (1, 0)), in_axes=2)
    assert "stablehlo.transpose" in for_cuda(function, struct((1024, 1024, 2)))


def test_derivatives() -> None:
    """Linear: what comes back is transposed back."""
    x, moved = (every_byte((1024, 1024), E4M3) for _ in range(2))
    primal, tangent = jax.jvp(lambda x: transpose(x, (1, 0)), (x,), (moved,))
    assert_same_bytes(primal, x.T)
    assert_same_bytes(tangent, moved.T)
    back: Any = jax.vjp(lambda x: transpose(x, (1, 0)), x)[1]
    assert_same_bytes(back(moved)[0], moved.T)


@pytest.mark.parametrize("disable", [False, True])
def test_elsewhere_it_is_that_of_lax(disable: bool) -> None:
    x = every_byte((1024, 1024), E4M3)
    with jax.disable_jit(disable):
        assert_same_bytes(transpose(x, (1, 0)), x.T)
    lowered = jax.jit(lambda x: transpose(x, (1, 0))).lower(x)
    assert "stablehlo.transpose" in lowered.as_text()
    assert PRIMITIVE in lowered.as_text(debug_info=True)


def test_exported_programs_have_no_kernel() -> None:
    """Who loads one may have another GPU."""
    exported = jax.export.export(jax.jit(lambda x: transpose(x, (1, 0))), platforms=("cuda",))(struct((1024, 1024)))
    assert kernel.NAME not in exported.mlir_module()


def test_over_several_devices_there_is_no_kernel_and_in_a_shard_there_is() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    x = jax.ShapeDtypeStruct((1024, 2048), E4M3, sharding=sharded)  # type: ignore[no-untyped-call]
    assert kernel.NAME not in for_cuda(lambda x: transpose(x, (1, 0)), x)
    before, after = PartitionSpec(None, "d"), PartitionSpec("d")  # type: ignore[no-untyped-call]
    shard = jax.shard_map(lambda x: transpose(x, (1, 0)), mesh=mesh, in_specs=before, out_specs=after)
    assert kernel.NAME in for_cuda(shard, x)
