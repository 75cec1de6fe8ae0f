"""The backends by name, and which one "auto" means."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from xla_fp8.backends import reference
from xla_fp8.backends.fastest import ChainBackend, FastestBackend
from xla_fp8.backends.protocol import Backend, Config, Implementation, No, Yes
from xla_fp8.errors import XlaFp8Error
from xla_fp8.target import GraphCall, Target, Verdict, advice_of, rule_of


class BackendError(XlaFp8Error):
    """A backend that there is none of, or that cannot do what it was asked for."""


@dataclasses.dataclass(frozen=True)
class ReferenceBackend:
    """Plain JAX in f32 (`xla_fp8.backends.reference`), on any platform."""

    name: str = "reference"
    opaque: bool = False

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        return Yes()

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        return (None,)

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        return reference.implementation_of(call)


@dataclasses.dataclass(frozen=True)
class XlaBackend:
    """Leaves every chain to XLA, whose GPU compiler has a matcher of its own: nothing is rewritten."""

    name: str = "xla"
    opaque: bool = False

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        return No("the backend is xla: the chain is left to XLA's own matcher")

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        return ()

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        raise BackendError("the xla backend runs no graph calls")


@functools.cache
def _reference() -> Backend:
    return ReferenceBackend()


@functools.cache
def _xla() -> Backend:
    return XlaBackend()


@functools.cache
def _cudnn() -> Backend:
    from xla_fp8.backends.cudnn.backend import CudnnBackend

    return CudnnBackend()


@functools.cache
def _mosaic() -> Backend:
    from xla_fp8.backends.mosaic.backend import MosaicBackend

    return MosaicBackend()


BACKENDS: Mapping[str, Callable[[], Backend]] = MappingProxyType(
    {"reference": _reference, "mosaic": _mosaic, "cudnn": _cudnn, "xla": _xla}
)
"""Every backend's name → what makes it. A GPU backend imports its libraries when it is made, not before."""


@functools.cache
def _fastest() -> Backend:
    return FastestBackend((_mosaic(), _cudnn()), (ChainBackend(),))


_AUTO: Mapping[str, tuple[Callable[[], Backend], ...]] = MappingProxyType(
    {"cuda": (_fastest, _xla), "rocm": (_xla,), "tpu": (_xla,)}
)
"""What "auto" tries on a platform. The reference interprets in f32: right everywhere, fast nowhere, so on an
accelerator the original chain is better than it."""


_PLATFORMS = ("cpu", "gpu", "cuda", "rocm", "tpu")


def platform_name(jax_platform: str) -> str:
    """JAX's "gpu" is CUDA's or ROCm's: the name that lowering knows ("cuda"); other names as they are."""
    return "cuda" if jax_platform == "gpu" else jax_platform


def backends_for(choice: str | Backend, platform: str) -> tuple[Backend, ...]:
    """The backends to ask for each call, in order, on a platform ("cpu", "cuda", ...).

    Raises:
        BackendError: an unknown name; the message lists those there are.
    """
    if not isinstance(choice, str):
        return (choice,)
    if choice == "auto":
        return tuple(make() for make in _AUTO.get(platform, (_reference,)))
    if choice not in BACKENDS:
        platform_hint = (
            f". The backend= of jax.jit, a platform, is another one: jax.jit(xla_fp8.rewrite(fn), backend={choice!r})"
        )
        hint = platform_hint if choice in _PLATFORMS else ""
        raise BackendError(f"unknown backend {choice!r}; the backends are: auto, {', '.join(BACKENDS)}{hint}")
    return (BACKENDS[choice](),)


def missing(choice: str | Backend, platform: str) -> str:
    """What is not installed of the backend that was named, with the pip line; "" where all is there, or for "auto"."""
    backends = () if choice == "auto" else backends_for(choice, platform)
    return next((why for b in backends if (why := getattr(b, "missing", lambda: None)())), "")


def choose(backends: Sequence[Backend], call: GraphCall, target: Target) -> Backend | No:
    """The first backend that runs `call`, or why none does."""
    reasons = []
    rule = advice = ""
    for backend in backends:
        verdict = backend.supports(call, target)
        if verdict.ok:
            return backend
        named = len(backends) == 1 or isinstance(backend, FastestBackend)
        reasons.append(verdict.reason if named else f"{backend.name}: {verdict.reason}")
        rule = rule or rule_of(verdict)
        advice = advice or advice_of(verdict)
    return No("; ".join(reasons) or "there is no backend for this platform", rule=rule, advice=advice)
