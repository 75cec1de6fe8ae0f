"""What `rewrite` and `jit` return: callables that also report, alone and as methods."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, Self

from xla_fp8.report import Report


class RewrittenFunction(functools.partial[Any]):
    """A function that runs rewritten, with its `report`.

    A `functools.partial` of nothing, because calling one costs next to nothing. As an attribute of a class it binds
    like a function; what it is asked then (`report`, `lower`, ...) takes what the method takes.

    Attributes:
        func: what runs.
    """

    __wrapped__: Callable[..., Any]
    _report_for: Callable[..., Report]

    @classmethod
    def of(cls, fn: Callable[..., Any], run: Callable[..., Any], report_for: Callable[..., Report]) -> Self:
        """A function that calls `run`; its name, signature, documentation and attributes are those of `fn`."""
        function = cls(run)
        for name, value in getattr(fn, "__dict__", {}).items():
            if not hasattr(cls, name):
                function.__dict__[name] = value
        functools.update_wrapper(function, fn, updated=())
        function._report_for = report_for
        return function

    def report(self, /, *args: Any, **kwargs: Any) -> Report:
        """The report for arguments like these: arrays or `jax.ShapeDtypeStruct`s. Runs nothing."""
        return self._report_for(*self.args, *args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Self:
        if instance is None:
            return self
        bound = type(self)(self.func, instance)
        bound.__dict__ = self.__dict__
        return bound

    @property
    def __self__(self) -> Any:
        if not self.args:
            raise AttributeError(f"{self!r} is not bound to an object")
        return self.args[0]

    @property
    def __func__(self) -> Self:
        function = type(self)(self.func)
        function.__dict__ = self.__dict__
        return function

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(self.__wrapped__, *self.args))

    # A method is made anew each time it is asked for, and is the same all the same: JAX's caches rely on it.
    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RewrittenFunction) or len(self.args) != len(other.args):
            return False
        return self.func is other.func and all(map(operator.is_, self.args, other.args))

    def __hash__(self) -> int:
        return hash((self.func, *map(id, self.args)))

    def __repr__(self) -> str:
        bound = f" of {self.args[0]!r}" if self.args else ""
        return f"<{type(self).__name__} {getattr(self, '__qualname__', self.func)}{bound}>"


class JittedFunction(RewrittenFunction):
    """A rewritten function under `jax.jit`, with all that a function of `jax.jit` has."""

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`: a `jax.stages.Lowered`."""
        return self.func.lower(*self.args, *args, **kwargs)  # type: ignore[attr-defined]

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).trace`: a `jax.stages.Traced`."""
        return self.func.trace(*self.args, *args, **kwargs)  # type: ignore[attr-defined]

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).eval_shape`: a tree of `jax.ShapeDtypeStruct`s."""
        return self.func.eval_shape(*self.args, *args, **kwargs)  # type: ignore[attr-defined]

    def clear_cache(self) -> None:
        """Forgets what was compiled, for every object that this is a method of."""
        self.func.clear_cache()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.func, name)
