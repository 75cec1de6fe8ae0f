"""dce: instructions and computations that nothing needs are removed."""

from __future__ import annotations

from xla_fp8.hlo import HloModule
from xla_fp8.passes.base import Pass
from xla_fp8.target import Target


class DeadCodeElimination(Pass):
    """Removes instructions without users and computations that nothing calls.

    Before::

        ENTRY %main { ... %unused = f32[8] negate(%x)
          ROOT %y = f32[8] add(%x, %x) }

    After::

        ENTRY %main { ... ROOT %y = f32[8] add(%x, %x) }

    Parameters, side effects and control predecessors stay.
    """

    name = "dce"

    def run(self, module: HloModule, target: Target) -> bool:
        removed = sum(computation.remove_dead() for computation in module.computations)
        reachable = module.called_computations()
        for computation in module.computations:
            if computation not in reachable:
                module.remove_computation(computation)
                removed += 1
        return removed > 0
