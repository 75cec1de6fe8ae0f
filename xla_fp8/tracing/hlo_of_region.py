"""The HLO of a region: what JAX lowers its equations to, on their own and for one device.

Most of the time that JAX takes to lower a small function is the same for a large one. So the regions of a function, its
family, are lowered together as functions of one module, and the module is taken apart.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from xla_fp8 import _jax_compat, hlo
from xla_fp8.tracing.equations import is_literal
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.surroundings import apart

_NAME = "xla_fp8_region"


class Family:
    """The regions that one cut has made: closed jaxprs, added as they are made. One object equals no other.

    Attributes:
        warned: what was warned of already while they were lowered.
        made: what backends made of their graph calls. Regions that differ in a constant, as the scale of a layer, have
            the same call: its kernel is traced once, and lowered once in a module.
    """

    def __init__(self) -> None:
        self._jaxprs: dict[Any, Any] = {}
        self.warned: set[str] = set()
        self.made: dict[Any, Any] = {}

    @property
    def structures(self) -> list[Structure]:
        """Those of its regions, each kind once."""
        return list(dict.fromkeys(structure_of(jaxpr, self) for jaxpr in self._jaxprs.values()))

    def add(self, jaxpr: Any) -> Any:
        """Adds a region and returns it, or an equal one that is there: JAX lowers and transforms one object once."""
        scopes = tuple(equation.source_info.name_stack for equation in _jax_compat.open_jaxpr(jaxpr).eqns)
        return self._jaxprs.setdefault((_structure(jaxpr), scopes), jaxpr)

    def __repr__(self) -> str:
        return f"Family({len(self._jaxprs)})"


@dataclasses.dataclass(frozen=True)
class Structure:
    """What decides how a region is rewritten: equal for the repeated layers of a net, which are rewritten once.

    Attributes:
        equations: inputs, equations and outputs, variables as numbers in the order in which they occur, literals as
            their bytes.
        sources: the user's line of each equation, which the report tells.
        jaxpr: one that is like this, without calls.
        family: what it may be lowered with; held weakly, as this object outlives it in caches.
    """

    equations: tuple[Any, ...]
    sources: tuple[str | None, ...]
    jaxpr: Any = dataclasses.field(compare=False, repr=False)
    family: weakref.ref[Family] | None = dataclasses.field(default=None, compare=False, repr=False)


def structure_of(jaxpr: Any, family: Family | None) -> Structure:
    """The structure of a region that is one of `family`."""
    structure: Structure = _structure(jaxpr)
    return structure if family is None else dataclasses.replace(structure, family=weakref.ref(family))


@_jax_compat.weakref_lru_cache
def _structure(jaxpr: Any) -> Structure:
    body = flat(jaxpr)
    inner = _jax_compat.open_jaxpr(body)
    return Structure(
        _numbered(inner),
        tuple(_jax_compat.equation_source(equation) for equation in inner.eqns),
        # A copy, because what is cached must not hold the jaxpr that it is cached for.
        _jax_compat.with_equations(body, inner.eqns, inner.outvars),
    )


def _numbered(jaxpr: Any) -> tuple[Any, ...]:
    """An open jaxpr without calls as a value that equals another's where they differ in variables alone."""
    numbers: dict[Any, int] = {}

    def numbered(atoms: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(
            (atom.aval, np.asarray(atom.val).tobytes() if is_literal(atom) else numbers.setdefault(atom, len(numbers)))
            for atom in atoms
        )

    inputs = numbered(jaxpr.invars)
    equations = tuple(
        (equation.primitive, tuple(equation.params.items()), numbered(equation.invars), numbered(equation.outvars))
        for equation in jaxpr.eqns
    )
    return inputs, equations, numbered(jaxpr.outvars)


def dtypes_of(jaxpr: Any) -> Iterator[np.dtype[Any]]:
    """The dtypes of the values of a jaxpr without calls."""
    inner = _jax_compat.open_jaxpr(jaxpr)
    for variables in (inner.constvars, inner.invars, *(equation.outvars for equation in inner.eqns)):
        yield from (variable.aval.dtype for variable in variables)


def hlo_module(structure: Structure, platform: str) -> hlo.HloModule:
    """A module of the caller's own: of a region, lowered for "cpu", "cuda", ..."""
    family = structure.family() if structure.family is not None else None
    lowered = _lowered_family(family, platform) if family is not None else {}
    found = lowered.get(structure) or _lowered((structure,), platform)[structure]
    return hlo.extract(found, _NAME)


@_jax_compat.weakref_lru_cache
def _lowered_family(family: Family, platform: str) -> dict[Structure, hlo.HloComputation]:
    """The regions of a family; none where JAX cannot lower one of them, which is to be found out one by one."""
    try:
        return _lowered(family.structures, platform)
    except Exception:
        return {}


def _lowered(structures: Sequence[Structure], platform: str) -> dict[Structure, hlo.HloComputation]:
    """Each region's computation, in a module that has them all."""
    names = [f"{_NAME}_{number}" for number in range(len(structures))]
    groups = [_types(structure) for structure in structures]

    def regions(groups: Sequence[Sequence[Any]]) -> list[Any]:
        of_jit = _jax_compat.parameters_of_jit()
        return [
            _evaluated(structure, name, group, of_jit)
            for structure, name, group in zip(structures, names, groups, strict=True)
        ]

    # Whatever mesh the caller is in, the region is a module without one: XLA's partitioner sees it later, in place.
    with apart(dtype for structure in structures for dtype in dtypes_of(structure.jaxpr)):
        traced = jax.jit(regions, keep_unused=True).trace(groups)
        module = hlo.parse(_jax_compat.lowered_hlo_text(traced.lower(lowering_platforms=(platform,))))
    named = {computation.name.partition(".")[0]: computation for computation in module.computations}
    return {structure: named[name] for structure, name in zip(structures, names, strict=True)}


def _types(structure: Structure) -> list[Any]:
    return [jax.core.ShapedArray(a.shape, a.dtype, weak_type=a.weak_type) for a in structure.jaxpr.in_avals]


def _evaluated(structure: Structure, name: str, arguments: Sequence[Any], of_jit: Mapping[str, Any]) -> list[Any]:
    """The region as a function of that name."""
    plain = _jax_compat.without_contexts(structure.jaxpr)
    if plain is not None:
        return _jax_compat.evaluate_staged(plain, arguments, name, of_jit)

    def evaluated(*values: Any) -> list[Any]:
        return _jax_compat.evaluate_equations(structure.jaxpr, values)

    evaluated.__name__ = name
    return list(jax.jit(evaluated)(*arguments))
