"""Quantize calls that the kernels run: what a call asks for, as a request whose rule is the call's own arithmetic.

    x ─┬─ convert ─ multiply or divide by a scalar ─ store     in f32; a copy in either order, or both
       └─ amax ─ scalar arithmetic ...                         the scalar: of the amax alone, or of operands alone

What else a call computes are scalars, which XLA makes of the amax.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Literal

import jax
import numpy as np

from xla_fp8.backends import reference_quantize
from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import choice
from xla_fp8.graph import FP8_MAX
from xla_fp8.hlo import Shape
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.quantize_call import Node, QuantizeCall

if TYPE_CHECKING:
    from xla_fp8.backends.quantize.atomic import Atomic
    from xla_fp8.backends.quantize.reduction import Reduction

Layout = Literal["row", "transposed", "both"]

_LAYOUTS: dict[frozenset[str], Layout] = {
    frozenset({"store"}): "row",
    frozenset({"store_transposed"}): "transposed",
    frozenset({"store", "store_transposed"}): "both",
}


@dataclasses.dataclass(frozen=True)
class CallRule:
    """The arithmetic of a call, as `request.Rule` has it. Hashable.

    Attributes:
        call: whose scalars are computed from an amax.
        dtype: that is stored.
        factor: the node that every element is multiplied or divided by.
        divides: which of the two.
    """

    call: QuantizeCall
    dtype: np.dtype[np.generic]
    factor: int
    divides: bool

    keeps_nan: ClassVar[bool] = False

    @property
    def largest(self) -> float:
        return next(FP8_MAX[node.type] for node in self.call.results if node.op != "result")

    def of_amax(self, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(factor, factor): the scale, if there is one, is a result of the call like others."""
        factor = reference_quantize.scalars(self.call, amax)[self.factor]
        return factor, factor

    def of_scale(self, scale: jax.Array) -> jax.Array:
        return scale

    def scaled(self, x: jax.Array, factor: jax.Array) -> jax.Array:
        return x / factor if self.divides else x * factor


@dataclasses.dataclass(frozen=True)
class CallRequest:
    """A call as `request.Request` has it. Hashable."""

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    rule: CallRule
    layout: Layout
    given: Literal["", "scale"]
    wants_amax: bool
    platform: str
    kept: tuple[int, ...] = ()


def request_of(call: QuantizeCall, x: Shape, platform: str) -> CallRequest | No:
    """What a call asks of the kernels for an x of that shape; or why none of them does that."""
    stores = [node for node in call.results if node.op != "result"]
    scaled = call.nodes[stores[0].operands[0] - 1]
    if any((node.operands, node.type) != (stores[0].operands, stores[0].type) for node in stores):
        return No("it stores several tensors")
    if scaled.op not in ("multiply", "divide") or scaled.type != "f32":
        return No("it stores what is not scaled by one f32 number")
    tensor, factor = scaled.operands
    if scaled.op == "multiply" and not call.is_tensor(tensor):
        tensor, factor = factor, tensor
    if call.is_tensor(factor) or not _is_x(call, tensor):
        return No("it stores what is not x times or by one number")
    needed = _needed(call, factor)
    sources = {node.op for node in needed if node.op in ("amax", "scalar", "reduce_max", "reduce_min")}
    amaxes = [node for node in call.nodes if node.op == "amax"]
    if not all(_is_x(call, node.operands[0]) for node in amaxes) or any(n.op.startswith("reduce_") for n in call.nodes):
        return No("it reduces something else than |x| by a maximum")
    if sources not in ({"amax"}, {"scalar"}):
        return No("what it scales by is neither of the amax alone nor of operands alone")
    return CallRequest(
        x.dimensions,
        numpy_dtype(x.element_type),
        CallRule(call, numpy_dtype(stores[0].type), factor, scaled.op == "divide"),
        _LAYOUTS[frozenset(node.op for node in stores)],
        "" if sources == {"amax"} else "scale",
        bool(amaxes),
        platform,
    )


def runs(call: QuantizeCall, x: Shape, platform: str) -> bool:
    """Whether kernels run the call, and faster than XLA its chain."""
    request = request_of(call, x, platform)
    return not isinstance(request, No) and _algorithm(request) is not None


def run(call: QuantizeCall, operands: Sequence[jax.Array], platform: str) -> tuple[jax.Array, ...]:
    """The results of a call: by kernels where it `runs` on them, else by plain JAX."""
    x, *given = operands
    shape = Shape.array(call.nodes[0].type, x.shape)
    request = request_of(call, shape, platform)
    if isinstance(request, No) or (algorithm := _algorithm(request)) is None:
        return reference_quantize.run(call, operands)
    scale = reference_quantize.scalars(call, None, given)[request.rule.factor] if request.given else None
    row, transposed, _, amax = algorithm.run(request, x, scale)
    scalars = reference_quantize.scalars(call, amax, given)
    copies = {"store": row, "store_transposed": transposed}
    return tuple(copies[n.op] if n.op in copies else scalars[n.operands[0]] for n in call.results)  # type: ignore[misc]


def _algorithm(request: CallRequest) -> Atomic | Reduction | None:
    """The kernels that are the fastest for a request; None where XLA's chain is."""
    name = choice.fastest(request)
    return None if name is None else _algorithms().get(name)


@functools.cache
def _algorithms() -> Mapping[str, Atomic | Reduction]:
    # Pallas is imported where a kernel runs, and not with all of tracing.
    from xla_fp8.backends.quantize.atomic import Atomic
    from xla_fp8.backends.quantize.reduction import Reduction
    from xla_fp8.backends.quantize.two_kernels import Settings

    # XLA computes the scalars between the kernels: whatever a call does with an amax that is NaN, or with narrow types,
    # is then what XLA does with it.
    separate = Settings("separate")
    return MappingProxyType({"atomic": Atomic(settings=separate), "reduction": Reduction(settings=separate)})


def _is_x(call: QuantizeCall, uid: int) -> bool:
    """Whether a node is x, or x in f32."""
    node = call.nodes[uid - 1]
    return node.op == "x" if node.op != "convert" else node.type == "f32" and call.nodes[node.operands[0] - 1].op == "x"


def _needed(call: QuantizeCall, uid: int) -> list[Node]:
    """The scalar nodes that a scalar is made of, itself among them; of tensors only their reductions."""
    found: dict[int, Node] = {}
    waiting = [uid]
    while waiting:
        node = call.nodes[waiting.pop() - 1]
        if node.uid not in found:
            found[node.uid] = node
            waiting += [operand for operand in node.operands if not call.is_tensor(operand)]
    return list(found.values())
