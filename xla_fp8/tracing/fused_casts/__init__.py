"""Casts to FP8 with the norms, activations and gates in front of them, which one kernel computes.

    x ─┬─ convert ─ sum ─ ... ─ rsqrt ─┐               ┌─ abs ─ reduce_max          the amax
       └─ convert ─ sub ──────────── mul ─ mul, add ─ silu ─ mul ─ clamp ─ convert to FP8
                                                       └─ dot                       the tensor itself

XLA's own kernels for this are bound by their instructions, of which there are 48 for each element of group norm, silu
and cast; and what reduces is a kernel of its own, which reads the tensor once more. What a graph of a convolution or
dot ends with belongs to that; and a bare cast is as fast as XLA makes it (docs/quantization.md, "Fused casts").

A kernel has more results than the cast where others read what is on the way to it. In training they do: the amax is the
next step's scale, a filter gradient is of the tensor in 16 bits, a bias gradient is a sum over its rows, and a norm's
gradient is of the mean and variance of each row.

Top to bottom:

    search.py      the groups of a program, one after the other, and why other casts are in none
    roots.py       where groups begin: casts, then other tensors, then sums
    walk.py        from a root up to the tensors that are in memory anyway: the equations of one group
    siblings.py    what else reads a tensor of the group and ends there: amax, sums, other casts
    cycles.py      whether a kernel would read what is made of its own results
    computable.py  whether the kernel of a group can compute an equation
    worth.py       whether it may grow, and whether it is faster than what XLA makes
    members.py     the equations of a group while it grows, and what is read and given
    program.py     what is known of the program, and what the groups found so far make of it
    found.py       what the search finds: groups, and reasons
    operations.py  what an operation is, of itself

Of what is found `xla_fp8.tracing.fused_cast_problem` makes operands and nodes of a kernel.
"""

from xla_fp8.tracing.fused_casts.search import fused_casts

__all__ = ["fused_casts"]
