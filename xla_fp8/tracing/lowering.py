"""How a region lowers: its rewritten module is merged into the caller's, each graph call as its backend lowers it."""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.interpreters import mlir

from xla_fp8 import _jax_compat
from xla_fp8.backends.fastest import FastestBackend
from xla_fp8.backends.registry import missing
from xla_fp8.backends.triton.device import hopper_gpu
from xla_fp8.report import Report
from xla_fp8.tracing import implementation
from xla_fp8.tracing.equations import Jaxpr
from xla_fp8.tracing.errors import FallbackWarning, NotRewrittenError, RegionError
from xla_fp8.tracing.hlo_of_region import Family, dtypes_of
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import fused_cast_p, opaque_region_p, region_p
from xla_fp8.tracing.reporting import check_strict
from xla_fp8.tracing.rewriting import MARK, Rewritten, rewritten
from xla_fp8.tracing.surroundings import apart

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def _lower(
    platform: str, context: Any, *arguments: Any, jaxpr: Jaxpr, options: Options, family: Family | None
) -> Sequence[Any]:
    result: Rewritten | None = None
    implementations: list[Jaxpr] = []
    options = dataclasses.replace(options, is_partitioned=_jax_compat.is_partitioned(context))
    try:
        result = rewritten(jaxpr, options, platform, os.environ.get("XLA_FP8_DUMP_DIR"), family)
        if _jax_compat.is_for_export(context):
            result = _for_export(result)
        implementations = _implementations(platform, context, result, options.is_partitioned, family)
    except Exception as error:  # whatever went wrong, the user's own program is there to fall back to
        why = implementation.told(error)
        if result is not None and not isinstance(error, RegionError):  # which is about this lowering alone
            result.failures.append(why)
        if options.strict:
            raise NotRewrittenError(f"strict=True, and rewriting an FP8 region failed: {why}") from error
        _warn(f"an FP8 region runs as plain JAX, because rewriting it failed: {why}", family)
        result = None
    if result is not None:
        _tell(result.report, options)
        if why := missing(options.backend, platform):
            _warn(f"FP8 chains run as plain JAX: {why}", family)
    if result is None or not result.stablehlo:
        return _lower_plain(context, jaxpr, arguments)
    return _merge(context, result, implementations, arguments)


def _lower_fused_cast(
    platform: str, context: Any, *arguments: Any, jaxpr: Jaxpr, options: Options, family: Family | None
) -> Sequence[Any]:
    """As its kernel on a GPU; as it is where XLA's partitioner comes after, which cannot split it, and in programs for
    `jax.export`, which take no kernels along."""
    if platform != "cuda" or _jax_compat.is_partitioned(context) or _jax_compat.is_for_export(context):
        return _lower_plain(context, jaxpr, arguments)
    made: dict[Any, Jaxpr] = {} if family is None else family.made
    try:
        if jaxpr not in made:
            made[jaxpr] = implementation.of_fused_cast(jaxpr)
        inner = context.replace(avals_in=made[jaxpr].in_avals, avals_out=made[jaxpr].out_avals)
        with apart(dtypes_of(made[jaxpr])), hopper_gpu():
            return _as_typed(context, _jax_compat.lower_jaxpr(inner, made[jaxpr], arguments))
    except Exception as error:
        _warn(f"a norm or activation in front of a cast to FP8 runs as plain JAX: {implementation.told(error)}", family)
        return _lower_plain(context, jaxpr, arguments)


def _tell(report: Report, options: Options) -> None:
    """Says what became of a region that is not as it was when its function was traced. Raises as `check_strict`."""
    if options.tell is not None and options.of_transformation:
        options.tell(report)
    if options.strict:
        check_strict(report)


def _warn(message: str, family: Family | None) -> None:
    """Warns, once for the regions of a family."""
    if family is None or message not in family.warned:
        warnings.warn(f"xla_fp8: {message}", FallbackWarning, stacklevel=3)
    if family is not None:
        family.warned.add(message)


def _for_export(region: Rewritten) -> Rewritten:
    """The region with backends that an exported program can run. Raises RegionError where a graph call has none."""
    backends = tuple(b.portable() if isinstance(b, FastestBackend) else b for b in region.backends)
    for call, backend in zip(region.calls, backends, strict=True):
        if getattr(backend, "needs_python", False):
            raise RegionError(
                f"the {backend.name} backend runs the graph {call.graph} through code that this Python process "
                "registers, which an exported program cannot take along. Export with backend='reference' (plain JAX, "
                "slow) or backend='xla' (the chain is left to XLA)"
            )
    return dataclasses.replace(region, backends=backends)


