"""`rewrite`: a function transformation that sends the FP8 chains of a function through the passes."""

from __future__ import annotations

import functools
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax.extend import core

from xla_fp8 import _jax_compat
from xla_fp8.api.call import Call, FlatFunction, ResultError
from xla_fp8.api.function import RewrittenFunction
from xla_fp8.backends.protocol import Backend
from xla_fp8.backends.registry import backends_for
from xla_fp8.passes import parse_pipeline
from xla_fp8.report import Report
from xla_fp8.target import Target
from xla_fp8.tracing import lowering  # noqa: F401  (registers how regions lower)
from xla_fp8.tracing.errors import FallbackWarning, NotRewrittenError, UntraceableError
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed
from xla_fp8.tracing.reporting import check_strict, report_of, strict_platform
from xla_fp8.tracing.untraceable import is_untraceable, reason, untraceable

ReportCallback = Callable[[Report], object]


def rewrite(
    fn: Callable[..., Any],
    *,
    passes: Iterable[str] | str | None = None,
    target: Target | str | None = None,
    backend: str | Backend = "auto",
    report: ReportCallback | None = None,
    strict: bool = False,
) -> RewrittenFunction:
    """`fn`, with its FP8 convolutions and dots rewritten into fused graphs. Same signature, same results.

    `fn` is traced as `jax.jit` traces it; its arrays may have any shape and dtype. Arguments that are no arrays
    (strings, functions, None, Python numbers) are closed over; strings, types and enums may be among its results. Only
    FP8 chains change: callbacks, effects, shard_map and the rest stay as they are. The result composes with `jax.jit`,
    `grad`, `vmap`, `scan` and every other transformation; without a `jax.jit` around it, it runs operation by operation
    as plain JAX does.

    Args:
        fn: a function that JAX can trace.
        passes: names of passes to run instead of the default pipeline, or one string of them ("a,b,c").
        target: device to assume, e.g. "h200" or "cc=9.0,cudnn=9.1"; the local GPU, else an h200.
        backend: "auto", "reference", "xla" (rewrite nothing), or a `xla_fp8.backends.protocol.Backend`.
        report: called with a `Report` each time `fn` has been traced: under `jax.jit`, once for each compilation. Also
            with one for each region that a transformation of the result (vmap, grad) makes, when that is compiled.
            What it raises reaches the caller.
        strict: raise where an FP8 convolution or dot stays as it was.

    Returns:
        The function. Its `report(*args)` returns the report for arguments like `args` (arrays or ShapeDtypeStructs).

    Raises:
        TargetError, UnknownPassError, BackendError: at once, for a target, pass or backend that there is none of.
        TypeError: at once, for a `fn` or a `report` that cannot be called, or a `backend` that is none.
        NotRewrittenError: when it is traced, with `strict`; where a transformation around it undoes a rewrite, when
            that is compiled. Also for a function that cannot be traced.
        UntraceableError: from its `report`, for a function that needs the value of an array.

    Where the rewriting itself fails, a `FallbackWarning` says why, once for a signature, and `fn` runs as it is.
    `XLA_FP8_REPORT=1` prints the report to stderr each time a function is traced; `XLA_FP8_DUMP_DIR=dir` writes each
    region's HLO before and after.
    """
    if not callable(fn):
        raise TypeError(f"xla_fp8 rewrites functions, and this is a {type(fn).__name__}: {fn!r}")
    if report is not None and not callable(report):
        raise TypeError(f"report= takes a function of one argument, a Report, and not a {type(report).__name__}")
    tell = functools.partial(_tell, report, name_of(fn))
    tell_transformed = functools.partial(_tell, report, f"{name_of(fn)}, after a transformation")
    options = make_options(passes=passes, target=target, backend=backend, strict=strict, tell=tell_transformed)
    flat_functions = functools.lru_cache(maxsize=256)(functools.partial(FlatFunction, fn))
    told: weakref.WeakSet[Any] = weakref.WeakSet()
    warned: set[Any] = set()

    def warn(call: Call, why: str) -> None:
        if call.signature not in warned:  # under whatever filter: it is called again and again
            warned.add(call.signature)
            warnings.warn(f"xla_fp8: {name_of(fn)} runs as plain JAX: {why}", FallbackWarning, stacklevel=3)

    def rewritten(*args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return fn(*args, **kwargs)
        call = Call.of(fn, flat_functions, args, kwargs)
        try:
            jaxpr, out_tree = call.trace()
        except ResultError as error:
            if strict:
                raise NotRewrittenError(f"strict=True, and {name_of(fn)} cannot be traced: {error}") from error
            warn(call, str(error))
            return fn(*args, **kwargs)
        except Exception as error:
            # With tracers plain JAX would raise it too.
            if not is_untraceable(error) or any(isinstance(array, jax.core.Tracer) for array in call.arrays):
                raise
            if strict:
                raise NotRewrittenError(f"strict=True, and {untraceable(name_of(fn), error)}") from error
            warn(call, reason(error))
            return fn(*args, **kwargs)
        is_news = jaxpr not in told and (report is not None or _printing())
        try:
            changed = cut_closed(jaxpr, options)
            found = report_of(changed, options) if is_news else None
            checked = report_of(changed, options, strict_platform(options), only_contractions=True) if strict else None
        except Exception as error:  # never worse than plain JAX
            if strict:
                raise NotRewrittenError(f"strict=True, and rewriting {name_of(fn)} failed: {error!r}") from error
            warn(call, f"{type(error).__name__}: {error}")
            changed, found, checked = jaxpr, None, None
        if found is not None:
            tell(found)
            told.add(jaxpr)
        if checked is not None:
            check_strict(checked)
        if changed is jaxpr:
            return jax.tree.unflatten(out_tree, core.jaxpr_as_fun(jaxpr)(*call.arrays))
        return jax.tree.unflatten(out_tree, _jax_compat.evaluate_staged(changed, call.arrays, call.function.__name__))

    def report_for(*args: Any, **kwargs: Any) -> Report:
        try:
            jaxpr, _ = Call.of(fn, flat_functions, args, kwargs).trace()
        except ResultError as error:
            raise UntraceableError(f"{name_of(fn)} cannot be traced: {error}") from error
        except Exception as error:
            if is_untraceable(error):
                raise untraceable(name_of(fn), error) from error
            raise
        return report_of(cut_closed(jaxpr, options), options)

    functools.update_wrapper(rewritten, fn, updated=())
    return RewrittenFunction.of(fn, rewritten, report_for)


def make_options(
    *,
    passes: Iterable[str] | str | None = None,
    target: Target | str | None = None,
    backend: str | Backend = "auto",
    strict: bool = False,
    tell: ReportCallback | None = None,
) -> Options:
    """Checked options. Raises as `rewrite` does."""
    if isinstance(backend, type) or not isinstance(backend, (str, Backend)):  # a class has the methods too
        raise TypeError(f"backend= takes a name or a Backend, and not a {type(backend).__name__}: {backend!r}")
    backends_for(backend, "cpu")
    return Options(
        parse_pipeline(passes if isinstance(passes, str) else ",".join(passes)) if passes is not None else None,
        Target.parse(target) if isinstance(target, str) else target,
        backend,
        strict,
        tell,
    )


def _printing() -> bool:
    return os.environ.get("XLA_FP8_REPORT", "") not in ("", "0")


def _tell(callback: ReportCallback | None, what: str, report: Report) -> None:
    if _printing():
        sys.stderr.write(f"xla_fp8: {what}\n{report}")
    if callback is not None:
        callback(report)


def name_of(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial) and not hasattr(fn, "__qualname__"):
        fn = fn.func
    return str(getattr(fn, "__qualname__", None) or repr(fn))
