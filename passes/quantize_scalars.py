"""The scalar part of a quantization: from the amax to what the tensor is multiplied by, as nodes of the call's string.

What depends on the amax must be in the call, since the call makes the amax; what does not is an operand, unless nobody
else needs it. What follows from these (the scale for the dequantization, say) is in it too, as results.
"""

from __future__ import annotations

from collections.abc import Iterable

from xla_fp8.hlo import HloInstruction
from xla_fp8.hlo.literal import format_scalar
from xla_fp8.passes.amax import Reduction
from xla_fp8.passes.quantize_chain import Chain
from xla_fp8.passes.values import WIDE_TYPES, Scalar, constant_of, scalar_of
from xla_fp8.quantize_call import INTEGER_TYPES, SCALAR_OPS, Node

MAX_CAPTURED = 48
_MOVES = ("broadcast", "reshape", "transpose", "copy", "bitcast")
_TYPES = (*WIDE_TYPES, *INTEGER_TYPES, "pred")


class NotCapturedError(Exception):
    """What depends on the amax and cannot be in the call."""

    def __init__(self, instruction: HloInstruction) -> None:
        super().__init__(instruction.name)
        self.instruction = instruction


class ScalarCapture:
    """Which scalars one call computes.

    Attributes:
        captured: the instructions, operands before users; no constants.
        externals: those that are operands.

    Raises:
        NotCapturedError: something between the amax and a scale is no operation of the call, or there is too much.
    """

    def __init__(self, chain: Chain, reductions: Iterable[Reduction], dependent: set[HloInstruction]) -> None:
        """
        Args:
            reductions: of the chain's x and its converts.
            dependent: what depends on one of them, as far as the cast.
        """
        self.reductions = {reduction.instruction: reduction for reduction in reductions}
        self.dependent = set(dependent)
        self.captured: dict[HloInstruction, None] = {}
        self.externals: dict[HloInstruction, None] = {}
        for scale in chain.scales:
            self._take(scale)
        for instruction in self.reductions:
            self._take(instruction)
        self._follow()

    def _take(self, instruction: HloInstruction) -> None:
        value, is_alone = behind_moves(instruction)
        if value in self.captured or value in self.externals or scalar_constant(value) is not None:
            return
        may_be_inside = op_of(value) is not None and len(self.captured) < MAX_CAPTURED
        if value in self.reductions:
            pass
        elif value in self.dependent and not may_be_inside:
            raise NotCapturedError(value)
        elif value in self.dependent or (may_be_inside and is_alone and value.user_count == 1 and not value.is_root):
            # No deeper than MAX_CAPTURED: each level adds one.
            self.captured[value] = None
            for operand in value.operands:
                self._take(operand)
            del self.captured[value]  # behind its operands
        else:
            self.externals[value] = None
            return
        self.captured[value] = None

    def _follow(self) -> None:
        """Captures what is computed from the captured alone."""
        pending = [value for value in self.captured if value in self.dependent]
        while pending and len(self.captured) < MAX_CAPTURED:
            for user in pending.pop(0).users:
                if user.opcode in _MOVES and user.shape.element_count == 1:
                    pending.append(user)
                elif user not in self.captured and op_of(user) is not None and self._has_operands(user):
                    self.captured[user] = None
                    self.dependent.add(user)
                    pending.append(user)

    def _has_operands(self, user: HloInstruction) -> bool:
        operands = [behind_moves(operand)[0] for operand in user.operands]
        return user.shape.element_count == 1 and all(
            o in self.captured or o in self.externals or scalar_constant(o) is not None for o in operands
        )

    def results(self, gone: set[HloInstruction]) -> list[HloInstruction]:
        """The captured that somebody outside needs: whose users are not all `gone`."""
        return [
            value
            for value in self.captured
            if value in self.dependent and (value.is_root or any(user not in gone for user in value.users))
        ]


