"""Is a filter gradient in FP8 faster than XLA's in bf16? The measurement behind "filter gradients stay bf16", or not.

    PYTHONPATH=. python3 benchmarks/filter_gradient.py --out filter_gradient.json [--seconds 150] [--only 28]

A filter gradient sums over images and pixels:

    dw [K, R, S, C]  =  sum over n, h, w of  dy [N, OH, OW, K]  *  x [N, H, W, C] moved by (r, s)

which is a convolution with batch and channels in each other's place: x as [C, H, W, N], and dy as its filter,
[K, OH, OW, N], as large as the image. FP8 tensor cores want the sum's dimension innermost, so both are transposed
first; then the forward kernel computes it as it is (`precision="highest"`: the sums are long). Timed on the device, in
turn:

    bf16        XLA's filter gradient of bf16 tensors
    from fp8    the same where x and dy are in FP8 in memory, converted first
    transposes  both, by XLA
    kernel      on transposed operands, for some configs
    fp8         transposes and the fastest of these configs together: what a program would run
"""

from __future__ import annotations

import argparse
import concurrent.futures
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
GRAPH = "1:[f32]conv();2:[f32]scale(1);"
SHAPES = (
    # N, H = W, C, K, R = S, stride
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150, help="no shape starts later")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--configs", type=int, default=3, help="of the kernel, for each shape")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: lower everything, time nothing")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    results: dict[str, Any] = {"device": str(jax.devices()[0].device_kind), "jax": jax.__version__}
    for shape in SHAPES:
        name = "x".join(map(str, shape))
        if arguments.only in name and time.monotonic() < end:
            results[name] = measure(name, shape, arguments.configs, arguments.dry_run)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")


def padding(size: int, taps: int, stride: int) -> tuple[int, int]:
    """SAME, as JAX has it."""
    total = max((-(-size // stride) - 1) * stride + taps - size, 0)
    return total // 2, total - total // 2


def swapped_call(shape: tuple[int, ...], transposed: bool) -> GraphCall:
    """The filter gradient as a convolution, whose operands are transposed already or by the backend."""
    n, size, c, k, taps, stride = shape
    low, high = padding(size, taps, stride)
    out = -(-size // stride)
    # The last rows that no window reaches belong to no product.
    high = taps - 1 + (out - 1) * stride + 1 - size - low
    return graph_call(
        GRAPH,
        batch=c,
        image=(size, size),
        channels=n,
        features=k,
        filter=(out, out),
        window=f"{{size={out}x{out} pad={low}_{high}x{low}_{high} rhs_dilate={stride}x{stride}}}",
        labels="b01f_o01i->b01f" if transposed else "f01b_i01o->b01f",
    )


def xla(shape: tuple[int, ...]) -> Callable[..., jax.Array]:
    """The filter gradient that JAX writes, as XLA compiles it."""
    _, _, c, k, taps, stride = shape
    pads = [padding(shape[1], taps, stride)] * 2

    def gradient(x: jax.Array, dy: jax.Array, scale: jax.Array) -> jax.Array:
        def forward(w: jax.Array) -> jax.Array:
            numbers = ("NHWC", "OHWI", "NHWC")
            y: jax.Array = lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=numbers)
            return y

        _, pull = jax.vjp(forward, jnp.zeros((k, taps, taps, c), x.dtype))
        dw: jax.Array = pull(dy)[0].astype(jnp.float32) * scale
        return dw

    return gradient


def measure(name: str, shape: tuple[int, ...], how_many: int, dry: bool) -> dict[str, Any]:
    n, size, c, k, taps, stride = shape
    out = -(-size // stride)
    rng = np.random.default_rng(0)
    x, dy = (
        rng.normal(size=dimensions).astype(jnp.float8_e4m3fn) for dimensions in ((n, size, size, c), (n, out, out, k))
    )
    scale = np.float32(1 / n)
    wide = tuple(array.astype(jnp.bfloat16) for array in (x, dy))
    moved = tuple(np.ascontiguousarray(array.transpose(3, 1, 2, 0)) for array in (x, dy))
    kernel_call, whole_call = (swapped_call(shape, transposed) for transposed in (True, False))
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "bf16": (xla(shape), (*wide, scale)),
        "from fp8": (
            lambda x, dy, scale: xla(shape)(x.astype(jnp.bfloat16), dy.astype(jnp.bfloat16), scale),
            (x, dy, scale),
        ),
        "transposes": (lambda *of: [array.transpose(3, 1, 2, 0) for array in of], (x, dy)),
        "transposes, pixels first": (lambda *of: [array.transpose(1, 2, 3, 0) for array in of], (x, dy)),
    }
    for backend in (MosaicBackend("default"), MosaicBackend("highest")):
        precision = backend.precision
        verdict = backend.supports(kernel_call, H200)
        assert verdict.ok, verdict.reason
        for config in backend.configs(kernel_call, H200)[: how_many if precision == "highest" else 1]:
            programs[f"kernel {precision}: {config}"] = (backend.lower(kernel_call, config), (*moved, scale))
            programs[f"fp8 {precision}: {config}"] = (backend.lower(whole_call, config), (x, dy, scale))
    contestants, failed = compiled(programs, dry)
    if dry:
        print(f"{name}: {len(contestants)} programs lowered, {len(failed)} not: {failed}", flush=True)
        return {"failed": failed}
    times = time_in_turn(contestants)
    flops = 2 * n * out * out * c * k * taps * taps
    found: dict[str, Any] = {"flops": flops, "failed": failed}
    expected = np.asarray(contestants["bf16"].executable(*contestants["bf16"].arguments)).transpose(3, 1, 2, 0)
    for label, timing in times.items():
        if not isinstance(timing, Timing):
            found[label] = {"error": timing}
            continue
        found[label] = {"us": timing.us, "spread": timing.spread, "tflops": flops / timing.us / 1e6}
        if label.startswith(("kernel", "fp8")):
            (result,) = contestants[label].executable(*contestants[label].arguments)
            error = np.linalg.norm(np.asarray(result) - expected) / np.linalg.norm(expected)
            found[label]["error against bf16"] = float(error)
        print(f"{name:24} {label:90} {timing.us:8.1f} us  {found[label].get('error against bf16', 0):.1e}", flush=True)
    best = min(found[label]["us"] for label in found if label.startswith("fp8 highest") and "us" in found[label])
    found["speedup"] = found["bf16"]["us"] / best
    print(f"{name:24} fp8 with transposes is {found['speedup']:.2f}x of bf16", flush=True)
    return found


def compiled(
    programs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]], dry: bool
) -> tuple[dict[str, Contestant], dict[str, str]]:
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
