"""The algorithms that make FP8 tensors, by name, and which one is taken: the seam for device kernels.

`Lax` defines the numbers. Every other algorithm gives the same bits; it may only be faster. Device kernels live in a
layer below, `xla_fp8.backends.quantize`, and import nothing from here: a request brings its arithmetic along
(`request.rule`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8.backends.protocol import Yes
from xla_fp8.backends.quantize.choice import fastest
from xla_fp8.backends.registry import platform_name
from xla_fp8.quantization.errors import QuantizationError
from xla_fp8.quantization.numerics import ScaleRule, amax_of
from xla_fp8.target import Verdict

Layout = Literal["row", "transposed", "both"]
LAYOUTS: tuple[Layout, ...] = ("row", "transposed", "both")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is asked of an algorithm, apart from the numbers. Hashable.

    Attributes:
        shape, dtype: of the tensor; float32, bfloat16 or float16.
        rule: how the scale follows from the amax, and the FP8 type.
        kept: the dimensions with a scale for each index, ascending; () for one scale.
        layout: which copies are made.
        given: "amax" or "scale" where that is an argument, "" where the algorithm finds the amax first.
        wants_amax: whether the amax of the tensor is a result, whatever is given.
        platform: where it runs: "cpu", "cuda", ...
    """

    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    rule: ScaleRule
    kept: tuple[int, ...]
    layout: Layout
    given: Literal["", "amax", "scale"]
    wants_amax: bool
    platform: str


Outcome = tuple[jax.Array | None, jax.Array | None, jax.Array, jax.Array | None]
"""What an algorithm makes, (row, transposed, scale, amax):

- row: the FP8 tensor in the order of x, row-major; None where the layout is "transposed".
- transposed: its last two dimensions exchanged, row-major; None where the layout is "row".
- scale: f32, of shape [], or of rank x.ndim with 1 in each dimension that is not kept.
- amax: f32 of the scale's shape, where asked for, else None.
"""


class Algorithm(Protocol):
    """One way to quantize. Algorithms are values: hashable, and equal ones compute alike."""

    @property
    def name(self) -> str: ...

    def supports(self, request: Request) -> Verdict:
        """`Yes`, or a `No` with the reason."""

    def run(self, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
        """Quantizes x; `given` is the f32 amax or scale, of the scale's shape. Traced where quantize is called."""


@dataclasses.dataclass(frozen=True)
class Lax:
    """Plain JAX operations, on any platform: what XLA makes two kernels of (a reduction, a cast)."""

    name: str = "lax"

    def supports(self, request: Request) -> Verdict:
        return Yes()

    def run(self, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
        needs_amax = request.wants_amax or not request.given
        amax = amax_of(x, request.kept) if needs_amax else None
        if request.given == "scale":
            assert given is not None
            multiplier, scale = request.rule.of_scale(given), given
        else:
            chosen = given if request.given == "amax" else amax
            assert chosen is not None
            multiplier, scale = request.rule.of_amax(chosen)
        row = request.rule.cast(x, multiplier)
        transposed = jnp.swapaxes(row, -1, -2) if request.layout != "row" else None
        return (
            row if request.layout != "transposed" else None,
            transposed,
            scale,
            amax if request.wants_amax else None,
        )


ALGORITHMS = ("lax", "atomic", "reduction", "single_pass", "resident")
"""The names."""


@functools.cache
def named(name: str) -> Algorithm:
    """The algorithm of a name in `ALGORITHMS`."""
    # Importing Pallas takes longer than all of xla_fp8: only where a kernel is meant, and only its own half of Pallas.
    match name:
        case "atomic":
            from xla_fp8.backends.quantize.atomic import Atomic

            return Atomic()
        case "reduction":
            from xla_fp8.backends.quantize.reduction import Reduction

            return Reduction()
        case "single_pass":
            from xla_fp8.backends.quantize.single_pass import SinglePass

            return SinglePass()
        case "resident":
            from xla_fp8.backends.quantize.resident import Resident

            return Resident()
    return Lax()


def choose(name: str, request: Request) -> Algorithm:
    """The algorithm of that name; for "auto" the fastest that can.

    Raises:
        QuantizationError: there is none of that name, or it cannot do this.
    """
    if name == "auto":
        return named(fastest(request) or "lax")
    if name not in ALGORITHMS:
        raise QuantizationError(f"there is no algorithm {name!r}: expected auto, {', '.join(ALGORITHMS)}")
    algorithm = named(name)
    verdict = algorithm.supports(request)
    if not verdict.ok:
        raise QuantizationError(f"algorithm {name!r} cannot quantize this: {verdict.reason}; algorithm='auto' can")
    return algorithm


def run(name: str, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
    """Quantizes with the algorithm of that name, or the one that "auto" means."""
    outcome: Outcome = _run(choose(name, request), request, x, given)
    return outcome


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)  # outside of any jit too, it is a few kernels
def _run(algorithm: Algorithm, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
    if isinstance(algorithm, Lax):
        return algorithm.run(request, x, given)
    return _run_kernels(algorithm, request, x, given)


def _run_kernels(algorithm: Algorithm, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
    """Under vmap it is Lax: a batch of kernels would have to wait at their barriers all at once."""

    @jax.custom_batching.custom_vmap
    def run(x: jax.Array, given: jax.Array | None) -> Outcome:
        return algorithm.run(request, x, given)

    @run.def_vmap
    def _(size: int, is_batched: Any, x: jax.Array, given: jax.Array | None) -> tuple[Outcome, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, tuple(is_batched))
        outcome: Outcome = jax.vmap(functools.partial(Lax().run, request), axes, axis_size=size)(x, given)
        return outcome, jax.tree.map(lambda _: True, outcome)

    outcome: Outcome = run(x, given)
    return outcome


def current_platform() -> str:
    """The platform that a program traced now is for."""
    return platform_name(jax.default_backend())
