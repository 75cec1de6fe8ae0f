"""The ops of a serialized graph, one declaration each: what they read, what they make, and what they mean.

The `xla` dialect is what XLA itself writes and reads (GraphString in cudnn_fused_conv_rewriter.cc,
GetGenericCudnnOperationGraph in cuda_dnn.cc). The `extended` dialect adds ops that only this project's backends run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

Dialect = Literal["xla", "extended"]
SideKind = Literal["scalar", "vector", "tensor"]
OutputKind = Literal["tensor", "aux_scalar", "aux_tensor"]


@dataclasses.dataclass(frozen=True, slots=True)
class OpSpec:
    """What one op of the graph is.

    Attributes:
        name: as written in the string.
        dialect: "xla" or "extended".
        meaning: the value of the node; `a` and `b` are its operands in the graph, `s` (and `t`) its side operands.
            Every value is f32; see `Node` for what the node's type says.
        operand_counts: how many operands it may have inside the graph.
        sides: its side operands, read from the custom call, when it has the smallest of `operand_counts`. With more
            operands inside the graph there are none.
            scalar: f32[]. vector: f32[K], K the size of the output's feature dimension.
            tensor: the output's dimensions, any float type.
        output: "tensor" is a value that later nodes may use; "aux_scalar" and "aux_tensor" leave the graph as
            additional results, and nothing in the graph uses them.
    """

    name: str
    dialect: Dialect
    meaning: str
    operand_counts: tuple[int, ...] = (1,)
    sides: tuple[SideKind, ...] = ()
    output: OutputKind = "tensor"

    @property
    def is_aux(self) -> bool:
        return self.output != "tensor"

    def sides_for(self, operand_count: int) -> tuple[SideKind, ...]:
        """The side operands of a node with that many operands inside the graph."""
        return self.sides if operand_count == min(self.operand_counts) else ()


_SPECS = (
    OpSpec("conv", "xla", "convolution of the custom call's operands 0 and 1", operand_counts=(0,)),
    OpSpec("scale", "xla", "a * s", sides=("scalar",)),
    OpSpec("invscale", "xla", "a / s", sides=("scalar",)),
    OpSpec("add", "xla", "a + b, or a + s", operand_counts=(1, 2), sides=("tensor",)),
    OpSpec("min", "xla", "min(a, b), or min(a, s); NaN if either is", operand_counts=(1, 2), sides=("tensor",)),
    OpSpec("max", "xla", "max(a, b), or max(a, s); NaN if either is", operand_counts=(1, 2), sides=("tensor",)),
    OpSpec("relu", "xla", "max(a, 0); NaN stays NaN"),
    OpSpec("elu", "xla", "a if a > 0, else exp(a) - 1"),
    OpSpec("amax", "xla", "the largest |a|, starting from 0; NaN if any a is", output="aux_scalar"),
    OpSpec("bias", "extended", "a + s, one s for each output feature", sides=("vector",)),
    OpSpec("channel_scale", "extended", "a * s, one s for each output feature", sides=("vector",)),
    OpSpec("add_scaled", "extended", "a + s * t, s an FP8 tensor and t its scale", sides=("tensor", "scalar")),
    OpSpec("clamp", "extended", "min(max(a, s), t); NaN stays NaN", sides=("scalar", "scalar")),
    OpSpec("silu", "extended", "a * sigmoid(a)"),
    OpSpec("gelu_erf", "extended", "a * (1 + erf(a / sqrt(2))) / 2"),
    OpSpec("gelu_tanh", "extended", "a * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a**3))) / 2"),
    OpSpec("sigmoid", "extended", "1 / (1 + exp(-a))"),
    OpSpec("tanh", "extended", "tanh(a)"),
    OpSpec("copy", "extended", "a, as one more result of its own type", output="aux_tensor"),
)

OPS: Mapping[str, OpSpec] = MappingProxyType({spec.name: spec for spec in _SPECS})
"""Every op by name."""

FP8_MAX: Mapping[str, float] = MappingProxyType({"f8e4m3fn": 448.0, "f8e5m2": 57344.0})
"""The largest finite value of each FP8 type; a store to the type saturates there."""

FP8_TYPES = tuple(FP8_MAX)
"""The FP8 types that cuDNN convolves."""

TYPES = (*FP8_TYPES, "f16", "bf16", "f32")
"""The element types a node may have: those that XLA's reader knows."""
