"""gemm-rewriter: scaled FP8 dots with their epilogue become XLA's own cuBLASLt custom calls."""

from __future__ import annotations

from collections.abc import Sequence

from xla_fp8.hlo import HloComputation, HloInstruction, Shape
from xla_fp8.hlo.attributes import quote
from xla_fp8.matmul import MATMUL_TARGET, MatmulCall
from xla_fp8.passes.base import Refusal, RewritePass, Walk, with_operands
from xla_fp8.passes.dequantization import Dequantized
from xla_fp8.passes.dot import dequantized_dot_operands, is_fp8_dot, unsupported_dot
from xla_fp8.passes.epilogue import Epilogue
from xla_fp8.passes.matmul_epilogue import Addend, Factor, MatmulCapture, Places, operand_factors
from xla_fp8.passes.matmul_form import DotDimensions, as_matrix, as_operand, from_matrix, pad
from xla_fp8.passes.values import ChannelVector, take_place
from xla_fp8.target import Target


class GemmRewriter(RewritePass):
    """Fuses what stands before and after an FP8 dot into one cuBLASLt call.

    Before::

        %x_wide = f32[64,256] convert(%x)
        %w_wide = f32[256,128] convert(%w)
        %dot = f32[64,128] dot(%x_wide, %w_wide), lhs_contracting_dims={1}, rhs_contracting_dims={0}
        %scaled = f32[64,128] multiply(%dot, %scales)
        %clamped = f32[64,128] clamp(%lows, %scaled, %highs)
        ROOT %y = f8e4m3fn[64,128] convert(%clamped)

    After::

        %wt = f8e4m3fn[128,256] transpose(%w), dimensions={1,0}
        %dot = (f8e4m3fn[64,128], s8[33554432]) custom-call(%x, %wt, %one, %one, %scale),
            custom_call_target="__cublas$lt$matmul$f8", backend_config={"gemm_backend_config":{...}}
        ROOT %y = f8e4m3fn[64,128] get-tuple-element(%dot), index=0

    XLA's own pass is gemm_rewriter.cc; this one sees through more spellings (docs/matmul.md). It is not in the default
    pipeline, because XLA's GPU compiler takes these calls only behind its layout assignment: modules from before it are
    for reading and for the reference. Numerically the call computes in f32 whatever the chain computed in.
    """

    name = "gemm-rewriter"
    op = "dot"

    def matches(self, instruction: HloInstruction) -> bool:
        return is_fp8_dot(instruction)

    def rewrite(self, walk: Walk, instruction: HloInstruction, target: Target) -> Refusal | None:
        """Puts the call in place of what it computes; returns why not where it cannot."""
        if refusal := self.unsupported(instruction, target):
            return refusal
        operands = dequantized_dot_operands(instruction, self.context)
        if isinstance(operands, Refusal):
            return operands
        types = [operand.source.shape.element_type for operand in operands]
        if types == ["f8e5m2", "f8e5m2"]:
            return self.context.refusal(
                "e5m2-operands",
                instruction,
                "multiplies f8e5m2 by f8e5m2, for which cuBLASLt has no kernel",
                "quantize one of them to float8_e4m3fn",
            )
        dimensions = DotDimensions.of(instruction)
        has_padded_rows = dimensions.padded[-2] != dimensions.matrix[-2]
        has_gelu = target.cuda >= (12, 4)
        capture = MatmulCapture(instruction, types, dimensions.column, has_padded_rows, walk.position, has_gelu)
        capture.collect()
        plan = capture.finish()
        places = capture.places(plan)
        assert isinstance(places, Places)  # `finish` takes no other
        if not self.context.consume_fuel():
            return self.context.refusal("fuel", instruction, "was left when the fuel ran out", "raise --fuel")
        self.replace(walk, instruction, operands, dimensions, plan, places, target)
        return None

    def unsupported(self, dot: HloInstruction, target: Target) -> Refusal | None:
        """Why a dot has no FP8 call, whatever its operands are; None where it may have one."""
        if reason := target.fp8_matmul_refusal():
            return Refusal("target", reason, "update CUDA, or compile for a newer device (--target)", dot)
        if refusal := unsupported_dot(dot, self.context):
            return refusal
        dimensions = DotDimensions.of(dot)
        if not all(group for operand in (dimensions.lhs, dimensions.rhs) for group in operand[1:]):
            return self.context.refusal(
                "matrix-vector",
                dot,
                "is no product of two matrices: an operand has no dimension of its own, or none is summed over",
                "leave it to XLA: a matrix times a vector is bound by memory",
            )
        return None

    def replace(
        self,
        walk: Walk,
        dot: HloInstruction,
        operands: Sequence[Dequantized],
        dimensions: DotDimensions,
        plan: Epilogue,
        places: Places,
        target: Target,
    ) -> None:
        computation = walk.computation
        sources = [
            as_operand(operand.build_source(), groups)
            for operand, groups in zip(operands, (dimensions.lhs, dimensions.rhs), strict=True)
        ]
        factors = [operand_factors(operand.scales) for operand in operands]
        # A scale behind the dot goes to an operand that has none.
        free = 0 if not factors[0] or factors[1] else 1
        factors[free] = (*factors[free], *places.operand_factors)
        result = Shape.array(plan.output.shape.element_type, dimensions.padded)
        values = [
            *sources,
            *([_matrix(places.matrix, dimensions)] if places.matrix else []),
            *(_product(computation, group) for group in factors),
            *([_bias(places.bias, dimensions)] if places.bias else []),
            *([_product(computation, places.result_factors)] if result.is_fp8 else []),
        ]
        last = len(result.dimensions) - 1
        call = MatmulCall(
            tuple(value.shape for value in values),
            (result, *(Shape("f32") for _ in plan.aux)),
            last,
            last,
            last - 1,
            places.matrix is not None,
            places.bias is not None,
            places.activation,
            bool(plan.aux),
            dot.operand_precision,
        )
        self.context.record(dot, self.op, is_fp8=True, graph=call, refusal=plan.stopped, saved_bytes=plan.saved_bytes)
        origin, name = self.context.origin(dot), dot.name
        fused = _create(computation, dot, call, values, target)
        computation.transfer_control_dependencies(dot, fused)
        replaced = [*with_operands((plan.output, *plan.aux)), *plan.merge_twins(computation)]
        element = computation.create("get-tuple-element", result, [fused], attributes={"index": "0"})
        take_place(computation, plan.output, from_matrix(element, dimensions))
        for number, aux in enumerate(plan.aux, 1):
            amax = computation.create(
                "get-tuple-element", Shape("f32"), [fused], attributes={"index": str(number)}, metadata_from=aux
            )
            if places.amax_factors:
                scale = _product(computation, places.amax_factors)
                size = computation.create("abs", scale.shape, [scale], metadata_from=aux)
                amax = computation.create("multiply", scale.shape, [amax, size], metadata_from=aux)
            if aux.shape.element_type != "f32":
                amax = computation.create("convert", aux.shape, [amax], metadata_from=aux)
            take_place(computation, aux, amax)
        walk.rewritten(fused, replaced)
        if name not in computation:
            computation.rename(fused, name)
        self.context.moved(fused, *origin)


