"""The backend: which graph calls cuDNN runs, with which plans, and the JAX function around it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence

import jax

from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import ffi, library, plans
from xla_fp8.backends.cudnn.errors import CudnnError, CudnnUnsupportedError
from xla_fp8.backends.cudnn.support import in_xla, support, support_by_rules
from xla_fp8.backends.protocol import Config, Implementation, No
from xla_fp8.target import GraphCall, Target, Verdict, format_version

WORKSPACE_LIMIT = 1 << 30
"""Bytes of workspace above which a plan is not taken: memory that the program would miss."""

NEAR = 1.05
"""How much longer than the fastest plan one may take on the device and still be compared with it in a program."""
_MOST_NEAR = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan by cuDNN's name, e.g. "eng4_k24=3"."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class CudnnBackend:
    """Graph calls through cuDNN, on GPUs that convolve FP8.

    Attributes:
        workspace_limit: in bytes; plans that need more are refused.
    """

    workspace_limit: int = WORKSPACE_LIMIT
    name: str = "cudnn"
    opaque: bool = True
    needs_python = True  # the call's target is registered by this process
    platforms = ("cuda",)

    @property
    def version(self) -> str:
        """What a measured choice of plan depends on: the versions of cuDNN and of its front end."""
        return f"cuDNN {format_version(library.version())}, front end {library.version_of('nvidia-cudnn-frontend')}"

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        """cuDNN's own answer, without device work; No with the pip line where a library is missing."""
        missing = self.missing()
        return _missing_verdict(call, target, missing) if missing else support(call, target)

    def missing(self) -> str | None:
        """Which library is not installed, with the pip line; None where all are."""
        return library.why_missing(("cudnn", "jax_tvm_ffi"))

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        """The plans that took the least time on the first GPU alone (`DevicePlans.times`), the fastest first.

        Only those near the fastest: where launching takes longer than running, a program does not tell them apart. What
        cuDNN prefers, where nothing could be timed.

        Raises:
            CudnnMissingError, CudnnUnsupportedError, CudnnError: as `lower`.
        """
        times = self._times(call)
        near = [name for name, time in times.items() if time <= NEAR * min(times.values())]
        return tuple(map(Plan, near[:_MOST_NEAR])) or (self._preferred(call),)

    def slower_configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        """The plans that `configs` leaves out, the fastest first. Raises as `configs`."""
        near = self.configs(call, target)
        return tuple(plan for plan in map(Plan, self._times(call)) if plan not in near)

    def _times(self, call: GraphCall) -> Mapping[str, float]:
        _await_programs()
        return plans.on_device(0).times(call_text.encode(call), self.workspace_limit)

    def config_named(self, call: GraphCall, target: Target, name: str | None) -> Config | None:
        """The plan of that name; None where it does not build within the limit. What cuDNN prefers, without a name."""
        if name is None:
            return self._preferred(call)
        try:
            return Plan(self._plan(call, name).name)
        except CudnnUnsupportedError:
            return None

    def _preferred(self, call: GraphCall) -> Plan:
        return Plan(self._plan(call, "").name)

    def _plan(self, call: GraphCall, name: str) -> plans.BuiltPlan:
        """A plan on the first GPU, where it is built if it is not yet."""
        device, text = plans.on_device(0), call_text.encode(call)
        if not device.is_built(text, name):
            _await_programs()
        return device.plan(text, name, self.workspace_limit)

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        """A JAX function of input, filter and side operands. Builds the plan, to know its workspace.

        Raises:
            CudnnMissingError: a library is not installed.
            CudnnUnsupportedError: the plan does not build, or needs more workspace than the limit.
            CudnnError: there is no GPU in this process to build a plan on.
        """
        if not isinstance(config, Plan):
            raise CudnnError(f"a config of the cudnn backend is a Plan, not {config!r}")
        built = self._plan(call, config.name)
        return ffi.implementation(call, built.name, built.workspace)

    def prepare(self, call: GraphCall, config: Config, devices: Sequence[jax.Device]) -> None:
        """Builds and loads the plan on each of the GPUs that will run it (`DevicePlans.prepare`). Raises CudnnError."""
        if not isinstance(config, Plan):
            return
        # By the name that the program's call has, and the GPU's number in this process, which XLA gives that call.
        text, name = call_text.encode(call), self._plan(call, config.name).name
        on = [plans.on_device(device.local_hardware_id) for device in devices if device.platform == "gpu"]
        if not all(one.is_prepared(text, name) for one in on):
            _await_programs()
            for one in on:
                one.prepare(text, name)

    def settled(self, call: GraphCall, config: Config) -> None:
        """Frees what was built for `call` beside `config`, after plans were timed; all where another backend won."""
        plans.on_device(0).keep_only(call_text.encode(call), config.name if isinstance(config, Plan) else "")


def _missing_verdict(call: GraphCall, target: Target, missing: str) -> No:
    """Without cuDNN's front end the chain is left to XLA: with a rule where that has no FP8 kernel for it either."""
    answer = in_xla(support_by_rules(call, target), call)
    return No(missing) if answer.ok else No(f"{answer.reason}; {missing}", rule=answer.rule, advice=answer.advice)


def _await_programs() -> None:
    """Returns when the programs that are running have made their results; other threads of Python run meanwhile.

    Building a plan may wait for its device, and the front end lets no other thread run. A program that is in a
    collective there may need such a thread on another device to go on.
    """
    for array in jax.live_arrays():  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # it was donated, or its program failed: that has ended too
            array.block_until_ready()
