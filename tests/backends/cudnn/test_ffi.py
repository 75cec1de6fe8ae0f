"""The FFI target on the CPU, with a cuDNN that only notes what it is asked: what XLA hands over, errors, threads."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8 import hlo
from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import CudnnError, buffers, device_context, ffi, library, plans
from xla_fp8.backends.cudnn.backend import CudnnBackend, Plan
from xla_fp8.backends.cudnn.errors import CudnnUnsupportedError
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import Target

GRAPH = "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f8e4m3fn]add(3);5:[bf16]amax(3);6:[bf16]copy(3);"

needs_jax_tvm_ffi = pytest.mark.skipif(
    importlib.util.find_spec("jax_tvm_ffi") is None, reason=f"jax-tvm-ffi is not installed: {library.PIP_LINE}"
)


@dataclasses.dataclass
class Recorder:
    """Stands for `DevicePlans`: keeps what it is asked to run."""

    calls: list[tuple[str, str, int]] = dataclasses.field(default_factory=list)
    error: str = ""

    def run(self, call: str, name: str, pointers: Sequence[int], workspace: int, stream: int) -> None:
        if self.error:
            raise CudnnError(self.error)
        assert all(pointers)
        assert workspace
        self.calls.append((call, name, len(pointers)))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(ffi.plans, "on_device", lambda ordinal: recorder)
    return recorder


def zeros(call: Any) -> list[jax.Array]:
    return [jnp.zeros(shape.dimensions, numpy_dtype(shape.element_type)) for shape in call.operand_shapes]


@needs_jax_tvm_ffi
@pytest.mark.parametrize("labels", ["b01f_o01i->b01f", "bf01_01io->fb01"])
def test_the_call_carries_graph_and_plan(recorder: Recorder, labels: str) -> None:
    call = graph_call(GRAPH, labels=labels)
    function = jax.jit(ffi.implementation(call, "eng4_k24=3", 256, "cpu"))
    outputs = function(*zeros(call))
    assert [(o.shape, o.dtype.name) for o in outputs] == [
        (call.output_shapes[0].dimensions, "float8_e4m3fn"),
        ((), "bfloat16"),
        (call.output_shapes[0].dimensions, "bfloat16"),
    ]
    ((text, plan, buffers),) = recorder.calls
    assert call_text.decode(text) == call_text.decode(call_text.encode(call))
    assert plan == "eng4_k24=3"
    assert buffers == len(call.operand_shapes) + 3
    compiled = function.lower(*zeros(call)).as_text()
    assert "xla_fp8.cudnn_graph" in compiled
    assert "1:[f32]conv();2:[f32]scale(1);" in compiled
    assert "} eng4_k24=3" in compiled


@needs_jax_tvm_ffi
@pytest.mark.parametrize("type_", ["f8e4m3fn", "f8e5m2", "bf16", "f16", "f32"])
def test_buffers_of_every_type_go_through(recorder: Recorder, type_: str) -> None:
    graph = f"1:[f32]conv();2:[f32]add(1);3:[{type_}]scale(2);"
    call = graph_call(graph, side=type_, types=("f8e5m2", "f8e4m3fn"))
    (output,) = jax.jit(ffi.implementation(call, "p", 0, "cpu"))(*zeros(call))
    assert output.dtype == numpy_dtype(type_)


@needs_jax_tvm_ffi
def test_layouts_are_asked_for_channels_last(recorder: Recorder) -> None:
    call = graph_call(GRAPH, labels="bf01_oi01->bf01")
    text = jax.jit(ffi.implementation(call, "p", 0, "cpu")).lower(*zeros(call)).as_text()
    layouts = text[text.index("operand_layouts") : text.index("operand_layouts") + 400]
    assert "dense<[1, 3, 2, 0]>" in layouts


@needs_jax_tvm_ffi
def test_nothing_but_the_call_is_in_a_program(recorder: Recorder) -> None:
    """No conversion, no transpose, no zero that the amax begins with: each would be a kernel more."""
    call = graph_call("1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]scale(2);4:[f32]amax(2);")
    program = jax.jit(ffi.implementation(call, "p", 0, "cpu")).lower(*zeros(call)).compile()
    opcodes = [instruction.opcode for instruction in hlo.parse(program.as_text()).entry]
    assert opcodes.count("custom-call") == 1
    assert set(opcodes) <= {"parameter", "custom-call", "get-tuple-element", "tuple"}


@needs_jax_tvm_ffi
def test_an_error_says_what_cudnn_said(recorder: Recorder) -> None:
    recorder.error = "cuDNN failed: CUDNN_STATUS_EXECUTION_FAILED; plan eng0 of {...}"
    call = graph_call(GRAPH)
    with pytest.raises(jax.errors.JaxRuntimeError, match="CUDNN_STATUS_EXECUTION_FAILED; plan eng0"):
        jax.block_until_ready(jax.jit(ffi.implementation(call, "p", 0, "cpu"))(*zeros(call)))


@needs_jax_tvm_ffi
def test_many_threads_call_it(recorder: Recorder) -> None:
    call = graph_call(GRAPH)
    function = jax.jit(ffi.implementation(call, "p", 0, "cpu"))
    arguments = zeros(call)
    jax.block_until_ready(function(*arguments))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: jax.block_until_ready(function(*arguments)), range(40)))
    assert len(recorder.calls) == 41


# The plans of a device, with a front end that has no device.


class FakeGraph:
    """A `pygraph` with three plans, of which the first does not build, and the kernels that the front end takes."""

    def __init__(self, log: list[str], taken: Container[int]) -> None:
        self.log = log
        self.taken = taken
        self.names = ["eng0", "eng1", "eng2"]
        self.current = -1

    def create_execution_plans(self, modes: list[str]) -> None:
        assert modes != ["FALLBACK"], "the others have plans"

    def create_execution_plan(self, engine: int, knobs: dict[str, int]) -> None:
        if knobs["kernel"] not in self.taken:
            raise RuntimeError("NOT_SUPPORTED")
        self.names = [f"eng{engine}_k24={knobs['kernel']}"]

    def check_support(self) -> None:
        pass

    def get_execution_plan_count(self) -> int:
        return len(self.names)

    def get_plan_name_at_index(self, index: int) -> str:
        return self.names[index]

    def build_plan_at_index(self, index: int) -> None:
        self.log.append(f"build {self.names[index]}")
        if self.names[index] == "eng0":
            raise RuntimeError("no kernel image")
        self.current = index

    def get_workspace_size(self) -> int:
        return 100 * self.current

    def _execute(self, pointers: dict[int, int], workspace: int, handle: str) -> None:
        self.log.append(f"run {self.names[self.current]} {pointers} {workspace} {handle}")


class FakeCudnn:
    cudnnGraphNotSupportedError = RuntimeError

    class heur_mode:
        A, B, FALLBACK = "A", "B", "FALLBACK"

    class knob_type:
        KERNEL_CFG = "kernel"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.taken: set[int] = set()
        self.room = 1 << 40

    def address(self, size: int) -> int:
        """Of memory, which is its size here; 0 where there is no room."""
        return size if size <= self.room else 0

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, handle: str, stream: int) -> None:
        self.log.append(f"stream {stream}")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCudnn:
    import contextlib

    fake = FakeCudnn()
    monkeypatch.setattr(library, "cudnn", lambda: fake)
    monkeypatch.setattr(device_context, "current", lambda ordinal: contextlib.nullcontext())
    monkeypatch.setattr(device_context, "memory", lambda size: contextlib.nullcontext(fake.address(size)))
    monkeypatch.setattr(device_context, "new_stream", lambda: 5)
    monkeypatch.setattr(device_context, "wait", lambda stream: fake.log.append(f"wait {stream}"))
    monkeypatch.setattr(
        plans.operation_graph,
        "build",
        lambda call, **settings: plans.operation_graph.OperationGraph(FakeGraph(fake.log, fake.taken), 3),
    )
    return fake


TEXT = call_text.encode(graph_call("1:[f8e4m3fn]conv();"))


def test_plans_are_listed_once_and_built_once(fake: FakeCudnn) -> None:
    device = plans.DevicePlans(0)
    assert device.names(TEXT) == ("eng0", "eng1", "eng2")
    built = device.plan(TEXT, "eng2")
    assert (built.name, built.workspace) == ("eng2", 200)
    assert device.plan(TEXT, "eng2") is built
    assert fake.log == ["build eng2"]


def test_the_fallback_is_asked_where_no_heuristic_proposes_a_plan(
    fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def create_execution_plans(graph: FakeGraph, modes: list[str]) -> None:
        asked.extend(modes)
        if modes != ["FALLBACK"]:
            raise RuntimeError("No valid engine configs")

    monkeypatch.setattr(FakeGraph, "create_execution_plans", create_execution_plans)
    assert plans.DevicePlans(0).names(TEXT) == ("eng0", "eng1", "eng2")
    assert asked == ["A", "B", "FALLBACK"]


@pytest.mark.parametrize(("features", "first"), [(128, 41), (64, 28)])
def test_kernels_that_heuristics_leave_out_come_first_where_cudnn_takes_them(
    fake: FakeCudnn, features: int, first: int
) -> None:
    fake.taken.update((41, 28, 9))
    text = call_text.encode(graph_call("1:[f8e4m3fn]conv();", features=features))
    [second] = {41, 28} - {first}
    device = plans.DevicePlans(0)
    assert device.names(text) == (
        *(f"eng4_k24={kernel}" for kernel in (first, second, 9)),
        *("eng0", "eng1", "eng2"),
    )
    assert device.plan(text).name == f"eng4_k24={first}"
    assert device.plan(text, "eng4_k24=9").name == "eng4_k24=9"
    assert fake.log == [f"build eng4_k24={first}", "build eng4_k24=9"]


def test_without_a_name_the_first_that_builds_is_taken(fake: FakeCudnn) -> None:
    assert plans.DevicePlans(0).plan(TEXT).name == "eng1"
    assert fake.log == ["build eng0", "build eng1"]


def test_a_plan_that_needs_too_much_workspace_is_passed_over(fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGraph, "get_workspace_size", lambda graph: 300 - 100 * graph.current)
    device = plans.DevicePlans(0)
    assert device.plan(TEXT).name == "eng1"
    assert device.plan(TEXT, workspace_limit=150).name == "eng2"
    with pytest.raises(CudnnUnsupportedError, match="eng1 needs 200 bytes of workspace; the limit is 150"):
        device.plan(TEXT, "eng1", workspace_limit=150)
    monkeypatch.setattr(plans, "on_device", lambda ordinal: device)
    backend, call, target = CudnnBackend(workspace_limit=150), call_text.decode(TEXT), Target.parse("h200")
    assert backend.config_named(call, target, None) == Plan("eng2")
    assert backend.config_named(call, target, "eng1") is None


def test_what_does_not_build_says_why(fake: FakeCudnn) -> None:
    with pytest.raises(CudnnUnsupportedError, match=r"cannot build a plan for .*eng0: no kernel image"):
        plans.DevicePlans(0).plan(TEXT, "eng0")
    with pytest.raises(CudnnUnsupportedError, match=r"cannot build a plan for .*eng4_k24=9: NOT_SUPPORTED"):
        plans.DevicePlans(0).plan(TEXT, "eng4_k24=9")
    for name in ("eng4_k99=9", "th=8"):
        with pytest.raises(CudnnUnsupportedError, match=f"no plan is called '{name}'"):
            plans.DevicePlans(0).plan(TEXT, name)


@pytest.fixture
def watch(fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How long each plan takes, by the number that the fake runs; what is not in it fails."""
    times = {"eng1": 30.0, "eng2": 20.0}

    def microseconds(stream: int, launch: Any) -> float:
        launch()
        name = fake.log[-1].split()[1]
        if name not in times:
            raise CudnnError("the launch failed")
        return times[name]

    monkeypatch.setattr(plans.stopwatch, "microseconds", microseconds)
    monkeypatch.setattr(device_context, "upload", lambda address, array: None)
    return times


