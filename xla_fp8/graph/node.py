"""One node of a serialized graph, and the rules that a node keeps towards those before it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from xla_fp8.graph.ops import OPS, TYPES, OpSpec

MAX_UID = 2**63 - 1
"""XLA's unique ids are int64."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """`UID:[type]op(operand uids)`.

    Every node computes in f32, whatever its type; the type says how the value is stored where it leaves the graph. A
    store to FP8 saturates: values beyond the largest finite one become that one, NaN stays NaN. A node inside the graph
    that reads an FP8 node therefore sees the value before rounding and saturation, as the amax of `y` does in
    `amax(y), convert(clamp(y))`.

    Attributes:
        uid: unique in the graph.
        type: element type of the result, one of `TYPES`.
        op: a name in `OPS`.
        operands: uids of operands inside the graph; operands from outside are not written.
    """

    uid: int
    type: str
    op: str
    operands: tuple[int, ...] = ()

    @property
    def spec(self) -> OpSpec:
        return OPS[self.op]

    @property
    def is_aux(self) -> bool:
        """Whether it is a result beside the output (amax, copy)."""
        return self.spec.is_aux

    def __str__(self) -> str:
        return f"{self.uid}:[{self.type}]{self.op}({','.join(map(str, self.operands))})"


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """A rule that a node breaks, and the part of it that does: `part`, and for an operand its index."""

    message: str
    part: Literal["uid", "type", "op", "operand"]
    index: int = 0


def find_problem(node: Node, earlier: Mapping[int, Node]) -> Problem | None:
    """Returns the first rule that `node` breaks, or None. `earlier` are the nodes before it, by uid."""
    if not 0 <= node.uid <= MAX_UID:
        return Problem(f"uid {node.uid} does not fit in 64 bits", "uid")
    if node.uid in earlier:
        return Problem(f"uid {node.uid} is taken by the node {earlier[node.uid]}", "uid")
    if node.type not in TYPES:
        return Problem(f"unknown type {node.type!r}; a node has one of {', '.join(TYPES)}", "type")
    spec = OPS.get(node.op)
    if spec is None:
        return Problem(f"unknown op {node.op!r}; the ops are {', '.join(OPS)}", "op")
    if not earlier and node.op != "conv":
        return Problem(f"the first node must be conv, not {node.op}", "op")
    if earlier and node.op == "conv":
        return Problem("a graph has one conv, its first node", "op")
    if len(node.operands) not in spec.operand_counts:
        wanted = " or ".join(map(str, spec.operand_counts))
        plural = "" if wanted == "1" else "s"
        return Problem(f"{node.op} takes {wanted} operand{plural} inside the graph, not {len(node.operands)}", "op")
    for index, uid in enumerate(node.operands):
        if uid not in earlier:
            return Problem(f"operand {uid} is not a node before this one", "operand", index)
        if earlier[uid].is_aux:
            return Problem(
                f"operand {uid} is {earlier[uid].op}, which leaves the graph: its users are outside", "operand", index
            )
    return None
