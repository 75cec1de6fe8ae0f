"""The reference backend: interprets a graph string with plain JAX ops in f32, on any platform.

It defines what a graph means; the other backends are tested against it. Numerics:

- Input, filter and side operands are converted to f32 (exact for every type but f64); the convolution runs in f32 at
  precision HIGHEST, and every node computes in f32. Node types only matter where a value leaves the graph.
- The output, copies and amax are then stored in their type. A store to FP8 saturates as
  `convert(clamp(-max, value, max))` does in HLO: infinities become the largest finite value, NaN stays NaN. Other types
  round to nearest even and overflow to infinity.
- NaN: every op propagates it. relu, min and max are HLO's maximum and minimum, which return NaN if either side is NaN;
  elu takes its second branch, exp(NaN) - 1. amax is NaN where any element is, so that a scale made of it tells. XLA's
  reduce over maximum means the same, but on a CPU it drops NaN, so amax looks for one by itself.
- scale and invscale are one multiplication or division each, in node order: a zero scale makes NaN of an infinity,
  `invscale` by zero makes infinities, which an FP8 output saturates.
- amax starts from 0, so it is 0 for a tensor without elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from xla_fp8.graph import FP8_MAX, FP8_TYPES, Graph, GraphTypeError, type_check
from xla_fp8.hlo import ConvolutionDimensionNumbers, Shape, Window
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall

Form = Literal["exact", "fusible"]
"""How a graph is written in JAX: in f32, which defines it; or as the chain of which XLA's GPU compiler makes an FP8
convolution of its own, where it can. Of the latter the numbers are XLA's, and no reference."""

_ELEMENT_TYPES = {numpy_dtype(name): name for name in (*FP8_TYPES, "f16", "bf16", "f32", "f64")}


def run(
    graph: Graph | str,
    window: Window,
    dim_labels: ConvolutionDimensionNumbers,
    feature_group_count: int,
    operands: Sequence[jax.Array],
    output_types: Sequence[str] | None = None,
    batch_group_count: int = 1,
    form: Form = "exact",
) -> tuple[jax.Array, ...]:
    """What the custom call of `graph` computes, without the workspace. Can be traced by jit.

    Args:
        graph: the graph, or its string.
        window, dim_labels, feature_group_count, batch_group_count: of the convolution, as on the custom call.
        operands: input, filter, then the side operands in node order: scalars of shape [], vectors [K] (K the number
            of output features), tensors of the output's shape.
        output_types: element types of the results, output first; those of the graph's nodes if None.
        form: see `Form`.

    Returns:
        The output, in the dimension order of `dim_labels`, then the aux outputs in node order.

    Raises:
        GraphStringError: `graph` is text that is not a serialized graph.
        GraphError: the graph has more than one tensor endpoint.
        GraphTypeError: operands or output types that do not fit the graph.
    """
    graph = Graph.parse(graph) if isinstance(graph, str) else graph
    results = (graph.output, *graph.aux_outputs)
    types = [node.type for node in results] if output_types is None else list(output_types)
    if len(types) != len(results):
        raise GraphTypeError(f"{graph} has {len(results)} results, but {len(types)} output types were given")
    values = node_values(graph, window, dim_labels, feature_group_count, operands, batch_group_count, form)
    return tuple(store(values[node.uid], type) for node, type in zip(results, types, strict=True))


def implementation_of(call: GraphCall, form: Form = "exact") -> Callable[..., tuple[jax.Array, ...]]:
    """`run` of a call, as a function of its operands."""
    types = tuple(shape.element_type for shape in call.output_shapes)

    def implementation(*operands: jax.Array) -> tuple[jax.Array, ...]:
        groups = call.feature_group_count
        return run(call.graph, call.window, call.dim_labels, groups, operands, types, form=form)

    return implementation


