"""The graph string as code on the accumulator: everything behind the convolution, in one pass, in f32.

`Epilogue` says what the kernel has to bring (scalars, vectors, tensors) and to store (tensors, amax); `evaluate`
computes a block of it. Values are what `xla_fp8.backends.reference` computes, up to the rounding of f32:

- scales in a row are multiplied first and applied once, and `invscale` multiplies by the reciprocal;
- what has an exponential in it is written with one exponential and one reciprocal, which in the kernel are single
  instructions (errors of 2^-22, denormals are 0): tanh(a) = 1 - 2 / (1 + exp(2 a)), elu(a) = exp(a) - 1. Both have an
  absolute error of 1e-7 near 0, far less than what the tensor core's sum has;
- gelu_erf is (1 + erf), which loses digits far below 0, where the result is near 0.

NaN goes through every op, as in the reference. A store to FP8 saturates: the conversion instruction does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xla_fp8.backends.mosaic.configs import Footprint
from xla_fp8.backends.protocol import No
from xla_fp8.graph import Graph, Node
from xla_fp8.graph.ops import SideKind
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall

_TENSOR_TYPES = ("f8e4m3fn", "f8e5m2", "bf16", "f16", "f32")
"""Element types of what is stored and of side tensors."""

Unary = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A side operand: its kind, and its element type (scalars and vectors are read as f32)."""

    kind: SideKind
    type: str


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """A graph and the types around it.

    Attributes:
        sides: the side operands, in the order of the custom call.
        outputs: element types of the tensors that are stored: the output, then the copies in node order.
    """

    graph: Graph
    sides: tuple[Side, ...]
    outputs: tuple[str, ...]

    @property
    def scalars(self) -> tuple[int, ...]:
        """Positions in `sides` of the scalars."""
        return self._of_kind("scalar")

    @property
    def vectors(self) -> tuple[int, ...]:
        return self._of_kind("vector")

    @property
    def tensors(self) -> tuple[int, ...]:
        return self._of_kind("tensor")

    @property
    def amax_count(self) -> int:
        return sum(node.op == "amax" for node in self.graph)

    @property
    def output_dtypes(self) -> tuple[Any, ...]:
        return tuple(numpy_dtype(type) for type in self.outputs)

    @property
    def tensor_dtypes(self) -> tuple[Any, ...]:
        return tuple(numpy_dtype(self.sides[i].type) for i in self.tensors)

    @property
    def footprint(self) -> Footprint:
        return Footprint(
            tuple(dtype.itemsize for dtype in self.output_dtypes),
            tuple(dtype.itemsize for dtype in self.tensor_dtypes),
            len(self.vectors),
            self.amax_count > 0,
            sum(_SPECIAL.get(node.op, 0) for node in self.graph),
        )

    def _of_kind(self, kind: SideKind) -> tuple[int, ...]:
        return tuple(i for i, side in enumerate(self.sides) if side.kind == kind)

    def finish(
        self, sums: jax.Array, sides: Sequence[jax.Array]
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """The epilogue on whole arrays, in XLA, where the kernel only stores sums: the tensors, and the amaxes."""

        def side(i: int) -> jax.Array:
            value = sides[i].astype(jnp.float32)
            # By hand, as `jax_numpy_rank_promotion` may forbid that "+" does it.
            return lax.broadcast_in_dim(value, sums.shape, (sums.ndim - 1,)) if i in self.vectors else value

        tensors, magnitudes, factors = self.evaluate(sums, side, store=saturating)
        return tensors, tuple(jnp.max(block) * factor for block, factor in zip(magnitudes, factors, strict=True))

    def evaluate(
        self,
        accumulator: jax.Array,
        side: Callable[[int], jax.Array],
        store: Callable[[jax.Array, Any], jax.Array] = lambda value, dtype: value.astype(dtype),
        reciprocal: Unary = lambda value: 1.0 / value,
    ) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[jax.Array | float, ...]]:
        """Computes a block.

        Args:
            accumulator: f32 [rows, columns].
            side: the f32 value of side operand `i` of `sides` for this block: a scalar, or [rows, columns].
            store: the conversion to the type of an output; in a kernel, one to FP8 saturates by itself.
            reciprocal: of values of at least 1, infinity included.

        Returns:
            The tensors to store, each in its type; for each amax an f32 block, and a factor of 0 or more. The amax is
            the largest value of all blocks times the factor: scales need not be multiplied in element by element, as
            max |a s| = |s| max |a|, rounded or not.
        """
        values: dict[int, _Value] = {self.graph.nodes[0].uid: _Value(accumulator)}
        used = iter(range(len(self.sides)))
        for node in self.graph.nodes[1:]:
            operands = [values[uid] for uid in node.operands]
            sides = [side(next(used)) for _ in node.spec.sides_for(len(node.operands))]
            values[node.uid] = _apply(node, operands, sides, reciprocal)
        stored = [self.graph.output, *(node for node in self.graph if node.op == "copy")]
        tensors = tuple(
            store(values[node.uid].plain(), dtype) for node, dtype in zip(stored, self.output_dtypes, strict=True)
        )
        seen = [values[node.uid] for node in self.graph if node.op == "amax"]
        factors = tuple(1.0 if value.scale is None else jnp.abs(value.scale) for value in seen)
        return tensors, tuple(jnp.abs(value.block) for value in seen), factors