class NodeBuilder:
    """Writes nodes: tensors and scalars by the instruction whose value they are, each once."""

    def __init__(self, chain: Chain, capture: ScalarCapture) -> None:
        self.chain = chain
        self.capture = capture
        self.nodes: list[Node] = []
        self.operands: list[HloInstruction] = []
        self._uids: dict[HloInstruction | tuple[str, str], int] = {}
        self.add("x", chain.x.shape.element_type)
        self._uids[chain.x] = 1

    def add(self, op: str, type_: str, operands: tuple[int, ...] = (), literal: str = "") -> int:
        self.nodes.append(Node(len(self.nodes) + 1, type_, op, operands, literal))
        return len(self.nodes)

    def tensor(self, wanted: HloInstruction) -> int:
        """The uid of a tensor of the chain."""
        for step in self.chain.steps:
            if wanted in self._uids:
                break
            if step.instruction not in self._uids:
                scales = (self.scalar(step.scale),) if step.scale is not None else ()
                opcode, type_ = step.instruction.opcode, step.instruction.shape.element_type
                self._uids[step.instruction] = self.add(opcode, type_, (self._uids[step.source], *scales))
        return self._uids[wanted]

    def scalar(self, instruction: HloInstruction) -> int:
        """The uid of a scalar that is captured, an operand or a constant."""
        value, _ = behind_moves(instruction)
        type_ = value.shape.element_type
        if (literal := scalar_constant(value)) is not None:
            key = (type_, literal)
            if key not in self._uids:
                self._uids[key] = self.add("constant", type_, literal=literal)
            return self._uids[key]
        if value not in self._uids:
            self._uids[value] = self._write(value, type_)
        return self._uids[value]

    def _write(self, value: HloInstruction, type_: str) -> int:
        if value in self.capture.externals:
            self.operands.append(value)
            return self.add("scalar", type_)
        if (reduction := self.capture.reductions.get(value)) is not None:
            return self._reduction(reduction, type_)
        if (tensor := self._range_of(value)) is not None:
            return self._reduced("amax", tensor)
        op = op_of(value)
        assert op is not None  # else it would not be captured
        return self.add(op, type_, tuple(self.scalar(operand) for operand in value.operands))

    def _reduction(self, reduction: Reduction, type_: str) -> int:
        uid = self._reduced(reduction.op, reduction.tensor)
        if reduction.tensor.shape.element_type != type_:
            uid = self.add("convert", type_, (uid,))
        return self.add("maximum", type_, (uid, self.scalar(reduction.floor))) if reduction.floor is not None else uid

    def _reduced(self, op: str, tensor: HloInstruction) -> int:
        """The uid of a reduction. Programs take one amax twice: to track it, and to quantize."""
        operand = self.tensor(tensor)
        key = (op, str(operand))
        if key not in self._uids:
            self._uids[key] = self.add(op, tensor.shape.element_type, (operand,))
        return self._uids[key]

    def _range_of(self, value: HloInstruction) -> HloInstruction | None:
        """The tensor whose amax max(reduce-max, -reduce-min) is; None where it is none.

        The two may differ in the sign of a zero, so where anything but a floor above zero follows it is none.
        """
        if value.opcode != "maximum" or not value.users or not all(map(_has_floor, value.users)):
            return None
        for high, low in (value.operands, value.operands[::-1]):
            top, bottom = behind_moves(high)[0], behind_moves(low)[0]
            if bottom.opcode != "negate":
                continue
            largest = self.capture.reductions.get(top)
            smallest = self.capture.reductions.get(behind_moves(bottom.operand(0))[0])
            if largest is None or smallest is None or (largest.op, smallest.op) != ("reduce_max", "reduce_min"):
                continue
            if largest.tensor is smallest.tensor and value.shape.element_type == largest.tensor.shape.element_type:
                return largest.tensor
        return None


def _has_floor(user: HloInstruction) -> bool:
    return user.opcode == "maximum" and any((constant_of(operand) or 0) > 0 for operand in user.operands)


def behind_moves(instruction: HloInstruction) -> tuple[HloInstruction, bool]:
    """The number that is broadcast or reshaped to `instruction`, and whether nobody else uses what is between."""
    is_alone = True
    while (
        instruction.opcode in _MOVES
        and instruction.shape.element_type == instruction.operand(0).shape.element_type
        and not instruction.has_control_dependencies
    ):
        is_alone &= instruction.user_count == 1 and not instruction.is_root
        instruction = instruction.operand(0)
    return instruction, is_alone


def scalar_constant(value: HloInstruction) -> str | None:
    """The text of a constant, None where `value` is none."""
    if value.opcode != "constant" or value.shape.element_type not in _TYPES:
        return None
    if value.shape.is_scalar:
        return None if value.is_elided_constant else value.payload
    scalar: Scalar | None = scalar_of(value)
    array = value.constant_value() if scalar is not None else None
    return None if array is None else format_scalar(array.reshape(-1)[0].item(), value.shape.element_type)


def op_of(value: HloInstruction) -> str | None:
    """The op of the call's string that a scalar instruction is; None where there is none."""
    shapes = [value.shape, *(operand.shape for operand in value.operands)]
    if any(not shape.is_array or shape.element_type not in _TYPES for shape in shapes):
        return None
    if value.has_control_dependencies:
        return None
    if value.opcode == "compare":
        return None if value.attr("type") == "TOTALORDER" else value.comparison_direction.lower()
    if value.opcode != "convert" and value.shape.element_count != 1:
        return None
    op = value.opcode.replace("-", "_")
    return op if op in SCALAR_OPS else None
