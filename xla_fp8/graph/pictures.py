"""What a drawing shows, before it is drawn: boxes and arrows around custom calls, and what they replaced."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Container, Iterable, Iterator
from typing import Literal

from xla_fp8.graph.custom_call import graph_of
from xla_fp8.graph.errors import GraphError
from xla_fp8.graph.graph import Graph
from xla_fp8.graph.node import Node
from xla_fp8.graph.ops import FP8_TYPES
from xla_fp8.hlo import HloInstruction, HloModule, Shape

_PRODUCTS = ("convolution", "dot")
_ENDS = ("parameter", "tuple", "call", "while", "conditional")
_MOST_REPLACED, _MOST_NEAR = 120, 20
"""Instructions in one picture, beside operands and users."""

BoxKind = Literal["operand", "instruction", "node", "result", "user", "rewritten", "refused", "other"]


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """An instruction of the module or a node of a graph. `title` is unique in its flow.

    `instruction` is the one that it is, or whose graph it is a node of; None where there is no module.
    """

    title: str
    detail: str
    kind: BoxKind
    instruction: HloInstruction | None = None


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
    flows = Before(before, module).replaced_by(c for c, _ in calls) if before else itertools.repeat(None)
    return [Picture(_title(call), flow, call_flow(call, g)) for (call, g), flow in zip(calls, flows, strict=False)]


def _title(call: HloInstruction) -> str:
    parts = [f"%{call.name} in %{call.parent.name}" if call.parent else f"%{call.name}"]
    parts += [f"{name}={value}" for name in ("window", "dim_labels") if (value := call.attr(name))]
    location = call.module.source_location(call)
    if location and location.file:
        parts.append(f"{location.file}:{location.line}")
    return ", ".join(parts)


def graph_flow(graph: Graph) -> Flow:
    """A graph alone, as its string has it."""
    flow = Flow()
    for node in graph:
        flow.box(Box(_node_title(node), node.type, "node"), [_node_title(graph.node(uid)) for uid in node.operands])
    return flow


def call_flow(call: HloInstruction, graph: Graph | None) -> Flow:
    """A custom call: its operands, the nodes of its graph (the call itself where it has none), results and their users.

    Raises GraphError where the call has too few operands for its graph.
    """
    if graph is None:
        flow = Flow()
        flow.box(instruction_box(call, "node"), [flow.box(instruction_box(o, "operand")) for o in call.operands])
        for user in call.users:
            flow.arrows.append((f"%{call.name}", flow.box(instruction_box(user, "result"))))
        return flow
    sides = graph.side_operands()
    if len(call.operands) != 2 + len(sides):
        raise GraphError(
            f"custom call %{call.name} has {len(call.operands)} operands, but its graph {graph} needs {2 + len(sides)}"
        )
    flow = Flow()
    for node in graph:
        titles = [_node_title(graph.node(uid)) for uid in node.operands]
        read = [s.index for s in sides if s.node == node.uid] if node.op != "conv" else [0, 1]
        titles += [flow.box(instruction_box(call.operand(index), "operand")) for index in read]
        flow.box(Box(_node_title(node), node.type, "node", call), titles)
    results = [_node_title(node) for node in (graph.output, *graph.aux_outputs)]
    for user in call.users:
        is_element = user.opcode == "get-tuple-element" and user.tuple_index < len(results)
        source = flow.box(instruction_box(user, "result"), [results[user.tuple_index] if is_element else results[0]])
        for further in user.users if is_element else ():
            title = flow.box(instruction_box(further, "user"))
            flow.arrows.append((source, title))
    return flow


def _node_title(node: Node) -> str:
    return f"#{node.uid} {node.op}"


@dataclasses.dataclass(frozen=True)
class _Region:
    """Instructions to be drawn.

    Attributes:
        below: those of them whose users outside are drawn too; others, a scale say, may have very many.
    """

    inside: Collection[HloInstruction]
    below: Container[HloInstruction]


class Before:
    """The module before, as pictures show it: what is gone around a convolution, or what stands around it.

    Args:
        before: the module that was read.
        after: what passes made of it. They keep the names of what they do not replace.
    """

    def __init__(self, before: HloModule, after: HloModule) -> None:
        # With the opcode: a custom call may have the name of the convolution that it replaced.
        kept = {(i.name, i.opcode) for c in after.computations for i in c}
        self._order = {i: position for position, i in enumerate(i for c in before.computations for i in c)}
        self._gone = {i for i in self._order if (i.name, i.opcode) not in kept}
        self._arrays = {i for i in self._order if i.has_shape and not i.shape.is_scalar}

    def replaced_by(self, calls: Iterable[HloInstruction]) -> Iterator[Flow | None]:
        """The flow that each call replaced; None where no convolution that is gone fits."""
        regions = {i: self._replaced(i) for i in self._order if i in self._gone and i.opcode == "convolution"}
        operands = {i: {operand.name for operand in self._boundary(region)} for i, region in regions.items()}
        op_names = {i: i.op_name for i in regions}  # once: every call is held against all of them
        for call in calls:
            names, op_name = {operand.name for operand in call.operands}, call.op_name
            fits = {i: (op_names[i] == op_name, len(operands[i] & names)) for i in regions}
            best = max(fits, key=fits.__getitem__, default=None)
            yield self._flow(regions.pop(best)) if best is not None and fits[best] != (False, 0) else None

    def around(self, instruction: HloInstruction) -> Flow:
        """What was replaced with `instruction`; where it is still there, what stands near it."""
        return self._flow(self._replaced(instruction) if instruction in self._gone else self._near(instruction))

    def _replaced(self, start: HloInstruction) -> _Region:
        """What is gone around the convolution: down to the next FP8 values or convolutions, then up from all of it."""
        below = self._walk({start: None}, self._gone, _MOST_REPLACED, down=True)
        return _Region(self._walk(below, self._gone, _MOST_REPLACED, down=False), below)

    def _near(self, start: HloInstruction) -> _Region:
        """Up to the FP8 values, convolutions, parameters and scalars that it comes from, and down as far."""
        above = self._walk({start: None}, self._arrays, _MOST_NEAR // 2, down=False)
        below = self._walk({start: None}, self._arrays, _MOST_NEAR // 2, down=True)
        inside = dict.fromkeys(i for i in {**above, **below} if i is start or i.opcode not in _ENDS)
        return _Region(inside, below)

    def _walk(
        self, start: dict[HloInstruction, None], within: Container[HloInstruction], most: int, *, down: bool
    ) -> dict[HloInstruction, None]:
        """Nearest first, `most` beside `start`."""
        found, todo = dict(start), collections.deque(start)
        while todo:
            instruction = todo.popleft()
            if down and _is_fp8(instruction):
                continue
            for other in instruction.users if down else instruction.operands:
                beyond = other.opcode in _PRODUCTS or (not down and _is_fp8(other))
                if other in within and other not in found and not beyond and len(found) < most + len(start):
                    found[other] = None
                    todo.append(other)
        return found

    def _flow(self, region: _Region) -> Flow:
        flow, inside = Flow(), sorted(region.inside, key=self._order.__getitem__)
        for instruction in self._boundary(region):
            flow.box(instruction_box(instruction, "operand"))
        for instruction in inside:
            flow.box(instruction_box(instruction, "instruction"), [f"%{o.name}" for o in instruction.operands])
        for instruction in (i for i in inside if i in region.below):
            for user in instruction.users:
                if user not in region.inside:
                    flow.arrows.append((f"%{instruction.name}", flow.box(instruction_box(user, "user"))))
        return flow

    def _boundary(self, region: _Region) -> list[HloInstruction]:
        """The operands of the region, in module order."""
        outside = {o for instruction in region.inside for o in instruction.operands if o not in region.inside}
        return sorted(outside, key=self._order.__getitem__)


def _is_fp8(instruction: HloInstruction) -> bool:
    return instruction.has_shape and instruction.shape.element_type in FP8_TYPES


def instruction_box(instruction: HloInstruction, kind: BoxKind) -> Box:
    what = instruction.opcode
    if what == "constant" and instruction.has_shape and instruction.shape.is_scalar:
        what = f"constant({instruction.payload})"
    root = "ROOT " if instruction.is_root else ""
    shape = f" {_without_layout(instruction.shape)}" if instruction.has_shape else ""
    return Box(f"%{instruction.name}", f"{root}{what}{shape}", kind, instruction)


def _without_layout(shape: Shape) -> Shape:
    if shape.is_tuple:
        return Shape.tuple(_without_layout(element) for element in shape.tuple_shapes)
    return shape.with_layout(None)
