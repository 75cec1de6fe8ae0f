"""simplify: the idioms that JAX writes, in the form that later passes look for. Every rule keeps every value."""

from __future__ import annotations

from collections.abc import Callable

from xla_fp8.hlo import HloInstruction, HloModule, Shape
from xla_fp8.passes.base import Pass, rewritable_computations
from xla_fp8.passes.values import broadcast_scalar, constant_of, scalar_of
from xla_fp8.target import Target

Rule = Callable[[HloInstruction], HloInstruction | None]


class Simplify(Pass):
    """Rewrites min/max pairs to clamps and scalars behind layers of broadcasts to one broadcast.

    Before::

        %max = f32[8] maximum(%lows, %x)
        %min = f32[8] minimum(%highs, %max)
        %wide = f32[8] convert(%scales)          ; %scales = bf16[8] broadcast(%scale)

    After::

        %clamp = f32[8] clamp(%lows, %x, %highs)
        %wide = f32[8] broadcast(f32[] convert(%scale))

    Also removes converts, reshapes and transposes that change nothing. min(max(x, lo), hi) is clamp(lo, x, hi) for
    lo <= hi, NaN included: HLO's minimum, maximum and clamp all hand NaN on.
    """

    name = "simplify"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for computation in rewritable_computations(module):
            touched = False
            # Operands before users, so that one sweep sees simplified operands.
            for instruction in computation.instructions:
                if instruction.parent is not computation or instruction.has_control_dependencies:
                    continue
                if self.context.fuel == 0:
                    break
                for rule in RULES.get(instruction.opcode, ()):
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
                    touched = True
                    break
            if touched:
                computation.remove_dead()
                computation.restore_order()
                changed = True
        return changed


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


RULES: dict[str, tuple[Rule, ...]] = {
    "minimum": (min_max_to_clamp,),
    "maximum": (min_max_to_clamp,),
    "broadcast": (one_broadcast,),
    "convert": (no_change, one_broadcast),
    "reshape": (no_change, one_broadcast),
    "transpose": (no_change, one_broadcast),
}
"""Rules by the opcode they look at."""


def _create(instruction: HloInstruction, opcode: str, shape: Shape, operands: list[HloInstruction]) -> HloInstruction:
    computation = instruction.parent
    assert computation is not None
    return computation.create(opcode, shape, operands, before=instruction, metadata_from=instruction)


def _copy_metadata(source: HloInstruction, new: HloInstruction) -> None:
    if metadata := source.attr("metadata"):
        new.attributes["metadata"] = metadata
