"""`xla_fp8.jit` end to end with the Mosaic backend on a Hopper GPU: the numbers, the transformations, the time.

    PYTHONPATH=. python3 benchmarks/hopper_jit.py [--out build/hopper_jit.json] [--budget-seconds 140] [--dry-run]

First small programs, with the heuristic's configs. Of one convolution in a row: each against plain `jax.jit` on the
CPU. Of several: FP8 rounding blows up any difference, however small, to its own size (a relative error e becomes
sqrt(0.09 * e) one layer on, and 0.09 at last), so a chain or a scan must give the very bits of its layers, run one by
one. All are compiled with EXACT_TYPES, without which XLA on a GPU leaves FP8 roundings out, and on a CPU does not. Then
one that is tuned while an outer program is traced. Then larger ones, timed against plain `jax.jit`: as they
are (XLA's own FP8 matcher; it tunes for 25 s a convolution) and in bf16. Runs from a checkout, without an install.
`--dry-run` lowers everything for cuda on any machine.
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
from xla_fp8.backends import cache  # noqa: E402
from xla_fp8.backends.compare import Tolerance, compare  # noqa: E402

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
HANG_SECONDS = 70
NEAR = Tolerance(2.0**-7, fp8_share=0.02, fp8_beyond_share=0.005)
"""Of one convolution. The tensor core sums in 13 bits, so a few FP8 outputs are a step off, and near zero more."""
NORM = 0.03
"""Of the error, relative, of a convolution behind another one: the first one's e of 2^-11, blown up once (0.7%), or by
gradients thrice. tensor_core_model.py gives 1.7% for the farthest value here, the gradient of the first filter of "loss
and gradients": it is behind the roundings of y1 to e4m3 and of two cotangents to e5m2."""
EXACT_TYPES: dict[str, str | bool] = {"xla_allow_excess_precision": False}
"""With excess precision, XLA's GPU compiler (its pass simplify-fp-conversions) removes the pair of converts
f32 -> FP8 -> f32, so an f32 convolution behind it gets the value that was never rounded."""
FP8_STEP = 0.09
"""An e4m3 step, relative to the value: what differences grow to in a deep network."""

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


@jax.custom_vjp
def trained(x: jax.Array, w: jax.Array) -> jax.Array:
    """A convolution of FP8 whose cotangent is FP8 too, scaled."""
    return jax.nn.relu(conv(quantize(x), quantize(w)) * 0.05)


