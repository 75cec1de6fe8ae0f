"""fused-dot-rewriter: scaled FP8 dots with their epilogue become graph calls, as the 1x1 convolutions that they are."""

from __future__ import annotations

import dataclasses

from xla_fp8.hlo import ConvolutionDimensionNumbers, HloComputation, HloInstruction, HloModule, Shape, Window
from xla_fp8.passes.base import Refusal, RewritePass, Walk, with_operands
from xla_fp8.passes.convolution import create_graph_call
from xla_fp8.passes.dequantization import Dequantized
from xla_fp8.passes.dot import dequantized_dot_operands, is_fp8_dot, unsupported_dot
from xla_fp8.passes.epilogue import Epilogue, EpilogueCapture, Side, build_side
from xla_fp8.passes.matmul_form import MULTIPLE, DotDimensions, reshape, row_major
from xla_fp8.passes.sinking import sink_moves
from xla_fp8.passes.values import MOVES, take_place, transpose
from xla_fp8.target import GraphCall, Target, advice_of

DOT_LABELS = ConvolutionDimensionNumbers("bf", "oi", "bf")
"""A convolution without spatial dimensions, [M, K] times [N, K]: HLO has it. `GraphCall.is_dot` knows it by this."""

FEWEST_ROWS = 64
"""What one instruction of Hopper's tensor core multiplies. A product of fewer rows is bound by reading the weights."""

_HOPPER = (9, 0)


class FusedDotRewriter(RewritePass):
    """Fuses what stands before and after an FP8 dot into one call that carries a graph, where a backend runs it.

    Before::

        %x_wide = f32[4,64,256] convert(%x)
        %w_wide = f32[256,128] convert(%w)
        %dot = f32[4,64,128] dot(%x_wide, %w_wide), lhs_contracting_dims={2}, rhs_contracting_dims={0}
        %scaled = f32[4,64,128] multiply(%dot, %scales)
        %clamped = f32[4,64,128] clamp(%lows, %scaled, %highs)
        ROOT %y = f8e4m3fn[4,64,128] convert(%clamped)

    After::

        %rows = f8e4m3fn[256,256] reshape(%x)
        %wt = f8e4m3fn[128,256] transpose(%w), dimensions={1,0}
        %dot = (f8e4m3fn[256,128], u8[0]) custom-call(%rows, %wt, %scale), dim_labels=bf_oi->bf,
            custom_call_target="__cudnn$convForwardGraph", backend_config={"cudnn_conv_backend_config":{...,
            "serialized_graph":"1:[f32]conv();2:[f8e4m3fn]scale(1);"}}
        %y_rows = f8e4m3fn[256,128] get-tuple-element(%dot), index=0
        ROOT %y = f8e4m3fn[4,64,128] reshape(%y_rows)

    The call is decided about before anything is changed: a dot of which no graph comes stays as it was, with all that
    surrounds it, for XLA's own matcher (or gemm-rewriter). A move behind the dot that would end the graph sinks to its
    FP8 result first. For Hopper and the extended dialect alone: XLA itself would give such a graph to cuDNN, and makes
    a cuBLASLt call of the dot. Numerically as a convolution: docs/numbers.md.
    """

    name = "fused-dot-rewriter"
    op = "dot"

    def run(self, module: HloModule, target: Target) -> bool:
        if not self.context.extended or target.compute_capability != _HOPPER:
            return False
        return super().run(module, target)

    def matches(self, instruction: HloInstruction) -> bool:
        return is_fp8_dot(instruction)

    def rewrite(self, walk: Walk, instruction: HloInstruction, target: Target) -> Refusal | None:
        form = self.form(instruction)
        if isinstance(form, Refusal):
            return form
        plan = self.plan(walk, form)
        if refusal := self.refused_by_backend(form, plan, target):
            return refusal
        if not self.context.consume_fuel():
            return self.context.refusal("fuel", instruction, "was left when the fuel ran out", "raise --fuel")
        if not plan.output.shape.is_fp8 and any(user.opcode in MOVES for user in plan.output.users):
            plan = self.plan_behind_moves(walk, form, plan, target)
        self.replace(walk, form, plan)
        return None

    def form(self, dot: HloInstruction) -> _Form | Refusal:
        """The dot as [M, K] times [N, K], or why it is none that a graph computes well."""
        if refusal := unsupported_dot(dot, self.context):
            return refusal
        dimensions = DotDimensions.of(dot)
        if what := _misfit(dot, dimensions):
            return self.context.refusal(
                "dot", dot, what, "XLA rewrites most scaled FP8 dots to cuBLASLt itself (docs/matmul.md)"
            )
        operands = dequantized_dot_operands(dot, self.context, dimensions.rhs[1][0])
        if isinstance(operands, Refusal):
            return operands
        (rows, columns), features = dimensions.matrix, dot.operand(0).shape.dimensions[-1]
        return _Form(dot, *operands, dimensions, rows, columns, features)

    def plan(self, walk: Walk, form: _Form) -> Epilogue:
        """The graph of a dot: its scales and as much of its epilogue as fits."""
        scales, channel = (*form.lhs.scales, *form.rhs.scales), form.dot.shape.rank - 1
        capture = _DotCapture(form.dot, scales, channel, walk.position, self.context.extended)
        capture.collect()
        return capture.finish()

    def plan_behind_moves(self, walk: Walk, form: _Form, plan: Epilogue, target: Target) -> Epilogue:
        """A graph that goes on behind the moves at the end of `plan`, where a backend runs it; else `plan`.

        Moves sink in either case, which changes no value.
        """
        if not sink_moves(plan.output):
            return plan
        walk.restart()
        longer = self.plan(walk, form)
        return plan if self.refused_by_backend(form, longer, target) else longer

    def refused_by_backend(self, form: _Form, plan: Epilogue, target: Target) -> Refusal | None:
        """Why the backend that was asked does not run a plan; None where it does, or none was asked."""
        if target.supports is None or (verdict := target.supports(form.call(plan))).ok:
            return None
        advice = advice_of(verdict) or "see what the backends run: docs/backends.md"
        return Refusal("backend", verdict.reason, advice, form.dot)

    def replace(self, walk: Walk, form: _Form, plan: Epilogue) -> None:
        """Puts the call in place of what it computes."""
        computation, dot = walk.computation, form.dot
        rhs = row_major(form.rhs.build_source())
        operands = [
            reshape(row_major(form.lhs.build_source()), (form.rows, form.features)),
            transpose(rhs, (1, 0)) if form.dimensions.rhs[1] == (1,) else rhs,
            *(self.side(side, computation, form) for side in plan.sides),
        ]
        results = (plan.output, *plan.aux)
        self.context.record(
            dot, self.op, is_fp8=True, graph=plan.graph, refusal=plan.stopped, saved_bytes=plan.saved_bytes
        )
        origin, name = self.context.origin(dot), dot.name
        shapes = form.output_shapes(plan)
        fused = create_graph_call(dot, {"dim_labels": str(DOT_LABELS)}, plan.graph, operands, shapes)
        computation.transfer_control_dependencies(dot, fused)
        replaced = [*with_operands(results), *plan.merge_twins(computation)]
        for index, (old, shape) in enumerate(zip(results, shapes, strict=True)):
            element = computation.create(
                "get-tuple-element", shape, [fused], attributes={"index": str(index)}, metadata_from=old
            )
            take_place(computation, old, reshape(element, old.shape.dimensions))
        walk.rewritten(fused, replaced)
        if name not in computation:
            computation.rename(fused, name)
        self.context.moved(fused, *origin)

    def side(self, side: Side, computation: HloComputation, form: _Form) -> HloInstruction:
        """A side operand, a tensor as [M, N]."""
        made = build_side(side, computation, (form.rows, form.columns), 1, self.context.extended)
        return reshape(made, (form.rows, form.columns)) if isinstance(side, HloInstruction) else made


