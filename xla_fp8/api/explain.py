"""`explain`: what rewriting would do to each convolution and dot of a function."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from xla_fp8.api.rewrite import ReportMethod, rewrite
from xla_fp8.report import Report


def explain(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Report]:
    """A function that takes what `fn` takes and returns the report, without running anything.

    Args:
        fn: a function or a bound method that JAX can trace, rewritten or jitted already or not.
        kwargs: those of `rewrite`: passes, target, backend, strict.

    Returns:
        `explain(fn)(*args)` is a `xla_fp8.report.Report`: `.rewritten` and `.refused` hold an entry for each
        convolution and dot, with the user's file and line; it prints as text, shows as HTML in a notebook, and has
        `to_json`, `to_markdown` and `to_html`. `args` are arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        As `rewrite`.
    """
    report = _report_of(fn)
    if report is None or kwargs:
        original = fn
        while _report_of(original) is not None:  # its own options do not count here
            original = original.__wrapped__  # type: ignore[attr-defined]
        report = _report_of(rewrite(original, **kwargs))
    assert report is not None
    # The report of a rewritten method is that of the function: it wants the object.
    owner = (fn.__self__,) if isinstance(fn, types.MethodType) and _report_of(fn) is not None else ()

    @functools.wraps(fn)
    def explained(*args: Any, **kwargs: Any) -> Report:
        return report(*owner, *args, **kwargs)

    return explained


def _report_of(fn: Callable[..., Any]) -> ReportMethod | None:
    """The `report` of a function that `rewrite` or `jit` made; None for any other, whatever attributes it has."""
    report = getattr(fn, "report", None)
    return report if isinstance(report, ReportMethod) else None
