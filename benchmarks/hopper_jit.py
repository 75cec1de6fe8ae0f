"""`xla_fp8.jit` end to end with the Mosaic backend on a Hopper GPU: the numbers, the transformations, the time.

    PYTHONPATH=. python3 benchmarks/hopper_jit.py [--out build/hopper_jit.json] [--budget-seconds 140] [--dry-run]

First small programs (with the heuristic's configs), each against plain `jax.jit` on the CPU; then larger ones, timed
against plain `jax.jit`: as they are (XLA's own FP8 matcher; it tunes for 25 s a convolution) and in bf16. Runs from a
checkout, without an install. `--dry-run` lowers everything for cuda on any machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
if importlib.util.find_spec("xla_fp8.passes") is None:  # not installed: passes/ lies beside the package
    _spec = importlib.util.spec_from_file_location(
        "xla_fp8.passes", ROOT / "passes/__init__.py", submodule_search_locations=[str(ROOT / "passes")]
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["xla_fp8.passes"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["xla_fp8.passes"])
sys.path.insert(0, str(ROOT / "examples"))
os.environ.setdefault("XLA_FP8_CACHE_DIR", tempfile.mkdtemp())  # tuning is part of what is measured

import demo  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

import xla_fp8  # noqa: E402
from xla_fp8.backends.compare import Tolerance, compare  # noqa: E402

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
HANG_SECONDS = 70
NEAR = Tolerance(0.02, fp8_share=0.1, fp8_beyond_share=0.02)
"""The tensor core sums in fewer bits than f32, so a few FP8 outputs are one step off; 16-bit ones a unit or two."""

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def fp8(key: int, *shape: int, dtype: Any = E4M3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(key).normal(size=shape), dtype)


def quantize(y: jax.Array, dtype: Any = E4M3) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(y, -largest, largest).astype(dtype)


def conv(x: jax.Array, w: jax.Array, wide: Any = jnp.float32, **options: Any) -> jax.Array:
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "OHWI", "NHWC")} | options
    return lax.conv_general_dilated(x.astype(wide), w.astype(wide), **options)


def layer(x: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A convolution, relu, amax, and back to FP8."""
    y = jax.nn.relu(conv(x, w) * scale)
    return quantize(y), jnp.max(jnp.abs(y))


