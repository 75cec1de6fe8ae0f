"""dynamic-quantize-rewriter: amax, scale, multiplication and saturating cast become one quantization custom call."""

from __future__ import annotations

from xla_fp8.hlo import HloComputation, HloInstruction, Shape
from xla_fp8.hlo.attributes import quote
from xla_fp8.passes.amax import Reduction, known_amax, reductions_of
from xla_fp8.passes.base import Refusal, RewritePass, Walk, with_operands
from xla_fp8.passes.quantize_chain import Chain, find_chain
from xla_fp8.passes.quantize_scalars import MAX_CAPTURED, NodeBuilder, NotCapturedError, ScalarCapture, op_of
from xla_fp8.passes.values import take_place
from xla_fp8.quantize_call import QUANTIZE_TARGET, QuantizeCall
from xla_fp8.target import Target


class DynamicQuantizeRewriter(RewritePass):
    """Fuses a quantization to FP8, with the amax that scales it or stands beside it, into one custom call.

    Before::

        %abs = f32[64,32] abs(%x)
        %amax = f32[] reduce(%abs, %minus_inf), dimensions={0,1}, to_apply=%maximum
        %scale = f32[] divide(%amax, %largest)
        %scaled = f32[64,32] divide(%x, %scales)           ; %scales = f32[64,32] broadcast(%scale)
        %clamped = f32[64,32] clamp(%lows, %scaled, %highs)
        %q = f8e4m3fn[64,32] convert(%clamped)
        %qt = f8e4m3fn[32,64] transpose(%q), dimensions={1,0}

    After::

        %call = (f8e4m3fn[64,32], f8e4m3fn[32,64], f32[]) custom-call(%x), custom_call_target="__xla_fp8$quantize", ...
        %q = f8e4m3fn[64,32] get-tuple-element(%call), index=0
        %qt = f8e4m3fn[32,64] get-tuple-element(%call), index=1
        %scale = f32[] get-tuple-element(%call), index=2

    The call's string repeats the arithmetic operation by operation (docs/graph-string.md), so every bit stays. Where
    the scale does not come from this tensor's amax it is an operand; so it is where the producer is a convolution that
    was rewritten and makes the amax itself. Run it behind the rewriters of convolutions and dots, whose epilogues end
    in casts too. It is not in the default pipeline: XLA knows no such call, this project runs it.
    """

    name = "dynamic-quantize-rewriter"
    op = "quantize"

    def matches(self, instruction: HloInstruction) -> bool:
        return instruction.opcode == "convert" and instruction.shape.is_fp8

    def rewrite(self, walk: Walk, instruction: HloInstruction, target: Target) -> Refusal | None:
        chain = find_chain(instruction)
        if chain is None or isinstance(chain, Refusal):
            return chain
        if refusal := self.unsupported(chain):
            return refusal
        if not self.context.consume_fuel():
            return self.context.refusal("fuel", chain.cast, "was left when the fuel ran out", "raise --fuel")
        for tensor in chain.tensors:
            _use_known_amax(walk.computation, tensor)
        chain, reductions, dependent = _begin(walk, chain)
        stopped = None
        try:
            capture = ScalarCapture(chain, reductions, dependent)
        except NotCapturedError as error:
            stopped = self._not_captured(error.instruction)
            capture = ScalarCapture(chain, (), set())
        self.replace(walk, chain, capture, stopped)
        return None

    def unsupported(self, chain: Chain) -> Refusal | None:
        """Why a quantization has no call; None where it has one."""
        cast = chain.cast
        for instruction in (*(step.instruction for step in chain.steps), cast):
            if instruction.has_control_dependencies:
                return self.context.refusal(
                    "control-dependencies", instruction, "has control dependencies", "run the pass before they are made"
                )
        if cast.shape.element_count == 0:
            return self.context.refusal("empty", cast, "has no elements", "nothing to gain: there is no work in it")
        return None

    def _not_captured(self, instruction: HloInstruction) -> Refusal:
        if op_of(instruction) is not None:
            return self.context.refusal(
                "too-deep",
                instruction,
                f"is one of more than {MAX_CAPTURED} operations between amax and scale, so the scale is an operand",
                "shorten the chain",
            )
        return self.context.refusal(
            "scale-operation",
            instruction,
            "stands between the amax and the scale and is no operation of the call, which therefore takes the scale as "
            "an operand",
            "compute the scale with multiply, divide, maximum, minimum, where and the like (docs/graph-string.md)",
        )

    def replace(self, walk: Walk, chain: Chain, capture: ScalarCapture, stopped: Refusal | None) -> None:
        computation, cast = walk.computation, chain.cast
        transposes = [user for user in cast.users if _exchanges_last_two(user)]
        builder = NodeBuilder(chain, capture)
        stored = builder.tensor(chain.steps[-1].instruction)
        replaced: list[list[HloInstruction]] = []
        if cast.is_root or len(transposes) < cast.user_count:
            builder.add("store", cast.shape.element_type, (stored,))
            replaced.append([cast])
        if transposes:
            builder.add("store_transposed", cast.shape.element_type, (stored,))
            replaced.append(transposes)
        results = capture.results(_gone({cast, *transposes, *capture.captured}))
        scalars: dict[int, list[HloInstruction]] = {}  # the values of a program that one number is
        for value in results:
            scalars.setdefault(builder.scalar(value), []).append(value)
        for uid, values in scalars.items():
            builder.add("result", values[0].shape.element_type, (uid,))
            replaced.append(values)
        call = QuantizeCall(tuple(builder.nodes))
        self.context.record(cast, "quantize", is_fp8=True, graph=call, refusal=stopped)
        fused = _create(computation, chain, call, builder.operands)
        superfluous = with_operands(old for olds in replaced for old in olds)
        for index, (olds, shape) in enumerate(zip(replaced, fused.shape.tuple_shapes, strict=True)):
            element = computation.create("get-tuple-element", shape, [fused], attributes={"index": str(index)})
            for old in olds:
                value = element if old.shape.rank == shape.rank else computation.create("reshape", old.shape, [element])
                take_place(computation, old, _in_layout_of(old.shape, value))
        walk.rewritten(fused, superfluous)


