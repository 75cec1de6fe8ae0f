"""Sharding of a graph call that XLA's partitioner cannot look into: by its batch, amax reduced over the shards.

A backend's kernel is one opaque operation to XLA, which would gather its operands on every device. Custom partitioning
says how it splits: the batch dimensions of input, output, residuals and copies go together (for Shardy: an einsum-like
rule), everything else is on every device, and the largest value of a sharded tensor is the largest of its shards'.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from xla_fp8.backends.protocol import Implementation
from xla_fp8.hlo import Shape
from xla_fp8.target import GraphCall
from xla_fp8.tracing.surroundings import apart, dtypes_of_shapes


def partitioned(
    call: GraphCall, lower: Callable[[GraphCall], Implementation], lower_shard: Callable[[GraphCall], Implementation]
) -> Implementation:
    """What `lower` makes of `call`, split over devices along its batch dimension.

    Args:
        lower: makes the function of the whole call, which says what it returns and never runs.
        lower_shard: makes that of a shard, which has a part of the batch and runs on each device.
    """
    batched = _batched_operands(call)
    labels = call.dim_labels
    in_batch = [labels.input_batch_dimension, *(labels.output_batch_dimension for _ in batched[1:])]
    out_batch = [labels.output_batch_dimension if shape.rank else None for shape in call.output_shapes]

    def batch_axes(shapes: Sequence[Any]) -> Any:
        """The mesh axes that the batch of the input is split over."""
        spec = tuple(getattr(shapes[0].sharding, "spec", ()))
        return spec[in_batch[0]] if in_batch[0] < len(spec) else None

    def sharding(mesh: Any, rank: int, batch: int | None, axes: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*(axes if d == batch else None for d in range(rank))))  # type: ignore[no-untyped-call]

    def operand_shardings(mesh: Any, axes: Any) -> tuple[NamedSharding, ...]:
        return tuple(
            sharding(mesh, shape.rank, batch if is_batched else None, axes)
            for shape, batch, is_batched in zip(call.operand_shapes, in_batch, batched, strict=True)
        )

    def result_shardings(mesh: Any, axes: Any) -> tuple[NamedSharding, ...]:
        return tuple(
            sharding(mesh, shape.rank, batch, axes) for shape, batch in zip(call.output_shapes, out_batch, strict=True)
        )

    def partition(mesh: Any, arguments: Sequence[Any], _: Any) -> tuple[Any, ...]:
        axes = batch_axes(arguments)

        def of_a_shard(*operands: jax.Array) -> tuple[jax.Array, ...]:
            with apart(dtypes_of_shapes((*call.operand_shapes, *call.output_shapes))):  # XLA compiles, wherever
                results = lower_shard(_with_batch(call, operands[0].shape[in_batch[0]]))(*operands)
                if axes is None:
                    return tuple(results)
                return tuple(
                    lax.pmax(result, axes)  # type: ignore[no-untyped-call]
                    if batch is None
                    else result
                    for result, batch in zip(results, out_batch, strict=True)
                )

        return mesh, of_a_shard, result_shardings(mesh, axes), operand_shardings(mesh, axes)

    def infer(mesh: Any, arguments: Sequence[Any], _: Any) -> tuple[NamedSharding, ...]:
        return result_shardings(mesh, batch_axes(arguments))

    @custom_partitioning
    def split(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(lower(call)(*operands))

    split.def_partition(  # type: ignore[no-untyped-call]
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=_sharding_rule(call, batched, in_batch, out_batch),
    )
    return split


def _with_batch(call: GraphCall, batch: int) -> GraphCall:
    """`call` with another batch size."""
    labels = call.dim_labels

    def resized(shape: Shape, dimension: int) -> Shape:
        sizes = shape.dimensions
        return shape.with_dimensions((*sizes[:dimension], batch, *sizes[dimension + 1 :]))

    input, *rest = call.operand_shapes
    operands = [resized(input, labels.input_batch_dimension)]
    operands += [
        resized(shape, labels.output_batch_dimension) if is_batched else shape
        for shape, is_batched in zip(rest, _batched_operands(call)[1:], strict=True)
    ]
    outputs = [resized(shape, labels.output_batch_dimension) if shape.rank else shape for shape in call.output_shapes]
    return dataclasses.replace(call, operand_shapes=tuple(operands), output_shapes=tuple(outputs))


def _batched_operands(call: GraphCall) -> list[bool]:
    """Which operands have the batch: the input and the side operands of the output's shape."""
    kinds = [side.kind for side in call.graph.side_operands()]
    return [True, False, *(kind not in ("scalar", "vector") for kind in kinds)]


def _sharding_rule(
    call: GraphCall, batched: Sequence[bool], in_batch: Sequence[int], out_batch: Sequence[int | None]
) -> str:
    """Shardy's rule: one factor for the batch, a factor of its own for every other dimension."""
    fresh = iter(range(1000))

    def factors(rank: int, batch: int | None) -> str:
        return " ".join("batch" if d == batch else f"d{next(fresh)}" for d in range(rank))

    operands = [
        factors(shape.rank, batch if is_batched else None)
        for shape, batch, is_batched in zip(call.operand_shapes, in_batch, batched, strict=True)
    ]
    results = [factors(shape.rank, batch) for shape, batch in zip(call.output_shapes, out_batch, strict=True)]
    return f"{', '.join(operands)} -> {', '.join(results)}"
