"""The cut: which equations of a jaxpr become regions, the only parts of a function that go through HLO text.

A region holds FP8 convolutions and dots with what quantizes and follows them: back to the FP8 tensors that are read,
forward through the epilogue. Or it holds one or more quantizations that belong to none of these and that kernels run.
It is convex (no path leaves it and comes back), because it becomes one equation.
Everything else stays JAX; an equation that holds jaxprs (scan, cond, while, shard_map, checkpoint, custom_vjp) has them
cut in turn.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from xla_fp8 import _jax_compat
from xla_fp8.backends.protocol import No
from xla_fp8.tracing import relu_masks
from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.epilogues import within_graph
from xla_fp8.tracing.equations import (
    BODIES,
    CONTRACTIONS,
    DERIVATIVE_RULES,
    RULES,
    Equation,
    Jaxpr,
    has_static_shapes,
    is_fp8,
    is_literal,
    is_plain,
    mentions_fp8,
    variables,
)
from xla_fp8.tracing.fused_casts import fused_casts
from xla_fp8.tracing.inline import inline_calls, substituted
from xla_fp8.tracing.quantizations import is_cast, quantizations
from xla_fp8.tracing.transposed_operands import with_transposed_operands

REGION = "xla_fp8_region"
"""How the name of the primitive starts that a region is an equation of."""


LeaveCast = Callable[[Equation, str, Equation | None], None]
"""Takes a cast to FP8, why no kernel computes it, in words, and the equation that is to blame where there is one."""

READS_ITS_RESULTS = "by way of other kernels its own would read what is made of its results"
"""Why a kernel that was found is not made."""


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What a cut does with what it finds.

    Attributes:
        make_region: makes a region's equation of its closed jaxpr, inputs and outputs, and an equation to take the
            source from.
        rewrite_rule: given a custom_vjp or custom_vmap equation, returns it with its rule rewritten.
        refuse: told of each FP8 convolution or dot that must stay with JAX.
        make_quantization: as make_region, of quantizations.
        quantizes: whether a cast to FP8 is worth a region, where the amax of what it casts scales it.
        make_fused_cast: as make_region, of a cast with the norm, activation or gate in front of it, or why no kernel
            computes it; None where there are no such kernels, and none that transpose operands of dots.
    """

    make_region: Callable[[Jaxpr, list[Any], list[Any], Equation], Equation]
    rewrite_rule: Callable[[Equation], Equation]
    refuse: Callable[[Equation], None]
    make_quantization: Callable[[Jaxpr, list[Any], list[Any], Equation], Equation]
    quantizes: Callable[[Equation], bool]
    make_fused_cast: Callable[[Jaxpr, list[Any], list[Any], Equation], Equation | No] | None


def cut(jaxpr: Jaxpr, hooks: Hooks) -> Jaxpr:
    """`jaxpr`, open or closed as it was, with its FP8 chains in regions; `jaxpr` itself where it has none."""
    if not mentions_fp8(jaxpr):
        return jaxpr
    inner = _jax_compat.open_jaxpr(jaxpr)
    substitution: dict[Any, Any] = {}
    inlined = list(inline_calls(inner.eqns, substitution))
    outvars = substituted(inner.outvars, substitution)
    equations = [
        hooks.rewrite_rule(equation) if equation.primitive.name in RULES else equation
        for equation in _without_unused(inlined, outvars)  # vjp leaves primal convolutions behind that nobody reads
    ]
    if hooks.make_fused_cast is not None:
        equations = with_transposed_operands(with_fused_casts(equations, outvars, hooks.make_fused_cast))
    flow = DataFlow(equations)
    seeds = _seeds(flow)
    for i, equation in enumerate(equations):
        if equation.primitive.name in CONTRACTIONS and not is_plain(equation) and flow.is_seed(i):
            hooks.refuse(equation)
    members = _members(flow, seeds)
    equations = [
        equation if i in members else _with_cut_bodies(equation, hooks) for i, equation in enumerate(equations)
    ]
    groups = _convex_groups(flow, members, seeds)
    regions = {group[0]: _region(flow, group, members, outvars, hooks.make_region) for group in groups}
    ordered = _with_quantizations(_contracted(equations, flow, groups, regions), outvars, hooks)
    return _jax_compat.with_equations(jaxpr, _without_unused(ordered, outvars), outvars)


def _seeds(flow: DataFlow) -> list[int]:
    """What regions are made around."""
    return [i for i, equation in enumerate(flow.equations) if flow.is_seed(i) and is_plain(equation)]


