"""What follows a convolution and can be computed with it: captures a graph, with an explicit worklist.

Every instruction that the graph can compute becomes a `Step`. When no more can be added, the furthest step is sought
that can be the graph's single tensor output: nothing else of what it needs may be used outside. So a fork is fused up
to where it parts, or whole where it joins again.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from xla_fp8.graph import FP8_MAX, FP8_TYPES, Graph
from xla_fp8.hlo import HloComputation, HloInstruction, Shape
from xla_fp8.hlo.literal import format_scalar, numpy_dtype
from xla_fp8.hlo.opcodes import ELEMENTWISE_BINARY, ELEMENTWISE_UNARY
from xla_fp8.passes.activations import Activation, find_activation
from xla_fp8.passes.base import Position, Refusal, described, with_operands
from xla_fp8.passes.dequantization import Dequantized, Scale, find_dequantized
from xla_fp8.passes.values import (
    MOVES,
    WIDE_TYPES,
    ChannelVector,
    Scalar,
    as_f32,
    bounded,
    broadcast_scalar,
    channel_vector_of,
    constant_of,
    reduces_with,
    scalar_of,
)

MAX_STEPS = 50
"""cuDNN's graphs are small; a chain longer than this is cut."""
_MAX_EXPLORED = 150
_TINY = 2.0**-126
"""The smallest f32 that is no subnormal."""

Side = HloInstruction | Scalar | ChannelVector | float
"""A side operand before it is made: a full tensor, a number, a vector, or a constant that fills a full tensor."""


@dataclasses.dataclass(frozen=True)
class Op:
    """One node of the graph to be: its operands are indices of `Op`s of the same step, or in-graph instructions."""

    name: str
    operands: tuple[HloInstruction | int, ...]
    sides: tuple[Side, ...] = ()


@dataclasses.dataclass(frozen=True)
class Step:
    """An instruction that the graph computes.

    Attributes:
        instruction: whose value it is.
        ops: the nodes it becomes; none for a convert between wide types, which f32 nodes need not make.
        inputs: in-graph instructions it reads.
        interior: instructions between inputs and result, which disappear with it.
        kind: "value", "amax", or "cast" (the saturating cast to FP8, which ends the graph).
    """

    instruction: HloInstruction
    ops: tuple[Op, ...]
    inputs: tuple[HloInstruction, ...]
    interior: tuple[HloInstruction, ...] = ()
    kind: str = "value"


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """A finished capture.

    Attributes:
        graph: the graph.
        output: the instruction that result 0 replaces.
        aux: those that results 1, 2, ... replace.
        twins: further instructions with the value of one in `aux`, each with that one: an amax that a program tracks,
            and takes again to quantize.
        sides: what the side operands are, in node order.
        stopped: why the graph ends where it does, where there was more that looked as if it belonged to it.
        saved_bytes: of memory traffic, as the report's entry has them.
    """

    graph: Graph
    output: HloInstruction
    aux: tuple[HloInstruction, ...]
    twins: tuple[tuple[HloInstruction, HloInstruction], ...]
    sides: tuple[Side, ...]
    stopped: Refusal | None
    saved_bytes: int

    def merge_twins(self, computation: HloComputation) -> list[HloInstruction]:
        """Puts those in `aux` in place of their twins; returns the twins and what they read, for `Walk.rewritten`."""
        unneeded = with_operands(twin for twin, _ in self.twins)
        for twin, first in self.twins:
            computation.replace(twin, first)
        return unneeded

    def side_shapes(self, result: Shape, channel: int) -> list[Shape]:
        """The shapes of the side operands of a call with this result, before any of them is made.

        Args:
            channel: the result's dimension of output features.
        """
        shapes: list[Shape] = []
        for operand, side in zip(self.graph.side_operands(), self.sides, strict=True):
            if operand.kind == "scalar":
                shapes.append(Shape("f32"))
            elif operand.kind == "vector":
                shapes.append(Shape.array("f32", (result.dimensions[channel],)))
            else:
                type_ = side.shape.element_type if isinstance(side, HloInstruction) else "f32"
                shapes.append(result.with_element_type(type_))
        return shapes


