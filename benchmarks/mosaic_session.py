"""One session with the Mosaic backend on a Hopper GPU: is it right, and how fast, against XLA in the same process.

    python benchmarks/mosaic_session.py --out results.json [--budget-seconds 500] [--only check,bench/14x14]
    python benchmarks/mosaic_session.py --final --budget-seconds 540 --out final.json
    python benchmarks/mosaic_session.py --dry-run            # no GPU: lowers everything for cuda, measures nothing

Items, each named; `--only` takes comma-separated parts of names, `--skip` likewise:

    check/...    a small convolution with one feature each, against the reference backend run on the CPU in f32
    bench/SHAPE  times several configs of the kernel on one shape, and XLA's bf16 and FP8 convolutions (FP8 last of all:
                 XLA tunes each for 25 s)
    highest/...  the same with precision="highest"
    variants/... other settings around the best config of a shape
    ceiling/...  the matrix product of a shape in cuBLASLt
    epilogue/... what amax, bias + silu + residual, copies and precision="highest" cost on one shape

Each item adds one entry to the JSON file as soon as it is done, so that a session that is cut short loses nothing; with
`--done FILE` entries of an earlier file are not measured again. An item that hangs is recorded, and the process starts
over without it. Times are device-bound: eight calls on eight inputs inside one jit, several runs enqueued, the median
of three.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8.backends import reference
from xla_fp8.backends.compare import compare
from xla_fp8.backends.mosaic import configs
from xla_fp8.backends.mosaic.backend import MosaicBackend
from xla_fp8.backends.mosaic.configs import Config
from xla_fp8.graph import FP8_TYPES, Graph
from xla_fp8.hlo import ConvolutionDimensionNumbers, Shape, Window
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall, Target

TARGET = Target.parse("h200")
NHWC = "b01f_o01i->b01f"
SCALE = "1:[f32]conv();2:[f8e4m3fn]scale(1);"
CALLS = 8
REPEATS = 5
HANG_SECONDS = 75


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution [N, *spatial, C] * [K, *window, C] with a graph, and how to run it.

    Attributes:
        sides: element type of each side operand in node order: "f32[]" a scalar, "f32[K]" a vector, else a tensor.
        results: element types of the results after the output.
        pad: "same", or the text of a window's padding.
    """

    name: str
    size: tuple[int, ...]
    channels: int
    window: tuple[int, ...]
    features: int
    graph: str = SCALE
    sides: tuple[str, ...] = ("f32[]",)
    results: tuple[str, ...] = ()
    types: tuple[str, str] = ("f8e4m3fn", "f8e4m3fn")
    stride: int = 1
    dilation: int = 1
    pad: str = "same"
    reversal: bool = False
    labels: str = NHWC
    precision: str = "default"
    special: bool = False
    config: Config | None = None

    @functools.cached_property
    def call(self) -> GraphCall:
        batch, *spatial = self.size
        pads = self._padding() if self.pad == "same" else self.pad.split("x")
        rank = len(spatial)
        ones = "x".join

        def each(value: object) -> str:
            return ones([str(value)] * rank)

        window = Window.parse(
            f"{{size={ones(map(str, self.window))} stride={each(self.stride)} pad={ones(pads)} "
            f"rhs_dilate={each(self.dilation)} rhs_reversal={each(int(self.reversal))}}}"
        )
        labels = ConvolutionDimensionNumbers.parse(self.labels)
        out = [d.output_size(size) for d, size in zip(window, spatial, strict=True)]

        def order(text: str, outer: int, inner: int, sizes: Sequence[int], outer_inner: str) -> tuple[int, ...]:
            return tuple(
                outer if c == outer_inner[0] else inner if c == outer_inner[1] else sizes[int(c)] for c in text
            )

        output = order(labels.output, batch, self.features, out, "bf")
        graph = Graph.parse(self.graph)

        def side(text: str) -> Shape:
            if text == "f32[K]":
                return Shape.array("f32", (self.features,))
            return Shape.parse(text) if "[" in text else Shape.array(text, output)

        aux = [Shape.parse("f32[]") if t == "f32[]" else Shape.array(t, output) for t in self.results]
        return GraphCall(
            graph,
            (
                Shape.array(self.types[0], order(labels.lhs, batch, self.channels, spatial, "bf")),
                Shape.array(self.types[1], order(labels.rhs, self.features, self.channels, self.window, "oi")),
                *map(side, self.sides),
            ),
            (Shape.array(graph.output.type, output), *aux),
            window,
            labels,
        )

    def _padding(self) -> list[str]:
        pads = []
        for size, taps in zip(self.size[1:], self.window, strict=True):
            out = -(-size // self.stride)
            total = max((out - 1) * self.stride + (taps - 1) * self.dilation + 1 - size, 0)
            pads.append(f"{total // 2}_{total - total // 2}")
        return pads

    @property
    def backend(self) -> MosaicBackend:
        return MosaicBackend(self.precision)  # type: ignore[arg-type]

    @property
    def flops(self) -> int:
        return 2 * self.call.output_shapes[0].element_count * math.prod(self.window) * self.channels

    def operands(self, seed: int = 0) -> list[np.ndarray[Any, Any]]:
        """Random operands; results are of the order of tens, so that FP8 outputs use their whole range."""
        rng = np.random.default_rng(seed)
        reduction = math.prod(self.window) * self.channels
        arrays = []
        for index, shape in enumerate(self.call.operand_shapes):
            dtype = numpy_dtype(shape.element_type)
            if shape.is_scalar:
                value = np.asarray(16 / math.sqrt(reduction) if index == 2 else rng.uniform(0.5, 2))
            else:
                value = rng.normal(size=shape.dimensions) * (1 if index < 2 else 8)
            arrays.append(np.asarray(value).astype(dtype))
        if self.special:
            flat = arrays[0].reshape(-1)
            flat[5] = np.nan
            if arrays[0].dtype == numpy_dtype("f8e5m2"):
                flat[-5] = np.inf
        return arrays


def checks() -> list[Case]:
    """Small convolutions, one feature each."""
    full = (
        "1:[f32]conv();2:[f32]scale(1);3:[f32]channel_scale(2);4:[f32]bias(3);5:[f32]silu(4);6:[f32]add_scaled(5);"
        "7:[f32]amax(6);8:[bf16]copy(6);9:[f8e4m3fn]invscale(6);"
    )
    cases = [
        Case("base", (2, 16, 16), 128, (3, 3), 128),
        Case("odd", (3, 15, 17), 48, (3, 5), 80),
        Case("tail", (2, 13, 11), 208, (3, 3), 144),
        Case("small", (1, 5, 5), 16, (3, 3), 16),
        Case("deep", (2, 8, 8), 1024, (3, 3), 256),
        Case("deep-highest", (2, 8, 8), 1024, (3, 3), 256, precision="highest"),
        Case("stride2", (2, 16, 16), 64, (3, 3), 64, stride=2),
        Case("stride2-odd", (2, 15, 13), 96, (3, 3), 64, stride=2),
        Case("stride2-tail", (2, 14, 14), 48, (7, 7), 64, stride=2, pad="3_3x3_3"),
        Case("stride3", (1, 20, 22), 32, (3, 3), 32, stride=3, pad="1_0x0_2"),
        Case("patches", (2, 16, 16), 32, (4, 4), 96, stride=4, pad="0_0x0_0"),
        Case("dilation", (1, 20, 20), 64, (3, 3), 64, dilation=2, pad="2_2x2_2"),
        Case("asymmetric", (2, 12, 12), 64, (4, 4), 64, pad="1_2x2_1"),
        Case("negative", (1, 16, 16), 64, (3, 3), 64, pad="-1_-2x-2_-1"),
        Case("1x1", (2, 7, 7), 256, (1, 1), 512),
        Case("1x1-stride2", (2, 14, 14), 256, (1, 1), 512, stride=2),
        Case("1-D", (4, 100), 64, (5,), 64, labels="b0f_o0i->b0f"),
        Case("nchw", (2, 12, 12), 64, (3, 3), 64, labels="bf01_oi01->bf01"),
        Case("reversal", (2, 12, 12), 64, (3, 3), 64, reversal=True, labels="b01f_i01o->b01f"),
        Case("e4m3xe5m2", (2, 12, 12), 64, (3, 3), 64, types=("f8e4m3fn", "f8e5m2")),
        Case("e5m2xe4m3", (2, 12, 12), 64, (3, 3), 64, types=("f8e5m2", "f8e4m3fn")),
        Case("e5m2xe5m2", (2, 12, 12), 64, (3, 3), 64, types=("f8e5m2", "f8e5m2")),
        Case("special", (2, 9, 9), 48, (3, 3), 48, types=("f8e5m2", "f8e5m2"), special=True),
        Case("special-stride", (2, 9, 9), 48, (3, 3), 48, stride=2, special=True),
    ]
    cases += [
        Case(f"out-{t}", (2, 12, 12), 96, (3, 3), 96, graph=f"1:[f32]conv();2:[{t}]scale(1);")
        for t in ("f8e5m2", "bf16", "f16", "f32")
    ]
    cases += [
        Case("f32-highest", (2, 12, 12), 512, (3, 3), 96, "1:[f32]conv();2:[f32]scale(1);", precision="highest"),
        Case("f32-default", (2, 12, 12), 512, (3, 3), 96, "1:[f32]conv();2:[f32]scale(1);"),
        Case("no-epilogue", (2, 12, 12), 96, (3, 3), 96, "1:[bf16]conv();", ()),
    ]
    odd: dict[str, Any] = {"size": (3, 9, 10), "channels": 80, "window": (3, 3), "features": 144}
    for op in ("relu", "elu", "silu", "gelu_erf", "gelu_tanh", "sigmoid", "tanh"):
        # sigmoid(0) is not 0: amax must not see what lies outside the output.
        graph = f"1:[f32]conv();2:[f32]scale(1);3:[f32]invscale(2);4:[f32]{op}(3);5:[f32]amax(4);6:[bf16]scale(4);"
        cases.append(Case(f"op-{op}", **odd, graph=graph, sides=("f32[]", "f32[]", "f32[]"), results=("f32[]",)))
    for type in (*FP8_TYPES, "bf16", "f16", "f32"):
        graph = "1:[f32]conv();2:[f32]scale(1);3:[f32]add(2);4:[f32]amax(3);5:[f8e4m3fn]scale(3);"
        cases.append(Case(f"add-{type}", **odd, graph=graph, sides=("f32[]", type, "f32[]"), results=("f32[]",)))
    cases += [
        Case(
            "min-max",
            **odd,
            graph="1:[f32]conv();2:[f32]scale(1);3:[f32]max(2);4:[f32]min(3);5:[f32]scale(4);6:[f8e4m3fn]max(4,5);",
            sides=("f32[]", "f32", "bf16", "f32[]"),
        ),
        Case(
            "bias",
            **odd,
            graph="1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]amax(3);5:[f32]relu(3);"
            "6:[f32]amax(5);7:[f8e4m3fn]scale(5);",
            sides=("f32[]", "f32[K]", "f32[]"),
            results=("f32[]", "f32[]"),
        ),
        Case(
            "full",
            **odd,
            graph=full,
            sides=("f32[]", "f32[K]", "f32[K]", "f8e4m3fn", "f32[]", "f32[]"),
            results=("f32[]", "bf16"),
        ),
        Case(
            "full-aligned",
            (2, 16, 16),
            128,
            (3, 3),
            256,
            graph=full,
            sides=("f32[]", "f32[K]", "f32[K]", "f8e5m2", "f32[]", "f32[]"),
            results=("f32[]", "bf16"),
        ),
        Case(
            "many-tiles",
            (16, 64, 64),
            64,
            (3, 3),
            128,
            graph=full,
            sides=("f32[]", "f32[K]", "f32[K]", "f8e4m3fn", "f32[]", "f32[]"),
            results=("f32[]", "bf16"),
        ),
    ]
    boxes = [(1, 8, 16), (4, 8, 8), (16, 1, 8), (32, 2, 2), (128, 1, 1), (1, 1, 128), (1, 128, 1)]
    for images, height, width in boxes:
        config = Config(images, height, width, 64, 64, stages=3)
        cases.append(Case(f"box-{images}x{height}x{width}", (5, 11, 19), 64, (3, 3), 96, config=config))
    for features, channels, stages, delay in ((256, 128, 3, 1), (32, 32, 8, 2), (96, 64, 4, 0), (160, 64, 4, 3)):
        config = Config(1, 8, 16, features, channels, stages, delay)
        name = f"tile-{features}-{channels}-{stages}-{delay}"
        cases.append(Case(name, (2, 17, 16), 192, (3, 3), 320, config=config))
    full_sides = ("f32[]", "f32[K]", "f32[K]", "f8e4m3fn", "f32[]", "f32[]")
    for splits in (3, 9):
        config = Config(4, 2, 16, 64, 128, 4, splits=splits)
        cases.append(
            Case(f"splits-{splits}", **odd, graph=full, sides=full_sides, results=("f32[]", "bf16"), config=config)
        )
    for slots, columns in ((2, 32), (4, 32), (1, 64)):
        config = Config(1, 8, 16, 128, 64, 3, columns=columns, side_slots=slots)
        cases.append(
            Case(
                f"columns-{columns}-{slots}",
                (4, 33, 40),
                128,
                (3, 3),
                272,
                graph=full,
                sides=full_sides,
                results=("f32[]", "bf16"),
                config=config,
            )
        )
    for features, pieces, splits in ((256, 2, 1), (192, 2, 1), (160, 1, 1), (128, 1, 3)):
        config = Config(1, 8, 16, features, 128, 3, promote=True, pieces=pieces, splits=splits)
        name = f"promote-{features}-{pieces}-{splits}"
        cases.append(
            Case(
                name,
                (2, 17, 16),
                256,
                (3, 3),
                320,
                graph=full,
                sides=full_sides,
                results=("f32[]", "bf16"),
                config=config,
            )
        )
    return cases


Shape5: TypeAlias = tuple[tuple[int, int, int], int, tuple[int, int], int, int]
"""Input [N, H, W], channels, window, features, stride."""


def stage(batch: int, size: int, channels: int, features: int, taps: int = 3, stride: int = 1) -> Shape5:
    return (batch, size, size), channels, (taps, taps), features, stride


def resnet50(batch: int) -> dict[str, Shape5]:
    """Every 3x3 and 1x1 convolution of ResNet-50, once."""
    shapes = {}
    for width, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        shapes[f"3x3-{size}-{width}"] = stage(batch, size, width, width)
        shapes[f"1x1-{size}-{width}-{4 * width}"] = stage(batch, size, width, 4 * width, 1)
        shapes[f"1x1-{size}-{4 * width}-{width}"] = stage(batch, size, 4 * width, width, 1)
        if width > 64:
            shapes[f"3x3-{2 * size}-{width}-s2"] = stage(batch, 2 * size, width, width, 3, 2)
            shapes[f"1x1-{2 * size}-{2 * width}-{width}"] = stage(batch, 2 * size, 2 * width, width, 1)
            shapes[f"1x1-{2 * size}-{2 * width}-{4 * width}-s2"] = stage(batch, 2 * size, 2 * width, 4 * width, 1, 2)
    shapes["1x1-56-64-64"] = stage(batch, 56, 64, 64, 1)
    return {f"resnet{batch}/{name}": shape for name, shape in shapes.items()}


def vgg16(batch: int) -> dict[str, Shape5]:
    sizes = ((224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256), (56, 256, 256), (28, 256, 512))
    sizes += ((28, 512, 512), (14, 512, 512))
    return {f"vgg{batch}/{size}-{c}-{k}": stage(batch, size, c, k) for size, c, k in sizes}


def diffusion(batch: int) -> dict[str, Shape5]:
    """The 3x3 convolutions of Stable Diffusion 1.5's UNet, then those that SDXL's has beside them."""
    sizes = ((64, 320), (32, 640), (16, 1280), (8, 1280), (128, 320), (64, 640), (32, 1280))
    return {f"sd{batch}/{size}-{width}": stage(batch, size, width, width) for size, width in sizes}


def convnext(batch: int) -> dict[str, Shape5]:
    """The pointwise convolutions of ConvNeXt-B."""
    shapes = {}
    for width, size in ((128, 56), (256, 28), (512, 14), (1024, 7)):
        shapes[f"{size}-{width}-{4 * width}"] = stage(batch, size, width, 4 * width, 1)
        shapes[f"{size}-{4 * width}-{width}"] = stage(batch, size, 4 * width, width, 1)
    return {f"convnext{batch}/{name}": shape for name, shape in shapes.items()}


BENCH: dict[str, Shape5] = {
    "64x64-256": ((32, 64, 64), 256, (3, 3), 256, 1),
    "56x56-128": ((64, 56, 56), 128, (3, 3), 128, 1),
    "28x28-512": ((64, 28, 28), 512, (3, 3), 512, 1),
    "14x14-512": ((64, 14, 14), 512, (3, 3), 512, 1),
    "7x7-512": ((64, 7, 7), 512, (3, 3), 512, 1),
    "32x32-1024": ((16, 32, 32), 1024, (3, 3), 1024, 1),
    "128x128-128": ((8, 128, 128), 128, (3, 3), 128, 1),
    "sdxl-64x64-1280": ((1, 64, 64), 1280, (3, 3), 1280, 1),
    "1x1-64x64-256": ((32, 64, 64), 256, (1, 1), 256, 1),
    "1x1-56x56-256": ((64, 56, 56), 256, (1, 1), 256, 1),
    "sd-64x64-320": ((2, 64, 64), 320, (3, 3), 320, 1),
    "sd16-64x64-320": ((16, 64, 64), 320, (3, 3), 320, 1),
    "56x56-128-s2": ((64, 56, 56), 128, (3, 3), 128, 2),
    **diffusion(1),
    **resnet50(64),
    **diffusion(2),
    **vgg16(64),
    **convnext(64),
    **diffusion(16),
    **resnet50(256),
}
"""First shapes of every kind, then all of each network."""

FINAL = (
    *("64x64-256", "resnet64/3x3-28-128", "sd2/64-320", "resnet64/1x1-14-256-1024", "resnet64/3x3-56-64"),
    *("sd2/32-640", "resnet64/3x3-28-256-s2", "resnet64/3x3-14-256", "sd2/16-1280", "resnet64/1x1-56-64-256"),
    *("sd2/32-1280", "resnet64/3x3-7-512", "convnext64/28-256-1024", "vgg64/56-256-256", "resnet64/1x1-28-512-128"),
    *("32x32-1024", "sd16/64-640", "sd1/64-320", "resnet64/1x1-56-256-512-s2", "convnext64/7-4096-1024"),
    *("resnet256/3x3-14-256", "sd1/16-1280", "sd2/64-640", "resnet256/1x1-7-512-2048", "128x128-128"),
    *("sd1/8-1280", "vgg64/28-512-512", "resnet256/3x3-56-64", "sd16/32-640", "resnet64/1x1-14-1024-256"),
)
"""Shapes of the published comparison, the most telling first: how many there is time for depends on XLA's tuning."""

HIGHEST = ("64x64-256", "28x28-512", "32x32-1024", "128x128-128", "sdxl-64x64-1280", "sd16-64x64-320")
"""Shapes timed with precision="highest" too."""

CEILINGS = ("64x64-256", "32x32-1024", "28x28-512", "sdxl-64x64-1280", "sd16-64x64-320", "1x1-56x56-256")
"""Shapes whose matrix product is timed in cuBLASLt, as XLA calls it."""

EPILOGUES: dict[str, dict[str, Any]] = {
    "scale": {},
    "amax": {
        "graph": "1:[f32]conv();2:[f32]scale(1);3:[f32]amax(2);4:[f8e4m3fn]scale(2);",
        "sides": ("f32[]", "f32[]"),
        "results": ("f32[]",),
    },
    "bf16": {"graph": "1:[f32]conv();2:[bf16]scale(1);"},
    "bias-silu-residual": {
        "graph": "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]silu(3);5:[f32]add(4);6:[f8e4m3fn]scale(5);",
        "sides": ("f32[]", "f32[K]", "bf16", "f32[]"),
    },
    "bias-relu-residual-fp8": {
        "graph": "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]add_scaled(3);5:[f32]relu(4);"
        "6:[f8e4m3fn]scale(5);",
        "sides": ("f32[]", "f32[K]", "f8e4m3fn", "f32[]", "f32[]"),
    },
    "copy": {
        "graph": "1:[f32]conv();2:[f32]scale(1);3:[bf16]copy(2);4:[f8e4m3fn]scale(2);",
        "sides": ("f32[]", "f32[]"),
        "results": ("bf16",),
    },
    "highest": {"precision": "highest"},
}


def bench_case(name: str, **changes: Any) -> Case:
    """The convolution of a name in `BENCH`; all have padding "same"."""
    size, channels, window, features, stride = BENCH[name]
    return Case(name, size, channels, window, features, stride=stride, **changes)


# Running


@dataclasses.dataclass
class Session:
    """Where results go, and how long there is."""

    out: pathlib.Path
    deadline: float
    dry: bool
    entries: dict[str, Any]
    pool: concurrent.futures.Executor
    running: tuple[str, float] | None = None

    def record(self, name: str, entry: dict[str, Any]) -> None:
        self.running = None
        self.entries[name] = entry
        self.out.write_text(json.dumps(self.entries, indent=1))

    def start(self, name: str) -> None:
        self.running = (name, time.monotonic())

    def watch(self) -> None:
        """In a thread: a kernel that never ends cannot be stopped from inside, but the process can start over."""
        while True:
            time.sleep(1)
            running = self.running
            if running and time.monotonic() - running[1] > HANG_SECONDS:
                name = running[0]
                print(f"{name} HANGS: starting over without it", flush=True)
                self.record(name, {"ok": False, "error": f"no end after {HANG_SECONDS} s"})
                arguments = [*sys.argv, "--done", str(self.out), "--budget-seconds", str(self.time_left)]
                os.execv(sys.executable, [sys.executable, *arguments])

    @property
    def time_left(self) -> float:
        return self.deadline - time.monotonic()


def shapes_of(case: Case) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s.dimensions, numpy_dtype(s.element_type)) for s in case.call.operand_shapes]


