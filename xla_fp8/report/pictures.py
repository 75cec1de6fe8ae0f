"""The pictures of an entry: what stood around it before the passes, and the graph call that it became."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence

from xla_fp8.graph import Graph, GraphError, graph_of
from xla_fp8.graph.overview import edges
from xla_fp8.graph.pictures import Before, Box, BoxKind, Flow, call_flow, graph_flow
from xla_fp8.hlo import HloAttributeError, HloInstruction, HloModule
from xla_fp8.report.report import Entry, Report

_WORD_RE = re.compile(r"[\w.-]+")


@dataclasses.dataclass(frozen=True)
class Modules:
    """A module before the passes, and what they made of it."""

    before: HloModule
    after: HloModule


class Pictures:
    """What is drawn for each entry of a report; graphs alone where its modules are not known.

    Args:
        entries: in the order of the page.
    """

    def __init__(self, entries: Sequence[Entry], modules: Modules | None) -> None:
        self.instructions: dict[HloInstruction, int] = {}
        """The number of the entry that an instruction stands for, before or after the passes."""
        self._entries = entries
        self._own: dict[int, HloInstruction] = {}
        self._calls: dict[int, HloInstruction] = {}
        self._modules = modules
        self._before = Before(modules.before, modules.after) if modules else None
        if modules is None:
            return
        for number, entry in enumerate(entries):
            if (own := _instruction(modules.before, entry)) is not None:
                self._own[number] = own
        self._calls = _calls(modules.after, entries, self._own)
        self.instructions = {i: number for found in (self._own, self._calls) for number, i in found.items()}

    def own(self, number: int) -> HloInstruction | None:
        """The instruction of an entry in the module before."""
        return self._own.get(number)

    def of(self, number: int) -> list[tuple[str, Flow]]:
        """(heading, flow) pairs of an entry."""
        entry, own, call = self._entries[number], self._own.get(number), self._calls.get(number)
        flows: list[tuple[str, Flow]] = []
        if self._before is not None and own is not None:
            flows.append(("before" if entry.graph else "as it stands", self._before.around(own)))
        graph = _graph(entry)
        if call is not None:
            flows.append(("after", call_flow(call, graph)))
        elif graph is not None:
            flows.append(("after", graph_flow(graph)))
        return flows

    def at_fault(self, number: int) -> set[str]:
        """The titles of boxes that the reason of an entry names, the entry's own aside."""
        entry = self._entries[number]
        return {f"%{word}" for word in _WORD_RE.findall(entry.reason)} - {f"%{entry.instruction}"}

    def overview(self, titles: Sequence[str], kinds: Sequence[BoxKind]) -> Flow:
        """The entries as boxes, in the order of the module, each with arrows from those that feed it."""
        flow = Flow()
        if self._modules is None:
            return flow
        numbers = {instruction: number for number, instruction in self._own.items()}
        for computation in self._modules.before.computations:
            for number in (numbers[i] for i in computation if i in numbers):
                flow.box(Box(titles[number], _short(self._entries[number]), kinds[number], self._own[number]))
        pairs = edges(self._modules.before, numbers)
        flow.arrows += [(titles[numbers[a]], titles[numbers[b]]) for a, b in pairs]
        return flow


def _short(entry: Entry) -> str:
    """The source line without its folders."""
    return entry.source.rpartition("/")[2] if entry.source else entry.op


def entries_of(report: Report) -> list[tuple[Entry, BoxKind]]:
    """The entries in the order of the page, each with its kind."""
    groups: list[tuple[Sequence[Entry], BoxKind]] = [
        (report.refused_fp8, "refused"),
        (report.rewritten, "rewritten"),
        (report.refused_without_fp8, "other"),
    ]
    return [(entry, kind) for entries, kind in groups for entry in entries]


def _instruction(module: HloModule, entry: Entry) -> HloInstruction | None:
    try:
        return module.computation(entry.computation).instruction(entry.instruction)
    except HloAttributeError:
        return None


def _graph(entry: Entry) -> Graph | None:
    """None for what has no graph string: a matmul or quantization call."""
    try:
        return Graph.parse(entry.graph) if entry.graph else None
    except GraphError:
        return None


def _calls(module: HloModule, entries: Sequence[Entry], own: dict[int, HloInstruction]) -> dict[int, HloInstruction]:
    """The call that each rewritten entry became: one with its graph, and its name or else its op_name."""
    named: dict[tuple[Graph | None, str], HloInstruction] = {}
    alike: dict[tuple[Graph | None, str], list[HloInstruction]] = {}
    for call in (i for c in module.computations for i in c if i.opcode == "custom-call"):
        graph = graph_of(call)
        named[graph, call.name] = call
        alike.setdefault((graph, call.op_name), []).append(call)
    found: dict[int, HloInstruction] = {}
    taken: set[HloInstruction] = set()
    for number in (n for n in own if entries[n].graph):
        before, graph = own[number], _graph(entries[number])
        candidates = itertools.chain([named.get((graph, before.name))], alike.get((graph, before.op_name), ()))
        best = next((call for call in candidates if call is not None and call not in taken), None)
        if best is not None:
            found[number] = best
            taken.add(best)
    return found
