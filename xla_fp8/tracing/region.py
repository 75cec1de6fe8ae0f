"""The primitive that stands for a region: an FP8 chain that is rewritten when it is lowered.

Under a transformation it is what its jaxpr is: the rules here transform that jaxpr with JAX's own rules and cut the
result again, so that the batched function, the tangent function and its transpose are rewritten in turn.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend import core
from jax.interpreters import ad, batching

from xla_fp8 import _jax_compat
from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import choice
from xla_fp8.backends.registry import backends_for, platform_name
from xla_fp8.hlo.garbage import collection_paused
from xla_fp8.tracing.cut import REGION, Hooks, cut
from xla_fp8.tracing.equations import CONTRACTIONS, Equation, Jaxpr, why_not_plain
from xla_fp8.tracing.errors import FallbackWarning, NotRewrittenError
from xla_fp8.tracing.fused_cast_problem import problem_of
from xla_fp8.tracing.hlo_of_region import Family
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.options import Options

region_p = core.Primitive(REGION)
opaque_region_p = core.Primitive(f"{REGION}_opaque")
"""A region that may hold kernels: lowering must know the devices to partition those, so an AbstractMesh will not do."""
fused_cast_p = core.Primitive(f"{REGION}_fused_cast")
"""What a kernel of fused casts computes, in training also tensors and sums without a cast; it goes through no HLO
text."""


def is_region(equation: Equation) -> bool:
    return equation.primitive in (region_p, opaque_region_p)


def make_fused_cast(
    options: Options, family: Family, closed: Jaxpr, inputs: list[Any], outputs: list[Any], source: Equation
) -> Equation | No:
    """The equation of a kernel, or why no kernel computes `closed`; see `xla_fp8.tracing.cut.Hooks`."""
    found = problem_of(closed)
    if isinstance(found, No):
        return found
    params = {"jaxpr": family.add(closed), "options": options, "family": family}
    return core.new_jaxpr_eqn(inputs, outputs, fused_cast_p, params, core.no_effects, source.source_info, source.ctx)


def cut_jaxpr(jaxpr: Jaxpr, options: Options) -> Jaxpr:
    """`jaxpr` with its FP8 chains in regions, open or closed as it was; itself where it has none."""
    platform = platform_name(jax.default_backend())
    backends = backends_for(options.backend, platform)
    family = Family()
    primitive = opaque_region_p if any(backend.opaque for backend in backends) else region_p

    def make_region(
        closed: Jaxpr, inputs: list[Any], outputs: list[Any], source: Equation, options: Options = options
    ) -> Equation:
        return core.new_jaxpr_eqn(
            inputs,
            outputs,
            primitive,
            {"jaxpr": family.add(closed), "options": options, "family": family},
            core.no_effects,
            source.source_info,
            source.ctx,
        )

    def refuse(equation: Equation) -> None:
        where = _jax_compat.equation_source(equation) or equation.primitive.name
        message = f"the FP8 {equation.primitive.name} at {where} runs as plain JAX: {why_not_plain(equation)}"
        if options.strict and options.of_transformation:  # else the function's report says it, with all others
            raise NotRewrittenError(f"strict=True, and under a transformation of the function {message}")
        warnings.warn(f"xla_fp8: {message}", FallbackWarning, stacklevel=2)

    def quantizes(equation: Equation) -> bool:
        size = max(math.prod(variable.aval.shape) for variable in equation.outvars)
        return options.takes_quantizations and choice.takes_dynamic(size, platform)

    fuses = options.takes_fused_casts and choice.takes_fused(platform)
    make_quantization = functools.partial(make_region, options=options.of_quantizations)
    rules = functools.partial(_with_cut_rules, options=options)
    make_cast = functools.partial(make_fused_cast, options, Family()) if fuses else None
    hooks = Hooks(make_region, rules, refuse, make_quantization, quantizes, make_cast)
    return cut(jaxpr, hooks)


def evaluate(jaxpr: Jaxpr, options: Options, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr that a transformation made, its FP8 chains in regions."""
    return list(core.jaxpr_as_fun(cut_closed(jaxpr, options.transformed))(*arguments))


def cut_closed(jaxpr: Jaxpr, options: Options) -> Jaxpr:
    """As `cut_jaxpr`, remembered for as long as `jaxpr` lives."""
    return _cut_or_none(jaxpr, options) or jaxpr