def with_fused_casts(
    equations: list[Equation],
    outvars: Sequence[Any],
    make: Callable[[Jaxpr, list[Any], list[Any], Equation], Equation | No],
    leave: LeaveCast | None = None,
) -> list[Equation]:
    """The equations with casts replaced that kernels compute with what is in front of them.

    This comes before regions are made, which end there: one that began the norm would write what it made of the tensor
    in f32.

    Args:
        make: `Hooks.make_fused_cast`.
        leave: told of each cast to FP8 that is in no kernel and in no graph.
    """
    if not any(map(is_cast, equations)):
        return equations
    if not all(map(has_static_shapes, equations)):
        if leave is not None:
            for cast in filter(is_cast, equations):
                leave(cast, "beside it are shapes that are not known yet, as an export leaves them", None)
        return equations
    equations = relu_masks.of_results(equations)
    flow = DataFlow(equations)
    seeds = _seeds(flow)
    regions = _convex_groups(flow, _members(flow, seeds), seeds)
    taken = {index for region in regions for index in within_graph(flow, outvars, region)}
    found = fused_casts(flow, outvars, taken)
    left = [(c.equation, c.reason, None if c.blame is None else equations[c.blame]) for c in found.unfused]
    made = []
    for group in found.groups:
        own = [equations[i] for i in group.equations]
        inside = {variable for equation in own for variable in equation.outvars}
        read = variables(atom for equation in own for atom in equation.invars)
        inputs = list(dict.fromkeys(variable for variable in read if variable not in inside))
        outputs = list(group.results)
        closed = _jax_compat.close_equations(inputs, outputs, own, REGION)
        kernel = make(closed, inputs, outputs, own[-1])
        if isinstance(kernel, No):
            left += [(i, kernel.reason, None) for i in group.equations if is_cast(equations[i])]
        else:
            made.append(kernel)
    changed = _with_kernels(equations, made)
    placed = set(map(id, changed))
    for kernel in made:
        if id(kernel) not in placed:
            casts = (i for i in map(flow.producer.__getitem__, kernel.outvars) if is_cast(equations[i]))
            left += [(i, READS_ITS_RESULTS, None) for i in casts]
    if leave is not None:
        for index, reason, blame in sorted(left, key=lambda cast: cast[0]):
            leave(equations[index], reason, blame)
    return _without_unused(changed, outvars)


def _with_kernels(equations: Sequence[Equation], made: Sequence[Equation]) -> list[Equation]:
    """The equations with those in place of some that make the same, in an order in which everything is made first."""
    taken = {variable for kernel in made for variable in kernel.outvars}
    changed = [*made, *(e for e in equations if taken.isdisjoint(e.outvars))]
    flow = DataFlow(changed)
    ordered = _contracted(changed, flow, (), {})
    if len(ordered) == len(changed):
        return ordered
    left = max(_cycle(flow, {id(equation) for equation in ordered}).intersection(range(len(made))))
    return _with_kernels(equations, [*made[:left], *made[left + 1 :]])


def _cycle(flow: DataFlow, ordered: set[int]) -> set[int]:
    """Some equations of which each reads another one's results.

    Args:
        ordered: by id those that read of none of them.
    """
    path: list[int] = []
    index = next(i for i, equation in enumerate(flow.equations) if id(equation) not in ordered)
    while index not in path:
        path.append(index)
        index = next(p for p in flow.predecessors[index] if id(flow.equations[p]) not in ordered)
    return set(path[path.index(index) :])


def _with_quantizations(equations: list[Equation], outvars: Sequence[Any], hooks: Hooks) -> list[Equation]:
    """The equations with quantizations in regions, of what is in none: a second cut, which leaves the first alone."""
    if not any(e.primitive.name == "reduce_max" for e in equations) or not any(
        is_cast(e) and hooks.quantizes(e) for e in equations
    ):
        return equations
    flow = DataFlow(equations)
    found = quantizations(flow, outvars, hooks.quantizes)
    members = {i for _, group in found for i in group}
    groups = [group for group in _convex_groups(flow, members, [cast for cast, _ in found]) if _has_amax(flow, group)]
    regions = {group[0]: _region(flow, group, members, outvars, hooks.make_quantization) for group in groups}
    return _contracted(equations, flow, groups, regions)


def _has_amax(flow: DataFlow, group: Sequence[int]) -> bool:
    return any(flow.equations[i].primitive.name == "reduce_max" for i in group)


def _with_cut_bodies(equation: Equation, hooks: Hooks) -> Equation:
    names = BODIES.get(equation.primitive.name)
    if not names:
        return equation
    params = dict(equation.params)
    for name in names:
        value = params.get(name)
        if isinstance(value, (tuple, list)):
            params[name] = type(value)(cut(body, hooks) for body in value)
        elif value is not None:
            params[name] = cut(value, hooks)
    return equation.replace(params=params)


def _members(flow: DataFlow, seeds: Iterable[int]) -> set[int]:
    """The seeds and their epilogues."""
    members: set[int] = set()
    pending = list(seeds)
    while pending:
        index = pending.pop()
        if index in members:
            continue
        members.add(index)
        for variable in flow.equations[index].outvars:
            if not is_fp8(variable.aval):  # a quantized tensor ends the epilogue; what reads it is another chain
                pending.extend(i for i in flow.consumers.get(variable, ()) if flow.chain[i])
    return members


