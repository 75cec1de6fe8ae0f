"""conv-rewriter: convolutions become cuDNN custom calls, classified as XLA does."""

from __future__ import annotations

from xla_fp8.hlo import HloComputation, HloInstruction, HloModule, Shape
from xla_fp8.passes.base import Pass, Refusal, rewritable_computations
from xla_fp8.passes.convolution import (
    FORWARD,
    WORKSPACE,
    BackwardForm,
    backend_config,
    dequantized_operands,
    match_backward_filter,
    match_backward_input,
    takes_dilated_input,
)
from xla_fp8.passes.dequantization import fed_by_fp8
from xla_fp8.target import Target


class ConvRewriter(Pass):
    """Rewrites each convolution to `__cudnn$convForward`, `__cudnn$convBackwardInput` or `__cudnn$convBackwardFilter`.

    Before::

        %conv = f32[8,28,28,128] convolution(%x, %w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f

    After::

        %conv = (f32[8,28,28,128], u8[0]) custom-call(%x, %w), window={size=3x3 pad=1_1x1_1},
            dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForward", backend_config={...}
        %get-tuple-element = f32[8,28,28,128] get-tuple-element(%conv), index=0

    The second result is cuDNN's workspace. An input gradient is a convolution with a reversed filter; a filter gradient
    has batch and features swapped and a window as large as the image (XLA's conv_rewriter.cc, where the window alone
    decides). Batch groups, reversed windows and more than three spatial dimensions stay convolutions.
    """

    name = "conv-rewriter"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for computation in rewritable_computations(module):
            for convolution in computation.instructions:
                if convolution.opcode != "convolution" or not _is_plain(convolution):
                    continue
                if self.context.only_fp8 and not any(fed_by_fp8(operand) for operand in convolution.operands):
                    continue
                if not self.context.consume_fuel():
                    return changed
                # Its filter is reversed already where the input is FP8: a backend may take it as it is.
                as_it_is = takes_dilated_input(target, self.context.extended) and not isinstance(
                    dequantized_operands(convolution), Refusal
                )
                form = (None if as_it_is else match_backward_input(convolution)) or match_backward_filter(convolution)
                self.rewrite(computation, convolution, form)
                changed = True
        return changed

    def rewrite(self, computation: HloComputation, convolution: HloInstruction, form: BackwardForm | None) -> None:
        attributes = {}
        for name in ("window", "dim_labels", "feature_group_count"):
            if value := convolution.attr(name):
                attributes[name] = value
        operands = list(convolution.operands)
        target_name = FORWARD
        if form is not None:
            attributes["window"], attributes["dim_labels"] = str(form.window), str(form.dim_labels)
            operands, target_name = [form.lhs, form.rhs], form.target
        attributes["custom_call_target"] = f'"{target_name}"'
        for name in ("operand_precision", "frontend_attributes", "metadata"):
            if value := convolution.attr(name):
                attributes[name] = value
        attributes["backend_config"] = backend_config()
        name, shape = convolution.name, convolution.shape
        origin = self.context.origin(convolution)
        call = computation.create(
            "custom-call",
            Shape.tuple([shape, WORKSPACE]),
            operands,
            name=f"{name}.call",
            before=convolution,
            attributes=attributes,
        )
        result = computation.create(
            "get-tuple-element",
            shape,
            [call],
            name=f"{name}.result",
            before=convolution,
            attributes={"index": "0", **({"sharding": s} if (s := convolution.sharding) else {})},
            metadata_from=convolution,
        )
        computation.transfer_control_dependencies(convolution, call)
        computation.replace(convolution, result)
        computation.rename(call, name)
        self.context.moved(call, *origin)


def _is_plain(convolution: HloInstruction) -> bool:
    """Whether it has a form among cuDNN's three (CanImplementAsGpuForwardConv)."""
    shapes = [convolution.shape, *(o.shape for o in convolution.operands)]
    return (
        convolution.has_shape
        and not any(s.is_dynamic or 0 in s.dimensions for s in shapes)
        and 1 <= convolution.dim_labels.spatial_rank <= 3
        and convolution.batch_group_count == 1
        and not any(d.reversal for d in convolution.window)
    )
