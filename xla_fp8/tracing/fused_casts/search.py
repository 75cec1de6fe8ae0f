"""The groups of a program, one after the other: each knows what those before it compute, read and give."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.fused_casts import roots
from xla_fp8.tracing.fused_casts.found import Found, Group, Reason, Unfused
from xla_fp8.tracing.fused_casts.program import Program
from xla_fp8.tracing.fused_casts.walk import group_of
from xla_fp8.tracing.quantizations import is_cast


def fused_casts(flow: DataFlow, outvars: Iterable[object], taken: Collection[int]) -> Found:
    """What kernels compute: casts, each with what is in front of it; then other tensors and sums of training.

    Args:
        outvars: results of the program.
        taken: equations that a graph of a convolution or dot computes.
    """
    program = Program.of(flow, outvars, taken)
    casts, unfused = roots.casts(program)
    groups: list[Group] = []
    for root in (*casts, *roots.tensors(program), *roots.sums(program)):
        equation = flow.equations[root.equation]
        if root.equation in program.fused or program.is_made(equation):
            continue
        found = group_of(program, root)
        if not isinstance(found, Reason):
            group, duplicated = found
            groups.append(group)
            program.add(len(groups), group, duplicated)
        elif is_cast(equation):
            unfused.append(Unfused(root.equation, found.text, found.blame))
    # A later group may have one as a sibling.
    left = [cast for cast in unfused if not program.is_made(flow.equations[cast.equation])]
    return Found(tuple(groups), tuple(sorted(left, key=lambda cast: cast.equation)))
