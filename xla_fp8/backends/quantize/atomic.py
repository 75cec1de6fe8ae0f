"""The algorithm "atomic": an amax kernel, whose programs join by an atomic max on the bits of |x|; a cast kernel."""

from __future__ import annotations

import dataclasses

import jax

from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize import two_kernels
from xla_fp8.backends.quantize.request import Outcome, Request
from xla_fp8.backends.quantize.two_kernels import DEFAULT, Settings
from xla_fp8.target import Verdict


@dataclasses.dataclass(frozen=True)
class Atomic:
    """Two kernels; the amax is one number in memory, which starts as zero.

    Which program comes first does not change the largest, so results do not vary from run to run.
    """

    name: str = "atomic"
    settings: Settings = DEFAULT
    interpret: bool = False

    def supports(self, request: Request) -> Verdict:
        return requests.supports(request, self.interpret)

    def run(self, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
        return two_kernels.run(request, x, given, "atomic", self.settings, self.interpret)
