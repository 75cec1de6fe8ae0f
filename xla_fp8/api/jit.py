"""`jit`: jax.jit of a rewritten function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from xla_fp8.api.function import JittedFunction
from xla_fp8.api.rewrite import make_options, name_of, rewrite
from xla_fp8.report import Report
from xla_fp8.tracing.reporting import report_of
from xla_fp8.tracing.untraceable import is_untraceable, untraceable

_REWRITE_ARGUMENTS = ("passes", "target", "backend", "report", "strict")


def jit(fn: Callable[..., Any] | None = None, /, **kwargs: Any) -> Any:
    """`jax.jit(rewrite(fn))`, as a function or as a decorator with or without parentheses.

    Args:
        fn: the function; left out for `@jit(static_argnums=0)`.
        kwargs: those of `xla_fp8.rewrite` (passes, target, backend, report, strict) and those of `jax.jit`
            (static_argnums, donate_argnums, in_shardings, ...), but for its deprecated `backend`, a platform: that is
            `jax.jit(rewrite(fn), backend=...)`.

    Returns:
        A function with all that one of `jax.jit` has (`lower`, `trace`, `eval_shape`, `clear_cache`, ...), whose calls
        cost the same. It has a `report(*args)` besides: the report for arguments like these (arrays or
        `jax.ShapeDtypeStruct`s). On a method all of these take what the method takes: `net.layer.report(x)`.

    Raises:
        As `rewrite`; TypeError for a keyword that neither knows. Its `report` also UntraceableError, for a function
        that needs the value of an argument that is not static.
    """
    ours = {name: kwargs.pop(name) for name in _REWRITE_ARGUMENTS if name in kwargs}
    if fn is None:
        return functools.partial(jit, **ours, **kwargs)
    jitted = jax.jit(rewrite(fn, **ours).func, **kwargs)
    options = make_options(**{name: value for name, value in ours.items() if name != "report"})

    def report_for(*args: Any, **kwargs: Any) -> Report:
        try:
            traced = jitted.trace(*args, **kwargs)
        except Exception as error:
            if is_untraceable(error):
                raise untraceable(name_of(fn), error) from error
            raise
        return report_of(traced.jaxpr, options)

    return JittedFunction.of(fn, jitted, report_for)