class EpilogueCapture:
    """Captures what follows one convolution; a subclass says what else may be captured, and what follows a dot.

    Args:
        result: the convolution's value (element 0 of the custom call).
        scales: of input and filter, moved behind the convolution.
        channel: dimension of the output features.
        position: of an instruction in the computation, operands before users.
        extended: whether ops of the extended dialect may be used.
    """

    kind = "convolution"
    """What is fused, in the words of a refusal."""

    def __init__(
        self,
        result: HloInstruction,
        scales: Sequence[Scale],
        channel: int,
        position: Callable[[HloInstruction], Position],
        extended: bool,
    ) -> None:
        self.result = result
        self.scales = tuple(scales)
        self.channel = channel
        self.position = position
        self.extended = extended
        self.steps: dict[HloInstruction, Step] = {result: Step(result, (), ())}
        self.stops: list[Refusal] = []

    # ---------------------------------------------------------------- finding steps

    def collect(self) -> None:
        """Finds every instruction that the graph could compute."""
        explored: set[HloInstruction] = set()
        queue: list[tuple[Position, int, HloInstruction]] = []

        def push_users(of: HloInstruction) -> None:
            for user in of.users:
                if user not in explored:
                    explored.add(user)
                    heapq.heappush(queue, (self.position(user), len(explored), user))

        push_users(self.result)
        misses = 0
        while queue and len(self.steps) < MAX_STEPS and misses < _MAX_EXPLORED:
            _, _, instruction = heapq.heappop(queue)
            step = None if instruction.has_control_dependencies else self.step(instruction)
            if step is not None:
                step = self.shared(step)
                self.steps[instruction] = step
                if step.kind == "value":
                    push_users(instruction)
            elif self.may_be_inside(instruction):
                misses += 1
                push_users(instruction)

    def may_be_inside(self, instruction: HloInstruction) -> bool:
        """Whether it may belong to an activation or an amax, which are recognised at their last instruction."""
        shape = instruction.shape
        return (
            (instruction.opcode in _POINTWISE or instruction.opcode in MOVES)
            and shape.is_array
            and shape.element_count == self.result.shape.element_count
        )

    def shared(self, step: Step) -> Step:
        """`step`; or, where the graph has the value already, that one: JAX writes `y * c` as often as the user does."""
        if step.kind != "value" or not step.ops:
            return step
        for twin in self.steps.values():
            if twin.ops == step.ops and twin.instruction.shape == step.instruction.shape:
                return Step(step.instruction, (), (twin.instruction,), step.interior)
        return step

    def in_graph(self, instruction: HloInstruction) -> bool:
        step = self.steps.get(instruction)
        return step is not None and step.kind == "value"

    def step(self, instruction: HloInstruction) -> Step | None:
        """What `instruction` would be in the graph; None where it cannot be part of it."""
        opcode = instruction.opcode
        if opcode == "reduce":
            return self.amax(instruction)
        if opcode in ("opt-barrier", "tuple") and (barrier := _barrier_refusal(instruction)):
            self.stops.append(barrier)
        if not instruction.shape.is_array:
            return None
        if instruction.shape.is_fp8:
            return self.saturating_cast(instruction)
        if instruction.shape.element_type not in WIDE_TYPES or not instruction.shape.same_dimensions(self.result.shape):
            return None
        if opcode == "convert":
            source = instruction.operand(0)
            return Step(instruction, (), (source,)) if self.in_graph(source) else None
        if (found := find_activation(instruction)) and self.in_graph(found.input):
            return self.activation(instruction, found)
        if opcode == "clamp":
            return self.clamp(instruction)
        if opcode == "select":
            self.clamping_select(instruction)
        if opcode in ("add", "subtract", "multiply", "divide", "maximum", "minimum"):
            return self.binary(instruction)
        return None

    def binary(self, instruction: HloInstruction) -> Step | None:
        """add, multiply, divide, maximum, minimum of an in-graph value and something else."""
        left, right = instruction.operands
        if self.in_graph(left) and self.in_graph(right):
            name = {"add": "add", "maximum": "max", "minimum": "min"}.get(instruction.opcode)
            return Step(instruction, (Op(name, (left, right)),), (left, right)) if name else None
        if not self.in_graph(left):
            left, right = right, left
            if not self.in_graph(left) or instruction.opcode in ("subtract", "divide"):
                return None  # the value is what is subtracted or divided by
        op = self.op_with_side(instruction, left, right)
        if op is None:
            return None
        return Step(instruction, (op,), (left,))

    def op_with_side(self, instruction: HloInstruction, value: HloInstruction, other: HloInstruction) -> Op | None:
        opcode = instruction.opcode
        if opcode in ("multiply", "divide"):
            if scalar := scalar_of(other):
                return Op("scale" if opcode == "multiply" else "invscale", (value,), (scalar,))
            vector = channel_vector_of(other)
            if vector and vector.dimension == self.channel:
                if self.extended:
                    factor = vector if opcode == "multiply" else dataclasses.replace(vector, then="reciprocal")
                    return Op("channel_scale", (value,), (factor,))
                self.stop(
                    "needs-extended-dialect",
                    instruction,
                    "scales each output channel, which the xla dialect of the graph string cannot say",
                    "use --dialect=extended (xla_fp8.jit does)",
                )
            else:
                self.stop(
                    "scale-not-scalar",
                    instruction,
                    "scales by a tensor, not by one number",
                    "scale by a scalar, or by one number for each output channel",
                )
            return None
        if opcode == "maximum":
            if constant_of(other) == 0:
                return Op("relu", (value,))
            return Op("max", (value,), (other,))
        if opcode == "minimum":
            return Op("min", (value,), (other,))
        return self.addition(instruction, value, other)

    def addition(self, instruction: HloInstruction, value: HloInstruction, other: HloInstruction) -> Op | None:
        """y + other; y - other where `other` is a vector, which is negated: a tensor would be written once more."""
        if not self.extended:
            return Op("add", (value,), (other,)) if instruction.opcode == "add" else None
        vector = channel_vector_of(other)
        if vector and vector.dimension == self.channel:
            if instruction.opcode == "subtract":
                vector = dataclasses.replace(vector, then="negate")
            return Op("bias", (value,), (vector,))
        if instruction.opcode == "subtract":
            return None
        residual = find_dequantized(other)
        if isinstance(residual, Dequantized) and len(residual.scales) == 1 and not residual.moves:
            scale = residual.scales[0]
            if isinstance(scale.value, Scalar) and not scale.inverse:
                return Op("add_scaled", (value,), (residual.source, scale.value))
        if _repeats(other):
            self.stop(
                "repeated-side",
                instruction,
                "adds a tensor that repeats a smaller one along more than the output channels: for the graph it would "
                "be written to memory first",
                "leave it to XLA, which adds it in what follows; or add one number for each output channel",
            )
            return None
        return Op("add", (value,), (other,))

    def activation(self, instruction: HloInstruction, found: Activation) -> Step | None:
        source = found.input
        interior = self.interior(instruction, source)
        if found.op == "relu":  # its comparison may be of what `source` is made of
            interior = (instruction.operand(0),)
        if found.op == "leaky_relu":
            assert found.slope is not None
            slope = found.slope.constant()
            if self.extended and slope is not None and _TINY <= slope <= 1:
                # The larger of y and slope * y, then: no tensor of zeros is read. A subnormal slope may be flushed to
                # 0, which makes NaN of an infinite y.
                ops: tuple[Op, ...] = (Op("scale", (source,), (found.slope,)), Op("max", (0, source)))
            else:
                ops = (Op("min", (source,), (0.0,)), Op("scale", (0,), (found.slope,)), Op("max", (1, source)))
            return Step(instruction, ops, (source,), interior)
        if found.op not in ("relu", "elu") and not self.extended:
            self.stop(
                "needs-extended-dialect",
                instruction,
                f"is {found.op}, which the xla dialect of the graph string cannot say",
                "use --dialect=extended (xla_fp8.jit does)",
            )
            return None
        return Step(instruction, (Op(found.op, (source,)),), (source,), interior)

    def clamp(self, instruction: HloInstruction) -> Step | None:
        """A clamp that is none of a cast to FP8, which saturates by itself."""
        source = instruction.operand(1)
        if not self.in_graph(source) or not all(_is_inside(instruction, type_) for type_ in _cast_to(instruction)):
            return None
        ops = self.clamp_ops(*instruction.operands)
        return Step(instruction, ops, (source,)) if ops else None

    def clamp_ops(self, low: HloInstruction, source: HloInstruction, high: HloInstruction) -> tuple[Op, ...]:
        """A clamp's nodes; none where it has a bound that the dialect cannot read.

        min and max read tensors: numbers would be written to memory first, which clamp's are not.
        """
        lowest, highest = constant_of(low), constant_of(high)
        if lowest is not None and highest is not None and not lowest <= highest:
            return ()
        if self.extended and (smallest := scalar_of(low)) and (largest := scalar_of(high)):
            return (Op("clamp", (source,), (smallest, largest)),)
        if lowest == 0 and highest is not None:
            return Op("relu", (source,)), Op("min", (0,), (_filled(high, source),))
        sides = _filled(low, source), _filled(high, source)
        if any(isinstance(side, HloInstruction) and side.shape.is_scalar for side in sides):
            return ()
        return Op("max", (source,), sides[:1]), Op("min", (0,), sides[1:])

    def clamping_select(self, instruction: HloInstruction) -> None:
        """A relu or clamp that would be one of the graph's, were it not for NaN: never a step, but a reason to stop."""
        found = bounded(instruction)
        if found and not found.keeps_nan and self.in_graph(found.value):
            self.stop(
                "nan-to-number",
                instruction,
                f"makes {found.bound:g} of NaN, which the graph's relu, min and max pass on",
                "write jax.nn.relu or jnp.clip, or let the comparison pick the bound: jnp.where(y < 0, 0, y)",
            )

    def amax(self, instruction: HloInstruction) -> Step | None:
        """reduce-max of abs over every dimension; without abs where the value cannot be negative.

        The order of the elements does not matter to it: they may be moved (jnp.ravel) in front of abs or behind it.
        """
        if len(instruction.operands) != 2 or not instruction.shape.is_scalar:
            return None
        value, init = instruction.operands
        has_abs, interior = False, []
        while not self.in_graph(value) and (value.opcode in MOVES or (value.opcode == "abs" and not has_abs)):
            has_abs |= value.opcode == "abs"
            interior.append(value)
            value = value.operand(0)
        if not has_abs and not self.is_nonnegative(value):
            return None
        start = constant_of(init)
        if not self.in_graph(value) or start is None or start > 0 or not reduces_with(instruction, "maximum"):
            return None
        if instruction.shape.element_type not in WIDE_TYPES:
            return None
        return Step(instruction, (Op("amax", (value,)),), (value,), tuple(interior), kind="amax")

    def is_nonnegative(self, value: HloInstruction) -> bool:
        """Whether an in-graph value is a relu, relu6, or a clamp between constants from 0 up; converts may follow."""
        while (step := self.steps.get(value)) is not None:
            if step.ops:
                if step.ops[-1].name == "clamp":
                    # Of bounds in the wrong order HLO's clamp is the upper one, which may be below zero.
                    bounds = [side.constant() for side in step.ops[-1].sides if isinstance(side, Scalar)]
                    return all(bound is not None and bound >= 0 for bound in bounds)
                return step.ops[0].name in ("relu", "sigmoid") and step.ops[-1].name in ("relu", "sigmoid", "min")
            if not step.inputs:
                return False
            value = step.inputs[0]
        return False

    def saturating_cast(self, instruction: HloInstruction) -> Step | None:
        """convert(clamp(-max, x, max)) to FP8, maybe through another wide type; not through integers or another FP8."""
        if instruction.opcode != "convert":
            return None
        clamp = instruction.operand(0)
        interior = [clamp]
        if _is_wide_convert(clamp):
            clamp = clamp.operand(0)
            interior.append(clamp)
        type_ = instruction.shape.element_type
        if type_ not in FP8_TYPES:
            if self.in_graph(clamp.operand(1) if clamp.opcode == "clamp" else instruction.operand(0)):
                self.stop(
                    "fp8-type",
                    instruction,
                    f"converts to {type_}, a type that a graph cannot store",
                    "quantize to float8_e4m3fn or float8_e5m2",
                )
            return None
        largest = FP8_MAX[type_]
        if clamp.opcode != "clamp":
            if self.in_graph(instruction.operand(0)):
                self.stop(
                    "missing-clamp",
                    instruction,
                    f"converts to {type_} without a clamp: values beyond {largest:g} become NaN or infinity, where the "
                    f"fused {self.kind} saturates",
                    f"clamp first: jnp.clip(y, -{largest:g}, {largest:g}).astype(...)",
                )
            return None
        low, source, high = clamp.operands
        if not self.in_graph(source):
            return None
        bounds = constant_of(low), constant_of(high)
        if bounds == (0.0, largest):  # jnp.clip(y, 0, 448): a relu, saturated
            return Step(instruction, (Op("relu", (source,)),), (source,), tuple(interior), kind="cast")
        if self.in_graph(clamp):  # to narrower bounds: the store has nothing to saturate
            return Step(instruction, (), (clamp,), tuple(i for i in interior if i is not clamp), kind="cast")
        if bounds != (-largest, largest):
            shown = " and ".join("a computed value" if b is None else f"{b:g}" for b in bounds)
            self.stop(
                "wrong-clamp-bounds",
                clamp,
                f"clamps to {shown}, not to the bounds of {type_}, -{largest:g} and {largest:g}",
                f"clamp to the type's own bounds: jnp.clip(y, -{largest:g}, {largest:g})",
            )
            return None
        return Step(instruction, (), (source,), tuple(interior), kind="cast")

    def stop(self, rule: str, instruction: HloInstruction, what: str, advice: str) -> None:
        self.stops.append(Refusal(rule, f"{described(instruction)} {what}", advice, instruction))

    def interior(self, result: HloInstruction, source: HloInstruction) -> tuple[HloInstruction, ...]:
        """Instructions strictly between `source` and `result`."""
        depends: dict[HloInstruction, bool] = {source: True}
        stack = [result]
        while stack:
            current = stack[-1]
            waiting = [o for o in current.operands if o not in depends]
            if waiting and self.position(current) > self.position(source):
                stack.extend(waiting)
                continue
            depends[current] = any(depends.get(o, False) for o in current.operands)
            stack.pop()
        return tuple(i for i, on_path in depends.items() if on_path and i is not source and i is not result)

    # ---------------------------------------------------------------- choosing the output

    def finish(self) -> Epilogue:
        """The largest graph with one tensor output, no cycle, and nothing lost that is used outside."""
        blocked: Refusal | None = None
        for output in reversed(self.steps.values()):
            if output.kind == "amax" or self.widens(output.instruction):
                continue  # who reads a wider copy can widen it: half the bytes
            needed = self.needed(output)
            for aux in self.aux_choices(output, needed):
                problem = self.problem(output, needed, aux)
                if problem is None:
                    return self.build(output, needed, aux, blocked)
                blocked = blocked or problem
        raise AssertionError("the convolution's own value is always a valid output")

    def narrows(self, instruction: HloInstruction) -> bool:
        """Whether a step is a convert to a type of fewer bytes."""
        return not self.steps[instruction].ops and _size(instruction) < _size(instruction.operand(0))

    def widens(self, instruction: HloInstruction) -> bool:
        """Whether a step is a convert to a type of more bytes, of a value that the graph rounds."""
        step = self.steps[instruction]
        return bool(step.inputs) and not step.ops and _size(instruction) > _size(instruction.operand(0))

    def needed(self, output: Step) -> list[Step]:
        """The steps that `output` is computed from, itself included, in order."""
        found = {output.instruction}
        pending = [output]
        while pending:
            for value in pending.pop().inputs:
                if value not in found:
                    found.add(value)
                    pending.append(self.steps[value])
        return [step for step in self.steps.values() if step.instruction in found]

    def aux_choices(self, output: Step, needed: list[Step]) -> list[tuple[Step, ...]]:
        """Which amax (and copy) results to try: all of them, then none."""
        values = {step.instruction for step in needed if step.kind == "value"}
        found = (self.amax_within(s, values) for s in self.steps.values() if s.kind == "amax")
        amax = tuple(step for step in found if step is not None)
        choices: list[tuple[Step, ...]] = [amax, ()] if amax else [()]
        if self.extended and output.kind == "cast":
            for base in tuple(choices):
                if copy := self.copy_step(output, needed, base):
                    choices.append((*base, copy))
        return choices

    def amax_within(self, amax: Step, values: set[HloInstruction]) -> Step | None:
        """The amax as one of a value among `values`: through converts between wide types, which are no nodes."""
        (value,) = amax.inputs
        interior = amax.interior
        while value not in values:
            step = self.steps[value]
            if step.ops or not step.inputs:
                return None
            interior, value = (*interior, value), step.inputs[0]
        return dataclasses.replace(amax, ops=(Op("amax", (value,)),), inputs=(value,), interior=interior)

    def copy_step(self, output: Step, needed: list[Step], aux: tuple[Step, ...]) -> Step | None:
        """A second tensor result for the one value that is used outside too; None where there is none, or several.

        Where its only use outside is a convert to a narrower type, the copy is of that type.
        """
        covered = self.covered(needed, aux)
        escaping = [
            step
            for step in needed
            if step is not output
            and (step.instruction.is_root or any(u not in covered for u in step.instruction.users))
        ]
        if len(escaping) != 1:
            return None
        value = escaping[0].instruction
        outside = [user for user in value.users if user not in covered]
        copied = value
        if len(outside) == 1 and not value.is_root and self.in_graph(outside[0]) and self.narrows(outside[0]):
            copied = outside[0]
        return Step(copied, (Op("copy", (value,)),), (value,), kind="copy")

    @staticmethod
    def covered(needed: list[Step], aux: tuple[Step, ...]) -> set[HloInstruction]:
        """Instructions that the graph makes superfluous."""
        covered: set[HloInstruction] = set()
        for step in (*needed, *aux):
            covered.update(step.interior)
            if step.kind != "copy" or step.instruction not in step.inputs:
                covered.add(step.instruction)
        return covered

    def problem(self, output: Step, needed: list[Step], aux: tuple[Step, ...]) -> Refusal | None:
        """Why this choice will not do: a value inside is used outside, or results would feed their own operands."""
        covered = self.covered(needed, aux)
        copied = {step.instruction for step in aux if step.kind == "copy"}
        for step in (*needed, *aux):
            inside = step.interior
            if step is not output and step.kind == "value" and step.instruction not in copied:
                inside = (step.instruction, *inside)
            for instruction in inside:
                outside = next((u for u in instruction.users if u not in covered), None)
                if outside is not None or instruction.is_root:
                    return self._two_endpoints(instruction, outside, output)
        escaping = [step.instruction for step in aux]
        externals = [side for step in needed for op in step.ops for side in self._side_instructions(op)]
        if escaping and self._any_depends_on(externals, escaping):
            name = escaping[0].name
            return Refusal(
                "cycle",
                f"{name} is a result of the {self.kind} and feeds an operand of {described(output.instruction)}: "
                "fusing both would make a cycle",
                "use delayed scaling: the scale of this step computed from an amax of an earlier one",
                output.instruction,
            )
        return None

    def _two_endpoints(self, value: HloInstruction, outside: HloInstruction | None, output: Step) -> Refusal:
        if outside is not None and (barrier := _barrier_refusal(outside)):
            return barrier
        if outside is not None and (product := self._product(outside)):
            return product
        other = described(outside) if outside is not None else "the computation's result"
        end = described(output.instruction)
        return Refusal(
            "two-endpoints",
            f"{described(value)} is used by {other} as well as on the way to {end}; a graph has one tensor output",
            "let only one of them use it; an FP8 output may have one wide copy beside it"
            + ("" if self.extended else " in the extended dialect (--dialect=extended)"),
            value,
        )

    def _product(self, instruction: HloInstruction) -> Refusal | None:
        """Why a product, quotient or difference of two values of the graph stops it; None for anything else."""
        word = {"multiply": "product", "divide": "quotient", "subtract": "difference"}.get(instruction.opcode)
        if word is None or len(set(instruction.operands)) < 2 or not all(map(self.in_graph, instruction.operands)):
            return None
        return Refusal(
            "unknown-operation",
            f"{described(instruction)} is the {word} of two values that the {self.kind} makes; a graph has no "
            "operation for that",
            "leave it to XLA, or use an activation that is one operation: silu for hard_swish"
            + ("" if self.extended else " (with --dialect=extended)"),
            instruction,
        )

    @staticmethod
    def _side_instructions(op: Op) -> list[HloInstruction]:
        found: list[HloInstruction] = []
        for side in op.sides:
            if isinstance(side, HloInstruction):
                found.append(side)
            elif isinstance(side, Scalar | ChannelVector):
                found.append(side.source)
        return found

    def _any_depends_on(self, externals: list[HloInstruction], sources: list[HloInstruction]) -> bool:
        """Whether an external operand is computed from one of `sources`. Walks up, never beyond the convolution."""
        first = min(self.position(s) for s in sources)
        seen = set(externals)
        pending = list(externals)
        while pending:
            current = pending.pop()
            if current in sources:
                return True
            for operand in (*current.operands, *current.control_predecessors):
                if operand not in seen and self.position(operand) >= first:
                    seen.add(operand)
                    pending.append(operand)
        return False

    # ---------------------------------------------------------------- building

    def build(self, output: Step, needed: list[Step], aux: tuple[Step, ...], blocked: Refusal | None) -> Epilogue:
        graph = Graph.conv()
        sides: list[Side] = []
        for scale in self.scales:
            vector = isinstance(scale.value, ChannelVector)
            name = "channel_scale" if vector else "invscale" if scale.inverse else "scale"
            graph = graph.append(name, (graph.nodes[-1].uid,))
            sides.append(scale.value)
        uids = {self.result: graph.nodes[-1].uid}
        for step in needed[1:]:
            own: list[int] = []
            for op in step.ops:
                graph = graph.append(op.name, [own[o] if isinstance(o, int) else uids[o] for o in op.operands])
                own.append(graph.nodes[-1].uid)
                sides.extend(op.sides)
            uids[step.instruction] = own[-1] if own else uids[step.inputs[0]]
        results: dict[tuple[str, int, str], HloInstruction] = {}
        twins: list[tuple[HloInstruction, HloInstruction]] = []
        for step in aux:
            node = (step.ops[0].name, uids[step.inputs[0]], step.instruction.shape.element_type)
            if node in results:
                twins.append((step.instruction, results[node]))
                continue
            results[node] = step.instruction
            graph = graph.append(node[0], [node[1]], node[2])
        graph = graph.with_type(uids[output.instruction], output.instruction.shape.element_type)
        stopped = self.explanation(output, blocked)
        made = tuple(results.values())
        saved = self.saved_bytes(output.instruction, made)
        return Epilogue(graph, output.instruction, made, tuple(twins), tuple(sides), stopped, saved)

    def saved_bytes(self, output: HloInstruction, aux: tuple[HloInstruction, ...]) -> int:
        """What is no longer written and read of the result itself.

        Nothing where the graph computes no more than that; one reading where the result is written beside the output.
        What follows a convolution counts as one kernel, as XLA makes it, so that it was read once.
        """
        if output is self.result:
            return 0
        times = 1 if self.result in aux else 2
        return times * self.result.shape.element_count * _size(self.result)

    def explanation(self, output: Step, blocked: Refusal | None) -> Refusal | None:
        """What kept the graph from reaching further: a fork or cycle, or a step that almost matched."""
        if output.kind == "cast":
            return None
        # What a fork looks like is often an activation that the dialect cannot say: the activation is the reason.
        for stop in reversed(self.stops):
            if stop.rule in ("needs-extended-dialect", "nan-to-number"):
                return stop
        if blocked is not None:
            return blocked
        return self.stops[-1] if self.stops else self.unknown_operation(output)

    def unknown_operation(self, output: Step) -> Refusal | None:
        """What follows the graph's end and is none of its operations, where the chain goes on to an FP8 tensor."""
        seen: set[HloInstruction] = set()
        pending = [output.instruction]
        while pending and len(seen) < _MAX_EXPLORED:
            for user in pending.pop().users:
                if user in seen or not user.shape.is_array:
                    continue
                seen.add(user)
                if user.shape.is_fp8:
                    first = output.instruction.users[0]
                    if first.opcode in MOVES:
                        return Refusal(
                            "unknown-operation",
                            f"{described(first)} moves elements in front of the cast to FP8, where a graph ends",
                            "quantize first and move the FP8 tensor: the same values, a quarter of the bytes",
                            first,
                        )
                    return Refusal(
                        "unknown-operation",
                        f"{described(first)} is, with what follows it, none of the graph's operations",
                        "use scale, add, clip, relu, relu6, leaky relu or elu"
                        + (", " if self.extended else "; with --dialect=extended also ")
                        + "silu, gelu, sigmoid, tanh and a scale for each channel",
                        first,
                    )
                if user.opcode in _POINTWISE or user.opcode in MOVES:
                    pending.append(user)
        return None


