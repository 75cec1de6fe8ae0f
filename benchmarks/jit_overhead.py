"""What xla_fp8.jit costs over jax.jit: one call of a small function, and lowering a ResNet-50 training step.

    python benchmarks/jit_overhead.py            # both; the second takes a minute or more on a small CPU
    python benchmarks/jit_overhead.py --calls    # only the first

Both numbers are ratios from one process, medians of rounds in which the two take turns. The training step quantizes
the operands of every convolution, and cotangents in the backward pass, so that its 53 convolutions and their gradients
all go through the passes.
"""

from __future__ import annotations

import argparse
import dataclasses
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


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of the process on all its threads, and by the clock."""

    cpu: float
    wall: float

    @staticmethod
    def of(action: Callable[[], Any]) -> tuple[Cost, Any]:
        cpu, wall = time.process_time(), time.perf_counter()
        result = action()
        return Cost(time.process_time() - cpu, time.perf_counter() - wall), result


def added_share(step: Callable[..., Any], arguments: tuple[Any, ...], ours_first: bool) -> Cost:
    """What xla_fp8.jit adds to trace and lower `step`, as a share of what jax.jit takes to trace, lower and compile."""

    def lower(jit: Callable[..., Any]) -> tuple[Cost, Any]:
        function = jit(lambda *args: step(*args))  # a function that no cache has seen
        return Cost.of(lambda: function.lower(*arguments))

    lower(jax.jit)  # fills JAX's own caches, or whoever comes first would pay for both
    early = [lower(xla_fp8.jit)] if ours_first else []
    plain, lowered = lower(jax.jit)
    ours, _ = early[0] if early else lower(xla_fp8.jit)
    compiling, _ = Cost.of(lowered.compile)
    print(
        f"trace and lower: jax.jit {plain.cpu:.2f} s, xla_fp8.jit {ours.cpu:.2f} s; "
        f"jax.jit's compile {compiling.cpu:.2f} s of CPU, {compiling.wall:.2f} s by the clock"
    )
    return Cost(
        (ours.cpu - plain.cpu) / (plain.cpu + compiling.cpu), (ours.wall - plain.wall) / (plain.wall + compiling.wall)
    )


def compile_overhead(image_size: int, batch: int, rounds: int) -> None:
    """What rewriting adds to the time in which jax.jit traces, lowers and compiles a ResNet-50 training step.

    Where others use the machine CPU time is the steadier one; it sums XLA's compile threads, which the clock does not.
    """
    shares = []
    for number in range(rounds):
        step, arguments = resnet50(image_size, batch + number)  # another batch, which our caches have not seen
        shares.append(added_share(step, arguments, ours_first=bool(number % 2)))
    cpu, wall = (statistics.median(getattr(share, kind) for share in shares) for kind in ("cpu", "wall"))
    print(f"rewriting adds {cpu:.1%} of jax.jit's CPU time, {wall:.1%} by the clock (medians of {rounds} rounds)")
    print(xla_fp8.jit(step).report(*arguments).summary)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", action="store_true", help="only the overhead of a call")
    parser.add_argument("--image-size", type=int, default=64, help="height and width of an image (default 64)")
    parser.add_argument("--batch", type=int, default=8, help="images in a batch of the first round (default 8)")
    parser.add_argument("--rounds", type=int, default=5, help="how often each compiles (default 5)")
    options = parser.parse_args()
    call_overhead()
    if not options.calls:
        compile_overhead(options.image_size, options.batch, options.rounds)


if __name__ == "__main__":
    main()
