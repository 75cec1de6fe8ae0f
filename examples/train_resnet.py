"""Trains a ResNet in FP8, beside bf16: one line makes the network FP8, another one compiles it.

    python examples/train_resnet.py                                on a CPU in a minute: a small one, on digits
    python examples/train_resnet.py --size resnet50 --batch 256    on a GPU: images per second, on random images

The digits are scikit-learn's, which ships them: pip install -e '.[examples]'.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from networks import resnet
from networks.layers import cross_entropy, normal

import xla_fp8

MOMENTUM = 0.9
SIZES = {"small": resnet.Config((1, 1), 16, 10, 32), "resnet50": resnet.RESNET50}

Step = Callable[[Any, Any], tuple[Any, jax.Array]]


def digits(batch: int, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Digits of 32x32 pixels, in three equal colours."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).repeat(4, 1).repeat(4, 2).repeat(3, 3)
    rng = np.random.default_rng(seed)
    while True:
        picked = rng.integers(0, len(images), batch)
        yield images[picked].astype(np.float32), labels[picked].astype(np.int32)


def noise(batch: int, config: resnet.Config) -> Iterator[tuple[Any, Any]]:
    """The same random images again and again, on the device."""
    rng = np.random.default_rng(0)
    images = jnp.asarray(rng.standard_normal((batch, config.image, config.image, 3), np.float32))
    labels = jnp.asarray(rng.integers(0, config.classes, batch))
    while True:
        yield images, labels


def make(recipe: str, config: resnet.Config, batch: int, rate: float, least: float | None) -> tuple[Any, Step]:
    """The state before the first step, and the step: (state, batch) → (state, loss).

    Args:
        recipe: "bf16", "delayed" or "dynamic".
        least: layers of fewer floating-point operations stay in bf16; None for the recipe's own rules.
    """
    params = jax.tree.map(jnp.asarray, resnet.init(normal(0), config))
    network = resnet.apply_training
    scaling: Any = {}
    if recipe != "bf16":
        network = xla_fp8.convert(network, xla_fp8.Recipe(recipe, min_flops=least))  # the line
    if recipe == "delayed":
        images = jax.ShapeDtypeStruct((batch, config.image, config.image, 3), jnp.bfloat16)
        scaling = network.init(params, images)

    def loss(params: Any, scaling: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, Any]:
        state = (scaling,) if recipe == "delayed" else ()
        logits, statistics = network(*state, params, images.astype(jnp.bfloat16))
        return cross_entropy(logits, labels), statistics

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, velocity, scaling = state
        gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)
        (value, statistics), (gradient, observed) = gradients(params, scaling, *batch)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        params = jax.tree.map(lambda p, v: p - rate * v, params, velocity)
        params = resnet.with_statistics(params, statistics)
        if recipe == "delayed":
            scaling = xla_fp8.update_scaling(scaling, observed)
        return (params, velocity, scaling), value

    compiled = jax.jit(step) if recipe == "bf16" else xla_fp8.jit(step)
    return (params, jax.tree.map(jnp.zeros_like, params), scaling), compiled


def train(state: Any, step: Step, batches: Iterator[Any], steps: int) -> tuple[np.ndarray, float]:
    """The losses of all steps, and the seconds of one, the first left out."""
    losses = []
    start = time.perf_counter()
    for number in range(steps):
        state, value = step(state, next(batches))
        losses.append(value)
        if number == 0:
            jax.block_until_ready(value)
            start = time.perf_counter()
    found = np.asarray(losses)
    return found, (time.perf_counter() - start) / max(1, steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--recipes", default="bf16,delayed", help="of bf16, delayed and dynamic")
    arguments = parser.parse_args()
    config = SIZES[arguments.size]
    is_small = arguments.size == "small"
    for recipe in arguments.recipes.split(","):
        state, step = make(recipe, config, arguments.batch, arguments.rate, 0 if is_small else None)
        batches = digits(arguments.batch, 0) if is_small else noise(arguments.batch, config)
        losses, seconds = train(state, step, batches, arguments.steps)
        last = losses[-max(1, len(losses) // 5) :].mean()
        print(f"{recipe:8} loss {losses[0]:.3f} to {last:.3f}, {arguments.batch / seconds:,.0f} images/s", flush=True)


if __name__ == "__main__":
    main()
