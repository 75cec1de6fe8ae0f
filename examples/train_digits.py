"""FP8 training with and without rewriting: a small convolutional net on scikit-learn's digits, the same loss curve.

    python examples/train_digits.py --plot docs/plots/digits.svg

Trains one net twice from the same start on the same batches: once under `jax.jit`, once under `xla_fp8.jit`. It is
plain JAX: each convolution quantizes input and filter to e4m3 and, backward, the cotangent to e5m2, with delayed scales
(from the largest value of the step before). Needs scikit-learn, which ships the data, and for --plot matplotlib:
pip install -e '.[examples]'. Runs on a CPU in less than a minute.

Two trainings whose sums are rounded differently part in time, because one value that rounds to another FP8 number is
6% of it. So there are two more numbers: how far the two steps differ from one and the same state (no time to part), and
how far a third training parts, under `jax.jit` too, whose start is other by one part in a million.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xla_fp8

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
TYPES = {"x": E4M3, "w": E4M3, "g": E5M2}
"""What becomes FP8, in which type: a convolution's input, its filter, and its cotangent."""
CHANNELS = (1, 16, 32, 32)
CONVOLUTIONS = 2 * len(CHANNELS) - 3
"""Of a training step, those that become graphs: all forward ones, and all input gradients but the image's. The filter
gradients are refused, as everywhere."""
BATCH, RATE, MOMENTUM = 128, 0.02, 0.9

Scales = dict[str, jax.Array]


def largest(dtype: Any) -> float:
    return float(jnp.finfo(dtype).max)


def quantize(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    return jnp.clip(x / scale, -largest(dtype), largest(dtype)).astype(dtype)


def next_scale(amax: jax.Array, dtype: Any) -> jax.Array:
    """Room for twice `amax`, as a power of two: dividing by it and multiplying by it again rounds nothing."""
    return jnp.exp2(jnp.ceil(jnp.log2(2 * jnp.maximum(amax, 1e-12) / largest(dtype))))


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@jax.custom_vjp
def fp8_conv(x: jax.Array, w: jax.Array, scales: Scales) -> jax.Array:
    """A 3x3 convolution in FP8. Its scales' "gradients" are the largest absolute values, for the next step's scales."""
    return forward(x, w, scales)[0]


def forward(x: jax.Array, w: jax.Array, scales: Scales) -> tuple[jax.Array, Any]:
    x8, w8 = quantize(x, scales["x"], E4M3), quantize(w, scales["w"], E4M3)
    wide = x8.astype(jnp.float32) * scales["x"], w8.astype(jnp.float32) * scales["w"]
    return conv(*wide), (x8, w8, scales, jnp.max(jnp.abs(x)), jnp.max(jnp.abs(w)))


def backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, Scales]:
    x8, w8, scales, x_amax, w_amax = saved
    _, pullback = jax.vjp(conv, x8.astype(jnp.float32) * scales["x"], w8.astype(jnp.float32) * scales["w"])
    dx, dw = pullback(quantize(g, scales["g"], E5M2).astype(jnp.float32) * scales["g"])
    return dx, dw, {"x": x_amax, "w": w_amax, "g": jnp.max(jnp.abs(g))}


fp8_conv.defvjp(forward, backward)


def logits(parameters: Any, scales: list[Scales], images: jax.Array) -> jax.Array:
    """Images [N, 8, 8, 1] → [N, 10]: three convolutions with relu, the middle one pooled, then a dense layer in f32."""
    y = images
    for index, (layer, of_layer) in enumerate(zip(parameters["convs"], scales, strict=True)):
        y = jax.nn.relu(fp8_conv(y, layer["w"], of_layer) + layer["b"])
        if index == 1:
            y = y.reshape(y.shape[0], 4, 2, 4, 2, -1).mean((2, 4))
    return y.reshape(y.shape[0], -1) @ parameters["dense"]


def loss(parameters: Any, scales: list[Scales], images: jax.Array, labels: jax.Array) -> jax.Array:
    """Cross entropy."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits(parameters, scales, images)), labels[:, None], 1))


def step(state: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
    """One step of gradient descent with momentum. State: (parameters, velocity, scales)."""
    parameters, velocity, scales = state
    value, (gradient, amax) = jax.value_and_grad(loss, (0, 1))(parameters, scales, images, labels)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
    parameters = jax.tree.map(lambda p, v: p - RATE * v, parameters, velocity)
    scales = [{name: next_scale(of_layer[name], TYPES[name]) for name in TYPES} for of_layer in amax]
    return (parameters, velocity, scales), value


def initial_state(perturbation: float = 0.0) -> Any:
    """The state before the first step: filters of He's size times 1 + perturbation, scales with room for 2."""
    rng = np.random.default_rng(0)

    def normal(*shape: int, gain: float = 2.0) -> jax.Array:
        size = np.sqrt(gain / np.prod(shape[:-1])) * (1 + perturbation)
        return jnp.asarray(rng.normal(size=shape) * size, jnp.float32)

    pairs = itertools.pairwise(CHANNELS)
    convs = [{"w": normal(3, 3, before, after), "b": jnp.zeros(after)} for before, after in pairs]
    parameters = {"convs": convs, "dense": normal(4 * 4 * CHANNELS[-1], 10, gain=0.2)}
    scales = [{name: next_scale(jnp.float32(1), dtype) for name, dtype in TYPES.items()} for _ in convs]
    return parameters, jax.tree.map(jnp.zeros_like, parameters), scales


