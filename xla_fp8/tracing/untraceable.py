"""Functions that JAX cannot trace because they need the values of their arguments: how to tell, and what to say."""

from __future__ import annotations

import linecache
import re
import textwrap
from types import TracebackType

import jax

from xla_fp8 import _jax_compat
from xla_fp8.tracing.errors import UntraceableError

_ADVICE: tuple[tuple[type[Exception], str], ...] = (
    (jax.errors.TracerBoolConversionError, "jnp.where, lax.cond or lax.while_loop instead of `if` or `while`"),
    (jax.errors.NonConcreteBooleanIndexError, "jnp.where(mask, x, fill) instead of x[mask], whose shape is not known"),
    (jax.errors.TracerArrayConversionError, "jax.numpy instead of numpy, or jax.pure_callback around numpy"),
    (jax.errors.TracerIntegerConversionError, "lax.fori_loop, or lax.dynamic_slice, instead of Python's integers"),
    (jax.errors.ConcretizationTypeError, "jax.numpy on the array instead of float(), int(), bool() or .item()"),
    (TypeError, "shapes that are Python numbers, known when the function is traced"),
)
"""What to write instead, by JAX's error: the first that fits."""


def is_untraceable(error: Exception) -> bool:
    """Whether JAX raised `error` because a value was needed where only shape and type are known."""
    if isinstance(error, jax.errors.UnexpectedTracerError):  # a leak, which plain JAX does not forgive either
        return False
    known = tuple(kind for kind, _ in _ADVICE[:-1])
    # Of shapes JAX says it with a plain TypeError.
    return isinstance(error, known) or (type(error) is TypeError and "concrete values" in str(error))


def untraceable(name: str, error: Exception) -> UntraceableError:
    """The error for a function called `name` whose tracing ended with `error`."""
    lines = [line for line in str(error).splitlines() if not line.startswith("See https://")]
    says = textwrap.indent("\n".join(lines), "  ")
    return UntraceableError(f"{name} cannot be traced: {reason(error)}\n{_advice(error)}\nJAX says:\n{says}")


def reason(error: Exception) -> str:
    """What is needed, and on which line of the user's, with the line."""
    found = re.search(r"depends on the values? of the arguments? (.+)\.$", str(error), re.M)
    what = f"the value of {found[1]}" if found else "a value that it computes"
    return f"it needs {what}, which tracing hides{_line(error.__traceback__)}"


def _advice(error: Exception) -> str:
    instead = next(advice for kind, advice in _ADVICE if isinstance(error, kind))
    return (
        f"Use {instead}. Or make what it depends on no array: a Python number, string or bool is taken as it is by "
        "explain and rewrite, and by jit where static_argnums or static_argnames names it."
    )


def _line(traceback: TracebackType | None) -> str:
    """The innermost line of the user's that a traceback goes through; "" where there is none."""
    line = ""
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if _jax_compat.is_user_file(file):
            code = linecache.getline(file, traceback.tb_lineno).strip()
            line = f" ({file}:{traceback.tb_lineno}: {code})" if code else f" ({file}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return line
