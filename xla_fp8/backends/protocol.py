"""What a backend is: something that says which graph calls it runs, with which settings, and as which JAX function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, runtime_checkable

import jax

from xla_fp8.target import GraphCall, Target, Verdict


@dataclasses.dataclass(frozen=True)
class Yes:
    """The backend runs it."""

    ok: bool = True
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class No:
    """The backend does not run it.

    Attributes:
        reason: a sentence for the report.
        rule: a short name where XLA could not run it in FP8 either (`xla_fp8.target.rule_of`), else "".
        advice: what would make it run, for the report; "" where there is none.
    """

    reason: str
    ok: bool = False
    rule: str = ""
    advice: str = ""


Config = Hashable
"""Settings of one way to run a call (tile sizes, an engine id); only the backend that made them reads them."""

Implementation = Callable[..., tuple[jax.Array, ...]]
"""Input, filter, side operands → the output, then the aux outputs. It is traced where the call stood."""


@runtime_checkable
class Backend(Protocol):
    """How graph custom calls run. Backends are values: hashable, two that are equal lower a call to the same, and
    `repr` tells different ones apart, alike in every process.

    Attributes:
        name: as `rewrite(..., backend=name)` says it.
        platforms: optional: JAX's names of what programs with it can be lowered for ("cpu", "cuda", ...), and where its
            configs are timed; everything where there is none (`platforms_of`).
        opaque: whether what `lower` returns is a custom call or kernel that XLA's partitioner cannot look into. Such a
            call is partitioned by its batch dimension, amax reduced across the shards.

    One whose configs are costly to list may have `config_named(call, target, name)`: the config with this text, or with
    None the one that a heuristic prefers; None where there is none. The autotuner then lists them only to time them.

    With that, `configs` may be only those that are near the fastest, and `slower_configs(call, target)` the others:
    they are timed where none of the first agrees with the reference.

    One with `prepare(call, config, devices)` is told on which devices of this process the function of a config will
    run, before any program with it does: there it loads what may not be loaded while a collective waits.

    One that needs other packages may have `missing()`: a sentence that names what is not installed, or None. Whoever
    names that backend is warned.

    One with a true attribute `needs_python` lowers to calls that only a process with this package can run; `jax.export`
    leaves its chains to XLA.
    """

    @property
    def name(self) -> str: ...

    @property
    def opaque(self) -> bool: ...

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        """Whether it can run `call`. Asked while compiling: no device work."""
        ...

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        """The ways to run `call`, the one that a heuristic prefers first. Never empty where `supports` said yes."""
        ...

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        """A JAX function that computes `call`.

        What it traces to must name the graph itself (as FFI attributes, say), never an id or key of this process:
        JAX's persistent compilation cache would return it to another process.
        """
        ...


def platforms_of(backend: Backend) -> tuple[str, ...] | None:
    """The platforms of a backend; None where it runs on all."""
    platforms: tuple[str, ...] | None = getattr(backend, "platforms", None)
    return platforms
