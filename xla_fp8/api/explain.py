"""`explain`: what rewriting would do to each convolution and dot of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xla_fp8.api.function import RewrittenFunction
from xla_fp8.api.rewrite import rewrite
from xla_fp8.report import Report


def explain(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Report]:
    """A function that takes what `fn` takes and returns the report, without running anything.

    Args:
        fn: a function or a method that JAX can trace, rewritten or jitted already or not.
        kwargs: those of `rewrite`: passes, target, backend, strict.

    Returns:
        `explain(fn)(*args)` is a `xla_fp8.report.Report`: `.rewritten` and `.refused` hold an entry for each
        convolution and dot, with the user's file and line; it prints as text, shows as HTML in a notebook, and has
        `to_json`, `to_markdown` and `to_html`. `args` are arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        As `rewrite`. The function: UntraceableError where `fn` needs the value of an array.
    """
    explained = fn if isinstance(fn, RewrittenFunction) and not kwargs else _rewritten(fn, kwargs)

    @functools.wraps(fn)
    def report(*args: Any, **kwargs: Any) -> Report:
        return explained.report(*args, **kwargs)

    return report


def _rewritten(fn: Callable[..., Any], kwargs: dict[str, Any]) -> RewrittenFunction:
    """`fn` rewritten with these options; its own, if it has any, do not count."""
    original, owner = fn, ()
    while isinstance(original, RewrittenFunction):
        owner = owner or original.args
        original = original.__wrapped__
    rewritten = rewrite(original, **kwargs)
    return rewritten.__get__(*owner) if owner else rewritten