@_jax_compat.weakref_lru_cache
@collection_paused()
def _cut_or_none(jaxpr: Jaxpr, options: Options) -> Jaxpr | None:
    changed = cut_jaxpr(jaxpr, options)
    return None if changed is jaxpr else changed  # a cached value must not hold its weak key


def _abstract_eval(*_: Any, jaxpr: Jaxpr, **__: Any) -> Sequence[Any]:
    return list(jaxpr.out_avals)


def _impl(primitive: Any, *arguments: Any, jaxpr: Jaxpr, options: Options, family: Family | None) -> list[Any]:
    if jax.config.jax_disable_jit:  # type: ignore[attr-defined]  # operation by operation is what the user asked for
        return _jax_compat.evaluate_equations(flat(jaxpr), arguments)
    return list(_compiled(jaxpr, primitive, options)(*arguments))


@_jax_compat.weakref_lru_cache
def _compiled(jaxpr: Jaxpr, primitive: Any, options: Options) -> Any:
    """What runs a region outside of any jit."""
    # The cache holds the jaxpr weakly, so its value must not hold it: keep an equal one.
    inner = _jax_compat.open_jaxpr(jaxpr)
    own = core.ClosedJaxpr(inner.replace(eqns=list(inner.eqns)), ())
    return jax.jit(lambda *arguments: primitive.bind(*arguments, jaxpr=own, options=options, family=None))


# vmap


def _batch(
    arguments: Sequence[Any], dims: Sequence[Any], *, jaxpr: Jaxpr, options: Options, family: Family | None
) -> tuple[Any, Any]:
    function = jax.vmap(core.jaxpr_as_fun(jaxpr), in_axes=tuple(dims))
    results = evaluate(jax.make_jaxpr(function)(*arguments), options, arguments)
    return results, [0] * len(results)


# Differentiation


def _jvp(
    primals: Sequence[Any], tangents: Sequence[Any], *, jaxpr: Jaxpr, options: Options, family: Family | None
) -> tuple[list[Any], list[Any]]:
    nonzero = tuple(type(tangent) is not ad.Zero for tangent in tangents)
    known, linear, nonzero_out = _linearized(jaxpr, nonzero)
    results = evaluate(known, options, primals)
    outputs, residuals = results[: len(nonzero_out)], results[len(nonzero_out) :]
    given = [tangent for tangent, is_nonzero in zip(tangents, nonzero, strict=True) if is_nonzero]
    moved = iter(evaluate(linear, options, [*residuals, *given]))
    return outputs, [
        next(moved) if is_nonzero else ad.Zero(jax.typeof(output).to_tangent_aval())
        for output, is_nonzero in zip(outputs, nonzero_out, strict=True)
    ]


@_jax_compat.weakref_lru_cache
def _linearized(jaxpr: Jaxpr, nonzero: tuple[bool, ...]) -> tuple[Jaxpr, Jaxpr, list[bool]]:
    """A region's two halves: primals → (outputs, residuals), and (residuals, tangents) → tangents.

    Apart, because what JAX stages of a linear function must be linear in its tangents alone.
    """
    both, nonzero_out = _jax_compat.jvp_of_jaxpr(jaxpr, nonzero)
    unknown = [False] * len(nonzero) + [True] * sum(nonzero)
    instantiate = [False] * len(nonzero_out) + [True] * sum(nonzero_out)
    known, linear, unknown_out = _jax_compat.split_jaxpr(both, unknown, instantiate)
    assert not any(unknown_out[: len(nonzero_out)]), "an output that depends on tangents"
    return known, linear, nonzero_out


def _transpose(
    cotangents: Sequence[Any], *arguments: Any, jaxpr: Jaxpr, options: Options, family: Family | None
) -> list[Any]:
    linear = tuple(isinstance(argument, ad.UndefinedPrimal) for argument in arguments)
    known = [argument for argument, is_linear in zip(arguments, linear, strict=True) if not is_linear]
    given = [
        ad.instantiate_zeros(cotangent)  # type: ignore[no-untyped-call]
        for cotangent in cotangents
    ]
    results = iter(evaluate(_transposed(jaxpr, linear), options, [*known, *given]))
    return [next(results) if is_linear else None for is_linear in linear]


