"""`explain`: what rewriting would do to each convolution and dot of a function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from xla_fp8.api.rewrite import rewrite
from xla_fp8.report import Report


def explain(fn: Callable[..., Any], **kwargs: Any) -> Callable[..., Report]:
    """A function that takes what `fn` takes and returns the report, without running anything.

    Args:
        fn: a function that JAX can trace, rewritten or jitted already or not.
        kwargs: those of `rewrite`: passes, target, backend, strict.

    Returns:
        `explain(fn)(*args)` is a `xla_fp8.report.Report`: `.rewritten` and `.refused` hold an entry for each
        convolution and dot, with the user's file and line; it prints as text, shows as HTML in a notebook, and has
        `to_json`, `to_markdown` and `to_html`. `args` are arrays or `jax.ShapeDtypeStruct`s.

    Raises:
        As `rewrite`.
    """
    existing = getattr(fn, "report", None)
    report: Callable[..., Report] = existing if callable(existing) and not kwargs else rewrite(fn, **kwargs).report  # type: ignore[attr-defined]

    @functools.wraps(fn)
    def explained(*args: Any, **kwargs: Any) -> Report:
        return report(*args, **kwargs)

    return explained
