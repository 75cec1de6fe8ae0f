"""Makes the maxima and minima over elements of a module keep a NaN, on every platform."""

from __future__ import annotations

from xla_fp8.hlo import HloInstruction, HloModule, Shape

_REDUCTIONS = ("reduce", "reduce-window", "all-reduce")


def keep_nan(module: HloModule) -> int:
    """Changes each reduction over `maximum` or `minimum` so that XLA's CPU does not drop a NaN; in place.

    HLO's maximum of a number and a NaN is NaN, but XLA's reduction on a CPU is vectorized with an instruction that
    returns the number: of nothing but NaNs it makes its start value, -inf in `jnp.max`. An explicit choice stays.

    Before::

        ROOT r = f32[] maximum(a, b)

    After::

        m = f32[] maximum(a, b)
        rest = f32[] select(b != b, b, m)
        ROOT r = f32[] select(a != a, a, rest)

    Returns:
        how many reducers were changed.
    """
    reducers = dict.fromkeys(
        instruction.to_apply
        for computation in module.computations
        for instruction in computation
        if instruction.opcode in _REDUCTIONS and _picks_a_float(instruction.to_apply.root)
    )
    for reducer in reducers:
        chosen = reducer.root
        for operand in reversed(chosen.operands):
            unordered = reducer.create(
                "compare", Shape.array("pred", ()), [operand, operand], attributes={"direction": "NE"}
            )
            chosen = reducer.create("select", operand.shape, [unordered, operand, chosen])
        reducer.set_root(chosen)
    return len(reducers)


def _picks_a_float(root: HloInstruction) -> bool:
    return root.opcode in ("maximum", "minimum") and root.shape.element_type.startswith(("f", "bf"))
