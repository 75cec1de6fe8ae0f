"""Makes plain HLO of a rewritten module: its custom calls become calls to what the reference lowers to."""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from xla_fp8 import _jax_compat
from xla_fp8.backends import reference, reference_matmul, reference_quantize
from xla_fp8.graph import Graph, graph_of
from xla_fp8.hlo import HloComputation, HloInstruction, HloModule, parse
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.hlo.opcodes import COMPUTATION_ATTRIBUTES
from xla_fp8.matmul import MatmulCall, matmul_of
from xla_fp8.quantize_call import QuantizeCall, quantize_call_of

_Function = Callable[..., tuple[jax.Array, ...]]
_NAME_RE = re.compile(r"[A-Za-z_][\w.\-]*")


def expand_graph_calls(module: HloModule) -> int:
    """Replaces every graph, matmul and quantize call by a `call` to plain HLO that computes the same result, in place.

    The module then compiles and runs on any platform. The workspace in the result is zeros.

    Before::

        %conv = (f8e4m3fn[1,8,8,32], u8[0]) custom-call(%x, %w, %s), custom_call_target="__cudnn$convForwardGraph", ...

    After::

        %conv = (f8e4m3fn[1,8,8,32], u8[0]) call(%x, %w, %s), to_apply=%conv.reference

    Returns:
        how many calls there were.

    Raises:
        GraphError: a call's string is not a graph, or the graph does not fit the call's operands.
        MatmulError, QuantizeCallError: another call with something that this package does not know.
        HloAttributeError: an operand or result of a type that no array has.
    """
    count = 0
    for computation in module.computations:
        for instruction in computation.instructions:
            if (graph := graph_of(instruction)) is not None:
                _expand(instruction, _of_graph(instruction, graph))
            elif (matmul := matmul_of(instruction)) is not None:
                _expand(instruction, _of_matmul(matmul))
            elif (quantize := quantize_call_of(instruction)) is not None:
                _expand(instruction, _of_quantize(quantize))
            else:
                continue
            count += 1
    return count


def expand_quantize_calls(module: HloModule) -> None:
    """As `expand_graph_calls`, for quantize calls alone: those that no kernel runs are plain operations again."""
    for computation in module.computations:
        for instruction in computation.instructions:
            if (quantize := quantize_call_of(instruction)) is not None:
                _expand(instruction, _of_quantize(quantize))


def _of_graph(call: HloInstruction, graph: Graph) -> _Function:
    types = [shape.element_type for shape in call.shape.tuple_shapes[:-1]]

    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        groups = call.feature_group_count, call.batch_group_count
        return reference.run(graph, call.window, call.dim_labels, groups[0], operands, types, groups[1])

    return run


def _of_matmul(matmul: MatmulCall) -> _Function:
    return lambda *operands: reference_matmul.run(matmul, operands)


def _of_quantize(quantize: QuantizeCall) -> _Function:
    return lambda *operands: reference_quantize.run(quantize, operands)


def _expand(call: HloInstruction, function: _Function) -> None:
    """Puts a `call` in the place of one custom call."""
    computation = call.parent
    assert computation is not None
    body = _merge(_lowered(call, function), call.module, f"{call.name}.reference", before=computation)
    plain = computation.create(
        "call",
        call.shape,
        call.operands,
        name=call.name,
        before=call,
        attributes={"to_apply": f"%{body.name}"},
        metadata_from=call,
    )
    computation.transfer_control_dependencies(call, plain)
    computation.replace(call, plain)


def _lowered(call: HloInstruction, function: _Function) -> HloModule:
    """What `function` lowers to; its root is the call's whole result: outputs, and zeros for the workspace."""

    def run(*operands: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
        outputs = function(*operands)
        if not call.shape.is_tuple:
            return outputs[0]
        rest = call.shape.tuple_shapes[len(outputs) :]
        return (*outputs, *(jnp.zeros(shape.dimensions, numpy_dtype(shape.element_type)) for shape in rest))

    operands = [
        jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            operand.shape.dimensions, numpy_dtype(operand.shape.element_type)
        )
        for operand in call.operands
    ]
    lowered = jax.jit(run, keep_unused=True).lower(*operands)
    # Without metadata: its stack frames would point into this module's tables.
    return parse(_jax_compat.lowered_short_text(lowered))


def _merge(source: HloModule, target: HloModule, name: str, before: HloComputation) -> HloComputation:
    """Moves every computation of `source` into `target` under a free name; returns what was the entry."""
    entry = source.entry
    names: dict[str, str] = {}
    for computation in source.computations:
        wished = name if computation is entry else f"{name}.{computation.name}"
        names[computation.name] = target.unique_computation_name(wished)
        # Callees come first, so what a computation calls has its new name by now.
        for instruction in computation:
            for attribute in COMPUTATION_ATTRIBUTES:
                if (text := instruction.attr(attribute)) is not None:
                    instruction.attributes[attribute] = _NAME_RE.sub(lambda m: names.get(m[0], m[0]), text)
        computation.name = names[computation.name]
        target.add_computation(computation, before=before)
    return entry
