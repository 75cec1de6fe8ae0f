"""`jit`: jax.jit of a rewritten function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from xla_fp8.api.rewrite import ReportMethod, make_options, rewrite
from xla_fp8.report import Report
from xla_fp8.tracing.reporting import report_of

_REWRITE_ARGUMENTS = ("passes", "target", "backend", "report", "strict")


def jit(fn: Callable[..., Any] | None = None, /, **kwargs: Any) -> Any:
    """`jax.jit(rewrite(fn))`, as a function or as a decorator with or without parentheses.

    Args:
        fn: the function; left out for `@jit(static_argnums=0)`.
        kwargs: those of `xla_fp8.rewrite` (passes, target, backend, report, strict) and those of `jax.jit`
            (static_argnums, donate_argnums, in_shardings, ...).

    Returns:
        What `jax.jit` returns: calls cost the same, and `lower`, `trace`, `eval_shape` and `clear_cache` are there. It
        has a `report(*args)` besides: the report for arguments like these (arrays or `jax.ShapeDtypeStruct`s).

    Raises:
        As `rewrite`; TypeError for a keyword that neither knows.
    """
    ours = {name: kwargs.pop(name) for name in _REWRITE_ARGUMENTS if name in kwargs}
    if fn is None:
        return functools.partial(jit, **ours, **kwargs)
    jitted = jax.jit(rewrite(fn, **ours), **kwargs)
    options = make_options(**{name: value for name, value in ours.items() if name != "report"})

    def report_for(*args: Any, **kwargs: Any) -> Report:
        return report_of(jitted.trace(*args, **kwargs).jaxpr, options)

    jitted.report = ReportMethod(fn, report_for)  # type: ignore[attr-defined]
    return jitted
