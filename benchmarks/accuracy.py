"""Training curves in FP8 against bf16: a ResNet that `xla_fp8.convert` turns to FP8, two tasks, three starts of each.

    python -m benchmarks.accuracy --out build/accuracy.json --plot docs/plots/accuracy.svg
    python -m benchmarks.accuracy --again build/accuracy.json --plot docs/plots/accuracy.svg    # draws, runs nothing

- digits: scikit-learn's 1,797 images of 8x8 pixels, many times over.
- teacher: labels drawn from what a random convolutional net says of random images, new ones at each step, so that
  nothing is learned by heart and a loss that drifts away from the other would go on doing so.

The network computes in bf16 (parameters in f32), and its inner convolutions in FP8 besides. From one start all kinds
see the same batches; what another start changes is what differences mean nothing. Needs flax, scikit-learn, and for
--plot matplotlib.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import xla_fp8

RECIPES = {
    "bf16": None,
    "FP8 dynamic": xla_fp8.Recipe("dynamic", min_flops=0),
    "FP8 delayed": xla_fp8.Recipe("delayed", min_flops=0),
}
"""Kinds of arithmetic. The layers are far below what would gain on a GPU; here it is their numbers that count."""

SEEDS = 3
MOMENTUM = 0.9

Array = jax.Array
Batch = tuple[Array, Array]


class Block(nn.Module):
    """Two convolutions and a shortcut, as in ResNet-18."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def conv(channels: int, window: int, stride: int = 1) -> nn.Conv:
            return nn.Conv(channels, (window, window), stride, use_bias=False, dtype=jnp.bfloat16)

        def norm() -> nn.BatchNorm:
            return nn.BatchNorm(use_running_average=False, dtype=jnp.bfloat16)

        y = nn.relu(norm()(conv(self.channels, 3, self.stride)(x)))
        y = norm()(conv(self.channels, 3)(y))
        if x.shape != y.shape:
            x = norm()(conv(self.channels, 1, self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    """A stem, blocks, the mean over pixels, and logits of ten classes."""

    blocks: tuple[tuple[int, int], ...]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.relu(nn.Conv(self.blocks[0][0], (3, 3), dtype=jnp.bfloat16)(x))
        for channels, stride in self.blocks:
            x = Block(channels, stride)(x)
        return nn.Dense(10)(x.mean((1, 2)).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        batches: (seed, steps) → images and labels of each step.
    """

    name: str
    model: nn.Module
    batches: Callable[[int, int], Iterator[Batch]]
    steps: int
    rate: float


def digits() -> Task:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32)

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            picked = rng.integers(0, len(images), 64)
            yield jnp.asarray(images[picked]), jnp.asarray(labels[picked])

    return Task("digits", ResNet(((16, 1), (32, 2), (64, 2))), batches, steps=300, rate=0.02)


def teacher() -> Task:
    """Random images, labelled by a random net that nobody trains."""

    class Teacher(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = jnp.tanh(nn.Conv(32, (3, 3), kernel_init=nn.initializers.normal(0.4))(x))
            x = jnp.tanh(nn.Conv(32, (3, 3), 2, kernel_init=nn.initializers.normal(0.2))(x))
            return nn.Dense(10, kernel_init=nn.initializers.normal(8.0))(x.mean((1, 2)))

    net = Teacher()
    shape = (64, 8, 8, 4)
    parameters = net.init(jax.random.key(1234), jnp.zeros(shape))

    @jax.jit
    def batch(key: Array) -> Batch:
        of_images, of_labels = jax.random.split(key)
        images = jax.random.normal(of_images, shape)
        return images, jax.random.categorical(of_labels, net.apply(parameters, images))

    def batches(seed: int, steps: int) -> Iterator[Batch]:
        return (batch(key) for key in jax.random.split(jax.random.key(seed), steps))

    return Task("teacher", ResNet(((16, 1), (16, 1), (32, 2), (32, 1))), batches, steps=600, rate=0.02)


def trainer(task: Task, recipe: xla_fp8.Recipe | None) -> Callable[[int], np.ndarray]:
    """seed → the losses of all steps of gradient descent with momentum."""
    model = task.model if recipe is None else xla_fp8.convert(task.model, recipe)

    def loss(parameters: Any, scaling: Any, batch: Batch) -> Array:
        images, labels = batch
        logits, _ = model.apply({"params": parameters, "fp8": scaling}, images, mutable=["batch_stats"])
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))

    @jax.jit
    def step(state: Any, batch: Batch) -> tuple[Any, Array]:
        parameters, velocity, scaling = state
        value, (gradient, observed) = jax.value_and_grad(loss, (0, 1))(parameters, scaling, batch)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        parameters = jax.tree.map(lambda p, v: p - task.rate * v, parameters, velocity)
        return (parameters, velocity, xla_fp8.update_scaling(scaling, observed)), value

    def train(seed: int) -> np.ndarray:
        batches = task.batches(seed, task.steps)
        first = next(batches)
        variables = jax.jit(model.init)(jax.random.key(seed), first[0])
        parameters = variables["params"]
        state = parameters, jax.tree.map(jnp.zeros_like, parameters), variables.get("fp8", {})
        losses = []
        for batch in (first, *batches):
            state, value = step(state, batch)
            losses.append(value)
        return np.asarray(losses)

    return train


def final(losses: np.ndarray) -> np.ndarray:
    """The mean loss of the last tenth of the steps, by start."""
    return losses[:, -max(1, losses.shape[1] // 10) :].mean(1)


def table(name: str, curves: dict[str, np.ndarray]) -> str:
    """Final losses by kind and start, and how far from bf16 each is, at the end and in each quarter of the steps."""
    wide = curves["bf16"]
    lines = [
        f"{name}: {wide.shape[1]} steps, mean loss of the last tenth; standard deviation of bf16 over the starts "
        f"{final(wide).std(ddof=min(1, len(wide) - 1)):.4f}",
        f"{'':14}" + "".join(f"start {seed}  " for seed in range(len(wide))) + "   mean  - bf16   - bf16, by quarters",
    ]
    for kind, losses in curves.items():
        ends, apart = final(losses), (losses - wide).mean(0)
        quarters = "  ".join(f"{part.mean():+.4f}" for part in np.array_split(apart, 4))
        lines.append(
            f"  {kind:12}"
            + "".join(f"{end:7.4f}  " for end in ends)
            + f"{ends.mean():7.4f} {(ends - final(wide)).mean():+.4f}   {quarters}"
        )
    return "\n".join(lines)


def plot(results: dict[str, dict[str, np.ndarray]], path: pathlib.Path) -> None:
    """For each task the curves, and how far they are from bf16; as SVG, the same bytes for the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "accuracy", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(2, len(results), figsize=(9, 5), sharex="col", height_ratios=(3, 2), squeeze=False)
    colors = dict(zip(RECIPES, ("black", "tab:blue", "tab:orange"), strict=True))
    for (above, below), (name, curves) in zip(axes.T, results.items(), strict=True):
        window = max(1, curves["bf16"].shape[1] // 30)

        def smooth(losses: np.ndarray, window: int = window) -> np.ndarray:
            return np.convolve(losses, np.ones(window) / window, "valid")[:: max(1, window // 4)]

        every = np.arange(len(smooth(curves["bf16"][0]))) * max(1, window // 4)
        for kind, losses in curves.items():
            for seed, of_start in enumerate(losses):
                label = f"{kind}: {final(losses).mean():.4f}" if seed == 0 else None
                style = {"lw": 2.5, "alpha": 0.35} if kind == "bf16" else {"lw": 0.8}
                above.semilogy(every, smooth(of_start), color=colors[kind], label=label, **style)
            if kind != "bf16":
                below.plot(every, smooth((losses - curves["bf16"]).mean(0)), color=colors[kind], lw=1)
        spread = final(curves["bf16"]).std(ddof=min(1, len(curves["bf16"]) - 1))
        below.axhspan(
            -spread, spread, color="black", alpha=0.1, lw=0, label="standard deviation of bf16 over the starts"
        )
        below.axhline(0, color="black", lw=0.5)
        above.set(title=name, ylabel=f"loss, mean of {window} steps")
        below.set(xlabel="step", ylabel="loss - bf16")
        above.legend(title="mean loss of the last tenth")
        below.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def measure(tasks: list[Task], seeds: int, kinds: list[str]) -> dict[str, dict[str, list[list[float]]]]:
    results: dict[str, dict[str, list[list[float]]]] = {}
    for task in tasks:
        results[task.name] = {}
        for kind in kinds:
            start = time.perf_counter()
            train = trainer(task, RECIPES[kind])
            results[task.name][kind] = [[float(loss) for loss in train(seed)] for seed in range(seeds)]
            print(f"{task.name}, {kind}: {time.perf_counter() - start:.0f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="of each training, instead of the task's own")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"starts of each ({SEEDS})")
    parser.add_argument("--tasks", nargs="+", default=["digits", "teacher"], choices=["digits", "teacher"])
    parser.add_argument("--out", type=pathlib.Path, metavar="FILE", help="write the losses as JSON")
    parser.add_argument("--again", type=pathlib.Path, metavar="FILE", nargs="+", help="read losses that --out wrote")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="write the curves as SVG")
    arguments = parser.parse_args()
    if arguments.again:
        results = {name: task for file in arguments.again for name, task in json.loads(file.read_text()).items()}
    else:
        tasks = [{"digits": digits, "teacher": teacher}[name]() for name in arguments.tasks]
        if arguments.steps:
            tasks = [dataclasses.replace(task, steps=arguments.steps) for task in tasks]
        results = measure(tasks, arguments.seeds, list(RECIPES))
        print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results))
    curves = {name: {kind: np.asarray(losses) for kind, losses in kinds.items()} for name, kinds in results.items()}
    for name, of_task in curves.items():
        print(table(name, of_task))
    if arguments.plot:
        plot(curves, arguments.plot)


if __name__ == "__main__":
    main()
