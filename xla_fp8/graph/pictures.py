"""What a drawing shows, before it is drawn: boxes and arrows around each custom call that has a graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal

from xla_fp8.graph.custom_call import graph_of
from xla_fp8.graph.errors import GraphError
from xla_fp8.graph.graph import Graph
from xla_fp8.graph.ops import FP8_TYPES
from xla_fp8.hlo import HloInstruction, HloModule, Shape

BoxKind = Literal["operand", "instruction", "node", "result", "user"]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """An instruction of the module or a node of a graph. `title` is unique in its flow."""

    title: str
    detail: str
    kind: BoxKind


@dataclasses.dataclass
class Flow:
    """Boxes by title, each after those it reads, and the arrows (from, to) in the order they were added."""

    boxes: dict[str, Box] = dataclasses.field(default_factory=dict)
    arrows: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def box(self, box: Box, inputs: Iterable[str] = ()) -> str:
        """Adds a box, unless its title is there, with arrows from `inputs`. Returns the title."""
        if box.title not in self.boxes:
            self.boxes[box.title] = box
            self.arrows += [(source, box.title) for source in inputs]
        return box.title

    def inputs(self, title: str) -> list[str]:
        return [source for source, target in self.arrows if target == title]


@dataclasses.dataclass(frozen=True)
class Picture:
    """One custom call: what it became, and, where the module before is known, what it was."""

    title: str
    before: Flow | None
    after: Flow


def pictures(module: HloModule, before: HloModule | None = None) -> list[Picture]:
    """One picture for each custom call that has a graph, in module order.

    Raises GraphError where a custom call has a string that is not a graph, or too few operands for it.
    """
    calls = [(i, g) for c in module.computations for i in c for g in [graph_of(i)] if g is not None]
    replaced = _Replaced(before, module) if before else None
    return [Picture(_title(call), replaced.flow(call) if replaced else None, _after(call, g)) for call, g in calls]


def _title(call: HloInstruction) -> str:
    parts = [f"%{call.name} in %{call.parent.name}" if call.parent else f"%{call.name}"]
    parts += [f"{name}={value}" for name in ("window", "dim_labels") if (value := call.attr(name))]
    location = call.module.source_location(call)
    if location and location.file:
        parts.append(f"{location.file}:{location.line}")
    return ", ".join(parts)


def _after(call: HloInstruction, graph: Graph) -> Flow:
    sides = graph.side_operands()
    if len(call.operands) != 2 + len(sides):
        raise GraphError(
            f"custom call %{call.name} has {len(call.operands)} operands, but its graph {graph} needs {2 + len(sides)}"
        )
    flow = Flow()
    for node in graph:
        titles = [f"#{uid} {graph.node(uid).op}" for uid in node.operands]
        read = [s.index for s in sides if s.node == node.uid] if node.op != "conv" else [0, 1]
        titles += [flow.box(_instruction_box(call.operand(index), "operand")) for index in read]
        flow.box(Box(f"#{node.uid} {node.op}", node.type, "node"), titles)
    results = [f"#{node.uid} {node.op}" for node in (graph.output, *graph.aux_outputs)]
    for user in call.users:
        is_element = user.opcode == "get-tuple-element" and user.tuple_index < len(results)
        source = flow.box(_instruction_box(user, "result"), [results[user.tuple_index] if is_element else results[0]])
        for further in user.users if is_element else ():
            title = flow.box(_instruction_box(further, "user"))
            flow.arrows.append((source, title))
    return flow


class _Replaced:
    """Finds, in the module before, the instructions that a custom call stands for: those that are gone."""

    def __init__(self, before: HloModule, after: HloModule) -> None:
        # With the opcode: a custom call may have the name of the convolution that it replaced.
        kept = {(i.name, i.opcode) for c in after.computations for i in c}
        self.order = {i: position for position, i in enumerate(i for c in before.computations for i in c)}
        self.gone = {i for i in self.order if (i.name, i.opcode) not in kept}
        self.convolutions = [i for i in self.order if i in self.gone and i.opcode == "convolution"]

    def flow(self, call: HloInstruction) -> Flow | None:
        """The flow that `call` replaced; None where no convolution that is gone fits."""
        names = {operand.name for operand in call.operands}

        def fit(convolution: HloInstruction) -> tuple[bool, int]:
            shared = sum(i.name in names for i in self._boundary(self._region(convolution)))
            return convolution.op_name == call.op_name, shared

        best = max(self.convolutions, key=fit, default=None)
        if best is None or fit(best) == (False, 0):
            return None
        self.convolutions.remove(best)
        region = self._region(best)
        flow = Flow()
        for instruction in self._boundary(region):
            flow.box(_instruction_box(instruction, "operand"))
        for instruction in sorted(region, key=self.order.__getitem__):
            flow.box(_instruction_box(instruction, "instruction"), [f"%{o.name}" for o in instruction.operands])
        for instruction in sorted(region, key=self.order.__getitem__):
            for user in instruction.users:
                if user not in region:
                    flow.arrows.append((f"%{instruction.name}", flow.box(_instruction_box(user, "user"))))
        return flow

    def _region(self, convolution: HloInstruction) -> set[HloInstruction]:
        """What is gone around the convolution: down to the next FP8 values or convolutions, then up from all of it."""
        region = self._walk({convolution}, down=True)
        return self._walk(region, down=False)

    def _walk(self, start: set[HloInstruction], down: bool) -> set[HloInstruction]:
        found, todo = set(start), list(start)
        while todo:
            instruction = todo.pop()
            if down and _is_fp8(instruction):
                continue
            for other in instruction.users if down else instruction.operands:
                beyond = other.opcode == "convolution" or (not down and _is_fp8(other))
                if other in self.gone and other not in found and not beyond:
                    found.add(other)
                    todo.append(other)
        return found

    def _boundary(self, region: set[HloInstruction]) -> list[HloInstruction]:
        """The operands of the region, in module order."""
        outside = {operand for instruction in region for operand in instruction.operands if operand not in region}
        return sorted(outside, key=self.order.__getitem__)


def _is_fp8(instruction: HloInstruction) -> bool:
    return instruction.shape.element_type in FP8_TYPES


def _instruction_box(instruction: HloInstruction, kind: BoxKind) -> Box:
    what = instruction.opcode
    if what == "constant" and instruction.shape.is_scalar:
        what = f"constant({instruction.payload})"
    root = "ROOT " if instruction.is_root else ""
    return Box(f"%{instruction.name}", f"{root}{what} {_without_layout(instruction.shape)}", kind)


def _without_layout(shape: Shape) -> Shape:
    if shape.is_tuple:
        return Shape.tuple(_without_layout(element) for element in shape.tuple_shapes)
    return shape.with_layout(None)
