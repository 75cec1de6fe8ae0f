"""Several backends as one, whose configs are all of theirs: the autotuner then times one backend against another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from xla_fp8.backends.protocol import Backend, Config, Implementation, No
from xla_fp8.target import GraphCall, Target, Verdict, advice_of, rule_of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config of one of the backends."""

    backend: Backend
    config: Config

    def __str__(self) -> str:
        return f"{self.backend.name} {self.config}"


@dataclasses.dataclass(frozen=True)
class FastestBackend:
    """Whatever of `backends` is fastest for a call. The first one that runs it is the choice without a measurement.

    Attributes:
        backends: in the order of preference; all opaque.
    """

    backends: tuple[Backend, ...]
    name: str = "fastest"
    opaque: bool = True

    @property
    def needs_python(self) -> bool:
        return any(getattr(backend, "needs_python", False) for backend in self.backends)

    @property
    def version(self) -> str:
        return "; ".join(f"{b.name} {getattr(b, 'version', '')}".strip() for b in self.backends)

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        """The yes of any, or the reasons of all."""
        verdicts = [(backend, backend.supports(call, target)) for backend in self.backends]
        for _, verdict in verdicts:
            if verdict.ok:
                return verdict
        rule = next((rule for _, verdict in verdicts if (rule := rule_of(verdict))), "")
        advice = next((advice for _, verdict in verdicts if (advice := advice_of(verdict))), "")
        reasons = "; ".join(f"{backend.name}: {verdict.reason}" for backend, verdict in verdicts)
        return No(reasons, rule=rule, advice=advice)

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        able = [backend for backend in self.backends if backend.supports(call, target).ok]
        return tuple(Candidate(backend, config) for backend in able for config in backend.configs(call, target))

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        assert isinstance(config, Candidate)
        return config.backend.lower(call, config.config)

    def settled(self, call: GraphCall, config: Config) -> None:
        """Tells each backend what was chosen, so that it frees what it built for the others."""
        assert isinstance(config, Candidate)
        for backend in self.backends:
            if settled := getattr(backend, "settled", None):
                settled(call, config.config if backend == config.backend else None)
