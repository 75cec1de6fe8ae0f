"""FP8 convolutions on the GPU: this project's backends against XLA's own FP8 and bf16 convolutions, device-bound.

    python benchmarks/conv.py --out build/bench              all shapes and epilogues; results.json, a table, a plot
    python benchmarks/conv.py --seconds 300 --out DIR        stops in time; what is in results.json is not run again
    python benchmarks/conv.py --tiny --out DIR               small shapes on any machine: does the script work?

Each number is the device's time for one call: several calls in one jit (`autotune.device_time`), so that dispatch is
not what is timed. XLA autotunes cuDNN too. A ratio is XLA's FP8 time through ours: above 1 we are faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8.backends.autotune import device_time, tune
from xla_fp8.backends.cudnn.backend import CudnnBackend
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.protocol import Backend
from xla_fp8.target import GraphCall, Target


@dataclasses.dataclass(frozen=True)
class Shape:
    """N, H, W, C, RxR, K, stride; SAME padding."""

    n: int
    h: int
    w: int
    c: int
    r: int
    k: int
    stride: int = 1

    def __str__(self) -> str:
        stride = f" stride {self.stride}" if self.stride != 1 else ""
        return f"{self.n},{self.h},{self.w},{self.c},{self.r}x{self.r},{self.k}{stride}"

    @property
    def padding(self) -> tuple[int, int]:
        total = max(self.r - self.stride, 0) if self.stride > 1 else self.r - 1
        return total // 2, total - total // 2

    @property
    def flops(self) -> int:
        low, high = self.padding
        out = [(n + low + high - self.r) // self.stride + 1 for n in (self.h, self.w)]
        return 2 * self.n * math.prod(out) * self.k * self.c * self.r * self.r


SHAPES = (
    Shape(32, 64, 64, 256, 3, 256),
    Shape(64, 56, 56, 128, 3, 128),
    Shape(64, 28, 28, 512, 3, 512),
    Shape(64, 14, 14, 512, 3, 512),
    Shape(64, 7, 7, 512, 3, 512),
    Shape(16, 32, 32, 1024, 3, 1024),
    Shape(8, 128, 128, 128, 3, 128),
    Shape(1, 64, 64, 1280, 3, 1280),
    Shape(32, 64, 64, 256, 1, 256),
    Shape(64, 56, 56, 256, 1, 256),
    Shape(2, 64, 64, 320, 3, 320),
    Shape(16, 64, 64, 320, 3, 320),
    Shape(64, 56, 56, 128, 3, 128, 2),
)
FEW = SHAPES[1], SHAPES[3], SHAPES[10]
"""The shapes of every epilogue but the first: XLA alone takes half a minute to tune one."""
TINY = (Shape(1, 8, 8, 16, 3, 16), Shape(1, 8, 8, 16, 3, 16, 2))

Chain = Callable[..., tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What stands behind the convolution.

    Attributes:
        graph: as a graph string.
        chain: the same in JAX, on the f32 value of the convolution and the side operands.
    """

    graph: str
    chain: Callable[..., Any]


def _quantized(y: jax.Array) -> jax.Array:
    return jnp.clip(y, -448, 448).astype(jnp.float8_e4m3fn)


EPILOGUES = {
    "scale": Epilogue("1:[f32]conv();2:[f8e4m3fn]scale(1);", lambda y, s: (_quantized(y * s),)),
    "relu+amax": Epilogue(
        "1:[f32]conv();2:[f32]scale(1);3:[f32]relu(2);4:[f8e4m3fn]scale(3);5:[f32]amax(3);",
        lambda y, s, t: (_quantized(jax.nn.relu(y * s) * t), jnp.max(jax.nn.relu(y * s))),
    ),
    "bias+silu": Epilogue(
        "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]silu(3);5:[f8e4m3fn]scale(4);",
        lambda y, s, b, t: (_quantized(jax.nn.silu(y * s + b) * t),),
    ),
    "channel scale+bias+gelu": Epilogue(
        "1:[f32]conv();2:[f32]channel_scale(1);3:[f32]bias(2);4:[f32]gelu_tanh(3);5:[f8e4m3fn]scale(4);",
        lambda y, c, b, t: (_quantized(jax.nn.gelu(y * c + b) * t),),
    ),
}
"""The first two XLA fuses itself; the others it leaves outside the FP8 graph."""


