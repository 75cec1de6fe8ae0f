"""Values as passes ask for them: the one number behind a broadcast, the vector behind a per-channel scale.

JAX writes the same scale in many ways: converted before or after it is broadcast, as `f32[]`, `f32[1]` or
`f32[1,1,1,1]`, behind a reshape. These helpers find the number; `Scalar.build` makes the instruction that holds it.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from xla_fp8.hlo import HloComputation, HloInstruction, Shape
from xla_fp8.hlo.literal import format_scalar, numpy_dtype

WIDE_TYPES = ("f32", "bf16", "f16")
"""The types a chain may compute in; f64 is refused, since the graph computes in f32."""

_TRANSPARENT = ("broadcast", "convert", "reshape", "bitcast", "copy", "transpose")
_MAX_DEPTH = 16

MOVES = frozenset({"reshape", "bitcast", "transpose", "copy", "reverse"})
"""What changes the order of the elements and nothing else."""


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A single number that an instruction repeats.

    Attributes:
        source: an instruction with one element, or a constant whose elements are all equal.
        converts: element types it is converted to on the way, in order.
    """

    source: HloInstruction
    converts: tuple[str, ...] = ()

    def build(self, element_type: str = "f32") -> HloInstruction:
        """A scalar of that type holding the value, made in the source's computation."""
        computation = self.source.parent
        assert computation is not None
        value = self.source
        if value.opcode == "constant" and not value.shape.is_scalar:
            literal = value.constant_value()
            assert literal is not None
            text = format_scalar(literal.reshape(-1)[0].item(), value.shape.element_type)
            value = computation.create("constant", Shape(value.shape.element_type), payload=text)
        elif not value.shape.is_scalar:
            value = computation.create("reshape", Shape(value.shape.element_type), [value], metadata_from=value)
        for type_ in (*self.converts, element_type):
            if value.shape.element_type != type_:
                value = computation.create("convert", Shape(type_), [value], metadata_from=self.source)
        return value

    def constant(self) -> float | None:
        """The value where it is a constant: rounded to each type on the way."""
        if self.source.opcode != "constant":
            return None
        array = self.source.constant_value()
        if array is None:
            return None
        value = array.reshape(-1)[:1]
        for type_ in self.converts:
            value = value.astype(numpy_dtype(type_))
        return float(value[0])


def scalar_of(instruction: HloInstruction) -> Scalar | None:
    """The number that every element of `instruction` is, or None where it is not one number repeated."""
    converts: list[str] = []
    current = instruction
    for _ in range(_MAX_DEPTH):
        if not current.shape.is_array or current.shape.is_dynamic:
            return None
        if current.opcode == "constant":
            if current.shape.element_count != 1 and not _is_uniform(current):
                return None
            return Scalar(current, tuple(reversed(converts)))
        if current.shape.element_count == 1 and current.opcode not in _TRANSPARENT:
            return Scalar(current, tuple(reversed(converts)))
        if current.opcode not in _TRANSPARENT:
            return None
        if current.opcode == "convert":
            converts.append(current.shape.element_type)
        current = current.operand(0)
    return None


def constant_of(instruction: HloInstruction) -> float | None:
    """The constant that every element of `instruction` is, or None."""
    scalar = scalar_of(instruction)
    return scalar.constant() if scalar else None


@dataclasses.dataclass(frozen=True)
class Bounded:
    """A maximum or minimum of a value and a constant, or a select that is one: jnp.where(value < bound, bound, value).

    Attributes:
        opcode: "maximum" or "minimum".
        value: what is bounded.
        bound_operand, bound: the constant.
        keeps_nan: whether it is NaN where `value` is, as HLO's maximum and minimum are; else it is `bound` there.
    """

    opcode: str
    value: HloInstruction
    bound_operand: HloInstruction
    bound: float
    keeps_nan: bool = True

    def keeps_side_of(self, other: float) -> bool:
        """Whether the result is beyond `other`, on the side that is not bounded, exactly where `value` is."""
        return self.bound >= other if self.opcode == "minimum" else self.bound <= other