def chained(x: jax.Array, ws: list[jax.Array], scale: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    amax = []
    for w in ws:
        x, largest = layer(x, w, scale)
        amax.append(largest)
    return x, amax


def chained_bf16(x: jax.Array, ws: list[jax.Array]) -> jax.Array:
    """The same network in bf16, which has no scales."""
    for w in ws:
        x = jax.nn.relu(conv(x, w, jnp.bfloat16))
    return x


def scanned(x: jax.Array, ws: jax.Array, scale: jax.Array) -> Any:
    return lax.scan(lambda x, w: layer(x, w, scale), x, ws)


def training_step(w: jax.Array, x: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A loss and its gradient through a quantized convolution."""

    def loss(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, amax = layer(x, quantize(w), scale)
        return jnp.mean(y.astype(jnp.float32) ** 2) + jnp.mean(w**2), amax

    (value, amax), gradient = jax.value_and_grad(loss, has_aux=True)(w)
    return gradient, jnp.stack([value, amax])


def scaled_residual(x: jax.Array, w: jax.Array, scale: jax.Array, r: jax.Array, bias: jax.Array) -> Any:
    y = jax.nn.silu(conv(x, w) * scale + bias) + r.astype(jnp.float32) * scale
    return quantize(y * 4), jnp.max(jnp.abs(y)), y.astype(jnp.bfloat16)


def in_bf16(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    return quantize(jax.nn.gelu(conv(x, w, jnp.bfloat16) * scale.astype(jnp.bfloat16)))


def channels_first(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    y = conv(x, w, window_strides=(2, 2), padding=((1, 2), (0, 1)), dimension_numbers=("NCHW", "OIHW", "NCHW"))
    return quantize(jax.nn.leaky_relu(y * scale))


def dilated(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    return quantize(jnp.tanh(conv(x, w, rhs_dilation=(2, 1)) * scale) * 100, E5M2)


def sequence(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    return quantize(jax.nn.relu6(conv(x, w, window_strides=(1,), dimension_numbers=("NWC", "WIO", "NWC")) * scale))


def grouped(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    return quantize(conv(x, w, feature_group_count=2) * scale)


def programs() -> dict[str, Program]:
    """Small programs, each with its arguments."""
    s = jnp.float32(0.05)
    x, w = fp8(0, 2, 14, 14, 64), fp8(1, 64, 3, 3, 64)
    blocks = demo.make_blocks(jax.random.key(0), 64, 32, count=2)
    image = demo.quantize(jax.random.normal(jax.random.key(1), (2, 16, 16, 64)), jnp.float32(0.02))
    scales = {"x": jnp.float32(0.02), "w": jnp.float32(0.01), "g": jnp.float32(0.05)}
    wide_w = jnp.asarray(np.random.default_rng(5).normal(size=(3, 3, 32, 32)) * 0.1, jnp.float32)
    features = jnp.asarray(np.random.default_rng(6).normal(size=(4, 14, 14, 32)), jnp.float32)
    deep = jnp.stack([fp8(k, 64, 3, 3, 64) for k in range(4)])
    return {
        "eight in a row, amax of each": (chained, (x, [fp8(k, 64, 3, 3, 64) for k in range(8)], s)),
        "bottleneck stage": (demo.stage, (image, blocks)),
        "backward, cotangent in e5m2": (demo.backward, (wide_w, features, scales)),
        "loss and gradient": (training_step, (w.astype(jnp.float32), x, s)),
        "scan over layers": (scanned, (x, deep, s)),
        "vmap over images": (jax.vmap(layer, (0, None, None)), (fp8(2, 3, 2, 14, 14, 64), w, s)),
        "vmap over filters": (jax.vmap(layer, (None, 0, None)), (x, deep, s)),
        "scaled residual, bias, silu, copy": (
            scaled_residual,
            (x, w, s, fp8(3, 2, 14, 14, 64, dtype=E5M2), jnp.linspace(-1, 1, 64)),
        ),
        "bf16 and gelu": (in_bf16, (x, w, s)),
        "NCHW, stride 2, e5m2 filter": (
            channels_first,
            (fp8(4, 2, 64, 15, 14), fp8(5, 96, 64, 3, 3, dtype=E5M2), s),
        ),
        "dilation, tanh, e5m2 out": (dilated, (x, w, s)),
        "1-D": (sequence, (fp8(6, 4, 100, 48), fp8(7, 5, 48, 80), s)),
        "1x1": (layer, (fp8(8, 4, 7, 7, 256), fp8(9, 512, 1, 1, 256), s)),
        "groups (another backend)": (grouped, (x, fp8(10, 64, 3, 3, 32), s)),
    }


class Watch:
    """Says what is running, and ends the process where that does not end."""

    def __init__(self, save: Callable[[], None], enabled: bool) -> None:
        self.name, self.since, self.save = "", time.monotonic(), save
        if enabled:
            threading.Thread(target=self.watch, daemon=True).start()

    def start(self, name: str) -> None:
        self.name, self.since = name, time.monotonic()

    def watch(self) -> None:
        while True:
            time.sleep(1)
            if time.monotonic() - self.since > HANG_SECONDS:
                print(f"{self.name}: HANGS", flush=True)
                self.save()
                os._exit(1)


def lowered(function: Any, arguments: Any, dry: bool) -> Any:
    return function.trace(*arguments).lower(lowering_platforms=("cuda",) if dry else None)


def on_the_cpu(function: Callable[..., Any], arguments: Any) -> list[Any]:
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*jax.device_put(arguments, cpu)))]


def check(name: str, function: Callable[..., Any], arguments: Any, backend: str, dry: bool) -> dict[str, Any]:
    """Compiles and runs a program with `xla_fp8.jit`, and compares it with plain JAX on the CPU."""
    expected = on_the_cpu(function, arguments)
    fast = xla_fp8.jit(function, backend=backend)
    start = time.monotonic()
    low = lowered(fast, arguments, dry)
    row: dict[str, Any] = {
        "kernels": low.as_text().count("custom_call @mosaic_gpu"),
        "refused": [str(e.reason) for e in fast.report(*arguments).refused],
    }
    if dry:
        return row | {"ok": True}
    outputs = jax.tree.leaves(low.compile()(*arguments))
    row["compile_s"] = time.monotonic() - start
    found = []
    for wanted, output in zip(expected, map(np.asarray, outputs), strict=True):
        difference = compare(wanted, output)
        error = float(np.linalg.norm(wanted.astype(np.float64) - output.astype(np.float64)))
        norm = float(np.linalg.norm(wanted.astype(np.float64)))
        found.append(
            {
                "type": wanted.dtype.name,
                "ok": NEAR.accepts(difference, wanted.dtype)
                or error <= 0.03 * norm,  # several layers, one on the other
                "equal": 1 - difference.share,
                "norm": error / max(norm, 1e-30),
            }
        )
    return row | {"ok": all(f["ok"] for f in found), "results": found}


def check_donation(dry: bool) -> dict[str, Any]:
    """The output takes the place of a donated input, and calling again gives the same bits."""
    arguments = ([fp8(k, 64, 3, 3, 64) for k in range(2)], jnp.float32(0.05))
    host = np.asarray(fp8(0, 2, 14, 14, 64))
    donating = xla_fp8.jit(lambda x, ws, s: chained(x, ws, s)[0], backend="mosaic", donate_argnums=0)
    if dry:
        text = lowered(donating, (jnp.asarray(host), *arguments), dry).as_text()
        return {"ok": True, "kernels": text.count("custom_call @mosaic_gpu")}
    results = []
    for _ in range(20):
        x = jnp.asarray(host)
        results.append(np.asarray(donating(x, *arguments)).tobytes())
        assert x.is_deleted(), "the input was not donated"
    return {"ok": len(set(results)) == 1}


def seconds(compiled: Any, arguments: Any) -> float:
    """Median over five of the time of some runs enqueued together."""
    jax.block_until_ready(compiled(*arguments))
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(10):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        samples.append((time.perf_counter() - start) / 10)
    return statistics.median(samples)


def large_programs() -> dict[str, tuple[Program, Program | None]]:
    """Programs to time, each with the same without FP8; without that, with the heuristic's configs and against nothing:
    XLA would tune for minutes."""
    x, ws, s = fp8(0, 64, 28, 28, 256), [fp8(k, 256, 3, 3, 256) for k in range(8)], jnp.float32(0.02)
    wide = (x.astype(jnp.bfloat16), [w.astype(jnp.bfloat16) * s.astype(jnp.bfloat16) for w in ws])
    blocks = demo.make_blocks(jax.random.key(0), 256, 128, count=3)
    image = demo.quantize(jax.random.normal(jax.random.key(1), (64, 56, 56, 256)), jnp.float32(0.02))
    return {
        "8 x (64,28,28,256 3x3 relu amax)": ((chained, (x, ws, s)), (chained_bf16, wide)),
        "bottleneck stage, batch 64": ((demo.stage, (image, blocks)), None),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/hopper_jit.json"))
    parser.add_argument("--budget-seconds", type=float, default=140)
    parser.add_argument("--dry-run", action="store_true", help="lower for cuda on this machine and run nothing")
    args = parser.parse_args()
    begin = time.monotonic()
    rows: dict[str, Any] = {}

    def save() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1))

    watch = Watch(save, enabled=not args.dry_run)
    print(f"jax {jax.__version__}; {[d.device_kind for d in jax.devices()]}", flush=True)
    warnings.simplefilter("always")
    os.environ["XLA_FP8_AUTOTUNE"] = "0"
    small = {
        name: (lambda n=name, p=program: check(n, *p, "auto" if "another" in n else "mosaic", args.dry_run))
        for name, program in programs().items()
    }
    for name, run in (small | {"donation, 20 times": lambda: check_donation(args.dry_run)}).items():
        if time.monotonic() - begin > args.budget_seconds:
            print("out of time")
            break
        watch.start(name)
        try:
            rows[name] = run()
        except Exception as error:
            rows[name] = {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        save()
        print(f"{name:36} {describe(rows[name])}", flush=True)
    if not args.dry_run:
        for name, (program, wide) in large_programs().items():
            os.environ["XLA_FP8_AUTOTUNE"] = "0" if wide is None else "1"
            contestants: dict[str, Callable[[], Any]] = {
                "xla_fp8.jit, mosaic": lambda p=program: (xla_fp8.jit(p[0], backend="mosaic"), p[1])
            }
            if wide is not None:
                contestants["jax.jit, bf16"] = lambda p=wide: (jax.jit(p[0]), p[1])
                contestants["jax.jit, FP8 by XLA"] = lambda p=program: (jax.jit(p[0]), p[1])
            for what, make in contestants.items():
                needed = 60 if "XLA" in what else 15
                if args.budget_seconds - (time.monotonic() - begin) < needed:
                    print(f"{name} / {what}: no time left")
                    continue
                watch.start(f"{name} / {what}")
                try:
                    function, arguments = make()
                    start = time.monotonic()
                    compiled = function.lower(*arguments).compile()
                    compile_s = time.monotonic() - start
                    row = {"ok": True, "us": 1e6 * seconds(compiled, arguments), "compile_s": compile_s}
                except Exception as error:
                    row = {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
                rows[f"{name} / {what}"] = row
                save()
                print(f"{name:36} {what:22} {describe(row)}", flush=True)
    failed = [name for name, row in rows.items() if not row["ok"]]
    print(f"{len(rows) - len(failed)} ok, {len(failed)} failed {failed}; {time.monotonic() - begin:.0f} s")
    return bool(failed)


def describe(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"ERROR {row['error']}"
    parts = ["ok  " if row["ok"] else "FAIL"]
    if "kernels" in row:
        parts.append(f"{row['kernels']} kernels")
    if "us" in row:
        parts.append(f"{row['us']:9.1f} us")
    if "compile_s" in row:
        parts.append(f"compiled in {row['compile_s']:.1f} s")
    parts += [
        f"{r['type'].removeprefix('float8_')}: equal {r['equal']:.3f} norm {r['norm']:.1e}"
        for r in row.get("results", [])[:3]
    ]
    return "  ".join(parts + [f"refused: {reason}" for reason in row.get("refused", [])])


if __name__ == "__main__":
    sys.exit(main())