def trained_backward(saved: tuple[jax.Array, ...], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w, y = saved
    g = quantize(jnp.where(y > 0, cotangent, 0) * 2.0**14, E5M2)
    dx = conv(g, jnp.flip(quantize(w), (1, 2)).transpose(3, 1, 2, 0)) * (0.05 / 2.0**14)
    return dx, filter_gradient(x, w, g.astype(jnp.float32) * (0.05 / 2.0**14))


def filter_gradient(x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
    """Of an f32 convolution, by XLA: nothing of it is FP8."""
    gradient: jax.Array = jax.vjp(lambda w: conv(x, w, precision=lax.Precision.HIGHEST), w)[1](g)[0]
    return gradient


def _trained_forward(x: jax.Array, w: jax.Array) -> Any:
    y = trained(x, w)
    return y, (x, w, y)


trained.defvjp(_trained_forward, trained_backward)


def training_step(ws: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    """A loss and its gradients through two quantized convolutions."""

    def loss(ws: list[jax.Array]) -> jax.Array:
        return jnp.mean(trained(trained(x, ws[0]), ws[1]) ** 2)

    value, gradients = jax.value_and_grad(loss)(ws)
    return gradients, value


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


def deep_programs() -> dict[str, Program]:
    """Programs of several layers; `one_by_one` runs the same arguments layer by layer."""
    x, deep, s = fp8(0, 2, 14, 14, 64), jnp.stack([fp8(k, 64, 3, 3, 64) for k in range(8)]), jnp.float32(0.05)
    return {
        "eight in a row, amax of each": (lambda x, ws, s: chained(x, list(ws), s), (x, deep, s)),
        "scan over eight layers": (scanned, (x, deep, s)),
    }


def one_by_one(x: jax.Array, ws: jax.Array, scale: jax.Array) -> tuple[jax.Array, np.ndarray[Any, Any]]:
    """Each layer a program of its own."""
    single, amax = xla_fp8.jit(layer, backend="mosaic"), []
    for w in ws:
        x, largest = single(x, w, scale)
        amax.append(largest)
    return x, np.asarray(amax)


def programs() -> dict[str, Program]:
    """Small programs, each with its arguments."""
    s = jnp.float32(0.05)
    x, w = fp8(0, 2, 14, 14, 64), fp8(1, 64, 3, 3, 64)
    blocks = demo.make_blocks(jax.random.key(0), 64, 32, count=2)
    image = demo.quantize(jax.random.normal(jax.random.key(1), (2, 16, 16, 64)), jnp.float32(0.02))
    scales = {"x": jnp.float32(0.02), "w": jnp.float32(0.01), "g": jnp.float32(0.05)}
    hwio = jnp.asarray(np.random.default_rng(5).normal(size=(3, 3, 32, 32)) * 0.1, jnp.float32)
    wide_w = jnp.asarray(np.random.default_rng(5).normal(size=(32, 3, 3, 32)), jnp.float32)
    features = jnp.asarray(np.random.default_rng(6).normal(size=(4, 14, 14, 32)), jnp.float32)
    deep = jnp.stack([fp8(k, 64, 3, 3, 64) for k in range(4)])
    return {
        "bottleneck stage": (demo.stage, (image, blocks)),
        "backward, cotangent in e5m2": (demo.backward, (hwio, features, scales)),
        "loss and gradients": (training_step, ([wide_w, wide_w[::-1]], features)),
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
    row, outputs = run(function, arguments, backend, dry)
    if dry:
        return row
    limit = FP8_STEP if name == "bottleneck stage" else NORM
    found = [near(wanted, output, limit) for wanted, output in zip(expected, outputs, strict=True)]
    return row | {"ok": all(f["ok"] for f in found), "results": found}


def check_filter_gradient(dry: bool) -> dict[str, Any]:
    """XLA's f32 filter gradient of a cotangent that was rounded to e5m2, first as XLA compiles it by default, then with
    EXACT_TYPES, which must be right."""
    x, w, g = (
        jnp.asarray(np.random.default_rng(key).normal(size=shape), jnp.float32)
        for key, shape in enumerate([(4, 14, 14, 32), (32, 3, 3, 32), (4, 14, 14, 32)])
    )

    def function(x: jax.Array, w: jax.Array, g: jax.Array) -> jax.Array:
        return filter_gradient(x, w, quantize(g, E5M2).astype(jnp.float32))

    if dry:
        return {"ok": True}
    (wanted,) = on_the_cpu(function, (x, w, g))
    low = jax.jit(function).lower(x, w, g)
    found = [
        near(wanted, np.asarray(low.compile(compiler_options=options)(x, w, g)), 1e-5) for options in ({}, EXACT_TYPES)
    ]
    return {"ok": found[1]["norm"] <= 1e-5, "results": found}


def check_deep(function: Callable[..., Any], arguments: Any, dry: bool) -> dict[str, Any]:
    """The whole program has the bits of its layers one by one."""
    row, outputs = run(function, arguments, "mosaic", dry)
    if dry:
        return row
    x, amax = one_by_one(*arguments)
    found = [near(np.asarray(x), outputs[0], 0.0), near(amax, np.asarray(outputs[1:]).reshape(-1), 0.0)]
    return row | {"ok": all(f["equal"] == 1 for f in found), "results": found}


def check_tuned_inside(dry: bool) -> dict[str, Any]:
    """Candidates are timed while `jax.jit` traces a scan around the call; the choice is stored, and right."""

    def outer(x: jax.Array, ws: jax.Array, scale: jax.Array) -> Any:
        fast = xla_fp8.jit(layer, backend="mosaic")
        return lax.scan(lambda x, w: fast(x, w, scale), x, ws)

    x, deep, s = fp8(0, 2, 12, 12, 64), jnp.stack([fp8(k, 64, 3, 3, 64) for k in range(2)]), jnp.float32(0.05)
    if dry:
        return {"ok": True, "kernels": lowered(jax.jit(outer), (x, deep, s), dry).as_text().count("@mosaic_gpu")}
    os.environ["XLA_FP8_AUTOTUNE"] = "1"
    known = len(list(cache.choices()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", xla_fp8.FallbackWarning)
            y, amax = jax.jit(outer)(x, deep, s)
        wanted, wanted_amax = one_by_one(x, deep, s)  # with the stored choice
    finally:
        os.environ["XLA_FP8_AUTOTUNE"] = "0"
    *_, choice = cache.choices()
    found = [near(np.asarray(wanted), np.asarray(y), 0.0), near(wanted_amax, np.asarray(amax), 0.0)]
    return {
        "ok": len(list(cache.choices())) == known + 1 and all(f["equal"] == 1 for f in found),
        "tuned": f"{choice.candidates} configs in {choice.tuning_seconds:.1f} s: {choice.config}",
        "us": choice.microseconds,
        "results": found,
    }


def run(function: Callable[..., Any], arguments: Any, backend: str, dry: bool) -> tuple[dict[str, Any], list[Any]]:
    fast = xla_fp8.jit(function, backend=backend)
    start = time.monotonic()
    low = lowered(fast, arguments, dry)
    row: dict[str, Any] = {
        "ok": True,
        "kernels": low.as_text().count("custom_call @mosaic_gpu"),
        "refused": [str(e.reason) for e in fast.report(*arguments).refused],
    }
    if dry:
        return row, []
    outputs = [np.asarray(output) for output in jax.tree.leaves(low.compile(compiler_options=EXACT_TYPES)(*arguments))]
    return row | {"compile_s": time.monotonic() - start}, outputs


def near(wanted: Any, output: Any, norm_limit: float) -> dict[str, Any]:
    """How near two results are; `ok` by NEAR, or by the norm of the error relative to the norm."""
    difference = compare(wanted, output)
    error = float(np.linalg.norm(wanted.astype(np.float64) - output.astype(np.float64)))
    norm = float(np.linalg.norm(wanted.astype(np.float64)))
    return {
        "type": wanted.dtype.name,
        "ok": NEAR.accepts(difference, wanted.dtype) or error <= norm_limit * norm,
        "equal": 1 - difference.share,
        "norm": error / max(norm, 1e-30),
    }


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
    parser.add_argument("--only", default="", help="parts of the names of what is run, between commas")
    parser.add_argument("--dry-run", action="store_true", help="lower for cuda on this machine and run nothing")
    args = parser.parse_args()
    begin = time.monotonic()
    rows: dict[str, Any] = {}

    def save() -> None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1))

    def wanted(name: str) -> bool:
        return any(part in name for part in args.only.split(","))

    watch = Watch(save, enabled=not args.dry_run)
    print(f"jax {jax.__version__}; {[d.device_kind for d in jax.devices()]}", flush=True)
    warnings.simplefilter("always")
    os.environ["XLA_FP8_AUTOTUNE"] = "0"
    small = {
        name: (lambda n=name, p=program: check(n, *p, "auto" if "another" in n else "mosaic", args.dry_run))
        for name, program in programs().items()
    }
    small |= {name: (lambda p=program: check_deep(*p, args.dry_run)) for name, program in deep_programs().items()}
    small["filter gradient by XLA"] = lambda: check_filter_gradient(args.dry_run)
    small["donation, 20 times"] = lambda: check_donation(args.dry_run)
    small["tuned while a scan is traced"] = lambda: check_tuned_inside(args.dry_run)
    for name, run_it in small.items():
        if not wanted(name):
            continue
        if time.monotonic() - begin > args.budget_seconds:
            print("out of time")
            break
        watch.start(name)
        try:
            rows[name] = run_it()
        except Exception as error:
            rows[name] = {"ok": False, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
        save()
        print(f"{name:36} {describe(rows[name])}", flush=True)
    if not args.dry_run:
        for name, (program, wide) in large_programs().items():
            if not wanted(name):
                continue
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
                    # XLA's own failures are told, but they are no failure of what is checked here.
                    ours = what.startswith("xla_fp8")
                    row = {"ok": not ours, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
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
    if "tuned" in row:
        parts.append(row["tuned"])
    return "  ".join(parts + [f"refused: {reason}" for reason in row.get("refused", [])])


if __name__ == "__main__":
    sys.exit(main())
