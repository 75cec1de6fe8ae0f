"""The XLA FFI target that runs a cuDNN graph: a Python function that gets device pointers and XLA's stream.

The target's name carries the graph itself and the plan, so a compiled program that comes out of JAX's persistent cache
runs what it was compiled for. With command buffers the function is called while XLA
records a CUDA graph, and not when the graph runs.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import library, plans
from xla_fp8.backends.cudnn.geometry import major_to_minor
from xla_fp8.backends.protocol import Implementation
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall

TARGET = "xla_fp8.cudnn_graph"


@functools.cache
def target(call: str, plan: str, platform: str = "gpu") -> str:
    """The name of an FFI target that runs `plan` for `call`; makes it known to XLA, once.

    The graph and the plan are in the name, not in attributes of the call: jax-tvm-ffi 0.1.3 frees string attributes
    twice ("malloc(): unaligned tcache chunk detected", seen on an H200 where integer attributes ran). Lowering comes
    before JAX looks into its persistent cache, so a program that comes out of it finds its target.

    Args:
        call: `call_text.encode` of the graph call.
        plan: the plan's name.

    Raises:
        CudnnMissingError: jax-tvm-ffi is not installed.
    """
    tvm_ffi, jax_tvm_ffi = library.tvm_ffi(), library.jax_tvm_ffi()

    def run(*buffers: Any) -> None:
        """What XLA calls with operands, results, and the workspace last."""
        device = buffers[0].device
        stream = tvm_ffi.get_raw_stream(device)
        *tensors, workspace = buffers
        pointers = [tensor.data_ptr() for tensor in tensors]
        plans.on_device(device.index).run(call, plan, pointers, workspace.data_ptr(), stream)

    name = f"{TARGET} {call} {plan}"
    jax_tvm_ffi.register_ffi_target(
        name, tvm_ffi.convert(run), arg_spec=["args", "rets"], platform=platform, allow_cuda_graph=True
    )
    return name


def implementation(call: GraphCall, plan: str, workspace: int, platform: str = "gpu") -> Implementation:
    """A JAX function of input, filter and side operands that calls the target of one plan.

    Tensors are asked for channels-last, whatever the order of their dimensions: XLA puts a transpose where one is
    needed, or, better, has the producer write that layout.

    Args:
        call: the graph call.
        plan: the plan's name.
        workspace: bytes.
        platform: XLA's name of where it runs.

    Raises:
        CudnnMissingError: jax-tvm-ffi is not installed.
    """
    name = target(call_text.encode(call), plan, platform)
    labels = call.dim_labels
    results = (call.graph.output, *call.graph.aux_outputs)
    # cuDNN reduces in f32; a narrower amax is converted behind the call.
    ffi_types = [
        _struct(shape.dimensions, jnp.float32 if node.op == "amax" else numpy_dtype(shape.element_type))
        for node, shape in zip(results, call.output_shapes, strict=True)
    ]
    ffi_types.append(_struct((max(workspace, 1),), jnp.uint8))
    channels_last = major_to_minor(labels.output)
    result_layouts = [() if node.op == "amax" else channels_last for node in results] + [(0,)]
    kinds = [side.kind for side in call.graph.side_operands()]
    operand_layouts = [major_to_minor(labels.lhs), major_to_minor(labels.rhs)]
    operand_layouts += [channels_last if kind == "tensor" else (0,) if kind == "vector" else () for kind in kinds]

    def function(*operands: jax.Array) -> tuple[jax.Array, ...]:
        # The graph asks for scalars and vectors in f32; converting what already is costs nothing.
        wide = [
            operand if kind == "tensor" else operand.astype(jnp.float32)
            for operand, kind in zip(operands, ["tensor", "tensor", *kinds], strict=True)
        ]
        ffi_call = jax.ffi.ffi_call(
            name, ffi_types, input_layouts=operand_layouts, output_layouts=result_layouts, vmap_method="sequential"
        )
        *outputs, _ = ffi_call(*wide)
        return tuple(
            output.astype(numpy_dtype(shape.element_type))
            for output, shape in zip(outputs, call.output_shapes, strict=True)
        )

    return function


def _struct(dimensions: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)  # type: ignore[no-untyped-call]
