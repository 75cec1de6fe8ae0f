"""Which fused casts and statistics there is a kernel for."""

from __future__ import annotations

from xla_fp8.backends.fused_cast.problem import REDUCTIONS, FusedCast, Statistics, Table
from xla_fp8.backends.fused_cast.tiling import parts_of, tiling_of
from xla_fp8.backends.protocol import No, Yes
from xla_fp8.target import Verdict

_TYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32")
_LARGEST_SIZE = 2**31 - 2**20


def _have_columns(problem: FusedCast) -> list[bool]:
    """Of each value, whether it has several numbers in a row."""
    found = [not isinstance(operand, Table) or bool(operand.columns) for operand in problem.operands]
    for node in problem.nodes:
        is_of_columns = any(found[o] for o in node.operands if isinstance(o, int))
        found.append(is_of_columns and node.op not in REDUCTIONS)
    return found


def supports_sums(statistics: Statistics) -> Verdict:
    """Whether there is a kernel that only makes sums."""
    if statistics.rows * statistics.columns > _LARGEST_SIZE:
        return No(f"more than {_LARGEST_SIZE} elements; Pallas' offsets of bytes have 32 bits")
    parts = parts_of(statistics)
    return parts if isinstance(parts, No) else Yes()


def supports(problem: FusedCast) -> Verdict:
    """Whether there is a kernel."""
    has_columns = _have_columns(problem)
    for result in problem.results:
        if result.kind == "row" and any(has_columns[value] for value in result.values):
            return No("a result by row of a value that has more than one number in a row")
        if result.dtype.name not in _TYPES:
            return No(f"{result.dtype.name}; Triton converts to {', '.join(_TYPES)} alone on a Hopper GPU")
    if problem.rows * problem.columns > _LARGEST_SIZE:
        return No(f"more than {_LARGEST_SIZE} elements; Pallas' offsets of bytes have 32 bits")
    statistics = problem.statistics
    for found in (tiling_of(problem), parts_of(statistics) if statistics is not None else None):
        if isinstance(found, No):
            return found
    return Yes()