def _create(
    computation: HloComputation,
    dot: HloInstruction,
    call: MatmulCall,
    operands: Sequence[HloInstruction],
    target: Target,
) -> HloInstruction:
    attributes = {"custom_call_target": quote(MATMUL_TARGET)}
    for name in ("frontend_attributes", "metadata"):
        if value := dot.attr(name):
            attributes[name] = value
    attributes["backend_config"] = call.backend_config
    workspace = Shape.array("s8", (workspace_size(target),))
    shape = Shape.tuple([*call.output_shapes, workspace])
    return computation.create("custom-call", shape, operands, name=f"{dot.name}.matmul", attributes=attributes)


def workspace_size(target: Target) -> int:
    """Bytes of the workspace that XLA gives to cuBLASLt (GemmWorkspaceRewriteVisitor in gemm_rewriter.cc)."""
    return 32 << 20 if target.compute_capability >= (9, 0) else 4 << 20


def _matrix(addend: Addend, dimensions: DotDimensions) -> HloInstruction:
    assert isinstance(addend.value, HloInstruction)
    return as_matrix(_converted(addend.value, addend.type), dimensions)


def _bias(addend: Addend, dimensions: DotDimensions) -> HloInstruction:
    assert isinstance(addend.value, ChannelVector)
    return pad(addend.value.build(dimensions.matrix[-1], addend.type), dimensions.padded[-1:])


def _converted(value: HloInstruction, type_: str) -> HloInstruction:
    if value.shape.element_type == type_:
        return value
    assert value.parent is not None
    return value.parent.create("convert", value.shape.with_element_type(type_), [value], metadata_from=value)


def _product(computation: HloComputation, factors: Sequence[Factor]) -> HloInstruction:
    """One f32 scalar that stands for all of `factors`; 1 where there are none."""
    product: HloInstruction | None = None
    for factor in factors:
        value = factor.value.build()
        if product is None and not factor.inverse:
            product = value
            continue
        product = product or computation.create("constant", Shape("f32"), payload="1")
        opcode = "divide" if factor.inverse else "multiply"
        product = computation.create(opcode, Shape("f32"), [product, value], metadata_from=value)
    return product or computation.create("constant", Shape("f32"), payload="1")
