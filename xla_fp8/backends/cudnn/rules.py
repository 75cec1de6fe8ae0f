"""What cuDNN refuses, as rules: the answer where cuDNN is not installed, and the words for cuDNN's own "no".

The rules hold for compute capability 9.0. They were read off the answers of cuDNN 9.19.0 and 9.28.1 to several thousand
random graphs, and tests/backends/cudnn/test_support.py compares them with the cuDNN that is installed: every op, type,
stride, dilation, padding and epilogue of the graph string has a plan; what has none is a kind of grouping or a channel
count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from xla_fp8.backends.cudnn.geometry import Geometry
from xla_fp8.graph import Graph
from xla_fp8.target import GraphCall

MADE_WITH = "cuDNN 9.19.0 and 9.28.1"
"""Whose answers the rules were read off."""

_ENOUGH = 8
"""Input channels per group from which every count has an engine."""


@dataclasses.dataclass(frozen=True)
class Rule:
    """One reason for which cuDNN has no plan.

    Attributes:
        name: short and stable, for reports and tests.
        broken: what breaks it, in a sentence with the numbers of the call; None where the call keeps the rule.
        advice: what to change in the program.
    """

    name: str
    broken: Callable[[GraphCall, Geometry], str | None]
    advice: str


def _input_dilation(call: GraphCall, geometry: Geometry) -> str | None:
    if any(d.base_dilation != 1 for d in call.window):
        return "dilates its input (a transposed convolution); cuDNN's FP8 graphs have forward convolutions only"
    return None


def _reversed_window(call: GraphCall, geometry: Geometry) -> str | None:
    if any(d.reversal for d in call.window):
        return "reverses its window; cuDNN's FP8 graphs have forward convolutions only"
    return None


def _single_channel(call: GraphCall, geometry: Geometry) -> str | None:
    if geometry.filter[:2] == (1, 1):
        return "has one input and one output channel; cuDNN has no FP8 engine for it"
    return None


def _grouped_amax(call: GraphCall, geometry: Geometry) -> str | None:
    if geometry.groups > 1 and any(node.op == "amax" for node in call.graph):
        return f"has {geometry.groups} groups and an amax; cuDNN's engines for grouped FP8 convolutions do not reduce"
    return None


def _grouped_channels(call: GraphCall, geometry: Geometry) -> str | None:
    channels = geometry.filter[1]
    if geometry.groups > 1 and len(call.window) < 3 and channels < _ENOUGH and channels != 4:
        return (
            f"has {channels} input channel{'s' if channels > 1 else ''} in each of {geometry.groups} groups; cuDNN's "
            f"FP8 engines need 4, or at least {_ENOUGH}"
        )
    return None


def f32_twice(graph: Graph) -> str | None:
    """How a graph asks for two buffers of one f32 value, which cuDNN cannot say; None where it does not."""
    stored = [graph.output.uid] if graph.output.type == "f32" else []
    stored += [node.operands[0] for node in graph if node.op == "copy" and node.type == "f32"]
    if len(set(stored)) < len(stored):
        return "stores one value twice in f32; a value of cuDNN's graph has one buffer"
    return None


RULES = (
    Rule(
        "input-dilation",
        _input_dilation,
        "put the zeros into the FP8 input first (jax.lax.pad with interior padding), and convolve without lhs_dilation",
    ),
    Rule("reversed-window", _reversed_window, "reverse the filter (jnp.flip), not the window"),
    Rule("single-channel", _single_channel, "pad the input channels or the output channels with zeros to two"),
    Rule(
        "grouped-amax",
        _grouped_amax,
        "take the amax of a tensor that no grouped convolution makes, or use a static scale",
    ),
    Rule(
        "grouped-channels",
        _grouped_channels,
        f"give each group 4 input channels, or at least {_ENOUGH}: fewer groups, or channels of zeros",
    ),
    Rule("f32-twice", lambda call, _: f32_twice(call.graph), "return the f32 tensor once, or the copy in bf16"),
)


def broken_rule(call: GraphCall) -> tuple[Rule, str] | None:
    """The first rule that `call` breaks and how, as a sentence; None where it keeps all."""
    geometry = Geometry.of(call)
    for rule in RULES:
        if what := rule.broken(call, geometry):
            return rule, f"the convolution {what}"
    return None