def _cast_to(clamp: HloInstruction) -> set[str]:
    """The FP8 types that what is clamped is cast to, directly or through another wide type."""
    users = [user for c in clamp.users for user in (c, *(c.users if _is_wide_convert(c) else ()))]
    return {user.shape.element_type for user in users if user.opcode == "convert" and user.shape.is_fp8}


def _is_wide_convert(instruction: HloInstruction) -> bool:
    return instruction.opcode == "convert" and instruction.shape.element_type in WIDE_TYPES


def _is_inside(clamp: HloInstruction, type_: str) -> bool:
    """Whether a clamp's bounds are within those of an FP8 type, and not both the same."""
    low, largest, high = constant_of(clamp.operand(0)), FP8_MAX.get(type_), constant_of(clamp.operand(2))
    if low is None or high is None or largest is None:
        return False
    return -largest <= low and high <= largest and (low, high) != (-largest, largest)


def _filled(bound: HloInstruction, like: HloInstruction) -> HloInstruction | float:
    """A clamp's bound as a tensor, or the number to fill one with: HLO's clamp takes numbers too."""
    constant = constant_of(bound)
    return bound if constant is None or bound.shape.same_dimensions(like.shape) else constant


def _repeats(side: HloInstruction) -> bool:
    """Whether a tensor is a broadcast of fewer elements, but more than one."""
    while side.opcode in ("convert", "reshape", "bitcast"):
        side = side.operand(0)
    return side.opcode == "broadcast" and 1 < side.operand(0).shape.element_count < side.shape.element_count