@dataclasses.dataclass(frozen=True)
class _Value:
    """A block times a scalar that is not yet multiplied in: a chain of scales costs one multiplication."""

    block: jax.Array
    scale: jax.Array | None = None

    def scaled(self, by: jax.Array) -> _Value:
        return _Value(self.block, by if self.scale is None else self.scale * by)

    def plain(self) -> jax.Array:
        return self.block if self.scale is None else self.block * self.scale


def saturating(value: jax.Array, dtype: Any) -> jax.Array:
    """The conversion to the type of a result outside the kernel: as one to FP8 does there, it saturates."""
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
        value = jnp.clip(value, -largest, largest)
    return value.astype(dtype)


SUMS = Epilogue(Graph.parse("1:[f32]conv();"), (), ("f32",))
"""No epilogue: what the kernel runs where the reduction is split."""


def _apply(node: Node, operands: list[_Value], sides: list[jax.Array], reciprocal: Unary) -> _Value:
    if node.op == "scale":
        return operands[0].scaled(sides[0])
    if node.op == "invscale":
        return operands[0].scaled(1.0 / sides[0])
    if node.op in ("amax", "copy"):
        return operands[0]
    values = [operand.plain() for operand in operands]
    if node.op in _WITH_RECIPROCAL:
        return _Value(_WITH_RECIPROCAL[node.op](values[0], reciprocal))
    return _Value(_OPS[node.op](*values, *sides))


def _elu(a: jax.Array) -> jax.Array:
    return jnp.where(a > 0, a, lax.exp(a) - 1.0)


def _gelu_erf(a: jax.Array) -> jax.Array:
    return 0.5 * a * (1.0 + lax.erf(a * math.sqrt(0.5)))


def _sigmoid(a: jax.Array, reciprocal: Unary) -> jax.Array:
    return reciprocal(1.0 + lax.exp(-a))


def _tanh(a: jax.Array, reciprocal: Unary) -> jax.Array:
    return 1.0 - 2.0 * reciprocal(1.0 + lax.exp(2.0 * a))


def _gelu_tanh(a: jax.Array, reciprocal: Unary) -> jax.Array:
    # (1 + tanh(b)) / 2 is sigmoid(2 b).
    return a * _sigmoid(2.0 * math.sqrt(2 / math.pi) * (a + 0.044715 * a * a * a), reciprocal)


_WITH_RECIPROCAL: Mapping[str, Callable[[jax.Array, Unary], jax.Array]] = MappingProxyType(
    {
        "silu": lambda a, reciprocal: a * _sigmoid(a, reciprocal),
        "gelu_tanh": _gelu_tanh,
        "sigmoid": _sigmoid,
        "tanh": _tanh,
    }
)
"""Ops of one f32 block that end with a reciprocal."""

_OPS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {
        "add": lambda a, b: a + b,
        "min": jnp.minimum,
        "max": jnp.maximum,
        "relu": lambda a: jnp.maximum(a, 0.0),
        "elu": _elu,
        "bias": lambda a, b: a + b,
        "channel_scale": lambda a, b: a * b,
        "add_scaled": lambda a, tensor, scale: a + tensor * scale,
        "clamp": lambda a, low, high: jnp.minimum(jnp.maximum(a, low), high),
        "gelu_erf": _gelu_erf,
    }
)
"""The other ops that are neither a scale nor an aux output, on f32 blocks."""


_SPECIAL: Mapping[str, int] = MappingProxyType(
    {"elu": 1, "silu": 2, "gelu_tanh": 2, "sigmoid": 2, "tanh": 2, "gelu_erf": 2}
)
"""Exponentials and reciprocals for each element; erf takes about as long as two."""


def epilogue_of(call: GraphCall) -> Epilogue | No:
    """The epilogue of a call, or why the kernel has none for it."""
    graph = call.graph
    sides = []
    for side in graph.side_operands():
        type = call.operand_shapes[side.index].element_type
        if side.kind == "tensor" and type not in _TENSOR_TYPES:
            return No(f"the kernel adds tensors of {', '.join(_TENSOR_TYPES)}, and {side.op} has one of {type}")
        sides.append(Side(side.kind, type))
    results = (graph.output, *graph.aux_outputs)
    types = []
    for node, shape in zip(results, call.output_shapes, strict=True):
        if node.op == "amax":
            continue
        if shape.element_type not in _TENSOR_TYPES:
            return No(f"the kernel stores {', '.join(_TENSOR_TYPES)}, not {shape.element_type}")
        types.append(shape.element_type)
    unknown = {node.op for node in graph.nodes[1:]} - {*_OPS, *_WITH_RECIPROCAL, "scale", "invscale", "amax", "copy"}
    if unknown:
        return No(f"the kernel does not know the op {' or '.join(sorted(unknown))}")
    return Epilogue(graph, tuple(sides), tuple(types))
