"""The main job on real input: a ResNet bottleneck stage in FP8, forward and backward, from JAX to rewritten HLO.

Builds the program with JAX here and now, dumps its HLO, runs `xla-fp8 opt` and `xla-fp8 explain` on the dump, shows
what changed and why the rest did not, and asks XLA's parser and StableHLO's verifier about the result. Runs on a CPU.
"""

from __future__ import annotations

import difflib
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8 import _jax_compat

OUT = pathlib.Path("build/demo")
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def quantize(x: jax.Array, scale: jax.Array, dtype: jnp.dtype = E4M3) -> jax.Array:
    """x / scale, saturated and cast to FP8."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x / scale, -largest, largest).astype(dtype)


def dequantize(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) * scale


def conv(x: jax.Array, w: jax.Array, stride: int = 1) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def bottleneck(x: jax.Array, block: dict, stride: int) -> tuple[jax.Array, list[jax.Array]]:
    """1x1, 3x3, 1x1 with a residual: each conv dequantizes, scales, adds a bias, activates and quantizes again."""
    amax = []
    y = x
    for name, step in (("reduce", 1), ("spatial", stride)):
        p = block[name]
        wide = conv(dequantize(y, p["sx"]), dequantize(p["w"], p["sw"]), step)
        wide = jax.nn.relu(wide + p["b"])
        amax.append(jnp.max(jnp.abs(wide)))
        y = quantize(wide, p["sy"])
    p = block["expand"]
    wide = conv(dequantize(y, p["sx"]), dequantize(p["w"], p["sw"]))
    shortcut = dequantize(x, p["sr"])
    if "project" in block:
        q = block["project"]
        shortcut = conv(dequantize(x, q["sx"]), dequantize(q["w"], q["sw"]), stride)
    wide = jax.nn.relu(wide + p["b"] + shortcut)
    amax.append(jnp.max(jnp.abs(wide)))
    return quantize(wide, p["sy"]), amax


def stage(x: jax.Array, blocks: list[dict]) -> tuple[jax.Array, list[jax.Array]]:
    amax = []
    for index, block in enumerate(blocks):
        x, seen = bottleneck(x, block, stride=2 if index == 0 else 1)
        amax += seen
    return x, amax


def backward(w: jax.Array, x: jax.Array, scales: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """One convolution's gradients as FP8 training computes them: the cotangent quantized to e5m2 first."""
    x8, w8 = quantize(x, scales["x"]), quantize(w, scales["w"])
    wide = dequantize(x8, scales["x"]), dequantize(w8, scales["w"])
    y, vjp = jax.vjp(conv, *wide)
    cotangent = dequantize(quantize(2 * y, scales["g"], E5M2), scales["g"])
    dx, dw = vjp(cotangent)
    return quantize(dx, scales["x"], E5M2), dw


def make_blocks(key: jax.Array, channels: int, width: int, count: int) -> list[dict]:
    """Random FP8 filters and scales near 1."""

    def layer(key, r, i, o):
        w = jax.random.normal(key, (r, r, i, o)) / (r * r * i) ** 0.5
        return {
            "w": quantize(w, jnp.float32(0.01)),
            "sw": jnp.float32(0.01),
            "sx": jnp.float32(0.02),
            "sy": jnp.float32(0.02),
            "sr": jnp.float32(0.02),
            "b": jnp.zeros((o,)),
        }

    blocks = []
    for index in range(count):
        keys = jax.random.split(jax.random.fold_in(key, index), 4)
        block = {
            "reduce": layer(keys[0], 1, channels, width),
            "spatial": layer(keys[1], 3, width, width),
            "expand": layer(keys[2], 1, width, channels * 2 if index == 0 else channels),
        }
        if index == 0:
            block["project"] = layer(keys[3], 1, channels, channels * 2)
            channels *= 2
        blocks.append(block)
    return blocks


def program(x, blocks, w, features, scales):
    """Forward through the stage, and one convolution's backward."""
    return stage(x, blocks), backward(w, features, scales)


def main() -> int:
    OUT.mkdir(parents=True, exist_ok=True)
    before, after = OUT / "bottleneck.hlo", OUT / "bottleneck.opt.hlo"
    key = jax.random.key(0)
    x = quantize(jax.random.normal(key, (4, 28, 28, 64)), jnp.float32(0.02))
    blocks = make_blocks(key, 64, 32, count=2)
    scales = {"x": jnp.float32(0.02), "w": jnp.float32(0.01), "g": jnp.float32(0.05)}
    w = jax.random.normal(key, (3, 3, 32, 32)) * 0.1
    features = jax.random.normal(key, (4, 14, 14, 32))
    arguments = (x, blocks, w, features, scales)
    lowered = jax.jit(program, keep_unused=True).lower(*arguments)
    before.write_text(_jax_compat.lowered_hlo_text(lowered))
    print(f"1. JAX {jax.__version__} traced a bottleneck stage; its HLO is in {before}\n")

    run("opt", str(before), "-o", str(after), "--target=h200")
    print(f"2. xla-fp8 opt wrote {after}. What changed (convolutions and their calls):\n")
    show_diff(before.read_text(), after.read_text())

    print("\n3. xla-fp8 explain says what was rewritten, and why the rest was not:\n")
    run("explain", str(before), "--target=h200")

    text = after.read_text()
    _jax_compat.full_text(text)
    _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(text))
    calls = text.count("__cudnn$convForwardGraph")
    print(f"\n4. XLA's parser and StableHLO's verifier accept the result. It has {calls} FP8 convolution graphs.")

    inputs = OUT / "inputs.npz"
    np.savez(inputs, **{str(i): np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(arguments))})
    print("\n5. Original and rewritten, run on the arrays they were traced for (graphs by the reference backend):\n")
    # Where f32 sums round the other way, an FP8 value is one step off; the layers behind see that and round again. The
    # lines below the table say what is allowed there.
    run("run", str(before), str(after), f"--inputs={inputs}")
    return 0


def run(*arguments: str) -> None:
    """The command line, as a user would call it."""
    print(f"$ xla-fp8 {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", "xla_fp8", *arguments], check=True)


def show_diff(old: str, new: str, limit: int = 150) -> None:
    """The lines with convolutions in them, before and after; metadata and the constant JSON left out."""

    def interesting(text: str) -> list[str]:
        lines = [line.partition(", metadata=")[0].strip() for line in text.splitlines()]
        graph = '"serialized_graph":'
        kept = []
        for full, line in zip(text.splitlines(), lines, strict=True):
            if "convolution(" in line or "custom-call(" in line:
                shown = full.partition(graph)[2].partition("}")[0]
                kept.append(line if not shown else f"{line}  graph={shown}")
        return kept

    for line in difflib.unified_diff(interesting(old), interesting(new), "before", "after", lineterm="", n=0):
        print("  " + (line if len(line) <= limit else line[: limit // 2] + " ... " + line[-limit // 2 :]))


if __name__ == "__main__":
    sys.exit(main())