def _with_operands(flow: DataFlow, group: Sequence[int], members: set[int]) -> list[int]:
    """A group with what makes its operands out of FP8 tensors and scalars, in program order.

    These equations are cheap, and others may read their results or the same group may not hold them (they depend on
    nothing, the group on something): each group gets its own copy.
    """
    taken = set(group)
    pending = list(group)
    while pending:
        for atom in flow.equations[pending.pop()].invars:
            if is_literal(atom) or is_fp8(atom.aval) or (producer := flow.producer.get(atom)) is None:
                continue
            if producer in taken or producer in members or not flow.chain[producer]:
                continue
            if _is_worth_taking(flow, producer, atom):
                taken.add(producer)
                pending.append(producer)
    return sorted(taken)


def _is_worth_taking(flow: DataFlow, producer: int, atom: Any) -> bool:
    """Whether a matcher needs to see how an operand is made: dequantization, broadcasts, constants."""
    equation = flow.equations[producer]
    return (
        atom in flow.dequantized
        or equation.primitive.name in ("broadcast_in_dim", "reshape", "squeeze", "convert_element_type", "pvary")
        or all(is_literal(operand) for operand in equation.invars)
    )


def _convex_groups(flow: DataFlow, members: set[int], seeds: Iterable[int]) -> list[list[int]]:
    """Splits `members` into connected groups that each have a seed, with no path from a group through outside into it.

    Each equation gets a level: that of its predecessors, one more where a path from a member enters the members again
    from outside. Members of one level are never connected through outside, and levels never fall along a path.
    """
    level = [0] * len(flow.equations)
    follows_member = [False] * len(flow.equations)
    parent: dict[int, int] = {i: i for i in members}

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    for i in range(len(flow.equations)):
        for p in flow.predecessors[i]:
            enters = i in members and p not in members and follows_member[p]
            level[i] = max(level[i], level[p] + enters)
            follows_member[i] |= p in members or follows_member[p]
        for p in flow.predecessors[i]:
            if i in members and p in members and level[i] == level[p]:
                parent[find(i)] = find(p)
    groups: dict[int, list[int]] = {}
    for i in sorted(members):
        groups.setdefault(find(i), []).append(i)
    seeded = {find(i) for i in seeds}
    return [group for root, group in groups.items() if root in seeded]


def _contracted(
    equations: Sequence[Equation], flow: DataFlow, groups: Sequence[Sequence[int]], regions: dict[int, Equation]
) -> list[Equation]:
    """The equations with each group as one, in an order in which everything is made before it is read.

    Args:
        regions: the first index of a group → its region.
    """
    first = {i: group[0] for group in groups for i in group}
    nodes = [i for i in range(len(equations)) if first.get(i, i) == i]
    waiting = dict.fromkeys(nodes, 0)
    successors: dict[int, list[int]] = {node: [] for node in nodes}
    for i, predecessors in enumerate(flow.predecessors):
        for p in predecessors:
            before, after = first.get(p, p), first.get(i, i)
            if before != after:
                waiting[after] += 1
                successors[before].append(after)
    ready = [node for node in nodes if not waiting[node]]  # in program order, so a heap
    ordered: list[Equation] = []
    while ready:
        node = heapq.heappop(ready)  # the first in program order, so that what need not move stays
        ordered.append(regions[node] if node in regions else equations[node])
        for after in successors[node]:
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, after)
    return ordered


def _region(
    flow: DataFlow,
    group: Sequence[int],
    members: set[int],
    outvars: Iterable[Any],
    make: Callable[[Jaxpr, list[Any], list[Any], Equation], Equation],
) -> Equation:
    own = set(group)
    equations = [flow.equations[i] for i in _with_operands(flow, group, members)]
    made = {variable for equation in equations for variable in equation.outvars}
    read = (atom for equation in equations for atom in equation.invars)
    inputs = list(dict.fromkeys(atom for atom in variables(read) if atom not in made))
    results = set(variables(outvars))
    outputs = [
        variable
        for i in group
        for variable in flow.equations[i].outvars
        if variable in results or any(reader not in own for reader in flow.consumers.get(variable, ()))
    ]
    closed = _jax_compat.close_equations(inputs, outputs, equations, REGION)
    named = (e for e in equations if e.primitive.name in CONTRACTIONS | DERIVATIVE_RULES)
    return make(closed, inputs, outputs, next(named, equations[-1]))


def _without_unused(equations: Sequence[Equation], outvars: Iterable[Any]) -> list[Equation]:
    """Drops equations without effects that nobody reads."""
    used = set(variables(outvars))
    kept: list[Equation] = []
    for equation in reversed(equations):
        if equation.effects or not used.isdisjoint(equation.outvars):
            kept.append(equation)
            used.update(variables(equation.invars))
    return kept[::-1]