def test_plans_are_timed_once_on_the_device_and_the_fastest_stand_first(
    fake: FakeCudnn, watch: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, call, target = plans.DevicePlans(0), call_text.decode(TEXT), Target.parse("h200")
    monkeypatch.setattr(plans, "on_device", lambda ordinal: device)
    assert device.times(TEXT, CudnnBackend().workspace_limit) == {"eng2": 20.0, "eng1": 30.0}, "eng0 does not build"
    launches = len(fake.log)
    assert CudnnBackend().configs(call, target) == (Plan("eng2"),), "eng1 is far behind"
    assert len(fake.log) == launches
    watch["eng1"] = 20.9
    near = plans.DevicePlans(0)
    monkeypatch.setattr(plans, "on_device", lambda ordinal: near)
    assert CudnnBackend().configs(call, target) == (Plan("eng2"), Plan("eng1"))


def test_plans_far_behind_are_there_for_where_the_others_are_wrong(
    fake: FakeCudnn, watch: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = plans.DevicePlans(0)
    monkeypatch.setattr(plans, "on_device", lambda ordinal: device)
    assert CudnnBackend().slower_configs(call_text.decode(TEXT), Target.parse("h200")) == (Plan("eng1"),)


def test_building_and_timing_plans_shows_how_far_it_is(
    fake: FakeCudnn, watch: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(
        plans.Progress, "show", lambda progress, done, what: shown.append(f"{done}/{progress.total} {what}")
    )
    plans.DevicePlans(0).times(TEXT)
    assert shown == [
        "1/3 building cudnn eng0",
        "2/3 building cudnn eng1",
        "3/3 building cudnn eng2",
        "3/3 timing cudnn eng1",
        "3/3 timing cudnn eng2",
    ]


def test_what_fails_as_it_is_timed_is_no_config(
    fake: FakeCudnn, watch: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = plans.DevicePlans(0)
    monkeypatch.setattr(plans, "on_device", lambda ordinal: device)
    del watch["eng2"]
    assert CudnnBackend().configs(call_text.decode(TEXT), Target.parse("h200")) == (Plan("eng1"),)


def test_where_nothing_can_be_timed_the_preferred_plan_is_the_only_one(
    fake: FakeCudnn, watch: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = plans.DevicePlans(0)
    monkeypatch.setattr(plans, "on_device", lambda ordinal: device)
    fake.room = 16
    assert CudnnBackend().configs(call_text.decode(TEXT), Target.parse("h200")) == (Plan("eng1"),)


def test_operands_lie_apart_and_what_is_uploaded_fills_them(fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    call = graph_call("1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]bias(2);4:[bf16]amax(2);", channels=16, features=48)
    uploaded = {}
    monkeypatch.setattr(device_context, "upload", lambda address, array: uploaded.update({address: array}))
    with buffers.of(call, workspace=100) as addresses:
        pass
    sizes = buffers.sizes(call)
    assert sizes[2:4] == [4, 4 * 48]
    assert sizes[-1] == 4
    assert all(a % 256 == addresses[0] % 256 for a in addresses)
    gaps = [after - before for before, after in itertools.pairwise(addresses)]
    assert all(gap >= size for gap, size in zip(gaps, sizes, strict=True))
    assert [array.nbytes for array in uploaded.values()] == sizes[:4]
    assert list(uploaded) == addresses[:4]
    assert all(np.isfinite(array.astype(np.float32)).all() for array in uploaded.values())


def test_a_run_sets_the_stream_and_launches(fake: FakeCudnn) -> None:
    device = plans.DevicePlans(0)
    device.run(TEXT, "eng1", [10, 20, 30], 40, 7)
    assert fake.log == ["build eng1", "stream 7", "run eng1 {1: 10, 2: 20, 3: 30} 40 handle"]


def test_preparing_launches_once_on_memory_as_large_as_the_largest_buffer(fake: FakeCudnn) -> None:
    device = plans.DevicePlans(0)
    device.prepare(TEXT, "eng2")
    device.prepare(TEXT, "eng2")
    call = call_text.decode(TEXT)
    size = max(shape.element_count for shape in (*call.operand_shapes, *call.output_shapes))
    assert fake.log == [
        "build eng2",
        "stream 5",
        f"run eng2 {{1: {size}, 2: {size}, 3: {size}}} {size} handle",
        "wait 5",
    ]
    device.run(TEXT, "eng2", [10, 20, 30], 40, 7)
    assert fake.log[4:] == ["stream 7", "run eng2 {1: 10, 2: 20, 3: 30} 40 handle"]


def test_a_plan_is_only_built_where_there_is_no_memory_to_launch_it_on(fake: FakeCudnn) -> None:
    fake.room = 16
    plans.DevicePlans(0).prepare(TEXT, "eng2")
    assert fake.log == ["build eng2"]


def test_an_amax_gets_memory_for_an_f32(fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeGraph, "get_workspace_size", lambda graph: 0)
    one = {"batch": 1, "image": (1, 1), "channels": 1, "features": 1, "filter": (1, 1)}
    call = graph_call("1:[f8e4m3fn]conv();2:[bf16]amax(1);", **one)
    plans.DevicePlans(0).prepare(call_text.encode(call), "eng1")
    assert fake.log[2] == "run eng1 {1: 4, 2: 4, 3: 4, 4: 4} 4 handle"


def test_a_forgotten_plan_is_prepared_again(fake: FakeCudnn) -> None:
    device = plans.DevicePlans(0)
    device.prepare(TEXT, "eng1")
    device.keep_only(TEXT, "eng2")
    device.prepare(TEXT, "eng1")
    assert [line for line in fake.log if "build" in line or "run" in line[:3]] == [
        "build eng1",
        f"run eng1 {fake.log[2].removeprefix('run eng1 ')}",
    ] * 2


def test_losers_are_forgotten(fake: FakeCudnn) -> None:
    device = plans.DevicePlans(0)
    first = device.plan(TEXT, "eng1")
    device.plan(TEXT, "eng2")
    device.keep_only(TEXT, "eng1")
    assert device.plan(TEXT, "eng1") is first
    device.plan(TEXT, "eng2")
    assert fake.log == ["build eng1", "build eng2", "build eng2"]


def test_without_a_driver_the_message_says_so() -> None:
    if np.any([device.platform == "gpu" for device in jax.devices()]):
        pytest.skip("there is a GPU here")
    with pytest.raises(CudnnError, match=r"(CUDA|NVIDIA) driver"), device_context.current(0):
        pass
