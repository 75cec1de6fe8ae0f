"""`rewrite`: a function transformation that sends the FP8 chains of a function through the passes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from xla_fp8.backends.protocol import Backend
from xla_fp8.backends.registry import backends_for
from xla_fp8.passes import parse_pipeline
from xla_fp8.report import Report
from xla_fp8.target import Target
from xla_fp8.tracing import lowering  # noqa: F401  (registers how regions lower)
from xla_fp8.tracing.errors import FallbackWarning, NotRewrittenError
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed
from xla_fp8.tracing.reporting import check_strict, report_of

ReportCallback = Callable[[Report], object]


def rewrite(
    fn: Callable[..., Any],
    *,
    passes: Iterable[str] | str | None = None,
    target: Target | str | None = None,
    backend: str | Backend = "auto",
    report: ReportCallback | None = None,
    strict: bool = False,
) -> Callable[..., Any]:
    """`fn`, with its FP8 convolutions and dots rewritten into fused graphs. Same signature, same results.

    `fn` is traced as `jax.jit` traces it; its arrays may have any shape and dtype. Arguments that are no arrays
    (strings, functions, None, Python numbers) are closed over. Only FP8 chains change: callbacks, effects, shard_map
    and the rest stay as they are. The result composes with `jax.jit`, `grad`, `vmap`, `scan` and every other
    transformation; without a `jax.jit` around it, it runs operation by operation as plain JAX does.

    Args:
        fn: a function that JAX can trace.
        passes: names of passes to run instead of the default pipeline, or one string of them ("a,b,c").
        target: device to assume, e.g. "h200" or "cc=9.0,cudnn=9.1"; the local GPU, else an h200.
        backend: "auto", "reference", "xla" (rewrite nothing), or a `xla_fp8.backends.protocol.Backend`.
        report: called with a `Report` each time `fn` has been traced: under `jax.jit`, once for each compilation.
        strict: raise where an FP8 convolution or dot stays as it was.

    Returns:
        The function. Its `report(*args)` returns the report for arguments like `args` (arrays or ShapeDtypeStructs).

    Raises:
        TargetError, UnknownPassError, BackendError: at once, for a target, pass or backend that there is none of.
        NotRewrittenError: when it is traced, with `strict`.

    Where the rewriting itself fails, a `FallbackWarning` says why and `fn` runs as it is. `XLA_FP8_REPORT=1` prints the
    report to stderr each time a function is traced; `XLA_FP8_DUMP_DIR=dir` writes each region's HLO before and after.
    """
    options = make_options(passes=passes, target=target, backend=backend, strict=strict)
    flat_functions = functools.lru_cache(maxsize=256)(functools.partial(_FlatFunction, fn))
    told: weakref.WeakSet[Any] = weakref.WeakSet()

    @functools.wraps(fn)
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return fn(*args, **kwargs)
        call = _Call.of(fn, flat_functions, args, kwargs)
        try:
            jaxpr, out_tree = call.trace()
        except jax.errors.ConcretizationTypeError as error:
            if any(isinstance(array, jax.core.Tracer) for array in call.arrays):
                raise  # plain JAX would raise it too
            _warn(f"it needs the values of its arguments, which tracing hides: {str(error).splitlines()[0]}", fn)
            return fn(*args, **kwargs)
        try:
            changed = cut_closed(jaxpr, options)
            if options.strict:
                check_strict(report_of(changed, options))
            if jaxpr not in told and (report or _printing()):
                told.add(jaxpr)
                _tell(fn, report_of(changed, options), report)
        except NotRewrittenError:
            raise
        except Exception as error:  # never worse than plain JAX
            if strict:
                raise
            _warn(f"{type(error).__name__}: {error}", fn)
            changed = jaxpr
        return jax.tree.unflatten(out_tree, core.jaxpr_as_fun(changed)(*call.arrays))

    def report_for(*args: Any, **kwargs: Any) -> Report:
        jaxpr, _ = _Call.of(fn, flat_functions, args, kwargs).trace()
        return report_of(cut_closed(jaxpr, options), options)

    rewritten.report = ReportMethod(fn, report_for)  # type: ignore[attr-defined]
    return rewritten


@dataclasses.dataclass(frozen=True)
class ReportMethod:
    """The `report` of a rewritten or jitted function: called like the function, it returns the report.

    Of a method it takes the object too: `Net.layer.report(net, x)`. What Python makes of `net.layer` hands out the
    function's attributes as they are and does not say which `net` it was; `explain(net.layer)(x)` knows.
    """

    fn: Callable[..., Any]
    report_for: Callable[..., Report]

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        try:
            return self.report_for(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if next(iter(inspect.signature(self.fn).parameters), None) == "self":
                error.add_note(
                    "The report of a method does not know its object: say xla_fp8.explain(obj.method)(*args), or "
                    "type(obj).method.report(obj, *args)."
                )
            raise


def make_options(
    *,
    passes: Iterable[str] | str | None = None,
    target: Target | str | None = None,
    backend: str | Backend = "auto",
    strict: bool = False,
) -> Options:
    """Checked options. Raises as `rewrite` does."""
    backends_for(backend, "cpu")
    return Options(
        parse_pipeline(passes if isinstance(passes, str) else ",".join(passes)) if passes is not None else None,
        Target.parse(target) if isinstance(target, str) else target,
        backend,
        strict,
    )


def _printing() -> bool:
    return os.environ.get("XLA_FP8_REPORT", "") not in ("", "0")


def _tell(fn: Callable[..., Any], report: Report, callback: ReportCallback | None) -> None:
    if _printing():
        sys.stderr.write(f"xla_fp8: {_name(fn)}\n{report}")
    if callback is not None:
        callback(report)


def _warn(reason: str, fn: Callable[..., Any]) -> None:
    warnings.warn(f"xla_fp8: {_name(fn)} runs as plain JAX: {reason}", FallbackWarning, stacklevel=3)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", None) or repr(fn))


@dataclasses.dataclass(frozen=True)
class _Static:
    """A leaf that is closed over. Equal to another only if both have one type and print alike: 1, True, 1.0 differ."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Static) or type(self.value) is not type(other.value):
            return False
        if isinstance(self.value, (float, complex)):  # NaN is NaN, and -0.0 is not 0.0
            return repr(self.value) == repr(other.value)
        return bool(self.value is other.value or self.value == other.value)

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


