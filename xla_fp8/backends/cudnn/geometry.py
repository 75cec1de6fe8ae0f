"""A convolution as cuDNN wants it said: dimensions in the order N, C, spatial; strides channels-last."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from xla_fp8.target import GraphCall


@dataclasses.dataclass(frozen=True)
class Geometry:
    """The dimensions of one convolution. Sizes are elements; every tuple of spatial things is in spatial order.

    cuDNN has no convolution with one spatial dimension for FP8, so a 1-D convolution gets a second one of size 1 in
    front: the bytes are the same.

    Attributes:
        input: (N, C, spatial...).
        filter: (K, C / groups, spatial...). cuDNN reads the groups off the two C.
        output: (N, K, spatial...).
        stride, dilation, padding_low, padding_high: one number for each spatial dimension.
    """

    input: tuple[int, ...]
    filter: tuple[int, ...]
    output: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding_low: tuple[int, ...]
    padding_high: tuple[int, ...]

    @staticmethod
    def of(call: GraphCall) -> Geometry:
        """The geometry of a call, whatever its dim labels."""
        labels, (lhs, rhs), result = call.dim_labels, call.operand_shapes[:2], call.output_shapes[0]
        lift = (1,) if labels.spatial_rank == 1 else ()
        none = (0,) if labels.spatial_rank == 1 else ()

        def dims(shape: Sequence[int], first: int, second: int, spatial: Sequence[int]) -> tuple[int, ...]:
            return (shape[first], shape[second], *lift, *(shape[d] for d in spatial))

        return Geometry(
            dims(
                lhs.dimensions,
                labels.input_batch_dimension,
                labels.input_feature_dimension,
                labels.input_spatial_dimensions,
            ),
            dims(
                rhs.dimensions,
                labels.kernel_output_feature_dimension,
                labels.kernel_input_feature_dimension,
                labels.kernel_spatial_dimensions,
            ),
            dims(
                result.dimensions,
                labels.output_batch_dimension,
                labels.output_feature_dimension,
                labels.output_spatial_dimensions,
            ),
            (*lift, *(d.stride for d in call.window)),
            (*lift, *(d.window_dilation for d in call.window)),
            (*none, *(d.padding_low for d in call.window)),
            (*none, *(d.padding_high for d in call.window)),
        )

    @property
    def rank(self) -> int:
        """Dimensions of each tensor."""
        return len(self.input)

    @property
    def groups(self) -> int:
        return self.input[1] // self.filter[1]

    @property
    def flops(self) -> int:
        """Floating-point operations of the convolution, a multiply and an add counted as two."""
        return 2 * math.prod(self.output) * math.prod(self.filter[1:])


def channels_last(dims: Sequence[int]) -> list[int]:
    """Strides of a dense tensor of dimensions (N, C, spatial...) whose C is the fastest: NHWC, OHWI."""
    strides = [0] * len(dims)
    step = 1
    for dimension in (1, *reversed(range(2, len(dims))), 0):
        strides[dimension] = step
        step *= dims[dimension]
    return strides


def major_to_minor(labels: str) -> tuple[int, ...]:
    """The order of memory, slowest dimension first, that makes a tensor with these dim labels channels-last.

    `labels` are those of one tensor: "bf01" gives (0, 2, 3, 1), "01io" of a filter (3, 0, 1, 2).
    """
    outer, channel = ("o", "i") if "o" in labels else ("b", "f")
    spatial = sorted(label for label in labels if label not in (outer, channel))
    return tuple(labels.index(label) for label in (outer, *spatial, channel))
