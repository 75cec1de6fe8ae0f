"""What stands for a graph or matmul call in the program: the jaxpr that its backend makes, or why there is none."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from xla_fp8 import _jax_compat
from xla_fp8.backends import autotune, reference_matmul, reference_quantize
from xla_fp8.backends.protocol import Backend, Implementation, platforms_of
from xla_fp8.backends.quantize import from_call
from xla_fp8.backends.transpose.primitive import transpose
from xla_fp8.backends.triton.device import hopper_gpu
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.matmul import MatmulCall
from xla_fp8.quantize_call import PlacedQuantizeCall
from xla_fp8.target import GraphCall, Target
from xla_fp8.tracing import fused_cast_problem
from xla_fp8.tracing.equations import Jaxpr
from xla_fp8.tracing.errors import RegionError
from xla_fp8.tracing.partition import partitioned
from xla_fp8.tracing.rewriting import Rewritten
from xla_fp8.tracing.surroundings import apart, dtypes_of_shapes
from xla_fp8.tracing.transposes import TransposeCall

_Call = GraphCall | MatmulCall | PlacedQuantizeCall | TransposeCall


def of_graph(
    call: GraphCall,
    backend: Backend,
    target: Target,
    is_partitioned: bool,
    devices: Sequence[jax.Device],
    made: dict[Any, Jaxpr],
) -> Jaxpr:
    """A graph call as its backend runs it.

    Args:
        is_partitioned: whether XLA's partitioner will split it over devices.
        devices: those of this process that will run it.
        made: what was made of other calls, to be added to: JAX lowers one object once in a module.
    """
    prepare = getattr(backend, "prepare", None)

    def lower(call: GraphCall, will_run: bool = True) -> Implementation:
        config = autotune.config_for(backend, call, target, may_time=False)
        function = backend.lower(call, config)
        if will_run and prepare is not None:
            prepare(call, config, devices)
        return function

    if backend.opaque and is_partitioned:
        # Shards are lowered while XLA compiles, which is no time to run programs; only they will run.
        return _traced(partitioned(call, functools.partial(lower, will_run=False), lower), call)
    config = autotune.config_for(backend, call, target)
    key = call, backend, str(config)
    if key not in made:
        made[key] = _traced(backend.lower(call, config), call)
    if prepare is not None:
        prepare(call, config, devices)
    return made[key]


def of_matmul(call: MatmulCall, fusible: bool) -> Jaxpr:
    """A matmul call in plain JAX; for XLA's GPU compiler as the chain of which it makes that call itself."""
    run = functools.partial(reference_matmul.run, call, fusible=fusible)
    return _traced(lambda *operands: run(operands), call)


def of_quantization(call: PlacedQuantizeCall, platform: str, is_partitioned: bool) -> Jaxpr:
    """A quantize call as kernels run it; plain JAX where XLA's partitioner, which cannot split them, comes after."""
    if is_partitioned:
        return _traced(lambda *operands: reference_quantize.run(call.call, operands), call)
    return _traced(lambda *operands: from_call.run(call.call, operands, platform), call)


def of_transpose(call: TransposeCall) -> Jaxpr:
    """A transpose as a kernel makes it on one GPU, and lax elsewhere."""
    return _traced(lambda x: (transpose(x, call.permutation, call.mirrored),), call)


def of_fused_cast(jaxpr: Jaxpr) -> Jaxpr:
    """A cast with what is in front of it, as its kernel computes it on a GPU. Raises where Triton cannot."""
    function = jax.jit(fused_cast_problem.implementation(jaxpr))
    avals = [jax.core.ShapedArray(a.shape, a.dtype) for a in jaxpr.in_avals]
    with apart(aval.dtype for aval in avals), hopper_gpu():
        # In a module of its own first: what fails halfway would leave half a function in the caller's.
        function.trace(*avals).lower(lowering_platforms=("cuda",))
        return _jax_compat.trace(function, avals, "xla_fp8_fused_cast")


def _traced(implementation: Callable[..., Any], call: _Call) -> Jaxpr:
    operands = call.operand_shapes
    avals = [jax.core.ShapedArray(s.dimensions, numpy_dtype(s.element_type)) for s in operands]

    def named(*values: Any) -> tuple[Any, ...]:
        with jax.named_scope(scope(call)):
            return tuple(implementation(*values))

    with apart(dtypes_of_shapes((*operands, *call.output_shapes))):
        jaxpr = _jax_compat.trace(named, avals, "xla_fp8_call")
    wanted = [(s.dimensions, numpy_dtype(s.element_type)) for s in call.output_shapes]
    if [(aval.shape, aval.dtype) for aval in jaxpr.out_avals] != wanted:  # the program would be none
        returned = ", ".join(f"{aval.dtype}{list(aval.shape)}" for aval in jaxpr.out_avals)
        results = ", ".join(map(str, call.output_shapes))
        raise RegionError(f"the backend's function returns ({returned}), and the call has the results ({results})")
    return jaxpr


def scope(call: _Call) -> str:
    """What a profiler shows of a call, as part of the op_name of all that it is made of."""
    if isinstance(call, PlacedQuantizeCall):
        return "xla_fp8/quantize"
    if isinstance(call, TransposeCall):
        return "xla_fp8/transpose"
    if isinstance(call, MatmulCall):
        name, steps = "matmul", call.steps
    else:
        name, steps = "conv_graph", tuple(node.op for node in call.graph if node.op != "conv")
    return f"xla_fp8/{name}[{','.join(steps)}]" if steps else f"xla_fp8/{name}"


def wrong_platform(region: Rewritten, platform: str) -> str:
    """Why the backends of a region do not run on a platform ("cpu", "cuda", ...); "" where they do."""
    for backend in region.backends:
        platforms = platforms_of(backend)
        if platforms is not None and platform not in platforms:
            return (
                f"the {backend.name} backend runs on {', '.join(platforms)}, and this program is lowered for "
                f"{platform}; backend='auto' picks one that runs there"
            )
    return ""


def failure(region: Rewritten) -> str:
    """What fails, or has failed, when a region is lowered; "" where nothing is known to.

    Kernels are not tried: to make one takes its time, and may take a device.
    """
    if region.failures:
        return region.failures[-1]
    pairs: Iterable[tuple[GraphCall, Any]] = zip(region.calls, region.backends, strict=True)
    tried = (_tried(call, backend, region.target) for call, backend in pairs if not backend.opaque)
    return next(filter(None, tried), "")


@functools.lru_cache(maxsize=1024)
def _tried(call: GraphCall, backend: Backend, target: Target) -> str:
    try:
        _traced(backend.lower(call, autotune.config_for(backend, call, target, may_time=False)), call)
    except Exception as error:  # a backend may raise anything
        return told(error)
    return ""


def told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
