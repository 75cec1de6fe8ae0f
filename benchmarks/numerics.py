"""Prints how far rewritten programs are from the originals: the tables of docs/numbers.md, measured on this machine.

python benchmarks/numerics.py
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xla_fp8
from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.backends.compare import compare
from xla_fp8.backends.executable import Executable

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
WIDE = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
Operands = list[np.ndarray[Any, Any]]


def program(wide: Any, y_type: Any, activation: str | None) -> Any:
    """A 3x3 convolution with three scales, written in `wide`."""

    def function(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array, y_scale: jax.Array) -> jax.Array:
        return xla_fp8.conv_general_dilated(
            *(x, w, (1, 1), "SAME"), dimension_numbers=("NHWC", "HWIO", "NHWC"), preferred_element_type=wide,
            lhs_scale=x_scale, rhs_scale=w_scale, activation=activation, out_scale=y_scale, out_dtype=y_type,
        )  # fmt: skip

    return function


def operands(seed: int, size: int = 16, features: int = 64) -> Operands:
    """Normal inputs and scales that no wide type holds exactly; the output uses most of e4m3's range."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4, size, size, features)).astype(E4M3)
    w = rng.normal(size=(3, 3, features, features)).astype(E4M3)
    return [x, w, *(np.float32(rng.uniform(0.5, 2)) for _ in range(3))]


def modules(function: Any, arrays: Operands) -> tuple[hlo.HloModule, hlo.HloModule]:
    """The program's module before and after the pipeline."""
    text = _jax_compat.lowered_hlo_text(jax.jit(function, keep_unused=True).lower(*arrays))
    rewritten = hlo.parse(text)
    passes.run(rewritten, target="h200", dialect="extended")
    return hlo.parse(text), rewritten


def equality_table() -> Iterator[str]:
    """Equal outputs of original and rewritten, and of each and the same program in f32 throughout."""
    yield "| wide type | output | activation | equal | one step apart | further | original = f32 | rewritten = f32 |"
    yield "|---|---|---|---|---|---|---|---|"
    for wide, y_type, activation in itertools.product(WIDE, (E4M3, E5M2), (None, "relu", "gelu_tanh")):
        arrays = operands(0)
        original, rewritten = (
            Executable(module, "cpu", {"xla_allow_excess_precision": False})
            for module in modules(program(WIDE[wide], y_type, activation), arrays)
        )
        exact = Executable(modules(program(jnp.float32, y_type, activation), arrays)[0], "cpu")
        counts = np.zeros(5)
        for seed in range(4):
            arrays = operands(seed)
            a, b, c = (executable(*arrays)[0] for executable in (original, rewritten, exact))
            difference = compare(a, b)
            one_step = difference.different - difference.beyond_one_step
            counts += (
                *(a.size - difference.different, one_step, difference.beyond_one_step),
                *(np.count_nonzero(a == c), np.count_nonzero(b == c)),
            )
        shares = " | ".join(f"{count / (4 * a.size):.3%}" for count in counts)
        yield f"| {wide} | {a.dtype.name} | {activation or 'none'} | {shares} |"


SPECIAL: dict[str, dict[int, float]] = {
    "finite": {},
    "NaN in the input": {0: np.nan},
    "NaN in the filter": {1: np.nan},
    "x_scale = inf": {2: np.inf},
    "x_scale = NaN": {2: np.nan},
    "x_scale = 0": {2: 0.0},
    "y_scale = inf": {4: np.inf},
    "y_scale = NaN": {4: np.nan},
    "y_scale = 0": {4: 0.0},
    "x_scale = inf, y_scale = 0": {2: np.inf, 4: 0.0},
    "x_scale = 1e38, w_scale = 1e-37": {2: 1e38, 3: 1e-37},
    "x_scale = w_scale = 1e30 (y overflows)": {2: 1e30, 3: 1e30},
    "x_scale = w_scale = 1e-30 (y underflows)": {2: 1e-30, 3: 1e-30},
}
"""Which operand is replaced by what; of a tensor, its first element."""


def special_table() -> Iterator[str]:
    """What becomes of infinities and NaN: values of a 1x1 convolution's outputs, original and rewritten."""
    yield "| case | activation | " + " | ".join(f"original, {w} | rewritten, {w}" for w in WIDE) + " |"
    yield "|---|---|" + "---|---|" * len(WIDE)
    # Four pixels of 16 channels: all ones; all zeros; ones and zeros; ones and some minus ones.
    inputs = np.array([[1] * 16, [0] * 16, [1] * 8 + [0] * 8, [1] * 12 + [-1] * 4], np.float32)
    for case, activation in itertools.product(SPECIAL, (None, "relu")):
        cells = []
        for wide in WIDE:
            arrays: Operands = [
                inputs.reshape(1, 1, 4, 16).astype(E4M3),
                np.ones((1, 1, 16, 16), E4M3),
                *(np.ones((), np.float32) for _ in range(3)),
            ]
            for index, value in SPECIAL[case].items():
                arrays[index] = arrays[index].copy()
                arrays[index].flat[0] = value
            for module in modules(program(WIDE[wide], E4M3, activation), arrays):
                (y,) = Executable(module, "cpu", {"xla_allow_excess_precision": False})(*arrays)
                cells.append(" ".join(f"{float(value):g}" for value in y[0, 0, :, 0]))
        yield f"| {case} | {activation or 'none'} | " + " | ".join(cells) + " |"


def main() -> None:
    print(f"jaxlib {_jax_compat.jaxlib_version()}, CPU, xla_allow_excess_precision=false\n")
    for line in itertools.chain(equality_table(), [""], special_table()):
        print(line, flush=True)


if __name__ == "__main__":
    main()
