"""The plans of graph calls on one GPU: listed by name, built, loaded before a program needs them, run on XLA's stream.

Building a plan and launching it for the first time load kernels, for which CUDA may wait until the device is idle. A
run must not: the front end holds Python's lock meanwhile. If the device waits for another one's part in a collective,
and that one's thread for Python's lock, both wait for ever. So `prepare` comes before, on every device of a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import re
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import buffers, device_context, library, operation_graph, stopwatch
from xla_fp8.backends.cudnn.errors import CudnnError, CudnnUnsupportedError
from xla_fp8.backends.cudnn.geometry import Geometry
from xla_fp8.backends.cudnn.operation_graph import one_line
from xla_fp8.backends.progress import Progress

_WIDE, _NARROW = "eng4_k24=41", "eng4_k24=28"
UNPROPOSED = (_WIDE, _NARROW, "eng4_k24=29", "eng4_k24=43", "eng4_k24=55", "eng4_k24=9")
"""Kernels that the heuristics of cuDNN 9.19.0 leave out or seldom propose, though one of them is the fastest.

Of all kernels of its engines 2 and 4, on an H200, for 25 rows of convolution and epilogue, none was faster than the
best of these by more than 1%; the best proposed one takes up to 1.44x as long (docs/benchmarks.md).

Their numbers are cuDNN's own. Another version may have other kernels there: those are tried and timed as any.
"""

_KNOBS: Mapping[int, str] = MappingProxyType({17: "SPLIT_K_SLC", 24: "KERNEL_CFG", 38: "STREAM_K"})
"""Knobs by their number in the names of plans (cudnnBackendKnobType_t), as the front end calls them."""

_NAME_RE = re.compile(r"eng(\d+)((?:_k\d+=\d+)*)")


@dataclasses.dataclass(frozen=True)
class BuiltPlan:
    """A plan that can run.

    Attributes:
        graph: the `cudnn.pygraph` whose current plan it is.
        name: cuDNN's name of it: the engine and its knobs, e.g. "eng4_k24=3".
        workspace: bytes that it needs.
    """

    graph: Any
    name: str
    workspace: int


class DevicePlans:
    """cuDNN on one GPU: a handle, and the plans built with it. Threads take turns.

    A plan is not safe to run from two threads at once, and a handle has one stream, so a run sets the stream and
    launches under a lock. Nothing is waited for and nothing copied under it: a run takes some microseconds.
    """

    def __init__(self, ordinal: int) -> None:
        self._ordinal = ordinal
        self._lock = threading.RLock()
        self._handle: Any = None
        self._stream = 0  # of its own launches; made once, as the handle may look at the last stream it was given
        self._proposed: dict[str, dict[str, tuple[Any, int]]] = {}
        self._built: dict[tuple[str, str], BuiltPlan] = {}
        self._loaded: set[tuple[str, str]] = set()
        self._times: dict[tuple[str, float], dict[str, float]] = {}

    def names(self, call: str) -> tuple[str, ...]:
        """The plans to choose from for a call (`call_text.encode`): UNPROPOSED, then those that cuDNN proposes.

        Of the first what cuDNN takes for the call, of the others heuristics A, then B, or else the fallback engines;
        each plan once. The order is a guess, of which the first took at most 1.61x the time of the best on those 25
        rows; the first that cuDNN proposes took up to 3.4x.

        Raises:
            CudnnUnsupportedError: it proposes none.
        """
        with self._lock, device_context.current(self._ordinal):
            proposals = self._proposals(call)
            features = Geometry.of(call_text.decode(call)).output[1]
            first = _NARROW if features % 128 else _WIDE
            tried = [first, *(name for name in UNPROPOSED if name != first)]
            taken = [name for name in tried if name in proposals or self._takes(call, name)]
            return tuple(dict.fromkeys((*taken, *proposals)))

    def times(self, call: str, workspace_limit: float = math.inf) -> dict[str, float]:
        """Microseconds that each of `names` takes on the device, the fastest first; measured once.

        Left out is what does not build, does not run, or needs more workspace. What launching costs has no part in
        it: in a program it hides which of two plans is faster where both are shorter than a launch. Empty where the
        device has no room for the operands.

        Raises:
            CudnnUnsupportedError: cuDNN proposes no plan.
        """
        if (known := self._times.get((call, workspace_limit))) is not None:
            return known
        names, built = self.names(call), []
        found: dict[str, float] = {}
        with Progress(len(names)) as progress:
            for done, name in enumerate(names, start=1):
                progress.show(done, f"building cudnn {name}")
                with contextlib.suppress(CudnnUnsupportedError):
                    built.append(self.plan(call, name, workspace_limit))
            workspace = max((plan.workspace for plan in built), default=0)
            with device_context.current(self._ordinal), buffers.of(call_text.decode(call), workspace) as addresses:
                for plan in built if addresses else ():
                    progress.show(len(names), f"timing cudnn {plan.name}")
                    with contextlib.suppress(CudnnError):
                        found[plan.name] = self._time(plan, call, addresses)
        ordered = dict(sorted(found.items(), key=lambda item: item[1]))
        self._times[call, workspace_limit] = ordered
        return ordered

    def _time(self, plan: BuiltPlan, call: str, addresses: Sequence[int]) -> float:
        *pointers, workspace = addresses
        stream = self._own_stream()
        return stopwatch.microseconds(stream, lambda: self._launch(plan, call, pointers, workspace, stream))

    def _own_stream(self) -> int:
        with self._lock:
            self._stream = self._stream or device_context.new_stream()
            return self._stream

    def plan(self, call: str, name: str = "", workspace_limit: float = math.inf) -> BuiltPlan:
        """Builds a plan, once.

        Args:
            call: `call_text.encode` of a graph call.
            name: one of `names`, or any other as cuDNN spells it; "" for the first of `names` that builds and keeps
                to the limit.
            workspace_limit: in bytes; what needs more is not taken.

        Raises:
            CudnnUnsupportedError: there is no such plan, it does not build, or it needs more workspace.
        """
        with self._lock:
            built = self._built.get((call, name))
            if built is None or built.workspace > workspace_limit:
                with device_context.current(self._ordinal):
                    built = self._build(call, name, workspace_limit)
                self._built[call, name] = self._built[call, built.name] = built
            return built

    def is_built(self, call: str, name: str) -> bool:
        """Whether `plan` has it, whatever its workspace."""
        with self._lock:
            return (call, name) in self._built

    def is_prepared(self, call: str, name: str) -> bool:
        """Whether `prepare` has nothing to do."""
        with self._lock:
            return (call, name) in self._loaded

    def prepare(self, call: str, name: str) -> None:
        """Builds a plan and launches it once, on memory of its own, so that `run` finds everything loaded. Once.

        Every buffer is the same memory, as large as the largest: what it computes is of no use. Where the device has no
        room for that, the plan is only built.

        Raises:
            CudnnUnsupportedError: there is no such plan, or it does not build.
            CudnnError: the launch failed.
        """
        if self.is_prepared(call, name):
            return
        graph_call = call_text.decode(call)
        with device_context.current(self._ordinal):
            built = self.plan(call, name)
            sizes = buffers.sizes(graph_call)
            # Outside the lock, as memory and streams may wait for the device, and programs that run for the lock.
            with device_context.memory(max(*sizes, built.workspace)) as address:
                if address:
                    stream = self._own_stream()
                    self._launch(built, call, [address] * len(sizes), address, stream)
                    device_context.wait(stream)
        with self._lock:
            self._loaded |= {(call, name), (call, built.name)}

    def run(self, call: str, name: str, pointers: Sequence[int], workspace: int, stream: int) -> None:
        """Launches a plan; builds it first where it was not prepared.

        Args:
            pointers: device addresses of operands, then results.
            workspace: device address of at least `BuiltPlan.workspace` bytes.
            stream: the CUDA stream, as a number.

        Raises:
            CudnnError: cuDNN failed; with its reason and the graph.
        """
        self._launch(self.plan(call, name), call, pointers, workspace, stream)

    def _launch(self, built: BuiltPlan, call: str, pointers: Sequence[int], workspace: int, stream: int) -> None:
        with self._lock:
            library.cudnn().set_stream(handle=self._handle, stream=stream)
            try:
                pack = dict(enumerate(pointers, start=1))
                library.execute(built.graph, pack, workspace, self._handle)
            except Exception as error:  # the front end has several classes of its own
                raise CudnnError(f"cuDNN failed: {one_line(error)}; plan {built.name} of {call}") from error

    def keep_only(self, call: str, name: str) -> None:
        """Forgets the plans of `call` that were built beside `name`, and the device memory that their kernels take."""
        with self._lock:
            for key in [key for key in self._built if key[0] == call and self._built[key].name != name]:
                del self._built[key]
                self._loaded.discard(key)

    def _proposals(self, call: str) -> dict[str, tuple[Any, int]]:
        """The plans that cuDNN proposes: by name the heuristic mode, and the plan's index there."""
        if (found := self._proposed.get(call)) is not None:
            return found
        cudnn = library.cudnn()
        found, refusals = {}, []
        for mode in (cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK):
            # The fallback's engines have one kernel each, which the other modes propose too where they propose any.
            if found and mode == cudnn.heur_mode.FALLBACK:
                break
            try:
                graph = self._graph(call)
                graph.create_execution_plans([mode])
                graph.check_support()
            except (RuntimeError, CudnnUnsupportedError, cudnn.cudnnGraphNotSupportedError) as error:
                refusals.append(one_line(error))
                continue
            for index in range(graph.get_execution_plan_count()):
                found.setdefault(graph.get_plan_name_at_index(index), (mode, index))
        if not found:
            raise CudnnUnsupportedError(f"cuDNN proposes no plan for {call}: {refusals[0]}")
        self._proposed[call] = found
        return found

    def _graph(self, call: str) -> Any:
        """A graph of its own for each built plan, as a graph has one current plan."""
        if self._handle is None:
            self._handle = library.cudnn().create_handle()
        return operation_graph.build(call_text.decode(call), handle=self._handle).graph

    def _takes(self, call: str, name: str) -> bool:
        """Whether cuDNN takes an engine and its kernel for a call; it may fail to build yet."""
        try:
            self._named(call, name)
        except Exception:  # the front end has several classes of its own
            return False
        return True

    def _named(self, call: str, name: str) -> Any:
        """A graph with the one plan of that name, not built; raises what the front end raises."""
        parts = _NAME_RE.fullmatch(name)
        pairs = [tuple(map(int, pair)) for pair in re.findall(r"_k(\d+)=(\d+)", name)]
        if parts is None or any(knob not in _KNOBS for knob, _ in pairs):
            raise CudnnUnsupportedError(f"no plan is called {name!r}")
        knob_type = library.cudnn().knob_type
        graph = self._graph(call)
        graph.create_execution_plan(int(parts[1]), {getattr(knob_type, _KNOBS[knob]): value for knob, value in pairs})
        graph.check_support()
        return graph

    def _planned(self, call: str, name: str) -> Any:
        """A graph whose current plan is the one of that name; raises what the front end raises."""
        if (proposal := self._proposals(call).get(name)) is None:
            graph, index = self._named(call, name), 0
        else:
            mode, index = proposal
            graph = self._graph(call)
            graph.create_execution_plans([mode])
            graph.check_support()
        graph.build_plan_at_index(index)
        return graph

    def _build(self, call: str, name: str, workspace_limit: float) -> BuiltPlan:
        problems = []
        for candidate in (name,) if name else self.names(call):
            try:
                graph = self._planned(call, candidate)
                workspace = int(graph.get_workspace_size())
            except Exception as error:  # the front end has several classes of its own
                problems.append(f"{candidate}: {one_line(error)}")
                continue
            if workspace <= workspace_limit:
                return BuiltPlan(graph, candidate, workspace)
            problems.append(f"{candidate} needs {workspace} bytes of workspace; the limit is {workspace_limit:.0f}")
        raise CudnnUnsupportedError(f"cuDNN cannot build a plan for {call}: {'; '.join(problems[:3])}")


@functools.cache
def on_device(ordinal: int) -> DevicePlans:
    """The plans of GPU number `ordinal` in this process."""
    return DevicePlans(ordinal)
