"""cudnn-fused-conv-rewriter: FP8 convolutions with their scales and epilogue become graph custom calls."""

from __future__ import annotations

from xla_fp8.hlo import HloInstruction, Shape
from xla_fp8.passes.base import Refusal, RewritePass, Walk, with_operands
from xla_fp8.passes.convolution import (
    BACKWARD_INPUT,
    CONVOLUTION_TARGETS,
    FORWARD,
    create_graph_call,
    dequantized_operands,
    result_shape,
    takes_dilated_input,
    unsupported_form,
)
from xla_fp8.passes.dequantization import Dequantized, fed_by_fp8
from xla_fp8.passes.epilogue import Epilogue, EpilogueCapture, build_side
from xla_fp8.passes.values import ChannelVector, take_place
from xla_fp8.target import GraphCall, Target, advice_of, rule_of


class CudnnFusedConvRewriter(RewritePass):
    """Fuses what stands before and after an FP8 convolution into one call that carries a serialized graph.

    Before::

        %x_wide = f32[8,28,28,64] convert(%x)
        %w_wide = f32[128,3,3,64] convert(%w)
        %conv = (f32[8,28,28,128], u8[0]) custom-call(%x_wide, %w_wide), ..., custom_call_target="__cudnn$convForward"
        %result = f32[8,28,28,128] get-tuple-element(%conv), index=0
        %scaled = f32[8,28,28,128] multiply(%result, %scales)
        %clamped = f32[8,28,28,128] clamp(%lows, %scaled, %highs)
        ROOT %y = f8e4m3fn[8,28,28,128] convert(%clamped)

    After::

        %conv = (f8e4m3fn[8,28,28,128], u8[0]) custom-call(%x, %w, %scale), window=..., dim_labels=...,
            custom_call_target="__cudnn$convForwardGraph", backend_config={"cudnn_conv_backend_config":{...,
            "serialized_graph":"1:[f32]conv();2:[f8e4m3fn]scale(1);"}}
        ROOT %y = f8e4m3fn[8,28,28,128] get-tuple-element(%conv), index=0

    Numerically the fused convolution computes in f32 whatever the chain computed in, with the scales of input and
    filter applied behind the convolution; docs/numbers.md says what that changes. Every FP8 convolution, rewritten or
    not, gets an entry in the report. XLA's own pass of this name is cudnn_fused_conv_rewriter.cc.
    """

    name = "cudnn-fused-conv-rewriter"
    op = "convolution"

    def matches(self, instruction: HloInstruction) -> bool:
        if instruction.opcode == "convolution":
            return True
        return instruction.opcode == "custom-call" and instruction.custom_call_target in CONVOLUTION_TARGETS

    def rewrite(self, walk: Walk, instruction: HloInstruction, target: Target) -> Refusal | None:
        operands = self.check(instruction, target)
        if isinstance(operands, Refusal):
            return operands
        return self.replace(walk, instruction, operands, self.plan(walk, instruction, operands), target)

    def refuse(self, instruction: HloInstruction, refusal: Refusal) -> None:
        is_fp8 = any(fed_by_fp8(operand) for operand in instruction.operands)
        self.context.record(instruction, self.op, is_fp8=is_fp8, refusal=refusal)

    def check(self, call: HloInstruction, target: Target) -> tuple[Dequantized, Dequantized] | Refusal:
        """The FP8 operands of a convolution that the target can run as a graph, or why it cannot."""
        operands = dequantized_operands(call)
        if isinstance(operands, Refusal):
            return operands
        if call.opcode == "custom-call" and call.custom_call_target != FORWARD:
            kind = "input" if call.custom_call_target == BACKWARD_INPUT else "filter"
            return Refusal(
                f"{kind}-gradient",
                f"{self.context.described(call, 'convolution')} is the {kind} gradient of a convolution; cuDNN's FP8 "
                "graphs have only forward convolutions, which input gradients of stride 1 are too",
                "keep the cotangent of this convolution in high precision",
                call,
            )
        if refusal := unsupported_form(call, takes_dilated_input(target, self.context.extended)):
            return refusal
        if call.opcode == "convolution":
            return Refusal(
                "not-a-custom-call",
                f"{self.context.described(call, 'convolution')} is still a plain convolution: its window is "
                "reversed, or conv-rewriter has not run",
                "run conv-canonicalizer and conv-rewriter first",
                call,
            )
        if reason := target.fp8_convolution_refusal():
            advice = "update the library, or compile for a newer device (--target, or target= in Python)"
            return Refusal("target", reason, advice, call)
        if not self.context.extended:
            for operand in operands:
                for scale in operand.scales:
                    if isinstance(scale.value, ChannelVector):
                        return Refusal(
                            "needs-extended-dialect",
                            f"{self.context.described(scale.instruction)} scales each output channel of the filter, "
                            "which the xla dialect of the graph string cannot say",
                            "use --dialect=extended (xla_fp8.jit does)",
                            scale.instruction,
                        )
        result = next(iter(call.users), None)
        if len(call.users) != 1 or result is None or result.opcode != "get-tuple-element" or result.tuple_index != 0:
            return Refusal(
                "workspace-used",
                f"{self.context.described(call, 'convolution')} is used other than through its result 0",
                "use only result 0",
                call,
            )
        return operands

    def plan(self, walk: Walk, call: HloInstruction, operands: tuple[Dequantized, Dequantized]) -> Epilogue:
        """The graph of a convolution: its scales and as much of its epilogue as fits."""
        capture = EpilogueCapture(
            call.users[0],
            (*operands[0].scales, *operands[1].scales),
            call.dim_labels.output_feature_dimension,
            walk.position,
            self.context.extended,
        )
        capture.collect()
        return capture.finish()

    def replace(
        self,
        walk: Walk,
        call: HloInstruction,
        operands: tuple[Dequantized, Dequantized],
        plan: Epilogue,
        target: Target,
    ) -> Refusal | None:
        """Puts the graph custom call in place of what it computes; returns why not where the backend says no."""
        shape = result_shape(call)
        labels = call.dim_labels
        output_shapes = [
            shape.with_element_type(plan.output.shape.element_type),
            *(aux.shape for aux in plan.aux),
        ]
        if target.supports is not None:
            shapes = self._operand_shapes(operands, plan, shape, labels.output_feature_dimension)
            groups, precision = call.feature_group_count, call.operand_precision
            verdict = target.supports(
                GraphCall(plan.graph, shapes, tuple(output_shapes), call.window, labels, groups, precision)
            )
            if not verdict.ok:
                # A backend that names a rule could not run it; one that does not leaves the chain to XLA.
                if rule_of(verdict):
                    self.context.unrunnable[self.context.origin(call)] = verdict.reason
                advice = advice_of(verdict) or "see what the backends run: docs/backends.md"
                return Refusal("backend", verdict.reason, advice, call)
        if not self.context.consume_fuel():
            return Refusal(
                "fuel",
                f"{self.context.described(call, 'convolution')} was left when the fuel ran out",
                "raise --fuel",
                call,
            )
        computation = walk.computation
        inputs = [operand.build_source() for operand in operands]
        sides = [
            build_side(side, computation, shape.dimensions, labels.output_feature_dimension, self.context.extended)
            for side in plan.sides
        ]
        form = {k: v for k in ("window", "dim_labels", "feature_group_count") if (v := call.attr(k))}
        fused = create_graph_call(call, form, plan.graph, [*inputs, *sides], output_shapes)
        self.context.record(
            call, self.op, is_fp8=True, graph=plan.graph, refusal=plan.stopped, saved_bytes=plan.saved_bytes
        )
        origin, name = self.context.origin(call), call.name
        computation.transfer_control_dependencies(call, fused)
        replaced = [*with_operands((plan.output, *plan.aux)), *plan.merge_twins(computation)]
        for index, old in enumerate((plan.output, *plan.aux)):
            element = computation.create(
                "get-tuple-element", old.shape, [fused], name=f"{old.name}.fused", attributes={"index": str(index)}
            )
            take_place(computation, old, element)
        walk.rewritten(fused, replaced)
        if name not in computation:
            computation.rename(fused, name)
        self.context.moved(fused, *origin)
        return None

    @staticmethod
    def _operand_shapes(
        operands: tuple[Dequantized, Dequantized], plan: Epilogue, shape: Shape, channel: int
    ) -> tuple[Shape, ...]:
        """Shapes of the custom call's operands, before any of them is made."""
        moved = [
            (o.moves[0].shape.with_element_type(o.source.shape.element_type) if o.moves else o.source.shape)
            for o in operands
        ]
        return (*moved, *plan.side_shapes(shape, channel))
