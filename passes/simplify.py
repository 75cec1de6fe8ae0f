"""simplify: the idioms that JAX writes, in the form that later passes look for. Every rule keeps every value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from xla_fp8.hlo import HloComputation, HloInstruction, HloModule, Shape
from xla_fp8.passes.base import Pass, rewritable_computations
from xla_fp8.passes.equal_casts import equal_casts
from xla_fp8.passes.values import WIDE_TYPES, bounded, broadcast_scalar, constant_of, scalar_of
from xla_fp8.target import Target

Rule = Callable[[HloInstruction], HloInstruction | None]


class Simplify(Pass):
    """Rewrites selects to min and max, these to clamps, and scalars behind layers of broadcasts to one.

    Before::

        %max = f32[8] maximum(%lows, %x)
        %min = f32[8] minimum(%highs, %max)
        %wide = f32[8] convert(%scales)          ; %scales = bf16[8] broadcast(%scale)

    After::

        %clamp = f32[8] clamp(%lows, %x, %highs)
        %wide = f32[8] broadcast(f32[] convert(%scale))

    Also removes converts, reshapes and transposes that change nothing, and casts to FP8 that another one equals.
    min(max(x, lo), hi) is clamp(lo, x, hi) for lo <= hi, NaN included: HLO's minimum, maximum and clamp all hand NaN
    on. So does select(x > hi, hi, x), which is min(x, hi); select(x < hi, x, hi), which makes hi of NaN, is not.
    Selects of 0 are left alone: of -0 they may make another zero than a maximum does.
    """

    name = "simplify"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for computation in rewritable_computations(module):
            instructions = computation.instructions
            # Operands before users, so that the rules see simplified operands.
            if self.apply(RULES, instructions):
                computation.remove_dead()
                computation.restore_order()
                instructions, changed = computation.instructions, True
            # Users first: in min(max(min(y, 6), -448), 448) it is the outer two that are the saturating clamp.
            if self.apply(CLAMP_RULES, reversed(instructions)):
                computation.remove_dead()
                computation.restore_order()
                changed = True
            if self.merge_casts(computation):
                computation.remove_dead()
                changed = True
        return changed

    def merge_casts(self, computation: HloComputation) -> bool:
        """Quantizes a tensor once where the program does so several times in the same way."""
        merged = False
        for cast, first in equal_casts(computation):
            if cast.has_control_dependencies or not self.context.consume_fuel():
                continue
            computation.replace(cast, first)
            merged = True
        return merged

    def apply(self, rules: Mapping[str, tuple[Rule, ...]], instructions: Iterable[HloInstruction]) -> bool:
        """Replaces each instruction that a rule has something for; returns whether there was one."""
        applied = False
        for instruction in instructions:
            computation = instruction.parent
            if computation is None or instruction.has_control_dependencies:
                continue
            if self.context.fuel == 0:
                break
            for rule in rules.get(instruction.opcode, ()):
                new = rule(instruction)
                if new is None:
                    continue
                self.context.consume_fuel()
                if (sharding := instruction.sharding) and new.sharding is None and new.opcode != "parameter":
                    new.attributes["sharding"] = sharding
                name = instruction.name
                computation.replace(instruction, new)
                if rule is not no_change:
                    computation.rename(new, name)
                applied = True
                break
        return applied


def min_max_to_clamp(instruction: HloInstruction) -> HloInstruction | None:
    """min(max(x, lo), hi) or max(min(x, hi), lo) → clamp(lo, x, hi), for constants lo <= hi."""
    outer = instruction.operands
    for inner, bound in (outer, outer[::-1]):
        if inner.opcode not in ("maximum", "minimum") or inner.opcode == instruction.opcode or inner.user_count != 1:
            continue
        outer_bound = constant_of(bound)
        if outer_bound is None:
            continue
        for x, other in (inner.operands, inner.operands[::-1]):
            inner_bound = constant_of(other)
            if inner_bound is None:
                continue
            low, high = (other, bound) if instruction.opcode == "minimum" else (bound, other)
            if (inner_bound <= outer_bound) if instruction.opcode == "minimum" else (outer_bound <= inner_bound):
                return _create(instruction, "clamp", instruction.shape, [low, x, high])
    return None


def select_to_min_max(instruction: HloInstruction) -> HloInstruction | None:
    """select(x < lo, lo, x) → max(x, lo) and select(x > hi, hi, x) → min(x, hi), for constants that are not 0."""
    if instruction.shape.element_type not in WIDE_TYPES:
        return None
    found = bounded(instruction)
    if found is None or not found.keeps_nan or found.bound == 0:
        return None
    return _create(instruction, found.opcode, instruction.shape, [found.value, found.bound_operand])


def one_broadcast(instruction: HloInstruction) -> HloInstruction | None:
    """A scalar that reaches its shape through several broadcasts, converts, reshapes → one broadcast of it."""
    if instruction.shape.is_scalar or not instruction.shape.is_array or instruction.shape.is_dynamic:
        return None
    source = instruction.operand(0)
    if instruction.opcode == "broadcast" and source.shape.is_scalar:
        return None
    if instruction.shape.element_count == 1:
        return None
    scalar = scalar_of(instruction)
    if scalar is None or (scalar.source.opcode == "constant" and not scalar.source.shape.is_scalar):
        return None
    computation = instruction.parent
    assert computation is not None
    value = scalar.build(instruction.shape.element_type)
    broadcast = broadcast_scalar(computation, value, instruction.shape.dimensions)
    broadcast.shape = instruction.shape
    _copy_metadata(instruction, broadcast)
    return broadcast


def no_change(instruction: HloInstruction) -> HloInstruction | None:
    """A convert, reshape or transpose whose result is its operand."""
    source = instruction.operand(0)
    if source.shape != instruction.shape:
        return None
    if instruction.opcode == "transpose" and instruction.dimensions != tuple(range(instruction.shape.rank)):
        return None
    return source


RULES: Mapping[str, tuple[Rule, ...]] = {
    "select": (select_to_min_max,),
    "broadcast": (one_broadcast,),
    "convert": (no_change, one_broadcast),
    "reshape": (no_change, one_broadcast),
    "transpose": (no_change, one_broadcast),
}
"""Rules by the opcode they look at."""

CLAMP_RULES: Mapping[str, tuple[Rule, ...]] = {"minimum": (min_max_to_clamp,), "maximum": (min_max_to_clamp,)}


def _create(instruction: HloInstruction, opcode: str, shape: Shape, operands: list[HloInstruction]) -> HloInstruction:
    computation = instruction.parent
    assert computation is not None
    return computation.create(opcode, shape, operands, before=instruction, metadata_from=instruction)


def _copy_metadata(source: HloInstruction, new: HloInstruction) -> None:
    if metadata := source.attr("metadata"):
        new.attributes["metadata"] = metadata