def call_of(shape: Shape, epilogue: Epilogue) -> GraphCall:
    low, high = shape.padding
    window = f"{{size={shape.r}x{shape.r} stride={shape.stride}x{shape.stride} pad={low}_{high}x{low}_{high}}}"
    return graph_call(
        epilogue.graph,
        batch=shape.n,
        image=(shape.h, shape.w),
        channels=shape.c,
        features=shape.k,
        filter=(shape.r, shape.r),
        window=window,
    )


def plain_jax(shape: Shape, epilogue: Epilogue, wide: Any) -> Chain:
    """The chain as a user writes it; XLA makes of it what it can."""
    padding = [shape.padding, shape.padding]

    def run(x: jax.Array, w: jax.Array, *sides: jax.Array) -> tuple[jax.Array, ...]:
        y = jax.lax.conv_general_dilated(
            x.astype(wide),
            w.astype(wide),
            (shape.stride, shape.stride),
            padding,
            dimension_numbers=("NHWC", "OHWI", "NHWC"),
        )
        return tuple(epilogue.chain(y.astype(jnp.float32), *sides))

    return run


def bf16_chain(shape: Shape, epilogue: Epilogue) -> Chain:
    """The same network without FP8: bf16 in, bf16 out, the epilogue in bf16's own type."""

    def run(x: jax.Array, w: jax.Array, *sides: jax.Array) -> tuple[jax.Array, ...]:
        padding = [shape.padding, shape.padding]
        y = jax.lax.conv_general_dilated(
            x, w, (shape.stride, shape.stride), padding, dimension_numbers=("NHWC", "OHWI", "NHWC")
        )
        outputs = _without_quantizing(epilogue, y.astype(jnp.float32), sides)
        return tuple(o.astype(jnp.bfloat16) for o in outputs)

    return run


def _without_quantizing(epilogue: Epilogue, y: jax.Array, sides: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    names = {value: name for name, value in EPILOGUES.items()}
    name = names[epilogue]
    if name == "scale":
        return (y * sides[0],)
    if name == "relu+amax":
        return (jax.nn.relu(y * sides[0]) * sides[1],)
    activation = jax.nn.silu if name == "bias+silu" else jax.nn.gelu
    return (activation(y * sides[0] + sides[1]) * sides[2],)


def operands_of(call: GraphCall) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(rng.normal(size=s.dimensions), jnp.float8_e4m3fn) for s in call.operand_shapes[:2]]
    return operands + [
        jnp.asarray(0.01 if s.is_scalar else rng.normal(size=s.dimensions) * 0.01, jnp.float32)
        for s in call.operand_shapes[2:]
    ]


def measure(shape: Shape, name: str, backends: list[Backend]) -> dict[str, Any]:
    """One row: microseconds of everything, or why there is no number."""
    epilogue = EPILOGUES[name]
    call = call_of(shape, epilogue)
    operands = operands_of(call)
    row: dict[str, Any] = {"shape": str(shape), "epilogue": name, "flops": shape.flops}
    wide = [operand.astype(jnp.bfloat16) for operand in operands[:2]] + operands[2:]
    for what, function, arguments in (
        ("xla_fp8", plain_jax(shape, epilogue, jnp.float32), operands),
        ("xla_bf16", bf16_chain(shape, epilogue), wide),
    ):
        row[what] = _timed(lambda f=function, a=arguments: device_time(f, a), row, what)
    for backend in backends:
        row[backend.name] = _timed(lambda b=backend: _best(b, call, row), row, backend.name)
    return row


