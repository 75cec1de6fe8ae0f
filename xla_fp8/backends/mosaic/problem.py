"""The convolution that the kernel computes: two spatial dimensions, channels last, one group; what fits, and why not.

`problem_of` brings the calls that other shapes come in (1-D, 3-D that is 2-D in disguise, 1x1) to this one form. It
moves no data: each is a reshape of tensors in memory order.
"""

from __future__ import annotations

import dataclasses
import math

from xla_fp8.backends.mosaic.phases import Phases, phases_of
from xla_fp8.backends.protocol import No
from xla_fp8.target import GraphCall

CHANNEL_MULTIPLE = 16
"""The copy engine (TMA) wants the strides of a tensor in multiples of 16 bytes: 16 FP8 channels."""

MAX_COPY_EXTENT = 256
"""The most elements a TMA box has along one dimension."""

MOST_PIXELS = 2**31 - 2**16
"""Along one dimension: a place in a tensor is an i32, and tiles, padding and windows reach beyond its end."""

MAX_PHASES = 64
"""The kernel finds a phase's numbers by one select for each phase."""


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
        base_dilation: of the input: 2 means that a zero stands between any two of its rows or columns, as in the input
            gradient of a strided convolution. The zeros are not in memory, and the kernel multiplies none of them.
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
    base_dilation: tuple[int, int] = (1, 1)

    @property
    def strided(self) -> bool:
        return self.stride != (1, 1)

    @property
    def phases(self) -> tuple[Phases, Phases]:
        """Of rows and columns: the convolutions over the input itself that this one consists of."""
        outputs = self.out_height, self.out_width
        fields = outputs, self.taps, self.stride, self.dilation, self.padding, self.base_dilation
        rows, columns = (phases_of(*along) for along in zip(*fields, strict=True))
        return rows, columns

    @property
    def largest_phase(self) -> Problem:
        """The phase with the most taps, as a problem of its own: what a choice of tile sizes has to know.

        Its padding is that of no phase; a convolution whose input is not dilated is returned as it is.
        """
        if self.base_dilation == (1, 1):
            return self
        rows, columns = self.phases
        return dataclasses.replace(
            self,
            out_height=rows.size,
            out_width=columns.size,
            taps=(max(1, rows.taps), max(1, columns.taps)),
            stride=(rows.stride, columns.stride),
            dilation=(rows.dilation, columns.dilation),
            padding=(0, 0),
            base_dilation=(1, 1),
        )

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
        """Floating-point operations, a multiply and an add counted as two; none with the zeros of a dilated input."""
        products = [sum(phase.size * phase.taps for phase in along.phases) for along in self.phases]
        return 2 * self.batch * self.features * self.channels * math.prod(products)

    def flattened(self) -> Problem:
        """A 1x1 convolution as the matrix product that it is: one row of N * H * W pixels, and no tile is cut short.

        Any other convolution as it is, and one of more pixels than a row can have.
        """
        if self.taps != (1, 1) or self.strided or self.padding != (0, 0) or self.base_dilation != (1, 1):
            return self
        if (self.out_height, self.out_width) != (self.height, self.width) or self.pixels > MOST_PIXELS:
            return self
        return dataclasses.replace(
            self, batch=1, height=1, width=self.pixels, out_height=1, out_width=self.pixels, reversal=(False, False)
        )


def problem_of(call: GraphCall) -> Problem | No:
    """The problem of a call, or why there is none."""
    labels, window = call.dim_labels, call.window
    lhs, rhs, out = (*(shape.dimensions for shape in call.operand_shapes[:2]), call.output_shapes[0].dimensions)
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
        trivial = (first.size, first.stride, first.base_dilation, first.padding_low, first.padding_high)
        if trivial != (1, 1, 1, 0, 0):
            return No(
                f"the kernel has two spatial dimensions, and this convolution has {len(window)}, of which the first "
                "has a window larger than 1, a stride, a padding or a dilated input"
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
    phases = math.prod(d.base_dilation // math.gcd(d.base_dilation, d.stride) for d in dims)
    if phases > MAX_PHASES:
        dilation = "x".join(str(d.base_dilation) for d in dims)
        return No(
            f"the convolution dilates its input by {dilation}, which makes {phases} phases; the kernel takes up to "
            f"{MAX_PHASES}"
        )
    if (longest := max(batch, *in_sizes, *out_sizes)) > MOST_PIXELS:
        return No(
            f"the kernel counts places in 32 bits, and a dimension of this convolution has {longest}; up to "
            f"{MOST_PIXELS} fit"
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
        base_dilation=pair([d.base_dilation for d in dims], 1),
    ).flattened()
