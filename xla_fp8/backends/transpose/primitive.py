"""The primitive of such a transpose: the kernel on one Hopper GPU, elsewhere what lax does; bit for bit the same.

Where it runs is decided when it is lowered, so that a program that was traced on a CPU has kernels on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from xla_fp8 import _jax_compat
from xla_fp8.backends.quantize.request import runs_on
from xla_fp8.backends.transpose.exchange import kernel_exchange
from xla_fp8.backends.triton.device import hopper_gpu

PRIMITIVE = "xla_fp8_transpose"

transpose_p = core.Primitive(PRIMITIVE)


def transpose(x: jax.Array, permutation: Sequence[int], mirrored: Sequence[int] = ()) -> jax.Array:
    """`lax.rev(x, mirrored).transpose(permutation)`, by a kernel where there is one that is faster than XLA's."""
    if kernel_exchange(x.shape, permutation, x.dtype, mirrored) is None:
        return _by_lax(x, permutation, mirrored)
    return _bind(x, permutation=tuple(permutation), mirrored=tuple(mirrored))


def _bind(x: jax.Array, **params: Any) -> jax.Array:
    result: jax.Array = transpose_p.bind(x, **params)  # type: ignore[no-untyped-call]
    return result


def _by_lax(x: jax.Array, permutation: Sequence[int], mirrored: Sequence[int]) -> jax.Array:
    return lax.transpose(lax.rev(x, mirrored) if mirrored else x, permutation)


def _abstract_eval(x: Any, *, permutation: tuple[int, ...], mirrored: tuple[int, ...]) -> Any:
    return x.update(shape=tuple(x.shape[dimension] for dimension in permutation))


def _impl(x: jax.Array, **params: Any) -> jax.Array:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # operation by operation is what the user asked for
        return _by_lax(x, **params)
    result: jax.Array = _compiled(**params)(x)
    return result


@functools.cache
def _compiled(**params: Any) -> Any:
    """What runs it outside of any jit."""
    return jax.jit(functools.partial(_bind, **params))


def _transpose(cotangent: Any, _: Any, *, permutation: tuple[int, ...], mirrored: tuple[int, ...]) -> list[jax.Array]:
    back = lax.transpose(cotangent, np.argsort(permutation))
    return [lax.rev(back, mirrored) if mirrored else back]


def _batch(
    arguments: Sequence[Any], dims: Sequence[Any], *, permutation: tuple[int, ...], mirrored: tuple[int, ...]
) -> tuple[jax.Array, int]:
    (x,), (dim,) = arguments, dims
    others = [d for d in range(x.ndim) if d != dim]
    return transpose(x, (dim, *(others[d] for d in permutation)), [others[d] for d in mirrored]), 0


def _lower_lax(context: Any, x: Any, **params: Any) -> Sequence[Any]:
    return _lowered(context, functools.partial(_by_lax, **params), x)


def _lower_cuda(context: Any, x: Any, **params: Any) -> Sequence[Any]:
    # XLA's partitioner cannot look into a kernel; and who loads an exported program may have another GPU.
    is_alone = not (_jax_compat.spans_devices(context) or _jax_compat.is_for_export(context))
    (aval,), (result,) = context.avals_in, context.avals_out
    exchange = kernel_exchange(aval.shape, dtype=aval.dtype, **params)
    if exchange is None or not is_alone or not runs_on("cuda").ok:
        return _lower_lax(context, x, **params)
    # Pallas is imported where a kernel runs, and not with all of tracing.
    from xla_fp8.backends.transpose import kernel

    with hopper_gpu(), jax.enable_x64(False):  # whose offsets would have 64 bits
        return _lowered(context, lambda x: kernel.run(exchange, x).reshape(result.shape), x)


def _lowered(context: Any, function: Any, x: Any) -> Sequence[Any]:
    # Without what the types of a shard_map say: it is traced outside of that.
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in context.avals_in]
    scoped = jax.named_scope(PRIMITIVE)(function)  # so that profiles tell it from other kernels
    found: Sequence[Any] = mlir.lower_fun(scoped, multiple_results=False)(context.replace(avals_in=avals), x)
    return found


transpose_p.def_impl(_impl)  # type: ignore[no-untyped-call]
transpose_p.def_abstract_eval(_abstract_eval)  # type: ignore[no-untyped-call]
ad.deflinear2(transpose_p, _transpose)  # type: ignore[no-untyped-call]
batching.primitive_batchers[transpose_p] = _batch
mlir.register_lowering(transpose_p, _lower_lax)
mlir.register_lowering(transpose_p, _lower_cuda, platform="cuda")
