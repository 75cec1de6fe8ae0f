"""Gradients of convolutions in FP8 against XLA's in bf16: input gradients of strides, and what filter gradients cost.

    PYTHONPATH=. python3 benchmarks/gradients.py --out gradients.json [--seconds 150] [--only filter,stride]

An **input gradient** of stride 2 is one kernel over the cotangent (`xla_fp8/backends/mosaic/phases.py`); both sides
store bf16. Contestants: "bf16" is XLA's, "fp8" some configs of the kernel.

A **filter gradient** sums over images and pixels:

    dw [K, R, S, C]  =  sum over n, h, w of  dy [N, OH, OW, K]  *  x [N, H, W, C] moved by (r, s)

which is a convolution with batch and channels in each other's place: x as [C, H, W, N], and dy as its filter,
[K, OH, OW, N], as large as the image. FP8 tensor cores want the sum's dimension innermost, so both are transposed
first; then the forward kernel computes it as it is (`precision="highest"`: the sums are long). Contestants:

    bf16        XLA's filter gradient of bf16 tensors
    from fp8    the same where x and dy are in FP8 in memory, converted first
    transposes  both, by XLA
    kernel      on transposed operands, for some configs
    fp8         transposes and kernel together: what a program would run

All are timed on the device, in turn.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.conv.timing import Contestant, Timing, time_in_turn
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.mosaic.backend import MosaicBackend
from xla_fp8.target import GraphCall, Target

H200 = Target.parse("h200")
FILTERS = (
    # N, H = W, C, K, R = S, stride of the forward convolution
    (64, 28, 128, 128, 3, 1),
    (64, 14, 256, 256, 3, 1),
    (256, 14, 256, 256, 3, 1),
    (32, 64, 256, 256, 3, 1),
    (64, 56, 64, 64, 3, 1),
    (64, 28, 256, 1024, 1, 1),
    (64, 28, 256, 256, 3, 2),
    (256, 7, 512, 512, 3, 1),
    (16, 32, 1024, 1024, 3, 1),
)
INPUTS = (
    (64, 56, 128, 128, 3, 2),
    (64, 28, 256, 256, 3, 2),
    (64, 14, 512, 512, 3, 2),
    (64, 56, 256, 512, 1, 2),
    (64, 28, 512, 1024, 1, 2),
    (16, 64, 320, 320, 3, 2),
    (256, 56, 128, 128, 3, 2),
    (64, 56, 128, 256, 2, 2),
)

Shape = tuple[int, int, int, int, int, int]
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150, help="no shape starts later")
    parser.add_argument("--only", default="", help="rows whose name contains one of these")
    parser.add_argument("--configs", type=int, default=3, help="of the kernel, for each shape")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: lower everything, time nothing")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    results: dict[str, Any] = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
    pairs = itertools.zip_longest(INPUTS, FILTERS)
    rows = [row for pair in pairs for row in zip(("input", "filter"), pair, strict=True) if row[1]]
    for kind, shape in rows:
        n, size, c, k, taps, stride = shape
        name = f"{kind} {n}x{size}x{size}x{c} {taps}x{taps} stride {stride} {k}"
        if any(part in name for part in arguments.only.split(",")) and time.monotonic() < end:
            programs = {"input": input_programs, "filter": filter_programs}[kind](shape, arguments.configs)
            results[name] = measure(name, shape, programs, arguments.dry_run)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def padding(size: int, taps: int, stride: int) -> tuple[int, int]:
    """SAME, as JAX has it."""
    total = max((-(-size // stride) - 1) * stride + taps - size, 0)
    return total // 2, total - total // 2


def swapped_call(shape: Shape, transposed: bool) -> GraphCall:
    """The filter gradient as a convolution, whose operands are transposed already or by the backend."""
    n, size, c, k, taps, stride = shape
    low, _ = padding(size, taps, stride)
    out = -(-size // stride)
    high = taps - 1 + (out - 1) * stride + 1 - size - low  # the last rows may belong to no window
    return graph_call(
        "1:[f32]conv();2:[f32]scale(1);",
        batch=c,
        image=(size, size),
        channels=n,
        features=k,
        filter=(out, out),
        window=f"{{size={out}x{out} pad={low}_{high}x{low}_{high} rhs_dilate={stride}x{stride}}}",
        labels="b01f_o01i->b01f" if transposed else "f01b_i01o->b01f",
    )


def input_call(shape: Shape) -> GraphCall:
    """The input gradient as a convolution over the dilated cotangent, with the filter [C, R, S, K], reversed."""
    n, size, c, k, taps, stride = shape
    out = -(-size // stride)
    low = taps - 1 - padding(size, taps, stride)[0]
    high = size - 1 + taps - ((out - 1) * stride + 1) - low
    return graph_call(
        "1:[f32]conv();2:[bf16]scale(1);",
        batch=n,
        image=(out, out),
        channels=k,
        features=c,
        filter=(taps, taps),
        window=f"{{size={taps}x{taps} pad={low}_{high}x{low}_{high} lhs_dilate={stride}x{stride}}}",
    )


def forward(shape: Shape, x: jax.Array, w: jax.Array) -> jax.Array:
    _, size, _, _, taps, stride = shape
    pads = [padding(size, taps, stride)] * 2
    y: jax.Array = lax.conv_general_dilated(x, w, (stride,) * 2, pads, dimension_numbers=("NHWC", "OHWI", "NHWC"))
    return y


def filter_gradient(shape: Shape) -> Callable[..., jax.Array]:
    """As JAX writes it and XLA compiles it: f32 [C, R, S, K]."""
    _, _, c, k, taps, _ = shape

    def gradient(x: jax.Array, dy: jax.Array, scale: jax.Array) -> jax.Array:
        _, pull = jax.vjp(lambda w: forward(shape, x, w), jnp.zeros((k, taps, taps, c), x.dtype))
        dw: jax.Array = pull(dy)[0].astype(jnp.float32) * scale
        return dw.transpose(3, 1, 2, 0)

    return gradient


def input_gradient(shape: Shape) -> Callable[..., jax.Array]:
    """As JAX writes it and XLA compiles it, of a filter [K, R, S, C]: bf16 [N, H, W, C]."""
    n, size, c, *_ = shape

    def gradient(dy: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        _, pull = jax.vjp(lambda x: forward(shape, x, w), jnp.zeros((n, size, size, c), dy.dtype))
        dx: jax.Array = pull(dy)[0] * scale.astype(dy.dtype)
        return dx

    return gradient


def random_tensors(shape: Shape) -> tuple[np.ndarray[Any, Any], ...]:
    """x, w [K, R, S, C] and dy, in e4m3: large ones repeat four million numbers."""
    n, size, c, k, taps, stride = shape
    out = -(-size // stride)
    pool = np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(jnp.float8_e4m3fn)
    sizes = ((n, size, size, c), (k, taps, taps, c), (n, out, out, k))
    return tuple(np.resize(pool[1000 * number :], size) for number, size in enumerate(sizes))


def input_programs(shape: Shape, how_many: int) -> dict[str, Program]:
    _, w, dy = random_tensors(shape)
    scale = np.float32(1 / 16)
    mirrored = np.ascontiguousarray(w[:, ::-1, ::-1].transpose(3, 1, 2, 0))
    programs: dict[str, Program] = {
        "bf16": (input_gradient(shape), (dy.astype(jnp.bfloat16), w.astype(jnp.bfloat16), scale))
    }
    return programs | kernels("fp8", input_call(shape), (dy, mirrored, scale), how_many, 1)


def filter_programs(shape: Shape, how_many: int) -> dict[str, Program]:
    x, _, dy = random_tensors(shape)
    scale = np.float32(1 / 16)
    moved = tuple(np.ascontiguousarray(array.transpose(3, 1, 2, 0)) for array in (x, dy))
    bf16 = filter_gradient(shape)
    programs: dict[str, Program] = {
        "bf16": (bf16, (x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), scale)),
        "from fp8": (lambda x, dy, s: bf16(x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), s), (x, dy, scale)),
        "transposes": (lambda *of: [array.transpose(3, 1, 2, 0) for array in of], (x, dy)),
        "transposes, pixels first": (lambda *of: [array.transpose(1, 2, 3, 0) for array in of], (x, dy)),
    }
    programs |= kernels("kernel", swapped_call(shape, True), (*moved, scale), 1, how_many)
    return programs | kernels("fp8", swapped_call(shape, False), (x, dy, scale), 1, how_many)


def kernels(label: str, call: GraphCall, operands: tuple[Any, ...], default: int, highest: int) -> dict[str, Program]:
    """The first configs of either precision."""
    programs: dict[str, Program] = {}
    for backend, how_many in ((MosaicBackend("default"), default), (MosaicBackend("highest"), highest)):
        verdict = backend.supports(call, H200)
        assert verdict.ok, verdict.reason
        for config in backend.configs(call, H200)[:how_many]:
            programs[f"{label} {backend.precision}: {config}"] = (backend.lower(call, config), operands)
    return programs


def measure(name: str, shape: Shape, programs: dict[str, Program], dry: bool) -> dict[str, Any]:
    n, size, c, k, taps, stride = shape
    contestants, failed = compiled(programs, dry)
    if dry:
        print(f"{name}: {len(contestants)} programs lowered, {len(failed)} not: {failed}", flush=True)
        return {"failed": failed}
    times = time_in_turn(contestants)
    flops = 2 * n * (-(-size // stride)) ** 2 * c * k * taps * taps
    found: dict[str, Any] = {"flops": flops, "failed": failed}
    for label, timing in times.items():
        if not isinstance(timing, Timing):
            found[label] = {"error": timing}
            continue
        found[label] = {"us": timing.us, "spread": timing.spread, "tflops": flops / timing.us / 1e6}
        if label.startswith(("kernel", "fp8")) and "bf16" in contestants:
            expected, result = (
                jax.tree.leaves(contestants[of].executable(*contestants[of].arguments))[0].astype(jnp.float32)
                for of in ("bf16", label)
            )
            found[label]["error"] = float(jnp.linalg.norm(result - expected) / jnp.linalg.norm(expected))
        print(f"{name:34} {label:84} {timing.us:8.1f} us  {found[label].get('error', 0):.1e}", flush=True)
    best = min((found[label]["us"] for label in found if label.startswith("fp8") and "us" in found[label]), default=0)
    if best and "us" in found.get("bf16", {}):
        found["speedup"] = found["bf16"]["us"] / best
        print(f"{name:34} fp8 is {found['speedup']:.2f}x of bf16", flush=True)
    return found


def compiled(programs: dict[str, Program], dry: bool) -> tuple[dict[str, Contestant], dict[str, str]]:
    """All programs, compiled side by side, with their arguments on the device; and what went wrong with others."""

    def one(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("cuda",)) if dry else traced.lower().compile()

    contestants, failed = {}, {}
    on_device: dict[int, jax.Array] = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {label: pool.submit(one, *program) for label, program in programs.items()}
        for label, future in futures.items():
            arguments = programs[label][1]
            try:
                executable = future.result()
            except Exception as error:
                failed[label] = f"{type(error).__name__}: {error}"[:300]
                continue
            for array in arguments:
                on_device.setdefault(id(array), array if dry else jax.device_put(array))
            contestants[label] = Contestant(executable, tuple(on_device[id(array)] for array in arguments), 1)
    return contestants, failed


if __name__ == "__main__":
    main()