def _size(instruction: HloInstruction) -> int:
    """Bytes of an element."""
    return numpy_dtype(instruction.shape.element_type).itemsize


def build_side(
    side: Side, computation: HloComputation, dimensions: tuple[int, ...], channel: int, extended: bool
) -> HloInstruction:
    """The operand that `side` stands for; numbers and vectors in f32, tensors in f32 or (extended) as they are."""
    if isinstance(side, Scalar):
        return side.build()
    if isinstance(side, ChannelVector):
        return side.build(dimensions[channel])
    if isinstance(side, float):
        constant = computation.create("constant", Shape("f32"), payload=format_scalar(side, "f32"))
        return broadcast_scalar(computation, constant, dimensions)
    return side if extended else as_f32(side)


def _barrier_refusal(user: HloInstruction) -> Refusal | None:
    """Why nothing goes on behind an optimization barrier, or the tuple of its operands; None for anything else."""
    for barrier in user.users if user.opcode == "tuple" else (user,):
        if barrier.opcode == "opt-barrier":
            return Refusal(
                "optimization-barrier",
                f"{described(barrier)} is an optimization barrier: nothing is fused across it",
                "take lax.optimization_barrier away, or put it behind the cast; jax.checkpoint makes none with "
                "prevent_cse=False",
                barrier,
            )
    return None


_POINTWISE = frozenset(ELEMENTWISE_BINARY | ELEMENTWISE_UNARY | {"select", "clamp"})
