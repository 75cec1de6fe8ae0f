"""Whether a group may grow, and whether its kernel is faster than what XLA makes of the same. Measured on an H200."""

from __future__ import annotations

from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import problem as problems
from xla_fp8.tracing.equations import Equation
from xla_fp8.tracing.fused_casts.computable import why_not_readable
from xla_fp8.tracing.fused_casts.found import Reason
from xla_fp8.tracing.fused_casts.members import Members
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import element_count

MOST_EQUATIONS, MOST_TENSORS = 256, 6
"""Of a kernel. A residual stream in f32 would be added up from all layers before, in each of them again."""

_LEAST_ARITHMETIC = 5
"""Operations on every element, scale and clamp among them; with fewer XLA's kernel is as fast. A norm has 6."""


def is_small(members: Members) -> bool:
    return len(members.computed) <= MOST_EQUATIONS and sum(map(members.rows.hold, members.read)) <= MOST_TENSORS


def why_not_worth_it(members: Members) -> Reason | None:
    """Why there is to be no kernel of a group that grows no more."""
    if len(members.computed) > MOST_EQUATIONS:
        return Reason(f"more than {MOST_EQUATIONS} operations are in front of it")
    if not is_small(members):
        return Reason(f"it reads more than {MOST_TENSORS} tensors")
    if not members.is_consistent or not members.tables.isdisjoint(members.computed):
        return Reason("one value is spread over rows here, and over columns there")
    unreadable = [reason for atom in members.tensors_read() if (reason := why_not_readable(members, atom))]
    # Where there is little because the kernel cannot go on, that is the reason to tell.
    unreadable.sort(key=lambda reason: (reason.blame not in members.stops, reason.blame or 0, reason.text))
    if unreadable and unreadable[0].blame in members.stops:
        return unreadable[0]
    return _why_too_little_arithmetic(members) or next(iter(unreadable), None)


def _why_too_little_arithmetic(members: Members) -> Reason | None:
    equations = [members.equation(index) for index in members.computed]
    count = sum(
        equation.primitive.name in problems.ELEMENTWISE and element_count(equation.outvars[0]) >= members.rows.size
        for equation in equations
    )
    is_enough = count >= _LEAST_ARITHMETIC
    if not any(map(is_cast, equations)):
        # XLA's sums over rows load 2 bytes at a time. Else only training has what saves memory: results for the
        # gradient of a norm, and steps of an activation that its gradient makes again in place of reading them.
        gives_rows = any(map(members.is_sum_of_row, members.computed))
        saves_memory = gives_rows or any(members.may_be_tensor(members.equation(i)) for i in members.duplicated)
        is_enough = any(map(members.is_sum, equations)) or (is_enough and saves_memory)
    if is_enough:
        return None
    operations = "operation" if count == 1 else "operations"
    uncounted = ", relu and the like not counted" if any(map(_is_call_of_arithmetic, equations)) else ""
    return Reason(
        f"{count} {operations} on each element{uncounted}; with fewer than {_LEAST_ARITHMETIC} XLA's own kernel is as "
        "fast"
    )


def _is_call_of_arithmetic(equation: Equation) -> bool:
    """Whether an equation is a call, as relu is, and not one that only refuses to be differentiated."""
    name = equation.primitive.name
    return name == "custom_jvp_call" and bool(_jax_compat.open_jaxpr(equation.params["call_jaxpr"]).eqns)
