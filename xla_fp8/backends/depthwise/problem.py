"""A depthwise convolution of images: its shapes, its input gradient as a convolution, and what no kernel does."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax import numpy as jnp

from xla_fp8.backends.protocol import No, Yes
from xla_fp8.target import Verdict

LARGEST_SIZE = 2**31 - 2**20
"""Elements of an image tensor; offsets in the kernels are 32-bit."""

ALIGNED = 8
"""Elements: what the channels are a multiple of, and so every offset of a pixel."""

LARGEST_WINDOW = 11
"""Rows or columns: the kernels' loops over a window are unrolled."""

_TYPES = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32)))


@dataclasses.dataclass(frozen=True)
class Problem:
    """y[n,p,q,c] = sum over r,s of x[n, p*stride + r - top, q*stride + s - left, c] * w[r,s,c], each sum in f32.

    Attributes:
        batch, height, width, channels: of x [N,H,W,C].
        window: rows and columns of w [R,S,C].
        stride: down and across.
        padding: (top, bottom), (left, right), zeros around x; none is negative.
        dtype: of x and y.
    """

    batch: int
    height: int
    width: int
    channels: int
    window: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[tuple[int, int], tuple[int, int]]
    dtype: np.dtype[np.generic]

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.height, self.width, self.channels

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """[N,P,Q,C]."""
        p, q = (
            (size + sum(padding) - window) // stride + 1
            for size, padding, window, stride in zip(
                (self.height, self.width), self.padding, self.window, self.stride, strict=True
            )
        )
        return self.batch, p, q, self.channels

    @property
    def filter_shape(self) -> tuple[int, int, int]:
        return *self.window, self.channels

    @property
    def input_gradient(self) -> Problem | None:
        """The convolution of dy with the filter turned by 180 degrees that is the gradient of x, of strides of 1.

        None where it is none: with other strides, or where the padding is wider than the window.
        """
        padding = tuple((r - 1 - low, r - 1 - high) for r, (low, high) in zip(self.window, self.padding, strict=True))
        if self.stride != (1, 1) or min(map(min, padding)) < 0:
            return None
        n, p, q, c = self.output_shape
        return Problem(n, p, q, c, self.window, (1, 1), (padding[0], padding[1]), self.dtype)


def supports(problem: Problem) -> Verdict:
    """`Yes`, or `No` with what neither kernel does."""
    if problem.dtype not in _TYPES:
        return No(f"{problem.dtype.name} images; the kernels take {', '.join(t.name for t in _TYPES)}")
    if problem.channels % ALIGNED:
        return No(f"{problem.channels} channels, not a multiple of {ALIGNED}: threads load 16 bytes of bf16")
    if max(problem.window) > LARGEST_WINDOW:
        return No(f"a window of {problem.window}; the kernels' largest is {LARGEST_WINDOW}")
    if max(problem.stride) > 2:
        return No(f"strides of {problem.stride}; the kernels have 1 and 2")
    if min(map(min, problem.padding)) < 0:
        return No("negative padding")
    if any(low >= r or high >= r for r, (low, high) in zip(problem.window, problem.padding, strict=True)):
        return No("padding as wide as the window: some results would be sums of nothing")
    if min(problem.input_shape) < 1 or min(problem.output_shape) < 1:
        return No("an empty tensor")
    if max(math.prod(problem.input_shape), math.prod(problem.output_shape)) > LARGEST_SIZE:
        return No(f"more than {LARGEST_SIZE} elements; the kernels' offsets are 32-bit")
    return Yes()
