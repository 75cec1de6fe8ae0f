"""Memory for the buffers of a call on the current device, with random operands: what plans are timed on."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from xla_fp8.backends.cudnn import device_context
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.hlo import Shape
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall

_ALIGNMENT = 256  # bytes, as XLA aligns its buffers
_RANDOM = 1 << 16  # elements that differ; more would take longer to make, and no less to compute with


def sizes(call: GraphCall) -> list[int]:
    """Bytes of each operand, then of each result; cuDNN's amax is f32, whatever the call's is."""
    operands = [shape.element_count * numpy_dtype(shape.element_type).itemsize for shape in call.operand_shapes]
    results = [
        4 if shape.is_scalar else shape.element_count * numpy_dtype(shape.element_type).itemsize
        for shape in call.output_shapes
    ]
    return operands + results


@contextlib.contextmanager
def of(call: GraphCall, workspace: int) -> Iterator[list[int]]:
    """Addresses of operands, results and a workspace; empty where the device has no room. Raises CudnnError."""
    rooms = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in (*sizes(call), max(workspace, 1))]
    with device_context.memory(sum(rooms)) as start:
        addresses = [start + offset for offset in itertools.accumulate(rooms[:-1], initial=0)] if start else []
        for address, shape in zip(addresses, call.operand_shapes, strict=False):
            device_context.upload(address, _random(shape))
        yield addresses


def _random(shape: Shape) -> np.ndarray[Any, Any]:
    count = math.prod(shape.dimensions)
    (values,) = random_inputs([Shape.array(shape.element_type, (min(count, _RANDOM),))])
    return np.resize(np.abs(values) if shape.is_scalar else values, count)
