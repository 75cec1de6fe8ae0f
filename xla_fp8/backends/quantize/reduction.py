"""The algorithm "reduction": an amax kernel, whose programs each write the amax of their part; a cast kernel."""

from __future__ import annotations

import dataclasses

import jax

from xla_fp8.backends.quantize import request as requests
from xla_fp8.backends.quantize import two_kernels
from xla_fp8.backends.quantize.request import Outcome, Request
from xla_fp8.backends.quantize.two_kernels import DEFAULT, Settings
from xla_fp8.target import Verdict


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Two kernels and a short list of amaxes between them, of which nothing must be zero at the start."""

    name: str = "reduction"
    settings: Settings = DEFAULT
    interpret: bool = False

    def supports(self, request: Request) -> Verdict:
        return requests.supports(request, self.interpret)

    def run(self, request: Request, x: jax.Array, given: jax.Array | None) -> Outcome:
        return two_kernels.run(request, x, given, "partial", self.settings, self.interpret)
