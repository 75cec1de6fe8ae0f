"""What xla_fp8.jit costs over jax.jit: one call of a small function, and lowering a ResNet-50 training step.

    python benchmarks/jit_overhead.py            # both; the second takes minutes on a small CPU
    python benchmarks/jit_overhead.py --calls    # only the first

Both numbers are ratios from one process. The training step quantizes the operands of every convolution, and cotangents
in the backward pass, so that its 53 convolutions and their gradients all go through the passes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import xla_fp8

LAYOUT = ("NHWC", "HWIO", "NHWC")


def quantize(x: jax.Array, dtype: Any) -> jax.Array:
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -largest, largest).astype(dtype)


def plain_conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=LAYOUT)


def fp8_conv(x: jax.Array, w: jax.Array, stride: int) -> jax.Array:
    @jax.custom_vjp
    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return forward(x, w)[0]

    def forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        x8, w8 = quantize(x, jnp.float8_e4m3fn), quantize(w, jnp.float8_e4m3fn)
        return plain_conv(x8.astype(x.dtype), w8.astype(x.dtype), stride), (x8, w8)

    def backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
        x8, w8 = saved
        g8 = quantize(g, jnp.float8_e5m2).astype(g.dtype)
        _, pull = jax.vjp(lambda x, w: plain_conv(x, w, stride), x8.astype(g.dtype), w8.astype(g.dtype))
        dx, dw = pull(g8)
        return dx, dw

    conv.defvjp(forward, backward)
    return conv(x, w)


def resnet50(image_size: int, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step (loss and new parameters) and its arguments' shapes."""
    shapes: list[tuple[int, ...]] = [(7, 7, 3, 64)]
    plan: list[tuple[int, int, int]] = []
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for block in range(blocks):
            plan.append((channels, width, 2 if block == 0 and stage else 1))
            shapes += [(1, 1, channels, width), (3, 3, width, width), (1, 1, width, 4 * width)]
            if channels != 4 * width:
                shapes.append((1, 1, channels, 4 * width))
            channels = 4 * width
    shapes.append((channels, 1000))

    def norm(x: jax.Array) -> jax.Array:
        mean = jnp.mean(x, (0, 1, 2))
        return (x - mean) * lax.rsqrt(jnp.var(x, (0, 1, 2)) + 1e-5)

    def loss(params: list[jax.Array], x: jax.Array, labels: jax.Array) -> jax.Array:
        rest = iter(params)
        x = jax.nn.relu(norm(fp8_conv(x, next(rest), 2)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for inputs, width, stride in plan:
            y = jax.nn.relu(norm(fp8_conv(x, next(rest), 1)))
            y = jax.nn.relu(norm(fp8_conv(y, next(rest), stride)))
            y = norm(fp8_conv(y, next(rest), 1))
            if inputs != 4 * width:
                x = norm(fp8_conv(x, next(rest), stride))
            x = jax.nn.relu(x + y)
        logits = jnp.mean(x, (1, 2)) @ next(rest)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    def step(params: list[jax.Array], x: jax.Array, labels: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        value, grads = jax.value_and_grad(loss)(params, x, labels)
        return value, [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    arguments = (
        [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        jax.ShapeDtypeStruct((batch, image_size, image_size, 3), jnp.float32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    return step, arguments


def call_overhead() -> None:
    """Time of one call of a compiled function, which is nearly all dispatch."""

    def function(x: jax.Array, y: jax.Array) -> jax.Array:
        return x + y

    arguments = (jnp.ones(4), jnp.ones(4))
    contestants = {"jax.jit": jax.jit(function), "xla_fp8.jit": xla_fp8.jit(function)}
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(20):
        for name, jitted in contestants.items():
            jitted(*arguments).block_until_ready()
            start = time.perf_counter()
            for _ in range(2000):
                jitted(*arguments)
            times[name].append((time.perf_counter() - start) / 2000)
    plain, ours = (statistics.median(times[name]) for name in contestants)
    print(f"call: jax.jit {plain * 1e6:.2f} us, xla_fp8.jit {ours * 1e6:.2f} us, ratio {ours / plain:.3f}")


def compile_overhead(image_size: int, batch: int) -> None:
    """Time to trace, lower and compile a ResNet-50 training step; what rewriting adds to the first two."""
    step, arguments = resnet50(image_size, batch)
    # The first trace of a process fills JAX's own caches; it must not count against jax.jit, which would come first.
    jax.jit(lambda *args: step(*args)).lower(*arguments)
    seconds = {}
    for name, jit in (("jax.jit", jax.jit), ("xla_fp8.jit", xla_fp8.jit)):
        start = time.perf_counter()
        traced = jit(lambda *args: step(*args)).trace(*arguments)  # a function that no cache has seen
        middle = time.perf_counter()
        lowered = traced.lower()
        end = time.perf_counter()
        lowered.compile()
        seconds[name] = (middle - start, end - middle, time.perf_counter() - end)
        print(f"{name}: trace {middle - start:.2f} s, lower {end - middle:.2f} s, compile {seconds[name][2]:.2f} s")
    plain, ours = seconds["jax.jit"], seconds["xla_fp8.jit"]
    added = sum(ours[:2]) - sum(plain[:2])
    print(f"rewriting adds {added:.2f} s, {added / sum(plain):.1%} of the {sum(plain):.2f} s that jax.jit takes")
    print(xla_fp8.jit(step).report(*arguments).summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="only the overhead of a call")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of an image (default 64)")
    parser.add_argument("--batch", type=int, default=8, help="images in a batch (default 8)")
    options = parser.parse_args()
    call_overhead()
    if not options.calls:
        compile_overhead(options.image_size, options.batch)


if __name__ == "__main__":
    main()
