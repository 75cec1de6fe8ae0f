"""Which equations of a jaxpr may go through HLO text, and which of them belong to an FP8 chain."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from xla_fp8 import _jax_compat

CONTRACTIONS = frozenset({"conv_general_dilated", "dot_general"})
"""What the passes look for."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ELEMENTWISE = _names(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy cos cosh "
    "div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p log2 logistic lt max min "
    "mul ne neg not one_minus_square or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor"
)
# pvary only changes what shard_map's types say; where a region is evaluated by itself it is the identity.
_MOVES = _names("broadcast_in_dim concatenate dynamic_slice expand_dims pad pvary reshape rev slice squeeze transpose")

# Of xla_fp8.quantization.derivatives: the value is the first operand, or zeros; only derivatives see more.
_STRAIGHT_THROUGH = _names("xla_fp8_straight_through xla_fp8_link")

CHAIN = _ELEMENTWISE | _MOVES | _STRAIGHT_THROUGH | {"reduce_max"}
"""What stands between quantized tensors and a contraction, and behind it."""

_REST = _names(
    "argmax argmin bitcast_convert_type cummax cummin cumprod cumsum dynamic_update_slice gather iota "
    "reduce_and reduce_min reduce_or reduce_prod reduce_sum reduce_window_max reduce_window_min reduce_window_sum "
    "select_and_scatter_add select_and_gather_add shift_left shift_right_arithmetic shift_right_logical split"
)

PLAIN = CHAIN | CONTRACTIONS | _REST
"""Equations that mean the same wherever they are lowered. Every other primitive stays with JAX: callbacks and effects
(they crash or lose their order on the way through HLO text), shard_map, sharding constraints (they would turn Shardy
off), custom partitioning, Pallas and FFI calls, random keys, and whatever a later JAX invents."""

CARRIERS = frozenset({"sharding_constraint", "reshard", "optimization_barrier", "name", "device_put", "all_gather"})
"""What hands on a tensor as it is and yet must stay with JAX, so that no region reaches beyond it."""

CALLS = frozenset({"jit", "closed_call", "core_call", "eval_jaxpr"})
DERIVATIVE_RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
RULES = frozenset({"custom_vjp_call", "custom_vmap_call"})
"""Equations with a function of the user's that takes their place under a transformation, and is rewritten then."""