def lower(function: Callable[..., Any], arguments: Any, dry: bool) -> Any:
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",) if dry else None)


def short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' | '.join(lines)[:300]}"


def run_checks(session: Session, cases: list[Case]) -> None:
    """Lowers and compiles all in parallel, then runs each and its reference."""
    for start in range(0, len(cases), 16):
        batch = cases[start : start + 16]
        if session.time_left < 20:
            print("  out of time")
            return
        compiled: dict[str, concurrent.futures.Future[Any]] = {}
        for case in batch:
            name = f"check/{case.name}"
            verdict = case.backend.supports(case.call, TARGET)
            if not verdict.ok:
                session.record(name, {"ok": False, "error": verdict.reason})
                print(f"{name:28} REFUSED {verdict.reason}")
                continue
            config = case.config or case.backend.configs(case.call, TARGET)[0]
            try:
                lowered = lower(case.backend.lower(case.call, config), shapes_of(case), session.dry)
            except Exception as error:
                session.record(name, {"ok": False, "error": short(error), "config": str(config)})
                print(f"{name:28} ERROR in lowering: {short(error)}")
                continue
            if session.dry:
                session.record(name, {"ok": True, "config": str(config)})
            else:
                compiled[case.name] = session.pool.submit(lowered.compile)
        for case in batch:
            if case.name in compiled:
                check(session, case, compiled[case.name])


