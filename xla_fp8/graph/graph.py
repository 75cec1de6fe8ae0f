"""The graph of one convolution custom call: a conv and the pointwise ops and reductions fused behind it.

In the module it is a string, `serialized_graph` in the backend config of `__cudnn$convForwardGraph`:

    1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]invscale(2);4:[f32]amax(2);

Source of the format: GraphString in XLA's cudnn_fused_conv_rewriter.cc.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from xla_fp8.graph.errors import GraphError
from xla_fp8.graph.node import Node, find_problem
from xla_fp8.graph.ops import Dialect, SideKind
from xla_fp8.graph.parser import parse_nodes


@dataclasses.dataclass(frozen=True, slots=True)
class SideOperand:
    """An operand of the custom call beside input and filter. Each use has its own, in node order.

    Attributes:
        node: uid of the node that reads it.
        op: that node's op.
        kind: scalar, vector or tensor (`OpSpec.sides` says their shapes).
        index: its position among the operands of the custom call, from 2.
    """

    node: int
    op: str
    kind: SideKind
    index: int


@dataclasses.dataclass(frozen=True)
class Graph:
    """Nodes in an order where each comes after its operands; the first is the conv. Immutable.

    Raises GraphError on construction where a node breaks a rule (`find_problem`). A graph under construction may have
    several endpoints; a finished one has a single output, which `output` and `type_check` ask for.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not self.nodes:
            raise GraphError("a graph has at least its conv node")
        earlier: dict[int, Node] = {}
        for node in self.nodes:
            if problem := find_problem(node, earlier):
                raise GraphError(f"in graph node {node}: {problem.message}")
            earlier[node.uid] = node

    @staticmethod
    def parse(text: str) -> Graph:
        """Reads a serialized graph; `str` gives exactly `text` back. Raises GraphStringError where it is not one."""
        return Graph(parse_nodes(text))

    @staticmethod
    def conv(type: str = "f32") -> Graph:
        """The graph that is only a convolution, with uid 1: where a pass starts."""
        return Graph((Node(1, type, "conv"),))

    def __str__(self) -> str:
        return "".join(f"{node};" for node in self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __len__(self) -> int:
        return len(self.nodes)

    def append(self, op: str, operands: Sequence[int], type: str = "f32") -> Graph:
        """This graph with one more node, whose uid (`nodes[-1].uid`) is the largest so far plus 1.

        Raises GraphError where the node breaks a rule.
        """
        uid = max(node.uid for node in self.nodes) + 1
        return Graph((*self.nodes, Node(uid, type, op, tuple(operands))))

    def with_type(self, uid: int, type: str) -> Graph:
        """This graph with another type on one node: a saturating cast to FP8 is a type on the output node."""
        self.node(uid)
        return Graph(tuple(dataclasses.replace(n, type=type) if n.uid == uid else n for n in self.nodes))

    @functools.cached_property
    def _by_uid(self) -> dict[int, Node]:
        return {node.uid: node for node in self.nodes}

    @functools.cached_property
    def _users(self) -> dict[int, tuple[Node, ...]]:
        users: dict[int, dict[int, Node]] = {node.uid: {} for node in self.nodes}
        for node in self.nodes:
            for operand in node.operands:
                users[operand][node.uid] = node
        return {uid: tuple(of.values()) for uid, of in users.items()}

    def node(self, uid: int) -> Node:
        """The node with that uid. Raises GraphError where there is none."""
        if uid not in self._by_uid:
            raise GraphError(f"the graph {self} has no node {uid}")
        return self._by_uid[uid]

    def users(self, uid: int) -> tuple[Node, ...]:
        """The nodes that read node `uid`, each once, in order."""
        return self._users[self.node(uid).uid]

    @property
    def dialect(self) -> Dialect:
        """ "xla" where XLA knows every op, else "extended"."""
        return "xla" if all(node.spec.dialect == "xla" for node in self.nodes) else "extended"

    @property
    def endpoints(self) -> tuple[Node, ...]:
        """The tensors from which no other tensor of the graph is made. Aux outputs are not endpoints."""
        return tuple(n for n in self.nodes if not n.is_aux and all(user.is_aux for user in self._users[n.uid]))

    @property
    def output(self) -> Node:
        """The node that is result 0 of the custom call. Raises GraphError where there are several endpoints."""
        endpoints = self.endpoints
        if len(endpoints) != 1:
            raise GraphError(
                f"the graph has {len(endpoints)} tensor endpoints, {' and '.join(map(str, endpoints))}; "
                "it must have one (a further tensor result is a copy node)"
            )
        return endpoints[0]

    @property
    def aux_outputs(self) -> tuple[Node, ...]:
        """The nodes that are results 1, 2, ... of the custom call, in node order; the workspace comes after them."""
        return tuple(node for node in self.nodes if node.is_aux)

    def side_operands(self) -> tuple[SideOperand, ...]:
        """Operands 2, 3, ... of the custom call, in node order."""
        uses = [(n, kind) for n in self.nodes for kind in n.spec.sides_for(len(n.operands))]
        return tuple(SideOperand(n.uid, n.op, kind, index) for index, (n, kind) in enumerate(uses, start=2))
