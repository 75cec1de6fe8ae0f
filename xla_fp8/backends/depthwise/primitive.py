"""The primitive of a depthwise convolution and of its gradients: kernels on one Hopper GPU, elsewhere what lax does.

Where it runs is decided when it is lowered, so that a program that was traced on a CPU has kernels on a GPU. The three
parts of a convolution are each other's derivatives (`xla_fp8.backends.depthwise.convolution`), so that one primitive
that is linear in both operands has derivatives of every order, forward and reverse.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from xla_fp8 import _jax_compat
from xla_fp8.backends.depthwise.convolution import OPERANDS, Convolution, Part
from xla_fp8.backends.quantize.request import runs_on
from xla_fp8.backends.triton.device import hopper_gpu

PRIMITIVE = "xla_fp8_depthwise"

depthwise_p = core.Primitive(PRIMITIVE)


def convolve(convolution: Convolution, x: jax.Array, w: jax.Array) -> jax.Array:
    """The convolution of x and w, in the order of dimensions and of the types that it says.

    On one Hopper GPU by kernels where there are; elsewhere exactly what `jax.lax.conv_general_dilated` computes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not convolution.supported.ok or jax.sharding.AxisType.Explicit in mesh.axis_types:
        return convolution.by_lax("output", x, w)
    return _bind(convolution, "output", x, w)


def _bind(convolution: Convolution, part: Part, *operands: jax.Array) -> jax.Array:
    alike = _jax_compat.alike_over_mesh(*operands)
    result: jax.Array = depthwise_p.bind(*alike, convolution=convolution, part=part)  # type: ignore[no-untyped-call]
    return result


def _abstract_eval(first: Any, _: Any, *, convolution: Convolution, part: Part) -> Any:
    return first.update(shape=convolution.shape(part), dtype=convolution.dtype_of(part), weak_type=False)


def _impl(*operands: jax.Array, convolution: Convolution, part: Part) -> jax.Array:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # operation by operation is what the user asked for
        return convolution.by_lax(part, *operands)
    result: jax.Array = _compiled(convolution, part)(*operands)
    return result


@functools.cache
def _compiled(convolution: Convolution, part: Part) -> Any:
    """What runs it outside of any jit."""
    return jax.jit(functools.partial(_bind, convolution, part))


def _transpose(position: int, cotangent: Any, *operands: Any, convolution: Convolution, part: Part) -> jax.Array:
    """The cotangent of the operand at a position: of the three the one that is missing, from the other two."""
    known = {OPERANDS[part][1 - position]: operands[1 - position], part: cotangent}
    wanted = OPERANDS[part][position]
    return _bind(convolution, wanted, *(known[operand] for operand in OPERANDS[wanted]))


def _batch(arguments: Sequence[Any], dims: Sequence[Any], *, convolution: Convolution, part: Part) -> tuple[Any, int]:
    """Images of several examples are more images. A filter for each example, or its gradient, is left to lax."""
    are_images = [operand != "filter" for operand in OPERANDS[part]]
    position = are_images.index(True)
    operand, x = OPERANDS[part][position], arguments[position]
    is_folded = part != "filter" and [dim is not None for dim in dims] == are_images
    folded = convolution.with_batch(x.shape[dims[position]]) if is_folded else None
    if folded is None or not folded.supported.ok:
        return jax.vmap(functools.partial(convolution.by_lax, part), tuple(dims))(*arguments), 0
    at, examples = convolution.batch_dimension(operand), x.shape[dims[position]]
    x = jax.numpy.moveaxis(x, dims[position], at).reshape(folded.shape(operand))
    y = _bind(folded, part, *(x if is_image else a for a, is_image in zip(arguments, are_images, strict=True)))
    at = convolution.batch_dimension(part)
    shape = convolution.shape(part)
    return y.reshape(*shape[:at], examples, *shape[at:]), at


def _lower_lax(context: Any, *operands: Any, convolution: Convolution, part: Part) -> Sequence[Any]:
    return _lowered(context, functools.partial(convolution.by_lax, part), operands)


def _lower_cuda(context: Any, *operands: Any, convolution: Convolution, part: Part) -> Sequence[Any]:
    # XLA's partitioner cannot look into a kernel; and who loads an exported program may have another GPU.
    is_alone = not (_jax_compat.spans_devices(context) or _jax_compat.is_for_export(context))
    kernel = convolution.by_kernel(part) if is_alone and runs_on("cuda").ok else None
    if kernel is None:
        return _lower_lax(context, *operands, convolution=convolution, part=part)
    with hopper_gpu(), jax.enable_x64(False):  # whose offsets would have 64 bits
        return _lowered(context, kernel, operands)


def _lowered(context: Any, function: Any, operands: Sequence[Any]) -> Sequence[Any]:
    # Without what the types of a shard_map say: it is traced outside of that.
    avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in context.avals_in]
    scoped = jax.named_scope(PRIMITIVE)(function)  # so that profiles tell it from other kernels
    found: Sequence[Any] = mlir.lower_fun(scoped, multiple_results=False)(context.replace(avals_in=avals), *operands)
    return found


def _stands_for(equation: Any) -> list[Any]:
    """The convolutions of lax in its place: what a policy of `jax.checkpoint` has an opinion about."""
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in equation.invars]  # type: ignore[no-untyped-call]
    convolution, part = equation.params["convolution"], equation.params["part"]
    jaxpr = jax.make_jaxpr(functools.partial(convolution.by_lax, part))(*avals)
    return [inner for inner in _jax_compat.open_jaxpr(jaxpr).eqns if inner.primitive.name == "conv_general_dilated"]


depthwise_p.def_impl(_impl)  # type: ignore[no-untyped-call]
depthwise_p.def_abstract_eval(_abstract_eval)  # type: ignore[no-untyped-call]
ad.defbilinear(  # type: ignore[no-untyped-call]
    depthwise_p, functools.partial(_transpose, 0), functools.partial(_transpose, 1)
)
batching.primitive_batchers[depthwise_p] = _batch
_jax_compat.save_as(depthwise_p, _stands_for)
mlir.register_lowering(depthwise_p, _lower_lax)
mlir.register_lowering(depthwise_p, _lower_cuda, platform="cuda")