def bounded(instruction: HloInstruction, nested: bool = True) -> Bounded | None:
    """`instruction` as a maximum or minimum with a constant; None where it is neither.

    Args:
        nested: whether what a select compares may be the inside of another one: where(y < 0, 0, where(y > 6, 6, y)).
    """
    if instruction.opcode in ("maximum", "minimum"):
        for value, other in (instruction.operands, instruction.operands[::-1]):
            if (bound := constant_of(other)) is not None and not math.isnan(bound):
                return Bounded(instruction.opcode, value, other, bound)
        return None
    if instruction.opcode != "select":
        return None
    compare, when_true, when_false = instruction.operands
    if compare.opcode != "compare" or compare.attr("type") == "TOTALORDER":
        return None
    direction = compare.attr("direction")
    for value, keeps_nan, other in ((when_false, True, when_true), (when_true, False, when_false)):
        bound = constant_of(other)
        if bound is None or math.isnan(bound):
            continue
        for compared, less in ((0, ("LT", "LE")), (1, ("GT", "GE"))):
            if direction not in ("LT", "LE", "GT", "GE") or constant_of(compare.operand(1 - compared)) != bound:
                continue
            # Where the value is less, the bound is taken (a maximum), or the value is (a minimum).
            opcode = "maximum" if (direction in less) == keeps_nan else "minimum"
            subject = compare.operand(compared)
            if subject is value or (nested and _bounded_on_the_other_side(value, subject, bound, opcode)):
                return Bounded(opcode, value, other, bound, keeps_nan)
    return None


def _bounded_on_the_other_side(value: HloInstruction, compared: HloInstruction, bound: float, opcode: str) -> bool:
    """Whether comparing `compared` says the same as comparing `value`."""
    inner = bounded(value, nested=False)
    return (
        inner is not None
        and inner.opcode != opcode
        and inner.value is compared
        and inner.keeps_nan
        and inner.keeps_side_of(bound)
    )


def _is_uniform(constant: HloInstruction) -> bool:
    # Large constants are never a scale written out; reading megabytes of text to find that out is not worth it.
    if constant.shape.element_count > 4096:
        return False
    value = constant.constant_value()
    return value is not None and value.size > 0 and bool((value == value.reshape(-1)[0]).all())


@dataclasses.dataclass(frozen=True)
class ChannelVector:
    """A vector repeated along every dimension of a tensor but one.

    Attributes:
        source: an instruction whose elements, in order, are the vector.
        dimension: the dimension of the tensor that the vector runs along.
        converts: as in Scalar.
        then: "negate" or "reciprocal" where that is what is wanted of the vector.
    """

    source: HloInstruction
    dimension: int
    converts: tuple[str, ...] = ()
    then: Literal["", "negate", "reciprocal"] = ""

    def build(self, length: int, element_type: str = "f32") -> HloInstruction:
        """`element_type[length]` holding the vector."""
        computation = self.source.parent
        assert computation is not None
        value = self.source
        if value.shape.rank != 1:
            shape = Shape.array(value.shape.element_type, (length,))
            value = computation.create("reshape", shape, [value], metadata_from=value)
        for type_ in (*self.converts, element_type):
            if value.shape.element_type != type_:
                shape = value.shape.with_element_type(type_)
                value = computation.create("convert", shape, [value], metadata_from=self.source)
        if self.then == "negate":
            return computation.create("negate", value.shape, [value], metadata_from=self.source)
        if self.then == "reciprocal":
            one = computation.create("constant", Shape(value.shape.element_type), payload="1")
            ones = broadcast_scalar(computation, one, value.shape.dimensions)
            return computation.create("divide", value.shape, [ones, value], metadata_from=self.source)
        return value


