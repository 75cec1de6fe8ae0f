"""conv-restorer: convolution custom calls that no graph took become convolutions again."""

from __future__ import annotations

import dataclasses

from xla_fp8.hlo import HloInstruction, HloModule, Window, WindowDimension
from xla_fp8.hlo.attributes import format_int_list
from xla_fp8.passes.base import Pass, rewritable_computations
from xla_fp8.passes.convolution import (
    BACKWARD_FILTER,
    BACKWARD_INPUT,
    CONVOLUTION_TARGETS,
    result_shape,
    swap_filter_and_output,
    swap_input_and_output,
)
from xla_fp8.target import Target


class ConvRestorer(Pass):
    """Undoes conv-rewriter, so that only FP8 graphs leave the pipeline and XLA sees the rest as it was.

    Before::

        %conv = (f32[8,28,28,128], u8[0]) custom-call(%x, %w), ..., custom_call_target="__cudnn$convForward"
        %get-tuple-element = f32[8,28,28,128] get-tuple-element(%conv), index=0

    After::

        %conv = f32[8,28,28,128] convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f

    A call whose workspace is used, or whose result is used other than through get-tuple-element 0, stays.
    """

    name = "conv-restorer"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for computation in rewritable_computations(module):
            touched = False
            for call in computation.instructions:
                if call.opcode == "custom-call" and call.custom_call_target in CONVOLUTION_TARGETS and _is_ours(call):
                    self.restore(call)
                    touched = True
            if touched:
                computation.restore_order()
                changed = True
        return changed

    def restore(self, call: HloInstruction) -> None:
        computation = call.parent
        assert computation is not None
        lhs, rhs = call.operands
        window, labels = call.window, call.dim_labels
        if call.custom_call_target == BACKWARD_INPUT:
            window, labels = _input_gradient_window(call), swap_input_and_output(labels)
            spatial = labels.kernel_spatial_dimensions
            rhs = _reversed(rhs, spatial, call)
        elif call.custom_call_target == BACKWARD_FILTER:
            window, labels = _filter_gradient_window(call), swap_filter_and_output(labels)
        attributes = {"window": str(window)} if len(window) else {}
        attributes["dim_labels"] = str(labels)
        for name in ("feature_group_count", "operand_precision", "frontend_attributes"):
            if value := call.attr(name):
                attributes[name] = value
        result = next(iter(call.users), None)
        if result is not None and (sharding := result.sharding):
            attributes["sharding"] = sharding
        origin = self.context.origin(call)
        convolution = computation.create(
            "convolution",
            result_shape(call),
            [lhs, rhs],
            name=f"{call.name}.restored",
            before=call,
            attributes=attributes,
            metadata_from=call,
        )
        name = call.name
        computation.transfer_control_dependencies(call, convolution)
        for user in call.users:
            computation.replace(user, convolution)
        computation.remove(call)
        computation.rename(convolution, name)
        self.context.moved(convolution, *origin)


def _reversed(filter_: HloInstruction, spatial: tuple[int, ...], call: HloInstruction) -> HloInstruction:
    """The reversal that a BackwardInput call implies: the instruction that it came from where that is still there."""
    if all(filter_.shape.dimensions[d] == 1 for d in spatial):
        return filter_
    for user in filter_.users:
        if user.opcode == "reverse" and sorted(user.dimensions) == sorted(spatial):
            return user
    computation = call.parent
    assert computation is not None
    return computation.create(
        "reverse",
        filter_.shape,
        [filter_],
        before=call,
        attributes={"dimensions": format_int_list(spatial)},
        metadata_from=call,
    )


def _is_ours(call: HloInstruction) -> bool:
    return (
        len(call.operands) == 2
        and not call.is_root
        and call.shape.is_tuple
        and all(u.opcode == "get-tuple-element" and u.tuple_index == 0 for u in call.users)
        and all(not u.has_control_dependencies for u in call.users)
    )


def _input_gradient_window(call: HloInstruction) -> Window:
    """The forward window of an input gradient: its stride dilates the input."""
    labels = call.dim_labels
    dims = []
    for index, backward in enumerate(call.window):
        old = WindowDimension(
            backward.size, padding_low=backward.size - 1 - backward.padding_low, base_dilation=backward.stride
        )
        dims.append(
            _fit_padding(
                old,
                call.operand(0).shape.dimensions[labels.output_spatial_dimensions[index]],
                result_shape(call).dimensions[labels.input_spatial_dimensions[index]],
            )
        )
    return Window(tuple(dims))


def _filter_gradient_window(call: HloInstruction) -> Window:
    """The forward window of a filter gradient: the cotangent is the window, dilated by the stride."""
    labels = swap_filter_and_output(call.dim_labels)
    dims = []
    for index, backward in enumerate(call.window):
        old = WindowDimension(
            call.operand(1).shape.dimensions[labels.kernel_spatial_dimensions[index]],
            padding_low=backward.padding_low,
            window_dilation=backward.stride,
        )
        dims.append(
            _fit_padding(
                old,
                call.operand(0).shape.dimensions[labels.input_spatial_dimensions[index]],
                result_shape(call).dimensions[labels.output_spatial_dimensions[index]],
            )
        )
    return Window(tuple(dims))


def _fit_padding(old: WindowDimension, input_size: int, output_size: int) -> WindowDimension:
    """The high padding with which a stride-1 window has exactly `output_size` places."""
    base = (input_size - 1) * old.base_dilation + 1
    return dataclasses.replace(old, padding_high=output_size - 1 + old.dilated_size - base - old.padding_low)