def _lower_plain(context: Any, jaxpr: Jaxpr, arguments: Sequence[Any]) -> Sequence[Any]:
    """A region as JAX lowers its equations."""
    body = flat(jaxpr)
    plain = _jax_compat.without_contexts(body)
    with apart(dtypes_of(body)):
        if plain is not None:
            results = _jax_compat.lower_jaxpr(context.replace(avals_in=plain.in_avals), plain, arguments)
        else:
            # Without what the types of a shard_map or of explicit axes say: equations are evaluated outside of these.
            avals = [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in context.avals_in]
            rule = mlir.lower_fun(lambda *values: _jax_compat.evaluate_equations(body, values), multiple_results=True)
            results = rule(context.replace(avals_in=avals), *arguments)
    return _as_typed(context, list(results))


def _implementations(
    platform: str, context: Any, region: Rewritten, is_partitioned: bool, family: Family | None
) -> list[Jaxpr]:
    """What the backend of each graph call makes of it; none where the module has the same region already.

    Made before anything of the region is in the module, since a backend may fail: no plan builds, no config agrees.
    """
    if region.name in context.module_context.symbol_table:
        return []
    if why := implementation.wrong_platform(region, platform):
        raise RegionError(why)
    devices = _jax_compat.local_devices_of(context)
    made: dict[Any, Jaxpr] = {} if family is None else family.made
    pairs = zip(region.calls, region.backends, strict=True)
    graphs = [
        implementation.of_graph(call, backend, region.target, is_partitioned, devices, made) for call, backend in pairs
    ]
    matmuls = [implementation.of_matmul(call, fusible=platform == "cuda") for call in region.matmuls]
    return [
        *graphs,
        *matmuls,
        *(implementation.of_quantization(c, platform, is_partitioned) for c in region.quantizations),
        *map(implementation.of_transpose, region.transposes),
    ]


def _merge(
    context: Any, region: Rewritten, implementations: Sequence[Jaxpr], arguments: Sequence[Any]
) -> Sequence[Any]:
    name, symbols = region.name, context.module_context.symbol_table
    if name not in symbols:  # else this module has the same region already
        name, calls = _jax_compat.merge_stablehlo(context, region.stablehlo, name)
        for operation in calls:
            target = mlir.ir.StringAttr(operation.attributes["call_target_name"]).value
            if target.startswith(MARK):
                _replace(context, implementations[int(target.removeprefix(MARK))], operation)
    main = symbols[name]
    call = mlir.ir.Operation.create(
        "func.call",
        results=list(mlir.ir.FunctionType(main.type).results),
        operands=list(arguments),
        attributes={"callee": mlir.ir.FlatSymbolRefAttr.get(name)},
    )
    return _as_typed(context, list(call.results))


def _as_typed(context: Any, results: Sequence[Any]) -> list[Any]:
    """A region's results, sharded as their types say: over explicit axes JAX states that after each operation."""
    avals = context.avals_out
    return [_jax_compat.sharded_as_typed(context, r, aval) for r, aval in zip(results, avals, strict=True)]


def _replace(context: Any, jaxpr: Jaxpr, operation: Any) -> None:
    """Puts what the backend of a marked call makes of it in its place."""
    with mlir.ir.InsertionPoint(operation), operation.location:
        inner = context.replace(
            primitive=None,
            avals_in=jaxpr.in_avals,
            avals_out=jaxpr.out_avals,
            tokens_in=mlir.TokenSet(),
            tokens_out=None,
        )
        with apart(dtypes_of(jaxpr)):
            values = _jax_compat.lower_jaxpr(inner, jaxpr, list(operation.operands))
    results = list(operation.results)
    if len(results) == 1 and not isinstance(results[0].type, mlir.ir.RankedTensorType):
        _replace_tuple(results[0], values)
    else:
        # The last result is the workspace, which nothing reads.
        for result, value in zip(results, values, strict=False):
            result.replace_all_uses_with(value)
    operation.erase()


def _replace_tuple(result: Any, values: Sequence[Any]) -> None:
    """Gives the elements of a tuple to those who took it apart."""
    for use in list(result.uses):
        element = use.owner
        if element.name != "stablehlo.get_tuple_element":
            raise RegionError(f"the result of a graph call goes to a {element.name} as a tuple")
        index = mlir.ir.IntegerAttr(element.attributes["index"]).value
        if index < len(values):
            element.results[0].replace_all_uses_with(values[index])
        element.operation.erase()


for _platform in PLATFORMS:
    # One rule for each platform, so that an export for several of them lowers a region for each.
    for _primitive in (region_p, opaque_region_p):
        mlir.register_lowering(_primitive, functools.partial(_lower, _platform), platform=_platform)
    mlir.register_lowering(fused_cast_p, functools.partial(_lower_fused_cast, _platform), platform=_platform)