def check(session: Session, case: Case, compiled: concurrent.futures.Future[Any]) -> None:
    name = f"check/{case.name}"
    session.start(name)
    try:
        executable = compiled.result()
        operands = case.operands()
        arrays = [jnp.asarray(operand) for operand in operands]
        got = [np.asarray(array) for array in executable(*arrays)]
        others = [[np.asarray(array) for array in executable(*arrays)] for _ in range(REPEATS)]
        types = [shape.element_type for shape in case.call.output_shapes]
        with jax.default_device(jax.devices("cpu")[0]):
            call = case.call
            run = jax.jit(lambda *a: reference.run(call.graph, call.window, call.dim_labels, 1, a, types))
            want = [np.asarray(array) for array in run(*map(jnp.asarray, operands))]
    except Exception as error:
        session.record(name, {"ok": False, "error": short(error)})
        print(f"{name:28} ERROR {short(error)}")
        return
    results = []
    for a, b, *repeats in zip(want, got, *others, strict=True):
        d = compare(a, b)
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        finite = np.isfinite(wide_a) & np.isfinite(wide_b)
        difference = np.linalg.norm((wide_a - wide_b)[finite])
        norm = difference / max(np.linalg.norm(wide_a[finite]), 1e-30)
        same = bool((np.isnan(wide_a) == np.isnan(wide_b)).all())
        repeat = all(b.tobytes() == c.tobytes() for c in repeats)
        largest = float(np.max(np.abs(wide_a[finite]), initial=0.0))
        worst = float(np.max(np.abs(wide_a - wide_b)[finite], initial=0.0))
        results.append(
            {
                "type": a.dtype.name,
                "norm": float(norm),
                "equal": 1 - d.share,
                "beyond_one_step": d.beyond_one_step / max(d.size, 1),
                "of_amax": worst / max(largest, 1e-30),
                "worst": d.worst,
                "nan_same": same,
                "repeat": repeat,
            }
        )
    ok = all(r["norm"] < (0.02 if len(results) == 1 else 0.01) and r["nan_same"] and r["repeat"] for r in results)
    session.record(name, {"ok": ok, "results": results})
    parts = "  ".join(
        f"{r['type'].removeprefix('float8_')}: equal {r['equal']:.4f} norm {r['norm']:.1e} "
        f"worst {r['of_amax']:.1e} of amax"
        + ("" if r["nan_same"] else " NANS DIFFER")
        + ("" if r["repeat"] else " NOT REPEATABLE")
        for r in results
    )
    print(f"{name:28} {'ok  ' if ok else 'FAIL'} {parts}", flush=True)


