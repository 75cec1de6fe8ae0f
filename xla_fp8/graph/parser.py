"""Reads the text of a serialized graph: `UID:[type]op(uids);` for each node, nothing between them.

Only the canonical spelling is read (no spaces, no leading zeros, a `;` after every node), so printing gives the text
back and equal graphs are equal strings.
"""

from __future__ import annotations

import re

from xla_fp8.graph.errors import GraphStringError
from xla_fp8.graph.node import MAX_UID, Node, find_problem

_NUMBER_RE = re.compile(r"[0-9]+")
_NAME_RE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_nodes(text: str) -> tuple[Node, ...]:
    """The nodes of `text`, in order. Raises GraphStringError where it is not a serialized graph."""
    if not text:
        raise GraphStringError("the graph is empty; it starts with a conv node, as in 1:[f32]conv();", text, 0)
    reader = _Reader(text)
    nodes: dict[int, Node] = {}
    while reader.position < len(text):
        node = reader.node(nodes)
        nodes[node.uid] = node
    return tuple(nodes.values())


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def node(self, earlier: dict[int, Node]) -> Node:
        starts: dict[tuple[str, int], int] = {("uid", 0): self.position}
        uid = self._uid()
        self._expect(":[", "after the uid")
        starts["type", 0] = self.position
        type_ = self._name("an element type")
        self._expect("]", "after the type")
        starts["op", 0] = self.position
        op = self._name("an op name")
        self._expect("(", "after the op")
        operands: list[int] = []
        while not self._at(")"):
            if operands:
                self._expect(",", "or ')' after an operand")
            starts["operand", len(operands)] = self.position
            operands.append(self._uid())
        self._expect(");", "at the end of a node")
        node = Node(uid, type_, op, tuple(operands))
        if problem := find_problem(node, earlier):
            raise GraphStringError(problem.message, self.text, starts[problem.part, problem.index])
        return node

    def _at(self, literal: str) -> bool:
        return self.text.startswith(literal, self.position)

    def _expect(self, literal: str, where: str) -> None:
        for character in literal:
            if not self._at(character):
                raise self._error(f"expected {character!r} {where}")
            self.position += 1

    def _name(self, what: str) -> str:
        match = _NAME_RE.match(self.text, self.position)
        if not match:
            raise self._error(f"expected {what}")
        self.position = match.end()
        return match[0]

    def _uid(self) -> int:
        match = _NUMBER_RE.match(self.text, self.position)
        if not match:
            raise self._error("expected a uid (a decimal number)")
        digits = match[0]
        if digits[0] == "0" and len(digits) > 1:
            raise self._error("a uid has no leading zeros")
        # The length first: Python refuses to convert thousands of digits.
        if len(digits) > len(str(MAX_UID)) or int(digits) > MAX_UID:
            raise self._error("this uid does not fit in 64 bits")
        self.position = match.end()
        return int(digits)

    def _error(self, message: str) -> GraphStringError:
        found = repr(self.text[self.position]) if self.position < len(self.text) else "the end of the text"
        if message.startswith("expected"):
            message += f", found {found}"
        return GraphStringError(message, self.text, self.position)
