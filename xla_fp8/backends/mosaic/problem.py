"""The convolution that the kernel computes: two spatial dimensions, channels last, one group; what fits, and why not.

`problem_of` brings the calls that other shapes come in (1-D, 3-D that is 2-D in disguise, 1x1) to this one form. It
moves no data: each is a reshape of tensors in memory order.
"""

from __future__ import annotations

import dataclasses
import math

from xla_fp8.backends.protocol import No
from xla_fp8.target import GraphCall

CHANNEL_MULTIPLE = 16
"""The copy engine (TMA) wants the strides of a tensor in multiples of 16 bytes: 16 FP8 channels."""

MAX_COPY_EXTENT = 256
"""The most elements a TMA box has along one dimension."""


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One 2-D convolution. Sizes count elements; pairs are (height, width).

    Attributes:
        batch, height, width, channels: of the input, [N, H, W, C].
        features: of the output, [N, OH, OW, K]; the filter is [K, R, S, C].
        out_height, out_width: OH and OW.
        taps: R and S.
        stride, dilation: of the window.
        padding: before the first row and column; negative skips rows. OH, OW say what lies behind the last.
        reversal: whether the window is mirrored, as in an input gradient.
    """

    batch: int
    height: int
    width: int
    channels: int
    features: int
    out_height: int
    out_width: int
    taps: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    dilation: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    reversal: tuple[bool, bool] = (False, False)

    @property
    def strided(self) -> bool:
        return self.stride != (1, 1)

    @property
    def input_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.height, self.width, self.channels

    @property
    def filter_shape(self) -> tuple[int, int, int, int]:
        return self.features, *self.taps, self.channels

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.out_height, self.out_width, self.features

    @property
    def pixels(self) -> int:
        """Output pixels: the M of the matrix product."""
        return self.batch * self.out_height * self.out_width

    @property
    def reduction(self) -> int:
        """How many products each output sums: the K of the matrix product."""
        return math.prod(self.taps) * self.channels

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply and an add counted as two."""
        return 2 * self.pixels * self.features * self.reduction

    def flattened(self) -> Problem:
        """A 1x1 convolution as the matrix product that it is: one row of N * H * W pixels, and no tile is cut short.

        Any other convolution as it is.
        """
        if self.taps != (1, 1) or self.strided or self.padding != (0, 0):
            return self
        if (self.out_height, self.out_width) != (self.height, self.width):
            return self
        return dataclasses.replace(
            self, batch=1, height=1, width=self.pixels, out_height=1, out_width=self.pixels, reversal=(False, False)
        )


def problem_of(call: GraphCall) -> Problem | No:
    """The problem of a call, or why there is none."""
    labels, window = call.dim_labels, call.window
    lhs, rhs, out = (*(shape.dimensions for shape in call.operand_shapes[:2]), call.output_shapes[0].dimensions)
    if any(d.base_dilation != 1 for d in window):
        return No(
            "the kernel reads the input as it is in memory, and this convolution dilates it (an input gradient of a "
            "strided convolution)"
        )
    if call.feature_group_count != 1:
        return No(f"the kernel has no grouped convolutions, and this one has {call.feature_group_count} groups")
    if any(size == 0 for size in (*lhs, *rhs, *out)):
        return No("a tensor without elements needs no kernel")
    batch = lhs[labels.input_batch_dimension]
    in_sizes = [lhs[d] for d in labels.input_spatial_dimensions]
    out_sizes = [out[d] for d in labels.output_spatial_dimensions]
    dims = list(window)
    # Leading spatial dimensions that the window does not mix are more batch.
    while len(dims) > 2:
        first = dims[0]
        if (first.size, first.stride, first.padding_low, first.padding_high) != (1, 1, 0, 0):
            return No(
                f"the kernel has two spatial dimensions, and this convolution has {len(window)}, of which the first "
                "has a window larger than 1, a stride or a padding"
            )
        batch *= in_sizes[0]
        dims, in_sizes, out_sizes = dims[1:], in_sizes[1:], out_sizes[1:]
    missing = 2 - len(dims)
    in_sizes, out_sizes = [1] * missing + in_sizes, [1] * missing + out_sizes

    def pair(values: list[int], default: int) -> tuple[int, int]:
        first, second = [default] * missing + values
        return first, second

    channels, features = lhs[labels.input_feature_dimension], rhs[labels.kernel_output_feature_dimension]
    for name, size in (("input", channels), ("output", features)):
        if size % CHANNEL_MULTIPLE:
            return No(
                f"the copy engine moves rows of multiples of {CHANNEL_MULTIPLE} bytes, and this convolution has {size} "
                f"{name} channels"
            )
    mirrored = [d.reversal and d.size > 1 for d in dims]
    return Problem(
        batch=batch,
        height=in_sizes[0],
        width=in_sizes[1],
        channels=channels,
        features=features,
        out_height=out_sizes[0],
        out_width=out_sizes[1],
        taps=pair([d.size for d in dims], 1),
        stride=pair([d.stride for d in dims], 1),
        dilation=pair([d.window_dilation for d in dims], 1),
        padding=pair([d.padding_low for d in dims], 0),
        reversal=(bool(([False] * missing + mirrored)[0]), bool(([False] * missing + mirrored)[1])),
    ).flattened()
