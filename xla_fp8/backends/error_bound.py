"""How far from the f32 reference a graph call may come out, element by element: a bound that no one tuned.

An FP8 tensor core multiplies exactly and adds up inexactly: within one instruction every addend, and the sum so far, is
aligned to the largest of them and cut off 13 bits behind its leading one (Hopper: DeepSeek-V3 technical report, section
3.5.2: of 32 aligned products the highest 14 bits are added). Each of the n addends so loses between nothing and `unit`
times the largest magnitude, in the direction of zero. The largest is about the sum so far: for addends in random order
a random walk beside a drift, at most r = sqrt(sum of (x*w)^2) beside k/n of the sum s itself. Its root mean square over
all k is m = sqrt(r^2 + s^2 / 3). r^2 is a convolution of squares.

A loss has the sign of its addend. Losses of random signs are, by Azuma's and Hoeffding's inequality, beyond
DEVIATIONS * unit * sqrt(n) * m together with a probability of less than 1e-9. Where d more addends are positive than
negative, or negative than positive, the losses of that many have no counterpart, and add d * unit * m: little for most
operands, n for numbers of one sign. d is a convolution of signs.

Added to a sum in f32 after every p products, m is that of p of n products: r shrinks by sqrt(p / n), s by p / n.

From the convolution the error goes through the graph: each op passes on its operand's, times how steep the op can be,
and adds its own rounding. An output is right if it lies between what the two ends of the interval round to; so a store
to FP8 needs no tolerance of its own, be it near zero, beside a rounding boundary or where it saturates.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8.backends import reference
from xla_fp8.graph import FP8_MAX, Node
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall

Array = np.ndarray[Any, Any]

DEVIATIONS = math.sqrt(2 * math.log(2 / 1e-9))
"""Of a sum of errors: 2 * exp(-DEVIATIONS^2 / 2) is 1e-9."""

ROUNDING = 2.0**-22
"""Of an f32 operation, relative to its result (of a sum: and to its first operand). Division on a GPU may be two units
off."""

APPROXIMATION = 2.0**-11
"""Of tanh, relative to its result: what is allowed for a GPU's approximate instruction. The other activations are made
of it, or of instructions that are more exact."""


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Where products are added up.

    Attributes:
        unit: what an addition loses at most, relative to the largest addend.
        promoted: after how many products the sum so far is added to one in f32, which loses next to nothing; infinite
            where the whole sum is made in one accumulator.
        truncates: cuts off towards zero, and does not round to nearest.
    """

    unit: float
    promoted: float = math.inf
    truncates: bool = False


F32 = Accumulator(2.0**-24)
TENSOR_CORE = Accumulator(2.0**-13, truncates=True)
"""Hopper's FP8 tensor core: cuDNN's kernels, and the Mosaic kernel at precision "default"."""


@dataclasses.dataclass(frozen=True)
class Interval:
    """A result of a graph call before it is stored, and how far from it a kernel's may be.

    Attributes:
        value: in f32.
        error: of each element, not negative; of no meaning where `value` is not finite.
        type: the element type in which it is stored.
    """

    value: Array
    error: Array
    type: str

    @property
    def stored(self) -> Array:
        """`value` as the reference stores it."""
        return _stored(self.value, self.type)

    def outside(self, output: Array) -> Array:
        """Which elements of a kernel's output lie beyond the bound: booleans.

        What the reference makes NaN or infinite must come out so (an infinity saturated, in FP8).
        """
        stored, given = self.stored.astype(np.float64), output.astype(np.float64)
        value, error = self.value.astype(np.float64), self.error.astype(np.float64)
        with np.errstate(all="ignore"):
            lowest = _stored(value - error, self.type).astype(np.float64)
            highest = _stored(value + error, self.type).astype(np.float64)
            same = (given == stored) | (np.isnan(given) & np.isnan(stored))
            within = np.isfinite(value) & (lowest <= given) & (given <= highest)
        return np.asarray(~(same | within))