@_jax_compat.weakref_lru_cache
def _transposed(jaxpr: Jaxpr, linear: tuple[bool, ...]) -> Jaxpr:
    """(arguments that are not linear, cotangents) → cotangents of the linear arguments."""
    function = core.jaxpr_as_fun(jaxpr)
    avals = [aval for aval, is_linear in zip(jaxpr.in_avals, linear, strict=True) if is_linear]

    def transposed(known: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        def of_linear(*values: Any) -> list[Any]:
            one, other = iter(values), iter(known)
            return list(function(*(next(one if is_linear else other) for is_linear in linear)))

        return jax.linear_transpose(of_linear, *avals)(list(cotangents))

    known_avals = [aval for aval, is_linear in zip(jaxpr.in_avals, linear, strict=True) if not is_linear]
    return jax.make_jaxpr(transposed)(known_avals, list(jaxpr.out_avals))


# jax.checkpoint


def _contractions(region: Equation) -> list[Equation]:
    """What a policy like `dots_saveable` has an opinion about."""
    equations = _jax_compat.open_jaxpr(flat(region.params["jaxpr"])).eqns
    return [equation for equation in equations if equation.primitive.name in CONTRACTIONS]


for _primitive in (region_p, opaque_region_p, fused_cast_p):
    _primitive.multiple_results = True
    _primitive.def_abstract_eval(_abstract_eval)  # type: ignore[no-untyped-call]
    _primitive.def_impl(functools.partial(_impl, _primitive))  # type: ignore[no-untyped-call]
    batching.primitive_batchers[_primitive] = _batch
    ad.primitive_jvps[_primitive] = _jvp
    ad.primitive_transposes[_primitive] = _transpose
    _jax_compat.save_as(_primitive, _contractions)
for _primitive in (opaque_region_p, fused_cast_p):
    _jax_compat.require_devices_during_lowering(_primitive)


# custom_vjp and custom_vmap


def _with_cut_rules(equation: Equation, options: Options) -> Equation:
    """An equation whose rules are rewritten when a transformation calls them."""
    if equation.primitive.name == "custom_vjp_call":
        return _with_cut_derivative(equation, options.transformed)
    rule = functools.partial(_batch_as_told, equation.params["rule"], options.transformed)
    return equation.replace(params={**equation.params, "rule": rule})


def _batch_as_told(rule: Any, options: Options, size: int, are_batched: Any, *arguments: Any) -> tuple[Any, Any]:
    """What the rule of a custom_vmap returns: a tree of results, and a tree of whether each is batched."""
    are_results_batched: list[Any] = []

    def traced(*values: Any) -> Any:
        results, are = rule(size, are_batched, *values)
        are_results_batched.append(are)
        return results

    jaxpr, shapes = jax.make_jaxpr(traced, return_shape=True)(*arguments)
    results = evaluate(jaxpr, options, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shapes), results), are_results_batched[-1]


def _with_cut_derivative(equation: Equation, options: Options) -> Equation:
    """A custom_vjp equation whose forward and backward functions are rewritten when somebody differentiates."""
    params = dict(equation.params)
    forward, backward = params["fwd_jaxpr_thunk"], params["bwd"]

    def cut_forward(*nonzeros: Any) -> tuple[Any, ...]:
        jaxpr, *rest = forward.call_wrapped(*nonzeros)
        return (cut_jaxpr(jaxpr, options), *rest)

    def cut_backward(*arguments: Any) -> Any:
        return _evaluate_backward(backward, options, arguments)

    params["fwd_jaxpr_thunk"] = _jax_compat.wrapped_like(cut_forward, forward)
    params["bwd"] = _jax_compat.wrapped_like(cut_backward, backward)
    return equation.replace(params=params)


def _evaluate_backward(backward: Any, options: Options, arguments: Sequence[Any]) -> Any:
    """The backward function of a custom_vjp, traced and cut; its result has symbolic zeros and, in jax 0.12, logs."""
    if not all(core.valid_jaxtype(argument) for argument in arguments):  # symbolic zeros
        return backward.call_wrapped(*arguments)
    shape: list[Any] = []

    def traced(*values: Any) -> list[Any]:
        result = backward.call_wrapped(*values)
        leaves, tree = jax.tree.flatten(result, is_leaf=lambda leaf: isinstance(leaf, ad.Zero))
        shape.append((leaves, tree))
        return [leaf for leaf in leaves if not isinstance(leaf, ad.Zero)]

    jaxpr = jax.make_jaxpr(traced)(*arguments)
    leaves, tree = shape[-1]
    values = iter(evaluate(jaxpr, options, arguments))
    return jax.tree.unflatten(tree, [leaf if isinstance(leaf, ad.Zero) else next(values) for leaf in leaves])
