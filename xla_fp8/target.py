"""What passes may assume of the device that will run the rewritten module."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable
from typing import Protocol

from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import Graph, graph_of
from xla_fp8.hlo import ConvolutionDimensionNumbers, HloInstruction, Shape, Window


class TargetError(XlaFp8Error):
    """A target that is not one: an unknown name, a field that is not `cc`, `cuda` or `cudnn`, a bad version."""


@dataclasses.dataclass(frozen=True, slots=True)
class GraphCall:
    """A convolution custom call, made or about to be: what a backend must know to say yes or no.

    Attributes:
        graph: the graph behind the convolution.
        operand_shapes: input, filter, then the side operands.
        output_shapes: the output, then the aux outputs; no workspace.
        operand_precision: of input and filter, as XLA writes it; empty is `default`. A backend whose sums lose bits
            that f32 keeps must not lose them where `exact_sums` is set.
    """

    graph: Graph
    operand_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    window: Window
    dim_labels: ConvolutionDimensionNumbers
    feature_group_count: int = 1
    operand_precision: tuple[str, ...] = ()

    @staticmethod
    def of(instruction: HloInstruction) -> GraphCall | None:
        """The graph call that an instruction of a rewritten module is; None where it is none.

        Raises:
            GraphError: the call has a string that is no graph.
        """
        graph = graph_of(instruction)
        if graph is None:
            return None
        return GraphCall(
            graph,
            tuple(operand.shape for operand in instruction.operands),
            instruction.shape.tuple_shapes[:-1],
            instruction.window,
            instruction.dim_labels,
            instruction.feature_group_count,
            instruction.operand_precision,
        )

    @property
    def is_dot(self) -> bool:
        """Whether it was a dot, [M, K] times [N, K]: a convolution without spatial dimensions (fused-dot-rewriter)."""
        return self.dim_labels.spatial_rank == 0

    @property
    def exact_sums(self) -> bool:
        """Whether the program asked for the highest precision of both operands: `precision=HIGHEST` in JAX."""
        return self.operand_precision == ("highest", "highest")


class Verdict(Protocol):
    """A backend's answer: `ok`, and where it is False the reason."""

    @property
    def ok(self) -> bool: ...

    @property
    def reason(self) -> str: ...


def rule_of(verdict: Verdict) -> str:
    """The name of the rule for which no kernel of the device can run a call in FP8, from the verdict's `rule`.

    "" where the verdict has none: the backend leaves the call to another one, or to XLA. A verdict with a rule makes
    conv-fp8-fallback rewrite the convolution in bf16.
    """
    return str(getattr(verdict, "rule", ""))


def advice_of(verdict: Verdict) -> str:
    """What would make the backend run the call, from the verdict's `advice`; "" where it has none."""
    return str(getattr(verdict, "advice", ""))


Version = tuple[int, ...]

_PRESETS: dict[str, Version] = {"h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "l40s": (8, 9), "a100": (8, 0)}


@dataclasses.dataclass(frozen=True)
class Target:
    """A device and its libraries.

    Attributes:
        name: "h200", or the text it was parsed from.
        compute_capability: of the GPU, e.g. (9, 0).
        cuda, cudnn: versions.
        supports: asked about every graph before it is made; None means that the version guards decide alone.
    """

    name: str
    compute_capability: Version
    cuda: Version = (13, 0)
    cudnn: Version = (9, 19)
    supports: Callable[[GraphCall], Verdict] | None = None

    @staticmethod
    def parse(text: str) -> Target:
        """Reads `h100`, `h200`, `b200`, `l40s`, `a100` or `cc=9.0,cuda=12.4,cudnn=9.1`.

        A name may be followed by fields that differ (`h200,cudnn=9.1`); fields that are left out are those of h200.

        Raises:
            TargetError: with the names and fields there are.
        """
        fields = {"cc": _PRESETS["h200"], "cuda": (13, 0), "cudnn": (9, 19)}
        for index, part in enumerate(text.strip().split(",")):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals and index == 0 and name.lower() in _PRESETS:
                fields["cc"] = _PRESETS[name.lower()]
            elif equals and name in fields:
                fields[name] = _version(value, part)
            else:
                raise TargetError(
                    f"unknown target {text!r}: expected one of {', '.join(_PRESETS)}, or fields like "
                    f"cc=9.0,cuda=12.4,cudnn=9.1 ({part.strip()!r} is neither)"
                )
        return Target(text.strip(), fields["cc"], fields["cuda"], fields["cudnn"])

    @staticmethod
    def default() -> Target:
        """The local GPU if there is one, else h200."""
        capability = _local_compute_capability()
        if capability is None:
            return Target.parse("h200")
        return Target("local GPU", capability)

    def fp8_convolution_refusal(self) -> str | None:
        """Why this target cannot run an FP8 convolution graph; None where it can.

        The rules are XLA's (F8GraphConv in cudnn_fused_conv_rewriter.cc) and cuDNN's support matrix.
        """
        if self.cuda < (12, 0):
            return f"FP8 convolutions need CUDA 12.0 or newer; the target has {format_version(self.cuda)}"
        if self.cudnn < (8, 9):
            return f"FP8 convolutions need cuDNN 8.9 or newer; the target has {format_version(self.cudnn)}"
        if self.compute_capability >= (9, 0):
            return None
        if self.compute_capability >= (8, 9):
            if self.cudnn >= (9, 8):
                return None
            return (
                "FP8 convolutions on compute capability 8.9 need cuDNN 9.8 or newer; "
                f"the target has {format_version(self.cudnn)}"
            )
        return (
            "FP8 convolutions need compute capability 9.0 (Hopper), or 8.9 with cuDNN 9.8 or newer; "
            f"the target has {format_version(self.compute_capability)}"
        )

    def fp8_matmul_refusal(self) -> str | None:
        """Why this target cannot run an FP8 matmul call; None where it can (CreateF8CustomCall in gemm_rewriter.cc)."""
        if self.cuda < (12, 0):
            return f"FP8 matmuls need CUDA 12.0 or newer; the target has {format_version(self.cuda)}"
        if self.compute_capability < (8, 9):
            return (
                "FP8 matmuls need compute capability 8.9 (Ada), 9.0 (Hopper) or newer; "
                f"the target has {format_version(self.compute_capability)}"
            )
        return None

    def __str__(self) -> str:
        return (
            f"{self.name} (compute capability {format_version(self.compute_capability)}, "
            f"CUDA {format_version(self.cuda)}, cuDNN {format_version(self.cudnn)})"
        )


def format_version(version: Version) -> str:
    """`(9, 0)` → "9.0"."""
    return ".".join(map(str, version))


def _version(value: str, part: str) -> Version:
    if not re.fullmatch(r"\d+(\.\d+){0,2}", value):
        raise TargetError(f"{part.strip()!r}: expected a version like 9.0")
    numbers = tuple(map(int, value.split(".")))
    return numbers if len(numbers) > 1 else (*numbers, 0)


def _local_compute_capability() -> Version | None:
    # Starting JAX's CUDA client takes seconds and device memory: only where a driver says there is a device to ask.
    if not os.path.exists("/dev/nvidia0"):
        return None
    from xla_fp8 import _jax_compat

    return _jax_compat.gpu_compute_capability()
