"""The epilogue on whole arrays, as a split reduction runs it: what the reference computes behind the same sums."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8.backends import reference
from xla_fp8.backends.compare import Tolerance, compare
from xla_fp8.backends.example_calls import POINTWISE, graph_call, random_call
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.backends.mosaic.epilogue import SUMS, Epilogue, epilogue_of
from xla_fp8.target import GraphCall

NEAR = Tolerance(1e-5, fp8_share=0.01, fp8_beyond_share=0.0)
BF16 = Tolerance(2.0**-8)


def run(call: GraphCall) -> None:
    epilogue = epilogue_of(call)
    assert isinstance(epilogue, Epilogue)
    operands = [jnp.asarray(array) for array in random_inputs(call.operand_shapes, seed=2)]
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


@pytest.mark.parametrize("seed", range(20))
def test_random_graphs(seed: int) -> None:
    run(random_call(seed, groups=(1,), largest=32))
