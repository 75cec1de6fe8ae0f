"""The epilogue on whole arrays, as a split reduction runs it: what the reference computes behind the same sums."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.sampling import sampled
from xla_fp8.backends import reference
from xla_fp8.backends.compare import Tolerance, compare
from xla_fp8.backends.example_calls import POINTWISE, graph_call, random_call
from xla_fp8.backends.inputs import random_operands
from xla_fp8.backends.mosaic import kernel
from xla_fp8.backends.mosaic.configs import CONSUMERS, Config
from xla_fp8.backends.mosaic.epilogue import SUMS, Epilogue, epilogue_of
from xla_fp8.backends.mosaic.geometry import Geometry
from xla_fp8.backends.mosaic.problem import Problem
from xla_fp8.target import GraphCall

pytestmark = pytest.mark.unoptimized

NEAR = Tolerance(1e-5, fp8_share=0.01, fp8_beyond_share=0.0)
BF16 = Tolerance(2.0**-8)


def run(call: GraphCall) -> None:
    epilogue = epilogue_of(call)
    assert isinstance(epilogue, Epilogue)
    operands = [jnp.asarray(array) for array in random_operands(call, seed=2)]
    labels = (call.window, call.dim_labels, call.feature_group_count)
    types = [shape.element_type for shape in call.output_shapes]
    expected = reference.run(call.graph, *labels, operands, types, 1)
    (sums,) = reference.run(SUMS.graph, *labels, operands[:2], ["f32"], 1)
    tensors, maxima = (iter(results) for results in epilogue.finish(sums, operands[2:]))
    for node, wanted in zip((call.graph.output, *call.graph.aux_outputs), expected, strict=True):
        got = next(maxima).astype(wanted.dtype) if node.op == "amax" else next(tensors)
        tolerance = BF16 if wanted.dtype.itemsize == 2 else NEAR
        difference = compare(np.asarray(wanted), np.asarray(got))
        assert tolerance.accepts(difference, np.asarray(wanted).dtype), f"{node.op}: {difference}"


@pytest.mark.parametrize("op", POINTWISE)
def test_every_op(op: str) -> None:
    run(graph_call(f"1:[f32]conv();2:[f32]scale(1);3:[f32]{op}(2);4:[f32]amax(3);5:[f8e4m3fn]invscale(3);"))


def test_vectors_where_ranks_are_not_promoted() -> None:
    call = graph_call("1:[f32]conv();2:[f32]channel_scale(1);3:[f32]bias(2);4:[f8e4m3fn]scale(3);")
    with jax.numpy_rank_promotion("raise"):
        run(call)


@pytest.mark.parametrize("seed", sampled(range(20), 5))
def test_random_graphs(seed: int) -> None:
    run(random_call(seed, groups=(1,), largest=32))


@pytest.mark.parametrize("box", [(1, 8, 16), (2, 8, 8), (1, 2, 64)], ids=str)
@pytest.mark.parametrize("features", [64, 80])
def test_amax_sees_nothing_beside_the_output(
    box: tuple[int, int, int], features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut tiles hold there what the copy engine's zeros give: NaN with an infinity in the filter, sigmoid(0) = 1/2."""

    def iota(dtype: Any, shape: tuple[int, ...], dimension: int, *, layout: Any) -> jax.Array:
        return lax.broadcasted_iota(dtype, shape, dimension)

    monkeypatch.setattr(plgpu, "broadcasted_iota", iota)
    problem = Problem(3, 9, 13, 32, features, 9, 13, taps=(3, 3), padding=(1, 1))
    geometry = Geometry(problem, Config(*box, tile_features=64, tile_channels=32, stages=4))
    parts = kernel._Kernel(geometry, SUMS, blocks=1)
    values = np.random.default_rng(0).normal(size=problem.output_shape).astype(np.float32)
    found = []
    for tile, warpgroup in itertools.product(range(geometry.tiles), range(CONSUMERS)):
        origin = geometry.warpgroup_origin(geometry.origin(tile), warpgroup)
        n, h, w = geometry.warpgroup_box()
        block = np.full((n, h, w, 64), np.nan, np.float32)
        share = values[origin.n :, origin.h :, origin.w :, origin.k :][:n, :h, :w, :64]
        block[tuple(map(slice, share.shape))] = abs(share)
        for first in range(0, 64, parts.columns):
            columns = jnp.asarray(block.reshape(-1, 64)[:, first : first + parts.columns])
            found.append(parts.largest(columns, origin, first, parts.rows_inside(origin)))
    assert jnp.max(jnp.stack(found)) == abs(values).max()
    assert not jnp.isnan(jnp.stack(found)).any()