_DYNAMIC = object()
"""Stands for an array among the static leaves."""


class _FlatFunction:
    """`fn` as a function of its array leaves. The same object for the same leaves, so that JAX finds its trace."""

    def __init__(self, fn: Callable[..., Any], tree: Any, leaves: tuple[Any, ...]) -> None:
        self.fn, self.tree, self.leaves = fn, tree, leaves
        self.__name__ = getattr(fn, "__name__", "xla_fp8_rewrite")

    def __call__(self, *arrays: Any) -> Any:
        rest = iter(arrays)
        leaves = [next(rest) if leaf is _DYNAMIC else leaf.value for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return self.fn(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a rewritten function: what is traced, and the arrays it is called with."""

    function: _FlatFunction
    arrays: Sequence[Any]

    @staticmethod
    def of(
        fn: Callable[..., Any], flat_functions: Callable[..., _FlatFunction], args: Any, kwargs: dict[str, Any]
    ) -> _Call:
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        static = tuple(_DYNAMIC if _is_array(leaf) else _Static(leaf) for leaf in leaves)
        try:
            return _Call(flat_functions(tree, static), arrays)
        except TypeError:  # a leaf or a key of the tree that has no hash: traced each time
            return _Call(_FlatFunction(fn, tree, static), arrays)

    def trace(self) -> tuple[Any, Any]:
        """The closed jaxpr, and the tree of its results. JAX remembers both."""
        jaxpr, out = jax.make_jaxpr(self.function, return_shape=True)(*self.arrays)
        return jaxpr, jax.tree.structure(out)


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return False
    return isinstance(leaf, jax.ShapeDtypeStruct) or core.valid_jaxtype(leaf)
