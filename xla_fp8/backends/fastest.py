"""Several backends as one, whose configs are all of theirs: the autotuner then times one backend against another.

What XLA's own compiler makes of a graph is among them, so that a shape on which it is the fastest is left to it. A
convolution in bf16 is not: of FP8 tensors it has to convert them first, and takes two to twelve times as long
(docs/benchmarks.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax

from xla_fp8.backends import reference
from xla_fp8.backends.protocol import Backend, Config, Implementation, No, Yes, platforms_of
from xla_fp8.errors import XlaFp8Error
from xla_fp8.target import GraphCall, Target, Verdict, advice_of, rule_of

MOST_CONFIGS = 8
"""Of one backend that are timed, beside XLA's own tuning, which takes about 20 s for one convolution."""


@dataclasses.dataclass(frozen=True)
class ChainBackend:
    """The graph in plain JAX, left to XLA's GPU compiler, which fuses an FP8 convolution where it can, and tunes it.

    A dot is a dot there, so that it becomes XLA's own cuBLASLt call.
    """

    name: str = "xla"
    opaque: bool = False

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        """Yes: what XLA does not fuse it runs in f32, which is never the fastest."""
        return Yes()

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        # The chain does not say that sums are to be exact, which XLA's call of a dot would have to know.
        return () if call.is_dot and call.exact_sums else ("chain",)

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        return reference.implementation_of(call, "fusible")


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config of one of the backends."""

    backend: Backend
    config: Config

    def __str__(self) -> str:
        return f"{self.backend.name} {self.config}"


@dataclasses.dataclass(frozen=True)
class FastestBackend:
    """Whatever is fastest for a call. The first of `backends` that runs it is the choice without a measurement.

    Attributes:
        backends: in the order of preference; one of them must run a call.
        peers: timed beside them, and never the choice without a measurement.
    """

    backends: tuple[Backend, ...]
    peers: tuple[Backend, ...] = ()
    name: str = "auto"
    opaque: bool = True

    @property
    def needs_python(self) -> bool:
        """Whether no candidate can do without this process: `portable` has those that can."""
        return all(map(_needs_python, (*self.backends, *self.peers)))

    @property
    def platforms(self) -> tuple[str, ...] | None:
        """Those of the first candidate that has any; None where all run everywhere."""
        return next(filter(None, map(platforms_of, self.backends)), None)

    @property
    def version(self) -> str:
        """Of all candidates; a new one, or a library that is installed later, is a reason to measure again."""
        return "; ".join(f"{backend.name} {_version(backend)}".strip() for backend in (*self.backends, *self.peers))

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        """The yes of the first, after which nobody else is asked, or the reasons of all."""
        verdicts = []
        for backend in self.backends:
            verdict = backend.supports(call, target)
            if verdict.ok:
                return verdict
            verdicts.append((backend, verdict))
        rule = next((rule for _, verdict in verdicts if (rule := rule_of(verdict))), "")
        advice = next((advice for _, verdict in verdicts if (advice := advice_of(verdict))), "")
        reasons = "; ".join(f"{backend.name}: {verdict.reason}" for backend, verdict in verdicts)
        return No(reasons, rule=rule, advice=advice)

    def portable(self) -> FastestBackend:
        """Without the backends whose calls only this process can run."""
        backends = tuple(backend for backend in self.backends if not _needs_python(backend))
        return dataclasses.replace(self, backends=backends or self.peers, peers=self.peers if backends else ())

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        return tuple(
            Candidate(backend, config)
            for backend in self._running(call, target)
            for config in _configs(backend, call, target)[:MOST_CONFIGS]
        )

    def config_named(self, call: GraphCall, target: Target, name: str | None) -> Config | None:
        """The config with this text, or the one that is the choice without a measurement; None where there is none.

        Only the backend that has it is asked for its configs: cuDNN builds plans to know its own.
        """
        for backend in self._running(call, target):
            if name is None or name.startswith(f"{backend.name} "):
                config = _named(backend, call, target, None if name is None else name.removeprefix(f"{backend.name} "))
                if config is not None:
                    return Candidate(backend, config)
        return None

    def _running(self, call: GraphCall, target: Target) -> Iterator[Backend]:
        """Who runs `call`, one after another: cuDNN takes its time to answer, and need not be asked for every call."""
        yield from (backend for backend in self.backends if backend.supports(call, target).ok)
        yield from self.peers

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        assert isinstance(config, Candidate)
        return config.backend.lower(call, config.config)

    def prepare(self, call: GraphCall, config: Config, devices: Sequence[jax.Device]) -> None:
        """Tells the backend of the choice on which devices it will run."""
        assert isinstance(config, Candidate)
        if prepare := getattr(config.backend, "prepare", None):
            prepare(call, config.config, devices)

    def settled(self, call: GraphCall, config: Config) -> None:
        """Tells each backend what was chosen, so that it frees what it built for the others."""
        assert isinstance(config, Candidate)
        for backend in self.backends:
            if settled := getattr(backend, "settled", None):
                settled(call, config.config if backend == config.backend else None)


def _configs(backend: Backend, call: GraphCall, target: Target) -> Sequence[Config]:
    """Its configs; none where it said yes and then cannot: of the plans that cuDNN proposes none may build."""
    try:
        return backend.configs(call, target)
    except XlaFp8Error:
        return ()


def _named(backend: Backend, call: GraphCall, target: Target, name: str | None) -> Config | None:
    """Its config of that name, or the one it prefers; None where there is none."""
    named: Callable[..., Config | None] | None = getattr(backend, "config_named", None)
    if named is None:
        configs = _configs(backend, call, target)
        return next((config for config in configs if name is None or str(config) == name), None)
    try:
        return named(call, target, name)
    except XlaFp8Error:
        return None


def _needs_python(backend: Backend) -> bool:
    return bool(getattr(backend, "needs_python", False))


def _version(backend: Backend) -> str:
    try:
        return str(getattr(backend, "version", ""))
    except XlaFp8Error:
        return "absent"