def channel_vector_of(instruction: HloInstruction) -> ChannelVector | None:
    """The vector that `instruction` broadcasts along one of its dimensions, or None."""
    converts: list[str] = []
    current = instruction
    dimension: int | None = None
    for _ in range(_MAX_DEPTH):
        if not current.shape.is_array:
            return None
        if current.opcode == "convert":
            converts.append(current.shape.element_type)
            current = current.operand(0)
            continue
        if current.opcode == "broadcast":
            source = current.operand(0)
            dims = current.dimensions
            if dimension is None:
                # Dimensions of size 1 in the source say nothing; exactly one other may be left.
                varying = [i for i, size in enumerate(source.shape.dimensions) if size != 1]
                if len(varying) != 1:
                    return None
                dimension = dims[varying[0]]
                index = varying[0]
            else:
                if index not in dims:
                    return None
                index = dims.index(index)
            current = source
            continue
        if dimension is not None and current.opcode in ("reshape", "bitcast"):
            source = current.operand(0)
            sizes = [size for size in source.shape.dimensions if size != 1]
            if len(sizes) > 1:
                return None
            index = next((i for i, size in enumerate(source.shape.dimensions) if size != 1), 0)
            current = source
            continue
        break
    if dimension is None or current.shape.element_count != instruction.shape.dimensions[dimension]:
        return None
    return ChannelVector(current, dimension, tuple(reversed(converts)))


def as_f32(instruction: HloInstruction) -> HloInstruction:
    """The same tensor in f32."""
    if instruction.shape.element_type == "f32":
        return instruction
    computation = instruction.parent
    assert computation is not None
    return computation.create(
        "convert", instruction.shape.with_element_type("f32"), [instruction], metadata_from=instruction
    )


def transpose(instruction: HloInstruction, permutation: tuple[int, ...]) -> HloInstruction:
    """`instruction` with output dimension i being its dimension permutation[i]; folds into a transpose before it."""
    computation = instruction.parent
    assert computation is not None
    if instruction.opcode == "transpose":
        inner = instruction.dimensions
        permutation = tuple(inner[d] for d in permutation)
        instruction = instruction.operand(0)
    if permutation == tuple(range(len(permutation))):
        return instruction
    sizes = [instruction.shape.dimensions[d] for d in permutation]
    if instruction.opcode == "broadcast":
        # A transposed broadcast is a broadcast: its dimensions land elsewhere.
        dims = tuple(permutation.index(d) for d in instruction.dimensions)
        if list(dims) == sorted(dims):
            return computation.create(
                "broadcast",
                instruction.shape.with_dimensions(sizes),
                [instruction.operand(0)],
                attributes={"dimensions": "{" + ",".join(map(str, dims)) + "}"},
                metadata_from=instruction,
            )
    return computation.create(
        "transpose",
        instruction.shape.with_dimensions(sizes),
        [instruction],
        attributes={"dimensions": "{" + ",".join(map(str, permutation)) + "}"},
        metadata_from=instruction,
    )


def inverse_permutation(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(permutation.index(d) for d in range(len(permutation)))


def broadcast_scalar(
    computation: HloComputation, scalar: HloInstruction, dimensions: tuple[int, ...]
) -> HloInstruction:
    """A scalar repeated over `dimensions`."""
    return computation.create(
        "broadcast",
        Shape.array(scalar.shape.element_type, dimensions),
        [scalar],
        attributes={"dimensions": "{}"},
        metadata_from=scalar,
    )


def reduces_with(reduce: HloInstruction, opcode: str) -> bool:
    """Whether the reduction applies `opcode` to its two parameters."""
    root = reduce.to_apply.root
    return (
        root.opcode == opcode
        and len(root.operands) == 2
        and root.operand(0) is not root.operand(1)
        and all(operand.opcode == "parameter" for operand in root.operands)
    )


def take_place(computation: HloComputation, old: HloInstruction, new: HloInstruction) -> None:
    """`new` in place of `old`, under its name and with its metadata and sharding."""
    for attribute in ("sharding", "metadata"):
        if (value := old.attr(attribute)) and not new.attr(attribute):
            new.attributes[attribute] = value
    computation.replace_all_uses_with(old, new)
    if not old.users and not old.has_control_dependencies:
        name = old.name
        computation.remove(old)
        computation.rename(new, name)
