"""What the kernel of a group can compute, and what it can read. Answers are reasons why not, or None."""

from __future__ import annotations

from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import problem as problems
from xla_fp8.tracing.equations import is_literal, variables
from xla_fp8.tracing.fused_casts.found import Reason
from xla_fp8.tracing.fused_casts.members import Members
from xla_fp8.tracing.fused_casts.operations import NARROW, is_constant, is_elementwise, is_operand
from xla_fp8.tracing.rows import columns_of, is_reshape

_MOVES = frozenset({"broadcast_in_dim", "concatenate", "dynamic_slice", "pad", "rev", "slice", "transpose"})
"""What XLA fuses with what reads it; for a kernel it would be written to memory first."""


def why_not_computed(members: Members, index: int) -> str | None:
    """Why the kernel cannot compute an equation, which is spread as the group says, and reads its result instead."""
    equation, spread, rows = members.equation(index), members.spread[index], members.rows
    name = equation.primitive.name
    if equation.effects or _jax_compat.has_own_context(equation):
        return "which stays as it is: it has effects, or stands under compute_on or set_xla_metadata"
    if not is_operand(equation.outvars[0]):
        return f"whose type kernels do not compute: {type_of(equation.outvars[0])}"
    if len(equation.outvars) > 1 and name != "split":  # a custom_jvp_call
        return "which has several results"
    if name in ("split", "slice"):
        is_of_columns = equation.invars[0].aval.dtype in NARROW and columns_of(equation, rows)
        return None if is_of_columns else "which is of other elements than whole columns of a tensor of 16 bits"
    if name == "concatenate":
        return None if joins_tensors(members, index) else "whose parts are no columns of 16 bits in memory"
    if name == "convert_element_type" and is_constant(equation):  # a bound of jnp.clip, which may be an integer
        return None
    others = [atom for atom in equation.invars if not is_operand(atom)]
    if others:
        return f"which reads what kernels do not: {type_of(others[0])}"
    if index in members.summed and spread in ("row", "column", "group"):
        return "which is a statistic of statistics: XLA makes the inner ones"
    if name in problems.REDUCTIONS and not is_reshape(equation):
        if spread == "group":
            is_of_groups = rows.groups_of_sum(equation) is not None and not members.readers_outside(index)
            return None if is_of_groups else "which adds up no groups of columns, or has other readers"
        is_of_rows = spread == "row" and rows.are_reduced_by(equation)
        return None if is_of_rows else "which does not reduce rows"
    if not is_reshape(equation) and name != "broadcast_in_dim" and not is_elementwise(equation):
        return "which kernels do not compute"
    if any(rows.spread(atom, equation, spread) is None for atom in variables(equation.invars)):
        return "whose operands are spread over parts of rows"
    return None


def joins_tensors(members: Members, index: int) -> bool:
    """Whether a concatenation is of columns, and of tensors in memory."""
    equation = members.equation(index)
    shape = equation.outvars[0].aval.shape
    return (
        equation.params["dimension"] == len(shape) - 1
        and shape[-1] == members.rows.columns
        and members.rows.hold(equation.outvars[0])
        and all(not is_literal(atom) and why_not_readable(members, atom, index) is None for atom in equation.invars)
    )


def why_not_readable(members: Members, atom: Any, reader: int | None = None) -> Reason | None:
    """Why what the kernel, or a reader that it computes, would read is not in memory in any case, and of 16 bits.

    XLA fuses other things with what reads them: moves, and operations that the kernel cannot do.
    """
    program, producer = members.program, members.flow.producer.get(atom)
    is_narrow = atom.aval.dtype in NARROW
    if producer is None or not members.flow.chain[producer] or atom in program.made:
        if is_narrow:
            return None
        return Reason(f"it reads {type_of(atom)}, and kernels read tensors of 16 bits", producer)
    name = members.equation(producer).primitive.name
    if name in _MOVES:
        return Reason(f"it reads the result of a {name}, which XLA fuses", producer)
    if is_narrow and (producer in program.taken or _has_other_readers(members, producer, reader)):
        return None
    stop = members.stops.get(producer, "which nothing else reads")
    return Reason(f"it reads the result of a {name}, {stop}", producer)


def _has_other_readers(members: Members, index: int, reader: int | None) -> bool:
    """Whether a result is needed by others than the group, and than one reader."""
    is_given = members.program.gives(members.equation(index))
    return is_given or any(other != reader for other in members.readers_outside(index))


def type_of(atom: Any) -> str:
    short: str = atom.aval.str_short(short_dtypes=True)
    return short
