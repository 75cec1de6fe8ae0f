"""Programs on two devices that meet in collectives: with a cuDNN whose kernels load when they are first launched.

CUDA may wait for a device before it loads a kernel. cuDNN's front end holds Python's lock then. A device whose program
waits in a collective for another device, the thread of which needs that lock to launch its own part, never gets on.
The fakes raise an error where the real ones would wait.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import pytest

from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import device_context, ffi, library, plans
from xla_fp8.backends.cudnn.backend import CudnnBackend, Plan
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.target import Target

CALLS = [graph_call("1:[f8e4m3fn]conv();", channels=channels) for channels in (16, 32)]
H200 = Target.parse("h200")
TEXTS = [call_text.encode(call) for call in CALLS]


@dataclasses.dataclass
class Machine:
    """Two GPUs: how many collectives each has in its queue, and the one that is current in this thread."""

    queued: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    current: int = 0
    launches: list[int] = dataclasses.field(default_factory=lambda: [0, 0])

    def collective(self, device: int) -> None:
        self.queued[device] += 1

    def waits_for_the_device(self) -> None:
        """What CUDA may do when it loads something, with Python's lock held: the other device can launch nothing."""
        if self.queued[self.current] > self.queued[1 - self.current]:
            raise RuntimeError(f"device {self.current} waits in a collective for device {1 - self.current}: for ever")


class LazyGraph:
    """A `pygraph` with one plan, whose kernel is loaded at the first launch."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.is_loaded = False

    def create_execution_plans(self, modes: list[str]) -> None: ...

    def check_support(self) -> None: ...

    def get_execution_plan_count(self) -> int:
        return 1

    def get_plan_name_at_index(self, index: int) -> str:
        return "eng0"

    def build_plan_at_index(self, index: int) -> None:
        self.machine.waits_for_the_device()

    def get_workspace_size(self) -> int:
        return 256

    def _execute(self, pointers: dict[int, int], workspace: int, handle: str) -> None:
        if not self.is_loaded:
            self.machine.waits_for_the_device()
        self.is_loaded = True
        self.machine.launches[self.machine.current] += 1


class Cudnn:
    cudnnGraphNotSupportedError = RuntimeError

    class heur_mode:
        A, B, FALLBACK = "A", "B", "FALLBACK"

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, handle: str, stream: int) -> None: ...


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the backend asks of a `jax.Device`."""

    local_hardware_id: int
    platform: str = "gpu"


GPUS: Any = (Gpu(0), Gpu(1))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine, cudnn = Machine(), Cudnn()
    devices = [plans.DevicePlans(ordinal) for ordinal in range(2)]

    @contextlib.contextmanager
    def current(ordinal: int) -> Any:
        before, machine.current = machine.current, ordinal
        yield
        machine.current = before

    monkeypatch.setattr(library, "cudnn", lambda: cudnn)
    monkeypatch.setattr(ffi, "target", lambda *_: "")  # jax-tvm-ffi is not needed to know when plans are built
    monkeypatch.setattr(device_context, "current", current)
    monkeypatch.setattr(device_context, "memory", lambda size: contextlib.nullcontext(1 << 20))
    monkeypatch.setattr(device_context, "new_stream", lambda: 1)
    monkeypatch.setattr(device_context, "wait", lambda stream: None)
    monkeypatch.setattr(plans, "on_device", lambda ordinal: devices[ordinal])
    monkeypatch.setattr(
        plans.operation_graph,
        "build",
        lambda call, **settings: plans.operation_graph.OperationGraph(LazyGraph(machine), 3),
    )
    return machine


def run_program(machine: Machine) -> None:
    """A convolution, an all-reduce, a convolution: XLA's thread of the first device is far ahead of the second's."""
    for ordinal in range(2):
        with device_context.current(ordinal):
            plans.on_device(ordinal).run(TEXTS[0], "eng0", [1, 2, 3], 4, 7)
            machine.collective(ordinal)
            plans.on_device(ordinal).run(TEXTS[1], "eng0", [1, 2, 3], 4, 7)


def test_a_program_that_was_prepared_loads_nothing_while_a_collective_waits(machine: Machine) -> None:
    backend = CudnnBackend()
    for call in CALLS:
        backend.prepare(call, Plan("eng0"), GPUS)
    prepared = list(machine.launches)
    run_program(machine)
    assert [after - before for after, before in zip(machine.launches, prepared, strict=True)] == [2, 2]


@pytest.mark.parametrize("prepared", [GPUS[:0], GPUS[1:]], ids=["nothing", "the other device"])
def test_a_program_that_was_not_would_wait_for_ever(machine: Machine, prepared: Any) -> None:
    """Also where lowering has built the plans on the first device: to be built is not to be loaded."""
    for call in CALLS:
        plans.on_device(0).plan(call_text.encode(call), "eng0")
        CudnnBackend().prepare(call, Plan("eng0"), prepared)
    with pytest.raises(Exception, match="for ever"):
        run_program(machine)


def test_only_gpus_of_the_program_are_prepared(machine: Machine) -> None:
    CudnnBackend().prepare(CALLS[0], Plan("eng0"), (GPUS[1], jax.devices("cpu")[0]))
    assert machine.launches == [0, 1]


def test_what_runs_is_awaited_before_anything_is_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a device idle where a program of before was only dispatched to the others."""
    machine.collective(0)

    class Result:
        def block_until_ready(self) -> None:
            if not machine.queued[1]:
                machine.collective(1)

    class Donated:
        def block_until_ready(self) -> None:
            raise RuntimeError("Array has been deleted")

    monkeypatch.setattr(jax, "live_arrays", lambda: [Donated(), Result()])
    backend = CudnnBackend()
    config = backend.config_named(CALLS[0], H200, None)
    backend.lower(CALLS[0], config)
    backend.prepare(CALLS[0], config, GPUS)
    assert machine.launches == [1, 1]
    monkeypatch.setattr(jax, "live_arrays", lambda: pytest.fail("there is nothing to load"))
    backend.prepare(CALLS[0], config, GPUS)


@pytest.mark.parametrize("ask", ["configs", "lower"])
def test_what_runs_is_awaited_before_a_plan_is_built(
    ask: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.collective(0)
    monkeypatch.setattr(jax, "live_arrays", lambda: machine.collective(1) or [])
    monkeypatch.setattr(plans.stopwatch, "microseconds", lambda stream, launch: 10.0)
    monkeypatch.setattr(device_context, "upload", lambda address, array: None)
    if ask == "configs":
        assert CudnnBackend().configs(CALLS[0], H200) == (Plan("eng0"),)
    else:
        CudnnBackend().lower(CALLS[0], Plan("eng0"))
