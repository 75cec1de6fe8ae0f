"""Where groups begin: the equations whose results kernels would be made for, with the rows of these."""

from __future__ import annotations

from typing import NamedTuple

from xla_fp8.tracing.equations import is_plain, why_not_plain
from xla_fp8.tracing.fused_casts.found import Unfused
from xla_fp8.tracing.fused_casts.operations import NARROW, is_elementwise
from xla_fp8.tracing.fused_casts.program import Program
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import Rows

_LEAST_SIZE = 2**16
"""Elements: of fewer a kernel's launch is most of its time."""


class Root(NamedTuple):
    """An equation, by index, and the rows that its group is on."""

    equation: int
    rows: Rows


def casts(program: Program) -> tuple[list[Root], list[Unfused]]:
    """Casts to FP8 that are no graph's, and those that no kernel is made for whatever is in front of them."""
    roots, unfused = [], []
    for index, equation in enumerate(program.flow.equations):
        if not is_cast(equation) or index in program.taken:
            continue
        shape = equation.outvars[0].aval.shape
        rows = Rows.of(shape)
        if not program.flow.chain[index]:
            unfused.append(Unfused(index, why_not_plain(equation), None))
        elif rows is None:
            unfused.append(Unfused(index, f"its shape is {list(shape)}, and kernels are of rows", None))
        elif rows.size < _LEAST_SIZE:
            text = f"{rows.size:,} elements; below {_LEAST_SIZE:,} a launch is most of a kernel's time"
            unfused.append(Unfused(index, text, None))
        else:
            roots.append(Root(index, rows))
    return roots, unfused


def tensors(program: Program) -> list[Root]:
    """Tensors of 16 bits that are in memory: something other than elementwise operations reads them."""
    roots = []
    for index, equation in enumerate(program.flow.equations):
        if not program.flow.chain[index] or index in program.taken or not is_elementwise(equation):
            continue
        result, *others = equation.outvars
        if others or result.aval.dtype not in NARROW:
            continue
        rows, readers = Rows.of(result.aval.shape), program.flow.consumers.get(result, ())
        is_in_memory = result in program.results or any(not program.flow.chain[reader] for reader in readers)
        if rows is not None and rows.size >= _LEAST_SIZE and is_in_memory:
            roots.append(Root(index, rows))
    return roots


def sums(program: Program) -> list[Root]:
    """Sums over all rows: gradients of biases and of what norms multiply by, and the statistics of batch norms. And
    those over groups of columns of each image, the statistics of group norms.

    Those of several tensors first, which take the others of these along.
    """
    equations = [(index, equation) for index, equation in enumerate(program.flow.equations) if is_plain(equation)]
    found = ((index, Rows.summed_by(equation) or Rows.grouped_by(equation)) for index, equation in equations)
    large = [Root(index, rows) for index, rows in found if rows is not None and rows.size >= _LEAST_SIZE]

    def tensor_count(root: Root) -> int:
        [operand] = program.flow.equations[root.equation].invars
        return len(program.tensors.get(operand, ()))

    return sorted(large, key=tensor_count, reverse=True)
