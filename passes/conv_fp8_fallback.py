"""conv-fp8-fallback: FP8 convolutions that the device cannot run in FP8 run in bf16, and say so."""

from __future__ import annotations

import dataclasses
import warnings

from xla_fp8.hlo import HloComputation, HloInstruction, HloModule, Shape
from xla_fp8.hlo.attributes import format_int_list
from xla_fp8.passes.base import Pass, Refusal, rewritable_computations
from xla_fp8.passes.convolution import dequantized_operands, result_shape
from xla_fp8.passes.dequantization import Dequantized, Scale
from xla_fp8.passes.values import ChannelVector, broadcast_scalar
from xla_fp8.target import Target


class Fp8FallbackWarning(UserWarning):
    """An FP8 convolution that runs in bf16, because the device has no FP8 kernel for it."""


class ConvFp8Fallback(Pass):
    """Makes bf16 convolutions of those FP8 ones for which the backend has no kernel (its verdict names a rule).

    Before::

        %x_wide = f32[8,28,28,64] convert(%x)
        %x_scaled = f32[8,28,28,64] multiply(%x_wide, %x_scales)
        %w_wide = f32[64,3,3,1] convert(%w)
        %conv = (f32[8,28,28,64], u8[0]) custom-call(%x_scaled, %w_wide), feature_group_count=64, ...,
            custom_call_target="__cudnn$convForward"
        %result = f32[8,28,28,64] get-tuple-element(%conv), index=0

    After::

        %x_bf16 = bf16[8,28,28,64] convert(%x)
        %w_bf16 = bf16[64,3,3,1] convert(%w)
        %tuple = (bf16[8,28,28,64], bf16[64,3,3,1]) tuple(%x_bf16, %w_bf16)
        %barrier = (bf16[8,28,28,64], bf16[64,3,3,1]) opt-barrier(%tuple)
        %conv = f32[8,28,28,64] convolution(%lhs, %rhs), feature_group_count=64, ...
        %result = f32[8,28,28,64] multiply(%conv, %x_scales)

    Every FP8 value is a bf16 value, and the convolution accumulates in f32, so nothing is lost: the scales go behind
    it, in f32, and the epilogue, amax and outputs stay as they were. The barrier keeps XLA's own matcher from making
    the FP8 graph again that the device cannot run. The report and an Fp8FallbackWarning say what the rule is.
    """

    name = "conv-fp8-fallback"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for computation in rewritable_computations(module):
            touched = False
            for call in computation.instructions:
                if call.parent is not computation or call.opcode not in ("convolution", "custom-call"):
                    continue
                reason = self.context.unrunnable.get(self.context.origin(call))
                if reason is None or not self.context.consume_fuel():
                    continue
                operands = dequantized_operands(call)
                assert not isinstance(operands, Refusal), "cudnn-fused-conv-rewriter asked the backend about it"
                self.tell(call, reason)
                self.rewrite(computation, call, operands)
                touched = True
            if touched:
                computation.remove_dead()
                computation.restore_order()
                changed = True
        self.context.fell_back |= changed
        return changed

    def tell(self, call: HloInstruction, reason: str) -> None:
        """Puts into the report, and warns, that `call` runs in bf16."""
        computation, name = self.context.origin(call)
        said = f"{reason}; it runs in bf16"
        for index, entry in enumerate(self.context.entries):
            if (entry.computation, entry.instruction) == (computation, name):
                self.context.entries[index] = dataclasses.replace(entry, reason=said)
        warnings.warn(f"{self.context.described(call, 'convolution')}: {said}", Fp8FallbackWarning, stacklevel=2)

    def rewrite(
        self, computation: HloComputation, call: HloInstruction, operands: tuple[Dequantized, Dequantized]
    ) -> None:
        wide = result_shape(call)
        inputs = []
        for operand in operands:
            source = operand.build_source()
            shape = source.shape.with_element_type("bf16")
            inputs.append(computation.create("convert", shape, [source], metadata_from=source))
        pair = Shape.tuple([operand.shape for operand in inputs])
        barrier = computation.create("opt-barrier", pair, [computation.create("tuple", pair, inputs)])
        elements = [
            computation.create("get-tuple-element", operand.shape, [barrier], attributes={"index": str(index)})
            for index, operand in enumerate(inputs)
        ]
        attributes = {}
        for name in ("window", "dim_labels", "feature_group_count", "frontend_attributes"):
            if value := call.attr(name):
                attributes[name] = value
        result = convolution = computation.create(
            "convolution",
            wide.with_element_type("f32"),
            elements,
            name=f"{call.name}.bf16",
            attributes=attributes,
            metadata_from=call,
        )
        channel = call.dim_labels.output_feature_dimension
        for scale in (*operands[0].scales, *operands[1].scales):
            result = _scaled(result, scale, channel)
        if wide.element_type != "f32":
            result = computation.create("convert", wide, [result], metadata_from=call)
        self.replace(computation, call, convolution, result)

    def replace(
        self, computation: HloComputation, call: HloInstruction, convolution: HloInstruction, result: HloInstruction
    ) -> None:
        """`result` in place of the value of `call`, whose name `convolution` takes."""
        origin, name = self.context.origin(call), call.name
        computation.transfer_control_dependencies(call, convolution)
        if call.opcode == "convolution":
            computation.replace(call, result)
        else:
            for element in call.users:
                computation.replace(element, result)
            computation.remove(call)
        computation.rename(convolution, name)
        self.context.moved(convolution, *origin)


def _scaled(value: HloInstruction, scale: Scale, channel: int) -> HloInstruction:
    """`value`, in f32, times one of the scales that stood before the convolution."""
    computation = value.parent
    assert computation is not None
    sizes = value.shape.dimensions
    if isinstance(scale.value, ChannelVector):
        vector = scale.value.build(sizes[channel])
        factor = computation.create(
            "broadcast",
            value.shape,
            [vector],
            attributes={"dimensions": format_int_list((channel,))},
            metadata_from=scale.instruction,
        )
    else:
        factor = broadcast_scalar(computation, scale.value.build(), sizes)
    opcode = "divide" if scale.inverse else "multiply"
    return computation.create(opcode, value.shape, [value, factor], metadata_from=scale.instruction)
