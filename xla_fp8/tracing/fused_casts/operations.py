"""What an operation is to a kernel, of itself: elementwise, a view, a number of the program's."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import problem as problems
from xla_fp8.tracing.equations import Equation, is_literal
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.rows import VIEWS, element_count

NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
"""Of tensors that kernels read."""

_FLOATS = (*NARROW, jnp.dtype(jnp.float32))


def is_elementwise(equation: Equation) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call":  # relu, and what refuses to be differentiated
        inner = _jax_compat.open_jaxpr(flat(equation.params["call_jaxpr"])).eqns
        return all(is_elementwise(e) and is_operand(e.outvars[0]) for e in inner)
    if name == "convert_element_type":
        return all(map(_is_float, (*equation.invars, *equation.outvars)))
    if name == "select_n":
        return len(equation.invars) == 3
    is_of_floats = name in problems.COMPARISONS or all(map(_is_float, equation.invars))
    return name in problems.ELEMENTWISE and is_of_floats


def is_view(equation: Equation) -> bool:
    return equation.primitive.name in VIEWS


def is_constant(equation: Equation) -> bool:
    """Whether a result is a number of the program's."""
    return all(map(is_literal, equation.invars)) and element_count(equation.outvars[0]) == 1


def is_maximum(equation: Equation) -> bool:
    """Whether an equation finds the largest of all elements."""
    return equation.primitive.name == "reduce_max" and element_count(equation.outvars[0]) == 1


def is_operand(atom: Any) -> bool:
    """Whether a value is of a type that nodes have: a float of 16 or 32 bits, or a truth value."""
    return _is_float(atom) or getattr(atom.aval, "dtype", None) == np.dtype(bool)


def _is_float(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) in _FLOATS
