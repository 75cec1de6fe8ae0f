"""conv-canonicalizer: FP8 convolutions in NHWC and OHWI, with the transposes moved away from the epilogue."""

from __future__ import annotations

import dataclasses

from xla_fp8.hlo import HloComputation, HloInstruction, HloModule, Window
from xla_fp8.hlo.attributes import format_int_list
from xla_fp8.passes.base import Context, Pass, Refusal, rewritable_computations
from xla_fp8.passes.convolution import (
    CANONICAL_LABELS,
    dequantized_operands,
    match_backward_filter,
    takes_dilated_input,
    unsupported_form,
)
from xla_fp8.passes.dequantization import Dequantized, Scale
from xla_fp8.passes.sinking import sink_moves
from xla_fp8.passes.values import (
    Scalar,
    broadcast_scalar,
    inverse_permutation,
    transpose,
)
from xla_fp8.target import Target


class ConvCanonicalizer(Pass):
    """Gives every FP8 convolution the layout that runs: input and output NHWC, filter OHWI (NWC, NDHWC for 1-D, 3-D).

    Before::

        %x_wide = f32[8,64,28,28] convert(%x)
        %w_wide = f32[128,64,3,3] convert(%w)
        %conv = f32[8,128,28,28] convolution(%x_wide, %w_wide), window={...}, dim_labels=bf01_oi01->bf01
        %y = f32[8,128,28,28] maximum(%conv, %zeros)

    After::

        %x_nhwc = f8e4m3fn[8,28,28,64] transpose(%x), dimensions={0,2,3,1}
        %w_ohwi = f8e4m3fn[128,3,3,64] transpose(%w), dimensions={0,2,3,1}
        %conv = f32[8,28,28,128] convolution(%x_wide, %w_wide), window={...}, dim_labels=b01f_o01i->b01f
        %max = f32[8,28,28,128] maximum(%conv, %zeros)
        %y = f32[8,128,28,28] transpose(%max), dimensions={0,3,1,2}

    Operands are rebuilt as convert and scales of a transposed FP8 tensor: a quarter of the bytes to move, and
    transposes that cancel between layers vanish. A reversed filter (the input gradient of a stride-1 convolution, or a
    reversed window) becomes a reversal of the FP8 tensor, so the convolution is a forward one. A transpose or reshape
    of the result sinks through the epilogue to the FP8 output. Convolutions that are not FP8, filter gradients, and
    others that no graph could take stay as they are.
    """

    name = "conv-canonicalizer"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for computation in rewritable_computations(module):
            touched = False
            for convolution in computation.instructions:
                if convolution.parent is not computation or convolution.opcode != "convolution":
                    continue
                operands = dequantized_operands(convolution)
                may_dilate = takes_dilated_input(target, self.context.extended)
                if isinstance(operands, Refusal) or unsupported_form(convolution, may_dilate):
                    continue
                if match_backward_filter(convolution):
                    continue
                if self.context.fuel == 0:
                    break
                canonical = is_canonical(convolution, operands)
                if not canonical:
                    convolution = self.canonicalize(computation, convolution, operands)
                if sink_moves(convolution) or not canonical:
                    self.context.consume_fuel()
                    touched = True
            if touched:
                computation.remove_dead()
                computation.restore_order()
                changed = True
        return changed

    def canonicalize(
        self, computation: HloComputation, convolution: HloInstruction, operands: tuple[Dequantized, Dequantized]
    ) -> HloInstruction:
        """Puts the convolution in canonical form, its result transposed back, in place of this one; returns it."""
        labels = convolution.dim_labels
        canonical = CANONICAL_LABELS[labels.spatial_rank]
        wide = convolution.operand(0).shape.element_type
        permutations = [
            tuple(have.index(label) for label in want)
            for have, want in ((labels.lhs, canonical.lhs), (labels.rhs, canonical.rhs))
        ]
        window = convolution.window
        reversed_dims = tuple(i + 1 for i, d in enumerate(window) if d.reversal)
        rebuilt = []
        for index, (operand, permutation) in enumerate(zip(operands, permutations, strict=True)):
            source = transpose(operand.build_source(), permutation)
            if index == 1 and reversed_dims:
                source = computation.create(
                    "reverse",
                    source.shape,
                    [source],
                    attributes={"dimensions": format_int_list(reversed_dims)},
                    metadata_from=convolution,
                )
            rebuilt.append(rebuild_dequantized(source, operand.scales, wide, self.context))
        attributes = dict(convolution.attributes)
        if reversed_dims:
            plain = tuple(dataclasses.replace(d, reversal=False) for d in window)
            attributes["window"] = str(Window(plain))
        attributes["dim_labels"] = str(canonical)
        to_canonical = tuple(labels.output.index(label) for label in canonical.output)
        sizes = [convolution.shape.dimensions[d] for d in to_canonical]
        new = computation.create(
            "convolution",
            convolution.shape.with_dimensions(sizes),
            rebuilt,
            name=f"{convolution.name}.canonical",
            attributes=attributes,
        )
        new.attributes.pop("control-predecessors", None)
        origin = self.context.origin(convolution)
        result = transpose(new, inverse_permutation(to_canonical))
        computation.transfer_control_dependencies(convolution, new)
        name = convolution.name
        computation.replace(convolution, result)
        computation.rename(new, name)
        self.context.moved(new, *origin)
        return new


def is_canonical(convolution: HloInstruction, operands: tuple[Dequantized, Dequantized]) -> bool:
    """Whether nothing needs to change: labels, no reversed window, and no moves on wide tensors."""
    labels = convolution.dim_labels
    return (
        labels == CANONICAL_LABELS[labels.spatial_rank]
        and not any(d.reversal for d in convolution.window)
        and not any(operand.moves for operand in operands)
    )


def rebuild_dequantized(
    source: HloInstruction, scales: tuple[Scale, ...], wide: str, context: Context
) -> HloInstruction:
    """convert(source) with the scales applied again, in the wide type."""
    computation = source.parent
    assert computation is not None
    value = computation.create("convert", source.shape.with_element_type(wide), [source], metadata_from=source)
    for scale in scales:
        if isinstance(scale.value, Scalar):
            factor = broadcast_scalar(computation, scale.value.build(wide), value.shape.dimensions)
        else:
            # Output features come first in an OHWI filter.
            vector = scale.value.build(value.shape.dimensions[0], wide)
            factor = computation.create(
                "broadcast",
                value.shape,
                [vector],
                attributes={"dimensions": "{0}"},
                metadata_from=scale.instruction,
            )
        opcode = "divide" if scale.inverse else "multiply"
        value = computation.create(opcode, value.shape, [value, factor], metadata_from=scale.instruction)
        context.moved(value, computation.name, scale.instruction.name)
    return value