@dataclasses.dataclass(frozen=True)
class _Form:
    """A dot that can be a graph: `rows` x `features` times `features` x `columns`."""

    dot: HloInstruction
    lhs: Dequantized
    rhs: Dequantized
    dimensions: DotDimensions
    rows: int
    columns: int
    features: int

    def call(self, plan: Epilogue) -> GraphCall:
        """The call of a graph, before any of it is made."""
        outputs = tuple(self.output_shapes(plan))
        operands = (
            Shape.array(self.lhs.source.shape.element_type, (self.rows, self.features)),
            Shape.array(self.rhs.source.shape.element_type, (self.columns, self.features)),
            *plan.side_shapes(outputs[0], 1),
        )
        return GraphCall(plan.graph, operands, outputs, Window(()), DOT_LABELS, 1, self.dot.operand_precision)

    def output_shapes(self, plan: Epilogue) -> list[Shape]:
        return [
            Shape.array(result.shape.element_type, (self.rows, self.columns) if result.shape.rank else ())
            for result in (plan.output, *plan.aux)
        ]


class _DotCapture(EpilogueCapture):
    """Captures what follows one dot."""

    kind = "dot"


def _misfit(dot: HloInstruction, dimensions: DotDimensions) -> str:
    """Why a dot has not the form of a 1x1 convolution, or is not worth being one; "" where it is."""
    (batch, free, contracting), (_, columns, other) = dimensions.lhs, dimensions.rhs
    if batch:
        return "has batch dimensions: no convolution, which has one filter"
    if len(contracting) != 1 or len(columns) != 1 or not free:
        return "has not one contracted dimension and one of columns, as a 1x1 convolution has"
    if contracting[0] != dot.operand(0).shape.rank - 1:
        return "sums over other than the last dimension of its left operand, as the gradient of weights does"
    rows, width = dimensions.matrix
    depth = dot.operand(1).shape.dimensions[other[0]]
    if depth % MULTIPLE or width % MULTIPLE:
        return f"is {rows} x {depth} times {depth} x {width}: kernels take multiples of {MULTIPLE} features and columns"
    if rows < FEWEST_ROWS:
        return f"has {rows} rows, fewer than the {FEWEST_ROWS} of a tensor core instruction"
    return ""