def digits() -> tuple[np.ndarray, np.ndarray]:
    """1797 images [N, 8, 8, 1] in [0, 1], and their labels, shuffled."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(labels))
    return (images[order].reshape(-1, 8, 8, 1) / 16).astype(np.float32), labels[order].astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        losses: of each step, [steps].
        states: before each step, and the last one.
        accuracy: on the images that were not trained on.
        seconds: compilation included.
    """

    losses: np.ndarray
    states: list[Any]
    accuracy: float
    seconds: float


def batches(steps: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The same for every training; the first fifth of the images is held out."""
    images, labels = digits()
    rng = np.random.default_rng(2)
    picked = [rng.integers(len(labels) // 5, len(labels), BATCH) for _ in range(steps)]
    return [(images[batch], labels[batch]) for batch in picked]


def train(compiled_step: Callable[..., Any], steps: int, perturbation: float = 0.0) -> Run:
    states, losses, start = [initial_state(perturbation)], [], time.perf_counter()
    for batch in batches(steps):
        state, value = compiled_step(states[-1], *batch)
        states.append(state)
        losses.append(value)
    seen = np.array(losses)
    seconds = time.perf_counter() - start
    images, labels = digits()
    held_out = len(labels) // 5
    parameters, _, scales = states[-1]
    guesses = jax.jit(logits)(parameters, scales, images[:held_out]).argmax(1)
    return Run(seen, states, float(np.mean(guesses == labels[:held_out])), seconds)


def same_state_differences(run: Run, compiled_step: Callable[..., Any]) -> tuple[float, float]:
    """How far single steps from the states of `run` differ from what `run` did: nothing adds up.

    Returns:
        The largest difference of a loss, and of an entry of the velocity (the gradients and their past) as a part of
        the largest entry of its array.
    """
    losses, velocities = [], []
    pairs = itertools.pairwise(run.states)
    for (before, after), batch, loss_before in zip(pairs, batches(len(run.losses)), run.losses, strict=True):
        state, value = compiled_step(before, *batch)
        losses.append(abs(float(value) - float(loss_before)))
        parts = jax.tree.map(lambda a, b: np.max(np.abs(a - b)) / np.max(np.abs(a)), after[1], state[1])
        velocities.append(max(jax.tree.leaves(parts)))
    return max(losses), float(max(velocities))


def report() -> Any:
    """What xla_fp8 says of the training step."""
    return xla_fp8.explain(step)(initial_state(), *batches(1)[0])


def plot(runs: dict[str, Run], path: pathlib.Path) -> None:
    """Both curves, and below them their difference, as SVG: the same bytes for the same numbers."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "digits", "svg.fonttype": "none", "font.size": 9})
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 4.5), sharex=True, height_ratios=(3, 1))
    for (name, run), style in zip(runs.items(), ({"lw": 4, "alpha": 0.35}, {"lw": 1, "color": "black"}), strict=True):
        above.semilogy(run.losses, label=f"{name}: {run.losses[-1]:.4f}", **style)
    one, other = (run.losses for run in runs.values())
    below.plot(abs(one - other), lw=1, color="tab:red")
    above.set(title="FP8 training on scikit-learn's digits, CPU", ylabel="loss")
    above.legend(title="loss of the last step")
    below.set(xlabel="step", ylabel="|difference|")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of each training (300)")
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="write the loss curves as SVG")
    arguments = parser.parse_args()
    print(report())
    plain, rewritten = jax.jit(step), xla_fp8.jit(step)
    runs = {"jax.jit": train(plain, arguments.steps), "xla_fp8.jit": train(rewritten, arguments.steps)}
    print(f"{arguments.steps} steps of {BATCH} images, jax {jax.__version__}, {jax.devices()[0].device_kind}\n")
    print("             first loss  last loss  accuracy  seconds")
    for name, run in runs.items():
        print(f"{name:11}  {run.losses[0]:10.6f}  {run.losses[-1]:9.6f}  {run.accuracy:8.2%}  {run.seconds:7.1f}")
    one, other = (run.losses for run in runs.values())
    of_loss, of_velocity = same_state_differences(runs["jax.jit"], rewritten)
    perturbed = train(plain, arguments.steps, perturbation=1e-6).losses
    print("\nlargest difference of a step's loss from that of jax.jit")
    print(f"  xla_fp8.jit, from the same state   {of_loss:.2g} (of the velocity, relative: {of_velocity:.2g})")
    print(f"  xla_fp8.jit, on its own            {np.max(abs(one - other)):.2g}")
    print(f"  jax.jit, start other by 1e-6       {np.max(abs(one - perturbed)):.2g}")
    if arguments.plot:
        plot(runs, arguments.plot)


if __name__ == "__main__":
    main()