BODIES: dict[str, tuple[str, ...]] = {
    "jit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "eval_jaxpr": ("call_jaxpr",),
    "scan": ("jaxpr",),
    "while": ("cond_jaxpr", "body_jaxpr"),
    "cond": ("branches",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "shard_map": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vmap_call": ("call",),
}
"""Where an equation that stays holds jaxprs that are rewritten in turn."""

Equation = Any
Jaxpr = Any
Variable = Any


def is_fp8(aval: Any) -> bool:
    """Whether a value is an FP8 tensor."""
    return hasattr(aval, "dtype") and _is_fp8_type(aval.dtype)


@functools.cache
def _is_fp8_type(dtype: Any) -> bool:
    return str(dtype).startswith("float8")


def bodies(equation: Equation) -> Iterator[Jaxpr]:
    """The jaxprs inside an equation that are rewritten in turn."""
    for name in BODIES.get(equation.primitive.name, ()):
        value = equation.params.get(name)
        for body in value if isinstance(value, (tuple, list)) else (value,):
            if body is not None:
                yield body


def mentions_fp8(jaxpr: Jaxpr) -> bool:
    """Whether an FP8 tensor occurs anywhere in a jaxpr: a quick look before any work."""
    inner = _jax_compat.open_jaxpr(jaxpr)
    return (
        any(is_fp8(variable.aval) for variable in (*inner.constvars, *inner.invars))
        or any(is_fp8(variable.aval) for equation in inner.eqns for variable in equation.outvars)
        or any(mentions_fp8(body) for equation in inner.eqns for body in bodies(equation))
    )


def is_plain(equation: Equation) -> bool:
    """Whether an equation may go through HLO text, with all that is in it."""
    return _consists_of(equation, PLAIN)


def why_not_plain(equation: Equation) -> str:
    """Why an equation that `is_plain` denies must stay with JAX."""
    if _jax_compat.has_own_context(equation):
        return "it stands under compute_on or set_xla_metadata, which HLO text would lose"
    if _has_own_sharding(equation):
        return "it has an out_sharding, which is the partitioner's business"
    if not _are_ordinary((*equation.invars, *equation.outvars)):
        return "its shapes are not static"
    if equation.primitive.name == "jit" and not _jax_compat.is_plain_jit(equation):
        return "it is a jit with shardings, layouts, donated arguments or compiler options of its own"
    return "it is a call with operations inside that must stay with JAX"


def is_chain(equation: Equation) -> bool:
    """Whether an equation may stand in an FP8 chain: plain, and no contraction or other reduction."""
    return _consists_of(equation, CHAIN)


def _consists_of(equation: Equation, primitives: frozenset[str]) -> bool:
    name = equation.primitive.name
    is_call = name in CALLS or name in DERIVATIVE_RULES
    if not (is_call or name in primitives) or equation.effects or _jax_compat.has_own_context(equation):
        return False
    if is_call:
        if name == "jit" and not _jax_compat.is_plain_jit(equation):
            return False
        return all(
            _consists_of(inner, primitives) for body in bodies(equation) for inner in _jax_compat.open_jaxpr(body).eqns
        )
    return not _has_own_sharding(equation) and _are_ordinary(equation.invars) and _are_ordinary(equation.outvars)


def has_contraction(jaxpr: Jaxpr) -> bool:
    """Whether a convolution or dot stands anywhere in a jaxpr: a quick look, too."""
    return any(
        equation.primitive.name in CONTRACTIONS or any(map(has_contraction, bodies(equation)))
        for equation in _jax_compat.open_jaxpr(jaxpr).eqns
    )


def has_static_shapes(equation: Equation) -> bool:
    """Whether no shape has a dimension that an export leaves open, and of which comparisons may raise."""
    shapes = (getattr(atom.aval, "shape", ()) for atom in (*equation.invars, *equation.outvars))
    return all(isinstance(size, int) for shape in shapes for size in shape)


def _has_own_sharding(equation: Equation) -> bool:
    """Whether an operation says how its result is sharded: the partitioner's business, not the matcher's.

    JAX's transposed convolutions always have a sharding. Over axes that are all manual (in shard_map) there is nothing
    to shard; over automatic ones, which none but the partitioner may name, it says nothing; over explicit ones it is in
    the type of the result, as every sharding is, and a region's results are sharded as their types say.
    """
    for name in _jax_compat.SHARDING_PARAMETERS:
        sharding = equation.params.get(name)
        if sharding is not None and not _says_nothing(sharding):
            return True
    return False


def _says_nothing(sharding: Any) -> bool:
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return False
    types, spec = set(sharding.mesh.axis_types), sharding.spec
    named = [axes for axes in spec if axes is not None]
    return bool(types) and (
        types == {jax.sharding.AxisType.Manual}
        or (not named and jax.sharding.AxisType.Explicit not in types)
        or (types == {jax.sharding.AxisType.Explicit} and not spec.unreduced and not spec.reduced)
    )


def _are_ordinary(atoms: Iterable[Any]) -> bool:
    """Whether values are arrays of static shape and of a type that HLO has (a typed random key is not)."""
    return all(map(_is_ordinary, map(_type_of, atoms)))


@functools.lru_cache(maxsize=4096)  # every value of a program comes by, and there are few types
def _is_ordinary(aval: Any) -> bool:
    return hasattr(aval, "shape") and _is_hlo_type(aval.dtype) and all(isinstance(size, int) for size in aval.shape)


@functools.cache
def _is_hlo_type(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype != jax.dtypes.float0


_Literal = core.Literal
_type_of = operator.attrgetter("aval")


def is_literal(atom: Any) -> bool:
    return isinstance(atom, _Literal)


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those of `atoms` that are no literals."""
    return [atom for atom in atoms if not isinstance(atom, _Literal)]
