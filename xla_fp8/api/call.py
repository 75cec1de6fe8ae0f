"""A call of a rewritten function: which of its arguments are arrays, and its trace."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core


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


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Constant:
    """A leaf of a result that is no array. It is a node without children, so it is part of the tree that JAX remembers
    of a trace, and what is made of that tree has the value itself."""

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: Any, _: Any) -> Any:
        return value


_CONSTANTS = (str, bytes, enum.Enum, type, np.dtype)
"""Of which results may be beside arrays: no call can tell that another one returned the same object."""

_DYNAMIC = object()
"""Stands for an array among the static leaves."""


class FlatFunction:
    """`fn` as a function of its arrays: it takes any tree that has them, in order, as its leaves.

    The same object for the same static leaves, so that JAX finds its trace. JAX's messages name `fn` and its arguments.
    """

    def __init__(self, fn: Any, tree: Any, leaves: tuple[Any, ...]) -> None:
        self.fn, self.tree, self.leaves = fn, tree, leaves
        self.__name__ = getattr(fn, "__name__", "xla_fp8_rewrite")
        # JAX looks here for the signature, and there for the name and the file.
        with contextlib.suppress(TypeError, ValueError):  # there is none of a builtin
            self.__signature__ = inspect.signature(fn)
        self.__wrapped__ = _with_code(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rest = iter(jax.tree.leaves((args, kwargs)))
        leaves = [next(rest) if leaf is _DYNAMIC else leaf.value for leaf in self.leaves]
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        results = _with_constants(self.fn(*args, **kwargs))
        for leaf in jax.tree.leaves(results):
            if not hasattr(leaf, "__jax_array__") and not core.valid_jaxtype(leaf):
                raise ResultError(f"it returns a value of type {type(leaf).__name__}, which is no array")
        return results


def _with_constants(results: Any) -> Any:
    return jax.tree.map(lambda leaf: _Constant(leaf) if isinstance(leaf, _CONSTANTS) else leaf, results)


class ResultError(TypeError):
    """A function returns something that no trace can hold, as it may be another thing each time."""


def _with_code(fn: Any) -> Any:
    """The function that a callable runs, as far as it is known: inside of a partial, in the class of an object."""
    while isinstance(fn, functools.partial):
        fn = getattr(fn, "__wrapped__", fn.func)
    return fn.__call__ if isinstance(inspect.unwrap(type(fn).__call__), types.FunctionType) else fn


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a rewritten function: what is traced, and the arrays it is called with.

    Attributes:
        function: `fn` with its other leaves.
        arrays: the leaves that are arrays.
        arguments: (args, kwargs) with None in place of the other leaves.
    """

    function: FlatFunction
    arrays: Sequence[Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]

    @staticmethod
    def of(
        fn: Callable[..., Any], flat_functions: Callable[..., FlatFunction], args: Any, kwargs: dict[str, Any]
    ) -> Call:
        """Args:
        flat_functions: makes and remembers the `FlatFunction` of a tree and its static leaves.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        arrays = [leaf for leaf in leaves if _is_array(leaf)]
        static = tuple(_DYNAMIC if _is_array(leaf) else _Static(leaf) for leaf in leaves)
        arguments = (args, kwargs) if len(arrays) == len(leaves) else _without_static(tree, leaves, arrays)
        try:
            return Call(flat_functions(tree, static), arrays, arguments)
        except TypeError:  # a leaf or a key of the tree that has no hash: traced each time
            return Call(FlatFunction(fn, tree, static), arrays, arguments)

    @property
    def signature(self) -> Any:
        """What calls have in common that JAX would trace once, but for the values of leaves that are no arrays."""
        return self.function.tree, tuple((jax.numpy.shape(a), jax.numpy.result_type(a)) for a in self.arrays)

    def trace(self) -> tuple[Any, Any]:
        """The closed jaxpr, and the tree of its results. JAX remembers both.

        Raises:
            ResultError: it returns what is neither an array nor one of a few plain types.
        """
        args, kwargs = self.arguments
        jaxpr, out = jax.make_jaxpr(self.function, return_shape=True)(*args, **kwargs)
        return jaxpr, jax.tree.structure(_with_constants(out))


def _without_static(tree: Any, leaves: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """The arguments with None, which has no leaves, for what is no array; just the arrays where a node refuses None."""
    try:
        arguments = jax.tree.unflatten(tree, [leaf if _is_array(leaf) else None for leaf in leaves])
        kept = jax.tree.leaves(arguments)
        if len(kept) == len(arrays) and all(a is b for a, b in zip(kept, arrays, strict=True)):
            return arguments
    except Exception:  # a class of the user's, whose constructor may raise anything
        pass
    return tuple(arrays), {}


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic):
        return False
    return isinstance(leaf, jax.ShapeDtypeStruct) or core.valid_jaxtype(leaf)
