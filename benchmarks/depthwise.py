"""Depthwise convolutions on a Hopper GPU: this project's kernels against XLA's in bf16, which is cuDNN.

    python -m benchmarks.depthwise --seconds 400 --out build/depthwise
    python -m benchmarks.depthwise --dry-run          small images, interpreted: to try it on any machine
    python -m benchmarks.depthwise --lower            every row for CUDA, on a machine without a GPU; times nothing

A row is a layer of a network and one of three parts: the convolution, the gradient of its input, that of its filter.
XLA computes it of bf16 tensors; the kernels with each of their configs, first of all the one that is taken where
nobody says. Every contestant computes several calls in one jit, on inputs of their own, and is timed on the device as
`benchmarks.conv.timing` does, all in turn, in one process. Before that its result is compared with XLA's in f32.

Bytes are those of the input, the result and the filter, read or written once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.conv.timing import Contestant, Timing, short, time_in_turn
from xla_fp8.backends.depthwise import filter_gradient, forward
from xla_fp8.backends.depthwise.convolution import OPERANDS, Convolution, Part
from xla_fp8.backends.depthwise.problem import Problem
from xla_fp8.backends.triton.device import hopper_gpu

XLA = "xla"
PARTS: tuple[Part, ...] = ("output", "filter", "input")
TITLES: Mapping[Part, str] = {"output": "forward", "filter": "filter gradient", "input": "input gradient"}
ERRORS: Mapping[Part, float] = {"output": 4e-3, "input": 4e-3, "filter": 1e-4}
"""Of results that are right: the norm of the difference from f32's as a part of their own. bf16 rounds by 2^-9."""

_POOL = 1 << 22
_BYTES = 3 << 30  # of all calls' inputs together


@dataclasses.dataclass(frozen=True)
class Layer:
    """Square images, padded as "SAME"."""

    network: str
    batch: int
    size: int
    channels: int
    window: int
    stride: int = 1

    @property
    def name(self) -> str:
        image = "x".join(map(str, (self.batch, self.size, self.size, self.channels)))
        return f"{self.network} {image} {self.window}x{self.window}" + (" stride 2" if self.stride == 2 else "")

    @property
    def convolution(self) -> Convolution:
        x = jax.ShapeDtypeStruct((self.batch, self.size, self.size, self.channels), jnp.bfloat16)
        w = jax.ShapeDtypeStruct((self.window, self.window, 1, self.channels), jnp.bfloat16)
        found = Convolution.of(
            x, w, (self.stride, self.stride), "SAME", None, None, ("NHWC", "HWIO", "NHWC"), self.channels
        )
        assert found is not None
        return found


_STAGES = ((56, 96), (28, 192), (14, 384), (7, 768))
_MOBILENET = ((112, 32, 1), (112, 96, 2), (56, 144, 1), (56, 144, 2), (28, 192, 1), (28, 192, 2), (14, 384, 1))
_MOBILENET += ((14, 576, 1), (14, 576, 2), (7, 960, 1))
LAYERS = (
    *(Layer("ConvNeXt-T", batch, size, channels, 7) for batch in (256, 64) for size, channels in _STAGES),
    *(Layer("MobileNet-V2", 256, size, channels, 3, stride) for size, channels, stride in _MOBILENET),
    Layer("EfficientNet-B0", 256, 28, 240, 5),
    Layer("EfficientNet-B0", 256, 14, 672, 5, 2),
)
"""The most wanted first, for a run that ends early."""
TINY = (Layer("tiny", 2, 7, 16, 7), Layer("tiny", 2, 8, 32, 3, 2))