def inner_times(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of (x, *rest) as a function of eight x: XLA inlines the calls, and traces them once."""
    one = jax.jit(function)

    def many(inputs: Sequence[jax.Array], *rest: jax.Array) -> list[Any]:
        return [one(x, *rest) for x in inputs]

    return many


def xla_fp8(case: Case) -> Callable[..., Any]:
    """The chain as JAX users write it, which XLA's own matcher turns into a cuDNN FP8 graph."""

    def run(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        y = xla_conv(case, x.astype(jnp.float32), w.astype(jnp.float32)) * scale
        return jnp.clip(y, -448.0, 448.0).astype(jnp.float8_e4m3fn)

    return run


def xla_bf16(case: Case) -> Callable[..., Any]:
    def run(x: jax.Array, w: jax.Array, _: jax.Array) -> jax.Array:
        # A network in bf16 has no scales, and XLA would multiply by one in a second kernel.
        return xla_conv(case, x, w)

    return run


def xla_conv(case: Case, x: jax.Array, w: jax.Array) -> jax.Array:
    window = case.call.window
    return lax.conv_general_dilated(
        x,
        w,
        [d.stride for d in window],
        [(d.padding_low, d.padding_high) for d in window],
        dimension_numbers=("NHWC", "OHWI", "NHWC"),
    )


def seconds_a_call(executable: Any, arguments: Any) -> float:
    """Median over three of the time of some runs enqueued together, for one of the eight calls of a run."""
    jax.block_until_ready(executable(*arguments))
    start = time.perf_counter()
    jax.block_until_ready(executable(*arguments))
    once = time.perf_counter() - start
    runs = max(3, min(40, int(0.02 / max(once, 1e-6))))
    samples = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(runs):
            results = executable(*arguments)
        jax.block_until_ready(results)
        samples.append((time.perf_counter() - start) / runs / CALLS)
    return statistics.median(samples)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Eight inputs, in the type that a contestant reads, and the operands behind them."""

    inputs: tuple[jax.Array, ...]
    rest: tuple[jax.Array, ...]

    @staticmethod
    def of(case: Case, wide: bool = False, integers: bool = False) -> Inputs:
        """Random; with `integers` small whole numbers, whose sums are exact and the same in any order."""
        key = jax.random.key(0)
        shapes = shapes_of(case)

        def random(number: int, shape: jax.ShapeDtypeStruct, scale: float = 1.0) -> jax.Array:
            values = jax.random.normal(jax.random.fold_in(key, number), shape.shape, jnp.bfloat16) * scale
            if integers and number <= 100:
                values = jnp.clip(jnp.round(values), -2, 2)
            values = values.astype(shape.dtype)
            return values.astype(jnp.bfloat16) if wide and shape.dtype.itemsize == 1 else values

        rest = [random(100, shapes[1])]
        reduction = math.prod(case.window) * case.channels
        for index, shape in enumerate(shapes[2:]):
            scalar = jnp.asarray(16 / math.sqrt(reduction) if index == 0 else 0.5, jnp.float32)
            rest.append(random(200 + index, shape, 8.0) if shape.shape else scalar)
        return Inputs(tuple(random(number, shapes[0]) for number in range(CALLS)), tuple(rest))


def measure(session: Session, name: str, case: Case, run: Callable[..., Any], data: Inputs, **facts: Any) -> float:
    """Compiles (unless done), times and records one contestant; returns microseconds, infinite where it failed."""
    if name in session.entries:
        return float(session.entries[name].get("us", math.inf))
    session.start(name)
    try:
        start = time.monotonic()
        executable = run() if facts.pop("compiled", False) else lower(run, data_shapes(data), False).compile()
        compile_seconds = time.monotonic() - start
        us = 1e6 * seconds_a_call(executable, (data.inputs, *data.rest))
    except Exception as error:
        session.record(name, {"ok": False, "error": short(error), **facts})
        print(f"  {name:60} ERROR {short(error)}", flush=True)
        return math.inf
    teraflops = case.flops / us / 1e6
    if "xla_fp8" in name:
        facts["fused"] = "convForwardGraph" in executable.as_text()
    if "cublaslt" in name:
        facts["fused"] = "cublas$lt$matmul$f8" in executable.as_text()
    session.record(name, {"ok": True, "us": us, "tflops": teraflops, "compile_s": compile_seconds, **facts})
    note = "" if facts.get("fused", True) else "  NOT FUSED"
    print(f"  {name:60} {us:8.1f} us {teraflops:6.0f} TF/s  compile {compile_seconds:4.1f} s{note}", flush=True)
    return us


def data_shapes(data: Inputs) -> tuple[Any, ...]:
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (data.inputs, *data.rest))


def contestants(
    session: Session, prefix: str, case: Case, data: Inputs, chosen: Sequence[Config]
) -> dict[Config, float]:
    """Times configs of the kernel: lowered one after another, compiled side by side, timed one after another."""
    futures = {}
    times = {}
    for config in chosen:
        if f"{prefix}/{config}" in session.entries:
            times[config] = float(session.entries[f"{prefix}/{config}"].get("us", math.inf))
            continue
        try:
            lowered = lower(inner_times(case.backend.lower(case.call, config)), data_shapes(data), False)
            futures[config] = session.pool.submit(lowered.compile)
        except Exception as error:
            session.record(f"{prefix}/{config}", {"ok": False, "error": short(error)})
            print(f"  {prefix}/{config} ERROR in lowering: {short(error)}")
    concurrent.futures.wait(futures.values())
    for config, future in futures.items():
        predicted = configs.predicted_cycles(problem(case), config, footprint(case))
        times[config] = measure(
            session, f"{prefix}/{config}", case, future.result, data, compiled=True, predicted=predicted
        )
    return times


def problem(case: Case) -> Any:
    from xla_fp8.backends.mosaic.problem import problem_of

    return problem_of(case.call)


def footprint(case: Case) -> configs.Footprint:
    from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of

    epilogue = epilogue_of(case.call)
    assert isinstance(epilogue, Epilogue), epilogue
    return epilogue.footprint


def run_bench(session: Session, name: str, how_many: int, precision: str = "default") -> None:
    """Times configs of the kernel on one shape, and XLA's bf16 convolution, which compiles quickly."""
    case = bench_case(name, precision=precision)
    kernel = "mosaic" if precision == "default" else precision
    chosen = case.backend.configs(case.call, TARGET)[:how_many]
    if session.dry:
        for config in chosen:
            try:
                lowered = lower(case.backend.lower(case.call, config), shapes_of(case), True)
                print(f"  bench/{name}/{kernel}/{config}  {len(lowered.as_text())} bytes")
            except Exception as error:
                print(f"  bench/{name}/{kernel}/{config}  ERROR {short(error)}")
        return
    print(f"bench/{name} {kernel}", flush=True)
    times = contestants(session, f"bench/{name}/{kernel}", case, Inputs.of(case), chosen)
    best = min(times, key=times.__getitem__)
    summary = {
        "ok": True,
        "best_config": str(best),
        "best_us": times[best],
        "heuristic_us": times[chosen[0]],
        "tflops": case.flops / times[best] / 1e6,
    }
    session.record(f"summary/{name}/{kernel}", summary)


def run_variants(session: Session, name: str) -> None:
    """What else could be tuned, around the best config of a shape: matrix multiplies in flight, stages."""
    case = bench_case(name)
    found = {str(config): config for config in case.backend.configs(case.call, TARGET)}
    best = found.get(session.entries.get(f"summary/{name}/mosaic", {}).get("best_config", ""))
    if best is None or session.dry:
        return
    changes = [{"delay": 0}, {"stages": best.stages - 1}, {"columns": 32}]
    variants = [dataclasses.replace(best, **change) for change in changes]
    print(f"variants/{name}: {best}", flush=True)
    able = [variant for variant in variants if variant.delay < variant.stages]
    contestants(session, f"variants/{name}", case, Inputs.of(case), able)


def run_baselines(session: Session, names: Sequence[str], wide: bool, tuners: int) -> None:
    """Times XLA's convolutions: compiled `tuners` shapes at once, then timed one by one.

    XLA's autotuner takes 25 s for an FP8 convolution, mostly to build cuDNN plans. Several at once may disturb each
    other's timings, and with them XLA's choice, and gain nothing (three took 90 and 101 s): the published comparison is
    made with one.
    """
    kind = "xla_bf16" if wide else "xla_fp8"
    todo = [name for name in names if f"bench/{name}/{kind}" not in session.entries]
    for start in range(0, len(todo), tuners):
        if session.time_left < 45:
            print(f"  out of time for {kind}: {todo[start:]}", flush=True)
            return
        group = [(name, bench_case(name)) for name in todo[start : start + tuners]]
        if session.dry:
            continue
        data = {name: Inputs.of(case, wide) for name, case in group}
        futures = {}
        for name, case in group:
            contestant = inner_times(xla_bf16(case) if wide else xla_fp8(case))
            futures[name] = session.pool.submit(lower(contestant, data_shapes(data[name]), False).compile)
        begin = time.monotonic()
        concurrent.futures.wait(futures.values())
        facts = {"compiled": True, "tuners": len(group), "tuning_s": time.monotonic() - begin}
        for name, case in group:
            measure(session, f"bench/{name}/{kind}", case, futures[name].result, data[name], **facts)


def run_final(session: Session, how_many: int) -> None:
    """Shape by shape: the kernel, then XLA in bf16 and in FP8, tuned alone. Cut short, it leaves whole rows."""
    for name in FINAL:
        if session.time_left < 50:
            print(f"out of time before {name}", flush=True)
            return
        if f"summary/{name}/mosaic" not in session.entries:
            run_bench(session, name, how_many)
        for wide in (True, False):
            run_baselines(session, [name], wide, tuners=1)


def run_ceiling(session: Session, name: str) -> None:
    """Times the FP8 matrix product that has the shape of a convolution, as XLA runs it, with fast accumulation."""
    case = bench_case(name)
    pixels = case.call.output_shapes[0].element_count // case.features
    reduction = math.prod(case.window) * case.channels
    product = dataclasses.replace(case, size=(1, 1, pixels), channels=reduction, window=(1, 1), stride=1)

    def run(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        a, b = (array.reshape(-1, reduction).astype(jnp.bfloat16) for array in (x, w))
        y = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)
        return jnp.clip(y * scale.astype(jnp.bfloat16), -448.0, 448.0).astype(jnp.float8_e4m3fn)

    if not session.dry:
        measure(session, f"ceiling/{name}/cublaslt", product, inner_times(run), Inputs.of(product))


def run_epilogues(session: Session, shape: str, names: Sequence[str]) -> None:
    plain: dict[str, float] = {}
    for name in names:
        case = bench_case(shape, **EPILOGUES[name])
        chosen = case.backend.configs(case.call, TARGET)[:3]
        prefix = f"epilogue/{shape}/{name}"
        if session.dry:
            for config in chosen:
                lowered = lower(case.backend.lower(case.call, config), shapes_of(case), True)
                print(f"  {prefix}/{config}  {len(lowered.as_text())} bytes")
            continue
        if session.time_left < 25:
            print("  out of time")
            return
        times = contestants(session, prefix, case, Inputs.of(case), chosen)
        plain[name] = min(times.values())
        session.record(
            f"summary/{prefix}", {"ok": True, "best_us": plain[name], "tflops": case.flops / plain[name] / 1e6}
        )


def table(entries: dict[str, Any]) -> str:
    lines = []
    failed = [name for name, entry in entries.items() if name.startswith("check/") and not entry["ok"]]
    passed = sum(name.startswith("check/") and entry["ok"] for name, entry in entries.items())
    lines.append(f"checks: {passed} ok, {len(failed)} failed {failed}")
    rows = {n.removeprefix("summary/"): e for n, e in entries.items() if n.startswith("summary/")}
    ratios: dict[str, list[float]] = {"fp8": [], "bf16": []}
    for name, row in rows.items():
        if "heuristic_us" not in row:
            lines.append(f"{name:48} {row['best_us']:8.1f} us {row['tflops']:6.0f} TF/s")
            continue
        shape, kernel = name.rsplit("/", 1)
        line = f"{name:40} {row['best_us']:8.1f} us {row['tflops']:6.0f} TF/s"
        for kind, found in ratios.items():
            us = entries.get(f"bench/{shape}/xla_{kind}", {}).get("us")
            if us is None:
                continue
            line += f"  x{us / row['best_us']:.2f} {kind}"
            if kernel == "mosaic":
                found.append(us / row["best_us"])
        ceiling = entries.get(f"ceiling/{shape}/cublaslt", {}).get("us")
        if ceiling is not None:
            line += f"  {ceiling / row['best_us']:.0%} of cuBLASLt"
        lines.append(f"{line}  heuristic +{row['heuristic_us'] / row['best_us'] - 1:.0%}  {row['best_config']}")
    lines += [
        f"geometric mean vs XLA {kind}: {statistics.geometric_mean(found):.2f} over {len(found)} shapes, "
        f"least {min(found):.2f}"
        for kind, found in ratios.items()
        if found
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("mosaic_session.json"))
    parser.add_argument("--done", type=pathlib.Path, help="results of an earlier session, not to be measured again")
    parser.add_argument("--budget-seconds", type=float, default=500)
    parser.add_argument("--only", default="", help="comma-separated parts of item names")
    parser.add_argument("--skip", default="", help="comma-separated parts of item names")
    parser.add_argument("--configs", type=int, default=6, help="configs to time for each shape")
    parser.add_argument("--no-baselines", action="store_true", help="do not time XLA's convolutions")
    parser.add_argument(
        "--tuners", type=int, default=1, help="XLA convolutions compiled at once (disturbs their choice)"
    )
    parser.add_argument("--final", action="store_true", help="only the published comparison: `FINAL`, in its order")
    parser.add_argument("--dry-run", action="store_true", help="lower for cuda on this machine and measure nothing")
    args = parser.parse_args()
    only, skip = [p for p in args.only.split(",") if p], [p for p in args.skip.split(",") if p]

    def wanted(name: str) -> bool:
        return (not only or any(p in name for p in only)) and not any(p in name for p in skip)

    entries = json.loads(args.done.read_text()) if args.done else {}
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        session = Session(args.out, time.monotonic() + args.budget_seconds, args.dry_run, entries, pool)
        print(f"jax {jax.__version__}; {[d.device_kind for d in jax.devices()]}; {' '.join(sys.argv)}", flush=True)
        begin = time.monotonic()
        threading.Thread(target=session.watch, daemon=True).start()
        if args.final:
            run_final(session, min(args.configs, 4))
            print(f"\n{table(session.entries)}\n{time.monotonic() - begin:.0f} s", flush=True)
            return
        cases = [c for c in checks() if wanted(f"check/{c.name}") and f"check/{c.name}" not in entries]
        run_checks(session, cases)
        print(f"checks took {time.monotonic() - begin:.0f} s", flush=True)
        names = [name for name in BENCH if wanted(f"bench/{name}")]
        runs = [(name, "default") for name in names]
        runs += [(name, "highest") for name in HIGHEST if wanted(f"highest/{name}")]
        for name, precision in runs:
            kernel = "mosaic" if precision == "default" else precision
            if f"summary/{name}/{kernel}" not in entries:
                if session.time_left < 30:
                    print("out of time")
                    break
                run_bench(session, name, args.configs, precision)
        for name in BENCH:
            if wanted(f"variants/{name}") and session.time_left > 30:
                run_variants(session, name)
        if not args.no_baselines:
            run_baselines(session, names, wide=True, tuners=1)
        for name in CEILINGS:
            if wanted(f"ceiling/{name}") and f"ceiling/{name}/cublaslt" not in entries and session.time_left > 30:
                run_ceiling(session, name)
        for shape in ("64x64-256", "56x56-128", "1x1-56x56-256"):
            names = [n for n in EPILOGUES if wanted(f"epilogue/{shape}/{n}")]
            if names and session.time_left > 25:
                run_epilogues(session, shape, names)
        if not args.no_baselines:
            run_baselines(session, [n for n in BENCH if wanted(f"bench/{n}")], wide=False, tuners=args.tuners)
        print(f"\n{table(session.entries)}\n{time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
