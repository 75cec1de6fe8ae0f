"""FP8 training with xla_fp8.fp8_dot and fp8_conv: the same loss as f32 and bf16, on two tasks.

    python examples/train_fp8.py --plot docs/plots/train_fp8.svg

A convolutional net on scikit-learn's digits (fp8_conv, and fp8_dot in the last layer), and a dense net that learns
labels drawn from another one's outputs (fp8_dot). Each is trained in f32, in bf16 and in FP8 with dynamic and with
delayed scales, from the same start on the same batches; and that from several starts, which says what differences mean
nothing.
Needs scikit-learn, which ships the digits, and for --plot matplotlib: pip install -e '.[examples]'. Runs on a CPU in
less than a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xla_fp8

KINDS = ("f32", "bf16", "FP8 dynamic", "FP8 delayed")
SEEDS = 3
WINDOW = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}

Array = jax.Array
Parameters = Mapping[str, Array]
Layer = Callable[[Array, str], Array]


@dataclasses.dataclass(frozen=True)
class Layers:
    """The layers of a net in one kind of arithmetic.

    Attributes:
        kind: one of KINDS.
        parameters: filters and matrices by name.
        scaling: with delayed scales, the state of each layer by name.
    """

    kind: str
    parameters: Parameters
    scaling: Mapping[str, xla_fp8.DelayedScaling]

    def conv(self, x: Array, name: str) -> Array:
        w = self.parameters[name]
        if self.kind.startswith("FP8"):
            return xla_fp8.fp8_conv(x, w, **WINDOW, scaling=self.scaling.get(name))
        return lax.conv_general_dilated(self.cast(x), self.cast(w), **WINDOW).astype(jnp.float32)

    def dense(self, x: Array, name: str) -> Array:
        w = self.parameters[name]
        if self.kind.startswith("FP8"):
            return xla_fp8.fp8_dot(x, w, scaling=self.scaling.get(name))
        return (self.cast(x) @ self.cast(w)).astype(jnp.float32)

    def cast(self, x: Array) -> Array:
        return x.astype(jnp.bfloat16) if self.kind == "bf16" else x


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learned.

    Attributes:
        shapes: of the parameters, by name; the last dimension is the output's.
        loss: (layers, inputs, targets of a batch) → scalar.
        data: inputs and targets, the first dimension being the examples.
    """

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    loss: Callable[[Layers, Array, Array], Array]
    data: tuple[np.ndarray, np.ndarray]
    batch: int
    steps: int
    rate: float
    momentum: float = 0.9


