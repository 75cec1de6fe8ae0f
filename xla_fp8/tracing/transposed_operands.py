"""Operands of FP8 dots that contract rows, as in the gradient of a weight: x[rows, C], g[rows, K] → [K, C].

cuBLASLt's FP8 matmul needs the contracted dimension innermost, and XLA transposes both operands for it.
A kernel transposes them faster:

    x8 ─ xla_fp8_transpose ─ transpose ─ dequantize ─ dot

XLA makes one dot of the plain transpose and the dot behind it: one that contracts the innermost dimension, which is
what cuBLASLt takes. The program means what it did, and what else reads x8 reads what it read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from xla_fp8 import _jax_compat
from xla_fp8.backends.transpose.exchange import kernel_exchange
from xla_fp8.backends.transpose.primitive import transpose_p
from xla_fp8.tracing.equations import DERIVATIVE_RULES, Equation, Variable, bodies, is_fp8, is_literal, is_plain
from xla_fp8.tracing.rows import element_count

SMALLEST_SIZE = 4_000_000
"""Elements of an operand that is transposed. XLA gives smaller dots to Triton, which reads operands in any order: there
the transpose would be one pass more."""

_WIDTH = 16
"""cuBLASLt's FP8 matmul takes multiples of it alone; other dots XLA computes in wider types."""

_ELEMENTWISE = frozenset({"convert_element_type", "copy", "div", "mul", "pvary", "stop_gradient"})
"""What dequantizes: a tensor, and at most a number beside it."""

_Chain = list[Equation]

_E5M2 = np.dtype(jnp.float8_e5m2)
_TYPES = (np.dtype(jnp.float8_e4m3fn), _E5M2)


def with_transposed_operands(equations: Sequence[Equation]) -> list[Equation]:
    """The equations with each large operand of such a dot transposed by the kernel, once for all dots that read it."""
    producer = {variable: equation for equation in equations for variable in equation.outvars}
    behind: dict[Variable, Variable] = {}  # an FP8 tensor → the same one behind both transposes
    changed: list[Equation] = []
    for equation in equations:
        operands = list(equation.invars)
        for position, (tensor, chain) in enumerate(_chains(equation, producer)):
            if not _is_transposed(tensor):
                continue
            if tensor not in behind:
                transposes = _transposes(tensor, equation)
                changed += transposes
                behind[tensor] = transposes[-1].outvars[0]
            dequantized = _dequantized(behind[tensor], chain)
            changed += dequantized
            operands[position] = dequantized[-1].outvars[0]
        changed.append(equation if operands == equation.invars else equation.replace(invars=operands))
    return changed


def _is_transposed(tensor: Variable) -> bool:
    shape, dtype = tensor.aval.shape, np.dtype(tensor.aval.dtype)
    return element_count(tensor) >= SMALLEST_SIZE and kernel_exchange(shape, _to_front(shape), dtype) is not None


def _to_front(shape: Sequence[int]) -> tuple[int, ...]:
    """The permutation that brings the last dimension to the front."""
    return (len(shape) - 1, *range(len(shape) - 1))


def _transposes(tensor: Variable, dot: Equation) -> list[Equation]:
    """The tensor transposed by the kernel, and that transposed back."""
    shape = tensor.aval.shape
    there, back = _to_front(shape), (*range(1, len(shape)), 0)
    moved = _jax_compat.fresh_variable(tensor.aval.update(shape=tuple(shape[d] for d in there)))
    return [
        _equation(transpose_p, tensor, moved, {"permutation": there, "mirrored": ()}, dot),
        _equation(lax.transpose_p, moved, _jax_compat.fresh_variable(tensor.aval), {"permutation": back}, dot),
    ]


def _equation(primitive: Any, read: Variable, made: Variable, params: dict[str, Any], dot: Equation) -> Equation:
    return core.new_jaxpr_eqn([read], [made], primitive, params, core.no_effects, dot.source_info, dot.ctx)


def _dequantized(tensor: Variable, chain: _Chain) -> list[Equation]:
    """The equations that dequantize a tensor, of another one."""
    made: list[Equation] = []
    for equation in chain:
        before = _tensor(equation)
        operands = [tensor if atom is before else atom for atom in equation.invars]
        tensor = _jax_compat.fresh_variable(equation.outvars[0].aval)
        made.append(equation.replace(invars=operands, outvars=[tensor]))
    return made


def _chains(equation: Equation, producer: dict[Variable, Equation]) -> list[tuple[Variable, _Chain]]:
    """The FP8 tensor of each operand and what dequantizes it; none of what is not such a dot for cuBLASLt."""
    if equation.primitive.name != "dot_general" or not is_plain(equation):
        return []
    contracted, batch = equation.params["dimension_numbers"]
    ranks = [len(operand.aval.shape) for operand in equation.invars]
    contracts_rows = all(
        tuple(dimensions) == tuple(range(rank - 1)) != () for dimensions, rank in zip(contracted, ranks, strict=True)
    )
    if not contracts_rows or any(batch):
        return []
    found = [_dequantization(operand, producer) for operand in equation.invars]
    chains = [chain for chain in found if chain is not None]
    if len(chains) < len(found):
        return []
    types = [np.dtype(tensor.aval.dtype) for tensor, _ in chains]
    # There is no matmul of two tensors in e5m2.
    if any(dtype not in _TYPES for dtype in types) or types == [_E5M2, _E5M2]:
        return []
    sizes = [size for tensor, _ in chains for size in _matrix(tensor)]
    return chains if all(size % _WIDTH == 0 for size in sizes) else []


def _matrix(tensor: Variable) -> tuple[int, int]:
    """Rows and columns."""
    shape = tensor.aval.shape
    return math.prod(shape[:-1]), shape[-1]


def _dequantization(operand: Any, producer: dict[Variable, Equation]) -> tuple[Variable, _Chain] | None:
    """The FP8 tensor that an operand is made of, and the equations from there on; None where it is of anything else."""
    chain: _Chain = []
    while not is_literal(operand) and not is_fp8(operand.aval):
        equation = producer.get(operand)
        if equation is None or (tensor := _tensor(equation)) is None:
            return None
        chain.append(equation)
        operand = tensor
    return None if is_literal(operand) or not chain else (_source(operand, producer), chain[::-1])


def _source(tensor: Variable, producer: dict[Variable, Equation]) -> Variable:
    """The FP8 tensor that calls hand on as it is, which each reader has of its own (`derivatives.refuse`)."""
    while (equation := producer.get(tensor)) is not None and equation.primitive.name in DERIVATIVE_RULES:
        body = _jax_compat.open_jaxpr(next(bodies(equation)))
        (result,) = body.outvars if len(body.outvars) == 1 else (None,)
        if result not in body.invars:
            break
        tensor = equation.invars[body.invars.index(result)]
    return tensor


def _tensor(equation: Equation) -> Any | None:
    """What an equation dequantizes, or hands on; None where it does something else."""
    if equation.primitive.name == "xla_fp8_straight_through":  # whose value is the first operand
        return equation.invars[0]
    if equation.primitive.name not in _ELEMENTWISE:
        return None
    shape = equation.outvars[0].aval.shape
    tensors = [atom for atom in equation.invars if atom.aval.shape == shape]
    others = [atom for atom in equation.invars if atom.aval.shape != shape]
    return tensors[0] if len(tensors) == 1 and all(element_count(atom) == 1 for atom in others) else None
