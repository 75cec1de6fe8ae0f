"""How a Triton kernel is launched, through Pallas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton


def launch(
    kernel: Callable[..., None],
    inputs: Sequence[jax.Array],
    outputs: Sequence[tuple[tuple[int, ...], Any]],
    *,
    name: str,
    programs: int,
    warps: int,
    interpret: bool,
    aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Runs a kernel of references to whole arrays.

    Args:
        outputs: shape and type of each.
        programs: size of the grid.
        aliases: index of an input → index of the output that starts as that input.
    """
    everywhere = pl.BlockSpec(memory_space=pl.ANY)
    # Inside shard_map results vary over the mesh axes that the first input varies over; Pallas wants that said.
    varying = jax.typeof(inputs[0]).manual_axis_type
    results = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying)  # type: ignore[no-untyped-call]
            for shape, dtype in outputs
        ],
        grid=(programs,),
        in_specs=[everywhere] * len(inputs),
        out_specs=[everywhere] * len(outputs),
        input_output_aliases=dict(aliases or {}),
        compiler_params=triton.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*inputs)
    return list(results)