@dataclasses.dataclass(frozen=True)
class Row:
    layer: Layer
    part: Part

    @property
    def name(self) -> str:
        return f"{self.layer.name}, {TITLES[self.part]}"

    @functools.cached_property
    def convolution(self) -> Convolution:
        return self.layer.convolution

    @property
    def problem(self) -> Problem | None:
        """What the kernel is asked for; None where there is none."""
        return self.convolution.problem.input_gradient if self.part == "input" else self.convolution.problem

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.convolution.shape("output")) * self.layer.window**2

    @property
    def bytes(self) -> int:
        parts: tuple[Part, ...] = ("input", "output", "filter")
        return 2 * sum(math.prod(self.convolution.shape(part)) for part in parts)

    @property
    def calls(self) -> int:
        return max(2, min(8, _BYTES // self.bytes))

    def configs(self) -> list[Any]:
        module = filter_gradient if self.part == "filter" else forward
        return list(module.configs(self.problem)) if self.problem is not None else []

    def by_xla(self, *operands: jax.Array) -> jax.Array:
        return self.convolution.by_lax(self.part, *operands)

    def by_kernel(self, config: Any, interpret: bool, *operands: jax.Array) -> jax.Array:
        problem = self.problem
        assert problem is not None
        if self.part == "filter":
            return filter_gradient.filter_gradient(problem, *operands, config, interpret)
        x, w = operands if self.part == "output" else operands[::-1]
        window = w[:, :, 0] if self.part == "output" else w[::-1, ::-1, 0]
        return forward.forward(problem, x, window, config, interpret)


ROWS = tuple(Row(layer, part) for layer in LAYERS for part in PARTS)


def program(function: Callable[..., jax.Array], row: Row) -> Callable[..., list[jax.Array]]:
    """Several calls, one behind the other. Its arguments are the operands of each; the filter is that of all."""
    once = jax.jit(function)  # traced and lowered once for all calls

    def run(calls: Sequence[tuple[jax.Array, ...]]) -> list[jax.Array]:
        results: list[jax.Array] = []
        for operands in calls:
            if results:  # else XLA might fuse what stands beside each other here and nowhere else
                operands, results[-1] = lax.optimization_barrier((operands, results[-1]))
            results.append(once(*operands))
        return results

    return run


def structs(row: Row) -> list[tuple[Any, ...]]:
    convolution = row.convolution
    one = tuple(
        jax.ShapeDtypeStruct(convolution.shape(part), jnp.bfloat16)  # type: ignore[no-untyped-call]
        for part in OPERANDS[row.part]
    )
    return [one] * row.calls


def inputs(row: Row) -> list[tuple[jax.Array, ...]]:
    """Normal numbers, others for each call."""
    pool = jnp.asarray(np.random.default_rng(0).normal(size=_POOL), jnp.bfloat16)

    @functools.partial(jax.jit, static_argnums=0)
    def make(shape: tuple[int, ...], number: jax.Array) -> jax.Array:
        return pool[(jnp.arange(math.prod(shape), dtype=jnp.uint32) + 7919 * number) & (_POOL - 1)].reshape(shape)

    def operand(part: Part, call: int) -> jax.Array:
        return make(row.convolution.shape(part), jnp.uint32(3 * call + PARTS.index(part)))

    shared = operand("filter", 0)
    return [
        tuple(shared if part == "filter" else operand(part, call) for part in OPERANDS[row.part])
        for call in range(row.calls)
    ]


def reference(row: Row, operands: Sequence[jax.Array]) -> jax.Array:
    """By XLA, of operands converted to f32."""
    wide = dataclasses.replace(
        row.convolution, dtype=np.dtype(np.float32), filter_dtype=np.dtype(np.float32), precision=lax.Precision.HIGHEST
    )
    result: jax.Array = jax.jit(functools.partial(wide.by_lax, row.part))(*(x.astype(jnp.float32) for x in operands))
    return result


@jax.jit
def distance(found: jax.Array, expected: jax.Array) -> jax.Array:
    """The norm of the difference, as a part of that of what is expected."""
    wide = found.astype(jnp.float32).reshape(expected.shape)
    return jnp.linalg.norm((wide - expected).ravel()) / jnp.linalg.norm(expected.ravel())


def contestants(row: Row, most: int, interpret: bool) -> dict[str, Callable[..., jax.Array]]:
    """XLA, and the kernel with some of its configs, the first of which is its own guess."""
    configs = row.configs()[:most]
    return {XLA: row.by_xla} | {
        label(config): functools.partial(row.by_kernel, config, interpret) for config in configs
    }


def label(config: Any) -> str:
    """A config of either kernel, as the table has it."""
    return ", ".join(f"{name} {value}" for name, value in dataclasses.asdict(config).items())


def compiled(row: Row, function: Callable[..., jax.Array]) -> Any:
    """The executable, or the error as text."""
    try:
        return jax.jit(program(function, row)).lower(structs(row)).compile()
    except Exception as error:
        return short(error)


def measure(row: Row, executables: Mapping[str, Any]) -> dict[str, Any]:
    """Checks and times all contestants of a row."""
    arguments = inputs(row)
    expected = reference(row, arguments[0])
    entry: dict[str, Any] = {
        "layer": dataclasses.asdict(row.layer),
        "part": TITLES[row.part],
        "flops": row.flops,
        "bytes": row.bytes,
        "calls": row.calls,
        "first": next((name for name in executables if name != XLA), None),
        "contestants": {},
    }
    found: dict[str, Any] = entry["contestants"]
    timed: dict[str, Contestant] = {}
    for name, executable in executables.items():
        if isinstance(executable, str):
            found[name] = {"problem": executable}
            continue
        try:
            results = executable(arguments)
            found[name] = {"error": float(distance(results[0], expected))}
            del results
        except Exception as error:
            found[name] = {"problem": short(error)}
            continue
        # XLA's filter gradient is rounded to bf16.
        limit = ERRORS["output"] if name == XLA else ERRORS[row.part]
        if found[name]["error"] <= limit:
            timed[name] = Contestant(executable, (arguments,), row.calls)
        else:
            found[name]["problem"] = f"off by {found[name]['error']:.2g} of the result"
    del expected
    for name, timing in time_in_turn(timed).items():
        found[name] |= timing.facts if isinstance(timing, Timing) else {"problem": timing}
    return entry


def summary(name: str, entry: Mapping[str, Any]) -> str:
    """A line of the table."""
    times = {key: value["us"] for key, value in entry["contestants"].items() if "us" in value}
    xla = times.pop(XLA, None)
    wide = f"{xla:9.1f}" if xla else "        -"
    if not times:
        problems = {str(value.get("problem")) for key, value in entry["contestants"].items() if key != XLA}
        return f"{name:58} {wide}  {'; '.join(sorted(problems)) or 'no kernel'}"
    best = min(times, key=lambda key: times[key])
    us, first = times[best], times.get(entry["first"])
    gain = f"{xla / us:5.2f}x" if xla else "      "
    guess = f"{first / us - 1:+6.1%}" if first else "   none"
    wrong = sum("problem" in value for value in entry["contestants"].values())
    return (
        f"{name:58} {wide} {us:9.1f} {gain} {guess} {entry['bytes'] / us / 1e3:7.0f} "
        f"{entry['flops'] / us / 1e6:6.2f}  {best}" + (f"  ({wrong} with problems)" if wrong else "")
    )


HEAD = f"{'':58} {'XLA us':>9} {'best us':>9} {'':6} {'guess':>6} {'GB/s':>7} {'TFLOP/s':>6}  best config"


def run(rows: Sequence[Row], most: int, seconds: float, threads: int, interpret: bool, out: Path) -> None:
    start = time.monotonic()
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": {},
    }
    out.mkdir(parents=True, exist_ok=True)
    print(f"{results['date']} {results['device']} jax {results['jax']}\n{HEAD}", flush=True)
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        for layer in dict.fromkeys(row.layer for row in rows):
            of_layer = [row for row in rows if row.layer == layer]
            if time.monotonic() - start > seconds:
                print(f"not measured, the {seconds:g} seconds are over: {', '.join(row.name for row in of_layer)}")
                continue
            # Kernels first, side by side; XLA's programs then alone, because XLA times cuDNN's while it compiles.
            functions = {row: contestants(row, most, interpret) for row in of_layer}
            futures = {
                (row, name): pool.submit(compiled, row, function)
                for row, some in functions.items()
                for name, function in some.items()
                if name != XLA
            }
            concurrent.futures.wait(futures.values())
            for row, some in functions.items():
                executables = {XLA: compiled(row, some[XLA])}
                executables |= {name: futures[row, name].result() for name in some if name != XLA}
                try:
                    entry = measure(row, executables)
                except Exception as error:
                    print(f"{row.name}: {short(error)}", flush=True)
                    continue
                results["rows"][row.name] = entry
                print(summary(row.name, entry), flush=True)
                (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"{time.monotonic() - start:.0f} s")


def lower(rows: Sequence[Row], most: int) -> int:
    """Lowers every contestant for CUDA; returns how many failed."""
    failed = 0
    for row in rows:
        start = time.perf_counter()
        problems: list[str] = []
        some = contestants(row, most, interpret=False)
        for name, function in some.items():
            try:
                with hopper_gpu():
                    jax.jit(program(function, row)).trace(structs(row)).lower(lowering_platforms=("cuda",))
            except Exception as error:
                problems.append(f"{name}: {short(error)}")
        failed += len(problems)
        print(f"{row.name:58} {len(some)} contestants, {time.perf_counter() - start:.1f} s", *problems, flush=True)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/depthwise"), help="folder of results.json")
    parser.add_argument("--seconds", type=float, default=400, help="no layer is started later")
    parser.add_argument("--threads", type=int, default=8, help="that compile kernels")
    parser.add_argument("--configs", type=int, default=12, help="of the kernel, for each row")
    parser.add_argument("--only", default="", help="rows whose names match this regular expression")
    parser.add_argument("--dry-run", action="store_true", help="small images, interpreted where there is no GPU")
    parser.add_argument("--lower", action="store_true", help="lower every row for CUDA, and time nothing")
    arguments = parser.parse_args()
    every = tuple(Row(layer, part) for layer in TINY for part in PARTS) if arguments.dry_run else ROWS
    rows = [row for row in every if re.search(arguments.only, row.name)]
    if arguments.lower:
        raise SystemExit(1 if lower(rows, arguments.configs) else 0)
    interpret = jax.default_backend() == "cpu"
    run(rows, arguments.configs, arguments.seconds, arguments.threads, interpret, arguments.out)


if __name__ == "__main__":
    main()
