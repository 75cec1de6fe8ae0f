"""A graph call as one line of JSON and back: what an FFI attribute, a cache key and a child process carry."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping

from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import Graph
from xla_fp8.hlo import ConvolutionDimensionNumbers, Shape, Window
from xla_fp8.target import GraphCall


class CallTextError(XlaFp8Error):
    """Text that is not an encoded graph call."""


def encode(call: GraphCall) -> str:
    """`call` as compact JSON; equal calls give equal text.

    Layouts of the shapes are left out, as cuDNN has its own, and so is a precision that changes no sum.
    """
    fields = {
        "graph": str(call.graph),
        "operands": [shape.text_without_layout for shape in call.operand_shapes],
        "results": [shape.text_without_layout for shape in call.output_shapes],
        "window": str(call.window),
        "dim_labels": str(call.dim_labels),
        "groups": call.feature_group_count,
    }
    if call.exact_sums:
        fields["precision"] = list(call.operand_precision)
    return json.dumps(fields, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def decode(text: str) -> GraphCall:
    """What `encode` made. Raises CallTextError where the text is not that."""
    try:
        fields = json.loads(text)
        return GraphCall(
            Graph.parse(fields["graph"]),
            tuple(map(Shape.parse, fields["operands"])),
            tuple(map(Shape.parse, fields["results"])),
            Window.parse(fields["window"]),
            ConvolutionDimensionNumbers.parse(fields["dim_labels"]),
            int(fields["groups"]),
            tuple(map(str, fields.get("precision", ()))),
        )
    except (ValueError, KeyError, TypeError, XlaFp8Error) as error:
        raise CallTextError(f"not a graph call: {error}: {text}") from error


def digest(key: Mapping[str, str]) -> str:
    """32 hex digits that stand for a mapping of names to texts, whatever its order."""
    return hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()[:32]
