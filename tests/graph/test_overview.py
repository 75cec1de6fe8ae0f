"""Which dots feed which: through arithmetic, tuples, calls, branches and loops, and not past another dot."""

from __future__ import annotations

from xla_fp8 import hlo
from xla_fp8.graph.overview import edges

MODULE = """
HloModule m

callee {
  p = f32[2,2] parameter(0)
  q = f32[2,2] parameter(1)
  n = f32[2,2] negate(p)
  ROOT both = (f32[2,2], f32[2,2]) tuple(n, q)
}

body {
  state = (f32[2,2], s32[]) parameter(0)
  carried = f32[2,2] get-tuple-element(state), index=0
  count = s32[] get-tuple-element(state), index=1
  in_loop = f32[2,2] dot(carried, carried), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT next = (f32[2,2], s32[]) tuple(in_loop, count)
}

condition {
  state.1 = (f32[2,2], s32[]) parameter(0)
  count.1 = s32[] get-tuple-element(state.1), index=1
  limit = s32[] constant(3)
  ROOT less = pred[] compare(count.1, limit), direction=LT
}

yes {
  ROOT y = f32[2,2] parameter(0)
}

no {
  z = f32[2,2] parameter(0)
  ROOT in_branch = f32[2,2] dot(z, z), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY main {
  a = f32[2,2] parameter(0)
  zero = s32[] constant(0)
  on = pred[] parameter(1)
  first = f32[2,2] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  second = f32[2,2] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  pair = (f32[2,2], f32[2,2]) call(first, second), to_apply=callee
  of_first = f32[2,2] get-tuple-element(pair), index=0
  third = f32[2,2] dot(of_first, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  init = (f32[2,2], s32[]) tuple(third, zero)
  loop = (f32[2,2], s32[]) while(init), condition=condition, body=body
  looped = f32[2,2] get-tuple-element(loop), index=0
  branch = f32[2,2] conditional(on, looped, second), true_computation=yes, false_computation=no
  ROOT last = f32[2,2] dot(branch, a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_edges() -> None:
    module = hlo.parse(MODULE)
    dots = [i for c in module.computations for i in c if i.opcode == "dot"]
    assert {(a.name, b.name) for a, b in edges(module, dots)} == {
        ("first", "third"),  # and not second: elements of a tuple are told apart
        ("third", "in_loop"),
        ("second", "in_branch"),
        ("third", "last"),  # a loop may run no round
        ("in_loop", "last"),
        ("in_branch", "last"),
    }


def test_only_what_is_asked_for_counts() -> None:
    module = hlo.parse(MODULE)
    ends = [module.entry.instruction(name) for name in ("second", "last")]
    assert [(a.name, b.name) for a, b in edges(module, ends)] == [("second", "last")]