def _best(backend: Backend, call: GraphCall, row: dict[str, Any]) -> float:
    configs = list(backend.configs(call, Target.parse("h200")))[:24]
    start = time.perf_counter()
    timings = tune(backend, call, configs)
    row[f"{backend.name}_tuning_seconds"] = round(time.perf_counter() - start, 1)
    row[f"{backend.name}_configs"] = [
        {"config": str(t.config), "us": None if t.problem else round(t.microseconds, 2), "problem": t.problem}
        for t in timings
    ]
    if timings[0].problem:
        raise RuntimeError(timings[0].problem)
    if settled := getattr(backend, "settled", None):
        settled(call, timings[0].config)
    return timings[0].microseconds


def _timed(measure: Callable[[], float], row: dict[str, Any], what: str) -> float | None:
    try:
        return round(measure(), 2)
    except Exception as error:  # a peer that does not compile is a result too
        row[f"{what}_problem"] = " ".join(str(error).split())[:300]
        return None


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    heads = ["shape", "epilogue", "XLA fp8", "XLA bf16", *names, *(f"{n} / XLA fp8" for n in names)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row["shape"], row["epilogue"]]
        for name in ("xla_fp8", "xla_bf16", *names):
            us = row.get(name)
            cells.append(f"{us:.1f} us {row['flops'] / us / 1e6:.0f} TF/s" if us else "-")
        for name in names:
            ours, theirs = row.get(name), row.get("xla_fp8")
            cells.append(f"{theirs / ours:.2f}x" if ours and theirs else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], names: list[str], path: Path) -> None:
    """A bar chart of TF/s; nothing where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [row for row in rows if row["epilogue"] == "scale"]
    figure, axes = pyplot.subplots(figsize=(12, 5))
    series = ["xla_fp8", "xla_bf16", *names]
    for index, name in enumerate(series):
        heights = [row["flops"] / row[name] / 1e6 if row.get(name) else 0 for row in rows]
        axes.bar([i + index * 0.8 / len(series) for i in range(len(rows))], heights, 0.8 / len(series), label=name)
    axes.set_xticks(range(len(rows)), [row["shape"] for row in rows], rotation=30, ha="right")
    axes.set_ylabel("TF/s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--resume", type=Path, help="results.json of an earlier run, which this one continues")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no shape later than this")
    parser.add_argument("--epilogues", default=",".join(EPILOGUES), help="which, by name")
    parser.add_argument("--backends", default="cudnn", help="which, by name: cudnn, mosaic")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    arguments = parser.parse_args()
    start = time.monotonic()
    backends = [_backend(name) for name in arguments.backends.split(",") if name]
    names = [backend.name for backend in backends]
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "results.json"
    source = arguments.resume or file
    rows = json.loads(source.read_text())["rows"] if source.exists() else []
    done = {(row["shape"], row["epilogue"]) for row in rows}
    device = jax.devices()[0]
    for index, name in enumerate(arguments.epilogues.split(",")):
        shapes = TINY if arguments.tiny else FEW if index else SHAPES
        for shape in shapes:
            if (str(shape), name) in done or time.monotonic() - start > arguments.seconds:
                continue
            row = measure(shape, name, backends)
            rows.append(row)
            print(table([row], names).splitlines()[-1], flush=True)
            about = {"device": device.device_kind, "jax": jax.__version__, "versions": [_version(b) for b in backends]}
            file.write_text(json.dumps({**about, "rows": rows}, indent=1))
    print(table(rows, names))
    plot(rows, names, arguments.out / "conv.png")


def _backend(name: str) -> Backend:
    if name == "cudnn":
        return CudnnBackend()
    from xla_fp8.backends.registry import BACKENDS

    return BACKENDS[name]()


def _version(backend: Backend) -> str:
    return f"{backend.name}: {getattr(backend, 'version', '')}"


if __name__ == "__main__":
    main()
