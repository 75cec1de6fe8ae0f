"""Graph calls made of a few numbers, and random ones: for tests, benchmarks, validation and `xla-fp8 doctor`."""

from __future__ import annotations

import numpy as np

from xla_fp8.graph import FP8_TYPES, Graph
from xla_fp8.hlo import ConvolutionDimensionNumbers, Shape, Window
from xla_fp8.target import GraphCall

LABELS = {1: "b0f_o0i->b0f", 2: "b01f_o01i->b01f", 3: "b012f_o012i->b012f"}
_DRAWN = (
    *("scale", "invscale", "add", "min", "max", "relu", "elu", "bias", "channel_scale", "add_scaled"),
    *("silu", "gelu_erf", "gelu_tanh", "sigmoid", "tanh"),
)
"""What random calls are drawn from. It stays as it is: a seed is then the call that it was on the GPU."""
POINTWISE = (*_DRAWN, "clamp")
TYPES = (*FP8_TYPES, "f16", "bf16", "f32")


def graph_call(
    graph: str,
    *,
    batch: int = 2,
    image: tuple[int, ...] = (16, 16),
    channels: int = 32,
    features: int = 32,
    filter: tuple[int, ...] = (3, 3),
    window: str | None = None,
    groups: int = 1,
    types: tuple[str, str] = ("f8e4m3fn", "f8e4m3fn"),
    side: str = "f32",
    residual: str = "f8e4m3fn",
    labels: str | None = None,
) -> GraphCall:
    """A call on NHWC input and OHWI filter (or `labels`); SAME padding, or `window`.

    `side` is the type of tensors among the side operands, `residual` that of add_scaled's.
    """
    pads = "x".join(f"{size // 2}_{size // 2}" for size in filter)
    parsed = Window.parse(window or f"{{size={'x'.join(map(str, filter))} pad={pads}}}")
    spatial = [d.output_size(size) for d, size in zip(parsed, image, strict=True)]
    dim_labels = ConvolutionDimensionNumbers.parse(labels or LABELS[len(image)])

    def shape(type: str, order: str, outer: int, inner: int, sizes: tuple[int, ...] | list[int]) -> Shape:
        by_label = {"b": outer, "f": inner, "o": outer, "i": inner, **{str(i): n for i, n in enumerate(sizes)}}
        return Shape.array(type, [by_label[label] for label in order])

    parsed_graph = Graph.parse(graph)
    output = shape(parsed_graph.output.type, dim_labels.output, batch, features, spatial)
    operands = [
        shape(types[0], dim_labels.lhs, batch, channels, image),
        shape(types[1], dim_labels.rhs, features, channels // groups, filter),
    ]
    for operand in parsed_graph.side_operands():
        operands.append(
            {
                "scalar": Shape("f32"),
                "vector": Shape.array("f32", (features,)),
                "tensor": output.with_element_type(residual if operand.op == "add_scaled" else side),
            }[operand.kind]
        )
    aux = [Shape(n.type) if n.op == "amax" else output.with_element_type(n.type) for n in parsed_graph.aux_outputs]
    return GraphCall(parsed_graph, tuple(operands), (output, *aux), parsed, dim_labels, groups)


def random_call(seed: int, *, groups: tuple[int, ...] = (1, 1, 1, 2, 4), largest: int = 256) -> GraphCall:
    """A random call: any ops, types, ranks, strides, dilations and paddings. The same seed gives the same call."""
    rng = np.random.default_rng(seed)

    def pick(*choices: object) -> object:
        return choices[int(rng.integers(len(choices)))]

    while True:
        rank = int(pick(1, 2, 2, 2, 3))  # type: ignore[call-overload]
        group_count = int(rng.choice(groups))
        channels, features = (int(c) * group_count for c in rng.choice([c for c in _CHANNELS if c <= largest], 2))
        image = tuple(int(n) for n in rng.choice([1, 2, 5, 7, 8, 14, 16, 28, 31], rank))
        filter_ = tuple(int(n) for n in rng.choice([1, 2, 3, 3, 3, 5, 7], rank))
        low = [int(rng.choice([0, n // 2, n - 1])) for n in filter_]
        high = [int(rng.choice([n, n, n + 1, 0])) for n in low]
        window = (
            f"{{size={'x'.join(map(str, filter_))}"
            f" stride={'x'.join(str(rng.choice([1, 1, 2, 3])) for _ in filter_)}"
            f" pad={'x'.join(f'{a}_{b}' for a, b in zip(low, high, strict=True))}"
            f" rhs_dilate={'x'.join(str(rng.choice([1, 1, 1, 2, 3])) for _ in filter_)}}}"
        )
        if all(d.output_size(n) for d, n in zip(Window.parse(window), image, strict=True)):
            break
    graph = Graph.conv()
    for _ in range(int(rng.integers(6))):
        graph = graph.append(str(pick(*_DRAWN)), (graph.nodes[-1].uid,))
    tensors = [node.uid for node in graph]
    graph = graph.with_type(tensors[-1], str(pick(*TYPES)))
    for _ in range(int(rng.choice([0, 0, 0, 1, 1, 2]))):
        graph = graph.append("amax", (int(rng.choice(tensors)),), str(pick("f32", "f32", "bf16")))
    if rng.random() < 0.2:
        graph = graph.append("copy", (int(rng.choice(tensors)),), str(pick(*TYPES)))
    return graph_call(
        str(graph),
        batch=int(rng.choice([1, 2, 3, 8])),
        image=image,
        channels=channels,
        features=features,
        filter=filter_,
        window=window,
        groups=group_count,
        types=(str(pick(*FP8_TYPES)), str(pick(*FP8_TYPES))),
        side=str(pick(*TYPES)),
        residual=str(pick(*FP8_TYPES)),
    )


_CHANNELS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 20, 32, 33, 40, 64, 100, 128, 256)