def node_values(
    graph: Graph,
    window: Window,
    dim_labels: ConvolutionDimensionNumbers,
    feature_group_count: int,
    operands: Sequence[jax.Array],
    batch_group_count: int = 1,
    form: Form = "exact",
) -> dict[int, jax.Array]:
    """The f32 value of every node, by uid, before any is stored. Arguments and errors are those of `run`."""
    operands = [jnp.asarray(operand) for operand in operands]
    shapes = [_shape_of(operand) for operand in operands]
    type_check(graph, shapes)
    groups = feature_group_count, batch_group_count
    convolved = convolution(operands[0], operands[1], window, dim_labels, *groups, form)
    type_check(graph, shapes, Shape.array(graph.output.type, convolved.shape), dim_labels)
    sides = side_values(graph, dim_labels, operands, convolved.ndim)
    values: dict[int, jax.Array] = {graph.nodes[0].uid: convolved}
    ops = _FUSIBLE_OPS if form != "exact" and convolved.size else _OPS
    for node in graph.nodes[1:]:
        values[node.uid] = ops[node.op](*(values[uid] for uid in node.operands), *sides[node.uid])
    return values


def side_values(
    graph: Graph, dim_labels: ConvolutionDimensionNumbers, operands: Sequence[jax.Array], rank: int
) -> dict[int, list[jax.Array]]:
    """The side operands of every node, by uid, in f32 and of a shape that broadcasts with the output's."""
    along_features = [1] * rank
    along_features[dim_labels.output_feature_dimension] = -1
    sides: dict[int, list[jax.Array]] = {node.uid: [] for node in graph}
    for side in graph.side_operands():
        value = jnp.asarray(operands[side.index]).astype(jnp.float32)
        sides[side.node].append(value.reshape(along_features) if side.kind == "vector" else value)
    return sides


def convolution(
    lhs: jax.Array,
    rhs: jax.Array,
    window: Window,
    labels: ConvolutionDimensionNumbers,
    feature_group_count: int,
    batch_group_count: int,
    form: Form = "exact",
) -> jax.Array:
    """HLO's convolution, with a result in f32."""
    lhs, rhs = (lax.convert_element_type(operand, jnp.float32) for operand in (lhs, rhs))
    if form == "exact":
        lhs, window = _padded(lhs, window, labels)
        # On a GPU, XLA would turn a convolution of converted FP8 operands into a cuDNN FP8 graph, and the reference
        # would be the thing that it is to check.
        lhs, rhs = lax.optimization_barrier((lhs, rhs))  # type: ignore[no-untyped-call]
    if not labels.spatial_rank:
        # XLA's own call of an FP8 dot sums in f32 where the precision says so, which is slower.
        return _dot(lhs, rhs, labels, lax.Precision.HIGHEST if form == "exact" else lax.Precision.DEFAULT)
    reversed_dimensions = [d for d, w in zip(labels.kernel_spatial_dimensions, window, strict=True) if w.reversal]
    return lax.conv_general_dilated(
        lhs,
        lax.rev(rhs, reversed_dimensions),
        window_strides=[w.stride for w in window],
        padding=[(w.padding_low, w.padding_high) for w in window],
        lhs_dilation=[w.base_dilation for w in window],
        rhs_dilation=[w.window_dilation for w in window],
        dimension_numbers=lax.ConvDimensionNumbers(
            lhs_spec=(labels.input_batch_dimension, labels.input_feature_dimension, *labels.input_spatial_dimensions),
            rhs_spec=(
                labels.kernel_output_feature_dimension,
                labels.kernel_input_feature_dimension,
                *labels.kernel_spatial_dimensions,
            ),
            out_spec=(
                labels.output_batch_dimension,
                labels.output_feature_dimension,
                *labels.output_spatial_dimensions,
            ),
        ),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _dot(lhs: jax.Array, rhs: jax.Array, labels: ConvolutionDimensionNumbers, precision: lax.Precision) -> jax.Array:
    """A convolution without spatial dimensions, as the dot that it was: XLA's GPU compiler gives it to cuBLASLt."""
    contracted = (labels.input_feature_dimension,), (labels.kernel_input_feature_dimension,)
    y = lax.dot_general(lhs, rhs, (contracted, ((), ())), precision, jnp.float32)
    return y if labels.output == "bf" else y.T


def _padded(lhs: jax.Array, window: Window, labels: ConvolutionDimensionNumbers) -> tuple[jax.Array, Window]:
    """The input with all its zeros, and the window over it, which pads and dilates nothing.

    HLO multiplies the zeros: by infinity to NaN. Given to XLA's CPU as attributes of the convolution they may be left
    out (it swaps operands where the filter is larger than the image), and of a 1-D convolution padded by -1_1 it
    returns what lies behind the input in memory.
    """
    if all(w.padding_low == w.padding_high == w.base_dilation - 1 == 0 for w in window):
        return lhs, window
    added = [(0, 0, 0)] * lhs.ndim
    for dimension, w in zip(labels.input_spatial_dimensions, window, strict=True):
        added[dimension] = (w.padding_low, w.padding_high, w.base_dilation - 1)
    bare = (dataclasses.replace(w, padding_low=0, padding_high=0, base_dilation=1) for w in window)
    return lax.pad(lhs, lax.full((), 0, lhs.dtype), added), Window(tuple(bare))


def _gelu_erf(a: jax.Array) -> jax.Array:
    return (
        0.5 * a * lax.erfc(-a * math.sqrt(0.5))
    )  # 1 + erf(z) = erfc(-z), which stays accurate where erf(z) is near -1


def gelu_tanh(a: jax.Array) -> jax.Array:
    return 0.5 * a * (1 + lax.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a * a * a)))