def digits() -> Task:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)

    def loss(layers: Layers, images: Array, labels: Array) -> Array:
        y = jax.nn.relu(layers.conv(images, "conv1"))
        y = jax.nn.relu(layers.conv(y, "conv2"))
        y = y.reshape(y.shape[0], 4, 2, 4, 2, -1).mean((2, 4))
        y = jax.nn.relu(layers.conv(y, "conv3"))
        return cross_entropy(layers.dense(y.reshape(y.shape[0], -1), "dense"), labels)

    shapes = {"conv1": (3, 3, 1, 16), "conv2": (3, 3, 16, 16), "conv3": (3, 3, 16, 16), "dense": (256, 10)}
    data = (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels.astype(np.int32)
    return Task("digits, convolutional net", shapes, loss, data, batch=64, steps=150, rate=0.02)


def teacher() -> Task:
    """A dense net learns labels that are drawn from what another one outputs."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(8192, 64)).astype(np.float32)
    logits = 3 * np.tanh(inputs @ rng.normal(size=(64, 32)) / 8) @ rng.normal(size=(32, 16)) / np.sqrt(32)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1).astype(np.int32)

    def loss(layers: Layers, inputs: Array, labels: Array) -> Array:
        y = jax.nn.gelu(layers.dense(inputs, "dense1"))
        y = jax.nn.gelu(layers.dense(y, "dense2"))
        return cross_entropy(layers.dense(y, "dense3"), labels)

    shapes = {"dense1": (64, 128), "dense2": (128, 128), "dense3": (128, 16)}
    return Task("labels of another net, dense net", shapes, loss, (inputs, labels), batch=128, steps=300, rate=0.02)


def cross_entropy(logits: Array, labels: Array) -> Array:
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1))


def initial(task: Task, seed: int) -> Parameters:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=shape) * np.sqrt(2 / np.prod(shape[:-1])), jnp.float32)
        for name, shape in task.shapes.items()
    }


def batches(task: Task, seed: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of each step, [steps, batch, ...]."""
    picked = np.random.default_rng(seed + 100).integers(0, len(task.data[0]), (steps, task.batch))
    return task.data[0][picked], task.data[1][picked]


def trainer(task: Task, kind: str) -> Callable[..., np.ndarray]:
    """(parameters, batches) → the losses of all steps of gradient descent with momentum."""

    def step(state: Any, batch: Any) -> tuple[Any, Array]:
        parameters, velocity, scaling = state

        def loss(parameters: Parameters, scaling: Any) -> Array:
            return task.loss(Layers(kind, parameters, scaling), *batch)

        value, (gradient, observed) = jax.value_and_grad(loss, (0, 1))(parameters, scaling)
        velocity = jax.tree.map(lambda v, g: task.momentum * v + g, velocity, gradient)
        parameters = jax.tree.map(lambda p, v: p - task.rate * v, parameters, velocity)
        scaling = {name: state.update(observed[name]) for name, state in scaling.items()}
        return (parameters, velocity, scaling), value

    compiled = jax.jit(step)

    def train(parameters: Parameters, batches: Any) -> np.ndarray:
        scaling = {}
        if kind == "FP8 delayed":
            scaling = {name: xla_fp8.DelayedScaling.create(amax=1.0, margin=1) for name in task.shapes}
        state = parameters, jax.tree.map(jnp.zeros_like, parameters), scaling
        losses = []
        for batch in zip(*batches, strict=True):
            state, value = compiled(state, batch)
            losses.append(value)
        return np.asarray(losses)

    return train


def curves(task: Task, steps: int, seeds: int = SEEDS) -> dict[str, np.ndarray]:
    """Losses by kind, [seeds, steps]."""
    found = {}
    for kind in KINDS:
        train = trainer(task, kind)
        found[kind] = np.stack([train(initial(task, seed), batches(task, seed, steps)) for seed in range(seeds)])
    return found


def final(losses: np.ndarray) -> np.ndarray:
    """The mean loss of the last tenth of the steps, [seeds]."""
    return losses[:, -max(1, losses.shape[1] // 10) :].mean(1)


def plot(results: dict[str, dict[str, np.ndarray]], path: pathlib.Path) -> None:
    """A panel for each task, as SVG: the same bytes for the same numbers. Curves are those of the first start."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "train_fp8", "svg.fonttype": "none", "font.size": 9})
    figure, axes = pyplot.subplots(1, len(results), figsize=(9, 3.6))
    styles = {"f32": {"lw": 5, "alpha": 0.3}, "bf16": {"lw": 2.5, "alpha": 0.6}, "FP8 dynamic": {}, "FP8 delayed": {}}
    for axis, (name, of_kind) in zip(axes, results.items(), strict=True):
        for kind, losses in of_kind.items():
            smooth = np.convolve(losses[0], np.ones(10) / 10, "valid")
            axis.semilogy(smooth, label=f"{kind}: {final(losses)[0]:.4f}", **{"lw": 1} | styles[kind])
        axis.set(title=name, xlabel="step", ylabel="loss, mean of 10 steps")
        axis.legend(title="mean loss of the last tenth")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="write the loss curves as SVG")
    arguments = parser.parse_args()
    results = {}
    start = time.perf_counter()
    for task in (digits(), teacher()):
        results[task.name] = of_kind = curves(task, task.steps)
        spread = final(of_kind["f32"]).std(ddof=1)
        print(f"{task.name}: {task.steps} steps of {task.batch}, mean loss of the last tenth")
        starts = "".join(f"   start {seed}" for seed in range(SEEDS))
        print(f"{'':14}{starts}   mean - f32")
        for kind, losses in of_kind.items():
            ends = final(losses)
            differs = (ends - final(of_kind["f32"])).mean()
            print(f"  {kind:12}{''.join(f'{end:10.5f}' for end in ends)}{differs:13.5f}")
        print(f"  standard deviation of f32 over the starts: {spread:.5f}\n")
    print(f"{time.perf_counter() - start:.0f} s, jax {jax.__version__}, {jax.devices()[0].device_kind}")
    if arguments.plot:
        plot(results, arguments.plot)


if __name__ == "__main__":
    main()
