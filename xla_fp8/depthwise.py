"""depthwise_conv: a depthwise convolution of images in the type that they have, by this project's kernels on Hopper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xla_fp8 import _jax_compat
from xla_fp8.backends.depthwise.convolution import Convolution
from xla_fp8.backends.depthwise.primitive import convolve

# As in xla_fp8.functions: dumps name the line of the call.
_jax_compat.hide_from_sources(str(Path(__file__).parent))

_NUMBERS = ("NHWC", "HWIO", "NHWC")


def depthwise_conv(
    x: jax.Array,
    w: jax.Array,
    *,
    window_strides: Sequence[int] = (1, 1),
    padding: str | Sequence[tuple[int, int]] = "SAME",
) -> jax.Array:
    """A depthwise convolution: each channel of images with a filter of its own.

        y[n,p,q,c] = sum over r,s of x[n, p*stride + r - top, q*stride + s - left, c] * w[r,s,c]

    On one Hopper GPU it and its gradients are computed by kernels of this project, which add up in float32. Elsewhere,
    over several devices, and where the kernels do not reach (channels that are no multiple of 8, windows beyond 11,
    strides beyond 2, padding as wide as the window or negative), it is `jax.lax.conv_general_dilated` with
    `feature_group_count=C`. Which of the two is decided when a program is lowered.

    It has derivatives of every order, forward and reverse, and stands in jit, vmap, scan, checkpoint and shard_map. A
    vmap over images is one convolution of more images; where it is over filters too, it is lax's.

    Args:
        x: images [N,H,W,C], in bfloat16, float16, float32 or float64; the kernels know the first three.
        w: filters [R,S,C], or [R,S,1,C] as lax has them, of a float type. A type other than x's is computed with in
            float32: parameters need not be converted to 16 bits first.
        window_strides: down and across.
        padding: "SAME", "SAME_LOWER" or "VALID", or (top, bottom), (left, right).

    Returns:
        [N,P,Q,C] of x's type. The gradient of x has x's type, that of w has w's, from sums in float32.

    Raises:
        TypeError: operands of other shapes or types; the message says which.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    for operand, name in ((x, "x"), (w, "w")):
        if not jnp.issubdtype(operand.dtype, jnp.floating) or operand.dtype.itemsize < 2:
            raise TypeError(
                f"{name} is {operand.dtype.name}: depthwise_conv takes bfloat16, float16, float32 or float64"
            )
    channels = x.shape[-1] if x.ndim == 4 else None
    is_filter = w.ndim == 3 or (w.ndim == 4 and w.shape[2] == 1)
    if channels is None or not is_filter or w.shape[-1] != channels:
        raise TypeError(
            f"x has shape {list(x.shape)} and w {list(w.shape)}: expected images [N,H,W,C] and filters [R,S,C] or "
            "[R,S,1,C] of the same channels"
        )
    strides = np.asarray(window_strides)
    are_pairs = isinstance(padding, str) or [np.shape(pair) for pair in padding] == [(2,), (2,)]
    if strides.shape != (2,) or strides.dtype.kind not in "iu" or min(strides) < 1 or not are_pairs:
        raise TypeError(
            f"window_strides={window_strides!r} and padding={padding!r}: expected two strides from 1 on, "
            "and two pairs or a name"
        )
    if w.dtype != x.dtype:
        w = w.astype(np.promote_types(x.dtype, np.float32))  # jnp's refuses where promotion is strict
    if w.ndim == 3:
        w = lax.expand_dims(w, [2])
    convolution = Convolution.of(x, w, window_strides, padding, None, None, _NUMBERS, channels)
    assert convolution is not None
    return convolve(convolution, x, w)