def intervals(call: GraphCall, operands: Sequence[Any], accumulator: Accumulator) -> list[Interval]:
    """What the reference computes for `call`, and how far from it a kernel with `accumulator` may be.

    Runs on JAX's default device. Raises what `reference.run` raises.
    """
    types = [shape.element_type for shape in call.output_shapes]
    results = (call.graph.output, *call.graph.aux_outputs)

    def run(*operands: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        values, errors = _values_and_errors(call, operands, accumulator)
        return [(values[node.uid], errors[node.uid]) for node in results]

    return [
        Interval(np.asarray(value), np.asarray(error), type)
        for (value, error), type in zip(jax.jit(run)(*operands), types, strict=True)
    ]


def _values_and_errors(
    call: GraphCall, operands: Sequence[jax.Array], accumulator: Accumulator
) -> tuple[dict[int, jax.Array], dict[int, jax.Array]]:
    graph, labels = call.graph, call.dim_labels
    values = reference.node_values(graph, call.window, labels, call.feature_group_count, operands)
    errors = {graph.nodes[0].uid: _error_of_sums(call, operands, values[graph.nodes[0].uid], accumulator)}
    sides = reference.side_values(graph, labels, operands, len(call.output_shapes[0].dimensions))
    for node in graph.nodes[1:]:
        inside = [(values[uid], errors[uid]) for uid in node.operands]
        errors[node.uid] = _error(node, values[node.uid], inside, sides[node.uid])
    return values, errors


def _error_of_sums(
    call: GraphCall, operands: Sequence[jax.Array], sums: jax.Array, accumulator: Accumulator
) -> jax.Array:
    """The error of the convolution itself: see the head of this file, whose names these are."""

    def convolution(of: Callable[[jax.Array], jax.Array]) -> jax.Array:
        lhs, rhs = (of(operand.astype(jnp.float32)) for operand in operands[:2])
        return reference.convolution(lhs, rhs, call.window, call.dim_labels, call.feature_group_count, 1)

    filter_shape = call.operand_shapes[1]
    n = math.prod(filter_shape.dimensions) // filter_shape.dimensions[call.dim_labels.kernel_output_feature_dimension]
    r, s = jnp.sqrt(convolution(jnp.square)), jnp.abs(sums)
    d = jnp.abs(convolution(jnp.sign)) if accumulator.truncates else 0

    def m(share: float) -> jax.Array:
        return jnp.hypot(math.sqrt(share) * r, share * s / math.sqrt(3))

    random = DEVIATIONS * math.sqrt(n)
    return accumulator.unit * (random + d) * m(min(1.0, accumulator.promoted / n)) + F32.unit * random * m(1.0)


def _error(
    node: Node, value: jax.Array, inside: Sequence[tuple[jax.Array, jax.Array]], sides: Sequence[jax.Array]
) -> jax.Array:
    """The error of a node, from (value, error) of its operands in the graph and its side operands."""
    operand, error = inside[0]
    match node.op:
        case "relu" | "min" | "max" | "clamp" | "copy":  # these choose a number and round nothing
            return functools.reduce(jnp.maximum, (e for _, e in inside))
        case "amax":
            magnitude = jnp.abs(operand)
            highest, lowest = jnp.max(magnitude + error, initial=0), jnp.max(magnitude - error, initial=0)
            return jnp.maximum(highest - value, value - lowest)
        case "scale" | "channel_scale":
            passed = error * jnp.abs(sides[0])
        case "invscale":
            passed = error / jnp.abs(sides[0])
        case "add" | "bias" | "add_scaled":
            passed = sum((e for _, e in inside[1:]), error) + ROUNDING * jnp.abs(operand)
        case "sigmoid":
            return error / 4 + APPROXIMATION / 2
        case "tanh":
            return error + APPROXIMATION * jnp.abs(value)
        case "elu":
            return error + ROUNDING * jnp.maximum(jnp.abs(value), 1)
        case "silu" | "gelu_erf" | "gelu_tanh":  # x times a sigmoid of x; none is steeper than 1.13
            return 1.13 * error + APPROXIMATION / 2 * jnp.abs(operand)
        case _:
            raise AssertionError(f"no error bound for {node.op}")
    return passed + ROUNDING * jnp.abs(value)


def _stored(value: Array, type: str) -> Array:
    """As the reference stores an f32 value."""
    if type in FP8_MAX:
        value = np.clip(value, -FP8_MAX[type], FP8_MAX[type])
    with np.errstate(over="ignore"):
        return value.astype(np.float32).astype(numpy_dtype(type))
