"""What a quantization kernel is asked for, and which requests none of them takes.

The classes are protocols: `xla_fp8.quantization`, which makes the requests, stands in a layer above.
"""

from __future__ import annotations

import functools
from typing import Literal, Protocol

import jax
import numpy as np

from xla_fp8.backends.protocol import No, Yes
from xla_fp8.target import Target, Verdict, format_version

Outcome = tuple[jax.Array | None, jax.Array | None, jax.Array, jax.Array | None]
"""(row, transposed, scale, amax), as `xla_fp8.quantization.algorithms.Outcome` has them."""


class Rule(Protocol):
    """How an amax becomes a scale, as `xla_fp8.quantization.numerics.ScaleRule` computes it."""

    @property
    def dtype(self) -> np.dtype[np.generic]: ...

    @property
    def largest(self) -> float: ...

    @property
    def keeps_nan(self) -> bool:
        """Whether the multiplier and the scale of an amax that is NaN are NaN, always."""

    def of_amax(self, amax: jax.Array) -> tuple[jax.Array, jax.Array]: ...
    def of_scale(self, scale: jax.Array) -> jax.Array: ...
    def scaled(self, x: jax.Array, multiplier: jax.Array) -> jax.Array:
        """What is cast, of x and the multiplier in f32."""


class Request(Protocol):
    """The fields of `xla_fp8.quantization.algorithms.Request` that kernels read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype[np.generic]: ...

    @property
    def rule(self) -> Rule: ...

    @property
    def kept(self) -> tuple[int, ...]: ...

    @property
    def layout(self) -> Literal["row", "transposed", "both"]: ...

    @property
    def given(self) -> Literal["", "amax", "scale"]: ...

    @property
    def wants_amax(self) -> bool: ...

    @property
    def platform(self) -> str: ...


LARGEST_SIZE = 2**31 - 2**20
"""Elements; offsets in the kernels are 32-bit."""


def supports(request: Request, interpret: bool) -> Verdict:
    """`Yes`, or `No` with what none of the kernels does.

    Args:
        interpret: the kernels are interpreted, which any platform can.
    """
    if not interpret and not (verdict := runs_on(request.platform)).ok:
        return verdict
    if request.kept:
        return No("it finds one amax of the whole tensor, and axis= asks for several")
    size = int(np.prod(request.shape))
    if size == 0:
        return No("the tensor is empty, so that there is nothing to launch")
    if size > LARGEST_SIZE:
        return No(f"the tensor has {size} elements, and offsets of 32 bits reach {LARGEST_SIZE}")
    return Yes()


def runs_on(platform: str) -> Verdict:
    """Whether the kernels run on a platform ("cuda", ...), on the local device."""
    if platform != "cuda":
        return No(f"its kernels run on CUDA devices, and the platform is {platform}")
    if (capability := _capability()) != (9, 0):
        return No(
            "its kernels were made and measured for compute capability 9.0 (Hopper), and the device has "
            f"{format_version(capability)}"
        )
    return Yes()


@functools.cache
def _capability() -> tuple[int, ...]:
    return Target.default().compute_capability


@functools.cache
def multiprocessors() -> int:
    """Of the local GPU, or of an H200 where there is none."""
    try:
        return int(jax.local_devices(backend="gpu")[0].core_count)
    except RuntimeError:
        return 132