def _use_known_amax(computation: HloComputation, tensor: HloInstruction) -> None:
    """Where a rewritten convolution makes the amax of `tensor`, nobody needs to find it again."""
    for reduction in reductions_of(tensor):
        if reduction.op != "amax" or reduction.floor is not None or reduction.instruction.shape.element_type != "f32":
            continue
        if (amax := known_amax(tensor)) is not None:
            computation.replace_all_uses_with(reduction.instruction, amax)


def _begin(walk: Walk, chain: Chain) -> tuple[Chain, list[Reduction], set[HloInstruction]]:
    """The chain from the tensor on that the call reads, the reductions of it, and what depends on these.

    That tensor is the one whose amax makes the scale; else the one in front of the last scale.
    """
    fallback: tuple[Chain, list[Reduction], set[HloInstruction]] | None = None
    for start in chain.starts():
        reductions = [reduction for tensor in start.unscaled for reduction in reductions_of(tensor)]
        dependent = walk.dependents([reduction.instruction for reduction in reductions], chain.cast)
        if any(scale in dependent for scale in start.scales):
            return chain.widened(start), reductions, dependent
        if len(start.scales) == 1 and (fallback is None or (reductions and not fallback[1])):
            fallback = chain.widened(start), reductions, dependent
    assert fallback is not None  # a chain has a scale
    return fallback


def _exchanges_last_two(user: HloInstruction) -> bool:
    if user.opcode != "transpose" or user.has_control_dependencies:
        return False
    order, rank = user.dimensions, user.shape.rank
    return order == (*range(rank - 2), rank - 1, rank - 2)


def _in_layout_of(shape: Shape, value: HloInstruction) -> HloInstruction:
    """`value`, copied where the layout of `shape` is another. JAX prints layouts that mean nothing yet; there XLA drops
    the copy, and behind layout assignment it keeps the elements in their places."""
    if shape.layout is None or value.shape.layout is None or shape.layout == value.shape.layout:
        return value
    assert value.parent is not None
    return value.parent.create("copy", value.shape.with_layout(shape.layout), [value], metadata_from=value)


def _gone(gone: set[HloInstruction]) -> set[HloInstruction]:
    """What nobody needs any more when all of `gone` are replaced."""
    pending = [operand for instruction in gone for operand in instruction.operands]
    while pending:
        current = pending.pop()
        if current in gone or current.is_root or current.opcode == "parameter" or current.has_control_dependencies:
            continue
        if all(user in gone for user in current.users):
            gone.add(current)
            pending.extend(current.operands)
    return gone


def _create(
    computation: HloComputation, chain: Chain, call: QuantizeCall, scalars: list[HloInstruction]
) -> HloInstruction:
    operands = [_in_layout_of(chain.x.shape.with_default_layout(), chain.x)]
    for scalar in scalars:
        is_reshaped = not scalar.shape.is_scalar
        shape = Shape(scalar.shape.element_type)
        operands.append(computation.create("reshape", shape, [scalar], metadata_from=scalar) if is_reshaped else scalar)
    attributes = {"custom_call_target": quote(QUANTIZE_TARGET)}
    if metadata := chain.cast.attr("metadata"):
        attributes["metadata"] = metadata
    attributes["backend_config"] = call.backend_config
    shape = Shape.tuple(call.result_shapes(chain.x.shape))
    return computation.create("custom-call", shape, operands, name=f"{chain.cast.name}.quantize", attributes=attributes)