def amax(a: jax.Array) -> jax.Array:
    """The largest magnitude, from 0; NaN if any element is NaN."""
    largest = jnp.max(jnp.abs(a), initial=0)
    return jnp.where(jnp.isnan(a).any(), jnp.nan, largest)


_OPS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    {
        "scale": lax.mul,
        "invscale": lax.div,
        "add": lax.add,
        "min": lax.min,
        "max": lax.max,
        "relu": lambda a: lax.max(a, jnp.zeros_like(a)),
        "elu": lambda a: lax.select(a > 0, a, lax.expm1(a)),
        "amax": amax,
        "bias": jnp.add,
        "channel_scale": jnp.multiply,
        "add_scaled": lambda a, tensor, scale: a + tensor * scale,
        "clamp": lambda a, low, high: lax.clamp(low, a, high),
        "silu": lambda a: a * lax.logistic(a),
        "gelu_erf": _gelu_erf,
        "gelu_tanh": gelu_tanh,
        "sigmoid": lax.logistic,
        "tanh": lax.tanh,
        "copy": lambda a: a,
    }
)
"""Each op of `xla_fp8.graph.OPS` but conv, on f32 values: operands inside the graph first, then side operands."""

_FUSIBLE_OPS: Mapping[str, Callable[..., jax.Array]] = MappingProxyType(
    # Of a start value XLA makes a kernel of its own behind its convolution; of a dot's gelu it knows this spelling.
    {**_OPS, "amax": lambda a: jnp.max(jnp.abs(a)), "gelu_tanh": jax.nn.gelu}
)


def store(value: jax.Array, type: str) -> jax.Array:
    """`value` in the element type in which it leaves the graph."""
    if type in FP8_MAX:
        largest = jnp.float32(FP8_MAX[type])  # a Python number would be f64 in x64 mode
        value = lax.clamp(-largest, value, largest)
    return lax.convert_element_type(value, numpy_dtype(type))


def _shape_of(operand: jax.Array) -> Shape:
    # A type that no graph has goes on under numpy's name, for type_check to refuse.
    return Shape.array(_ELEMENT_TYPES.get(operand.dtype, operand.dtype.name), operand.shape)
