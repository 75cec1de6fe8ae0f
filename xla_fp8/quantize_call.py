"""The quantization custom call, `__xla_fp8$quantize`: a wide tensor to FP8, read and written.

Its graph string says every step of the arithmetic, in HLO's own operations, so that two programs that round differently
are two strings (docs/graph-string.md)::

    1:[bf16]x();2:[bf16]amax(1);3:[f32]convert(2);4:[f32]constant(448);5:[f32]divide(3,4);6:[f32]convert(1);
    7:[f32]divide(6,5);8:[f8e4m3fn]store(7);9:[f32]result(5);

Operands: x, then one scalar for each `scalar` node. Results, as a tuple: one for each `store`, `store_transposed` and
`result` node, in their order.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from types import MappingProxyType

from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import FP8_TYPES
from xla_fp8.hlo import HloInstruction, Shape

QUANTIZE_TARGET = "__xla_fp8$quantize"

WIDE_TYPES = ("f32", "bf16", "f16")
"""What x may be, and what tensors may be computed in."""
INTEGER_TYPES = ("u32", "s32", "u16", "s16")

SOURCES = ("x", "scalar", "constant")
REDUCTIONS: Mapping[str, str] = MappingProxyType(
    {"amax": "the largest |a|", "reduce_max": "the largest a", "reduce_min": "the smallest a"}
)
"""Tensor → scalar, NaN if any element is."""
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
SCALAR_OPS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("convert", "bitcast_convert", "negate", "abs", "floor", "ceil", "is_finite", "not"), 1),
        **dict.fromkeys(("add", "subtract", "multiply", "divide", "maximum", "minimum"), 2),
        **dict.fromkeys(("and", "or", "xor", "shift_left", "shift_right_logical", *COMPARISONS), 2),
        **dict.fromkeys(("select", "clamp"), 3),
    }
)
"""HLO's operations by name, and how many operands they have: those whose result IEEE 754 fixes to the last bit."""
TENSOR_OPS = ("convert", "multiply", "divide")
"""Those that tensors may go through; a scalar operand is that of every element."""
RESULTS = ("store", "store_transposed", "result")

_NODE_RE = re.compile(r"(\d+):\[(\w+)\](\w+)\(([^()]*)\);")
_LITERAL_RE = re.compile(r"[-+.\w]+")


class QuantizeCallError(XlaFp8Error):
    """A string or custom call that is no quantization; the message says what is wrong where."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """`UID:[type]op(operands)`.

    Attributes:
        uid: 1, 2, 3, ... in the order of the string.
        type: element type of the value, rounded to it.
        op: of `SOURCES`, `REDUCTIONS`, `SCALAR_OPS` or `RESULTS`.
        operands: uids of nodes before this one.
        literal: a constant's value, as HLO writes it.
    """

    uid: int
    type: str
    op: str
    operands: tuple[int, ...] = ()
    literal: str = ""

    def __str__(self) -> str:
        return f"{self.uid}:[{self.type}]{self.op}({self.literal or ','.join(map(str, self.operands))})"


@dataclasses.dataclass(frozen=True)
class QuantizeCall:
    """What one call computes: its nodes, checked. Hashable; `str` gives the string, `parse` reads it.

    Raises:
        QuantizeCallError: a node breaks a rule; the message names both.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        for index, node in enumerate(self.nodes):
            if problem := self._problem(index, node):
                raise QuantizeCallError(f"quantize string, node {node}: {problem}")
        if not any(node.op.startswith("store") for node in self.nodes):
            raise QuantizeCallError("quantize string: no node stores an FP8 tensor: add a store or store_transposed")

    @staticmethod
    def parse(text: str) -> QuantizeCall:
        """Reads the string; only the canonical spelling, so that equal calls are equal strings."""
        nodes, position = [], 0
        while position < len(text):
            match = _NODE_RE.match(text, position)
            if match is None:
                raise QuantizeCallError(
                    f"quantize string, offset {position}: expected UID:[type]op(operands); in {text!r}"
                )
            uid, type_, op, inside = match.groups()
            if op == "constant":
                nodes.append(Node(int(uid), type_, op, literal=inside))
            elif re.fullmatch(r"(\d+(,\d+)*)?", inside):
                nodes.append(Node(int(uid), type_, op, tuple(map(int, inside.split(","))) if inside else ()))
            else:
                raise QuantizeCallError(
                    f"quantize string, node {match[0]} the operands of {op} are uids, not {inside!r}"
                )
            position = match.end()
        return QuantizeCall(tuple(nodes))

    def __str__(self) -> str:
        return "".join(f"{node};" for node in self.nodes)

    @property
    def backend_config(self) -> str:
        """Compact JSON, as XLA prints that of its own calls."""
        return json.dumps({"quantize_backend_config": {"serialized_graph": str(self)}}, separators=(",", ":"))

    @functools.cached_property
    def scalars(self) -> tuple[Node, ...]:
        """The nodes that are operands of the call, behind x."""
        return tuple(node for node in self.nodes if node.op == "scalar")

    @functools.cached_property
    def results(self) -> tuple[Node, ...]:
        """The nodes that are results of the call."""
        return tuple(node for node in self.nodes if node.op in RESULTS)

    def is_tensor(self, uid: int) -> bool:
        """Whether the node has x's shape."""
        return uid in self._tensors

    def result_shapes(self, x: Shape) -> tuple[Shape, ...]:
        """The shapes of the results for an x of that shape, row-major."""
        row = x.dimensions
        transposed = (*row[:-2], *row[:-3:-1])
        dimensions = {"store": row, "store_transposed": transposed, "result": ()}
        return tuple(Shape.array(node.type, dimensions[node.op]) for node in self.results)

    @functools.cached_property
    def _tensors(self) -> frozenset[int]:
        found: set[int] = set()
        for node in self.nodes:
            if node.op == "x" or (node.op in TENSOR_OPS and found.intersection(node.operands)):
                found.add(node.uid)
        return frozenset(found)

    def _problem(self, index: int, node: Node) -> str:
        """The first rule that a node breaks, "" where it keeps them all."""
        if node.uid != index + 1:
            return f"expected uid {index + 1}"
        if (node.op == "x") != (index == 0):
            return "x is the first node, and the only one of its kind"
        count = 1 if node.op in REDUCTIONS or node.op in RESULTS else SCALAR_OPS.get(node.op, 0)
        if node.op not in (*SOURCES, *REDUCTIONS, *SCALAR_OPS, *RESULTS):
            return f"unknown op; the ops are {', '.join((*SOURCES, *REDUCTIONS, *SCALAR_OPS, *RESULTS))}"
        if len(node.operands) != count:
            return f"{node.op} takes {count} operands"
        if any(not 1 <= uid <= index for uid in node.operands):
            return "an operand is no node before this one"
        operands = [self.nodes[uid - 1] for uid in node.operands]
        if any(operand.op in RESULTS for operand in operands):
            return "an operand leaves the call: its users are outside"
        tensors = [self.is_tensor(operand.uid) for operand in operands]
        if node.op in (*REDUCTIONS, "store", "store_transposed"):
            if not all(tensors):
                return f"{node.op} takes a tensor"
        elif any(tensors) and node.op not in TENSOR_OPS:
            return f"a tensor goes through {', '.join(TENSOR_OPS)} only"
        return _type_problem(node, [operand.type for operand in operands], any(tensors))


def _type_problem(node: Node, types: list[str], is_tensor: bool) -> str:
    if node.op.startswith("store"):
        return "" if node.type in FP8_TYPES else f"stores {' or '.join(FP8_TYPES)}"
    if node.type not in (WIDE_TYPES if node.op == "x" or is_tensor else (*WIDE_TYPES, *INTEGER_TYPES, "pred")):
        return f"type {node.type} is not taken here"
    if node.op == "constant":
        return "" if _LITERAL_RE.fullmatch(node.literal) else "the value of a constant is one number"
    if node.op in (*COMPARISONS, "is_finite"):
        return "" if node.type == "pred" and len(set(types)) == 1 else "compares values of one type, giving pred"
    if node.op == "select":
        types = types[1:] if types[0] == "pred" else ["pred"]
    if node.op in ("convert", "bitcast_convert") or not types:
        return ""
    return "" if set(types) == {node.type} else f"operands of types {', '.join(types)} where {node.type} is computed"


@dataclasses.dataclass(frozen=True)
class PlacedQuantizeCall:
    """A call on an x of one shape, as it stands in a program. Hashable."""

    call: QuantizeCall
    x: Shape

    @property
    def operand_shapes(self) -> tuple[Shape, ...]:
        return (self.x, *(Shape(node.type) for node in self.call.scalars))

    @property
    def output_shapes(self) -> tuple[Shape, ...]:
        return self.call.result_shapes(self.x)


def quantize_call_of(instruction: HloInstruction) -> QuantizeCall | None:
    """The quantization that a custom call is; None where `instruction` is none.

    Raises:
        QuantizeCallError: which names the instruction, where its string is none or does not fit its shapes.
    """
    if instruction.opcode != "custom-call" or instruction.custom_call_target != QUANTIZE_TARGET:
        return None
    config = instruction.backend_config.get("quantize_backend_config")
    text = config.get("serialized_graph") if isinstance(config, dict) else None
    try:
        if not isinstance(text, str):
            raise QuantizeCallError("no serialized_graph in a quantize_backend_config")
        call = QuantizeCall.parse(text)
        _check_shapes(call, instruction)
    except QuantizeCallError as error:
        raise QuantizeCallError(f"custom call %{instruction.name}: {error}") from error
    return call


def _check_shapes(call: QuantizeCall, instruction: HloInstruction) -> None:
    given = [operand.shape for operand in instruction.operands]
    wanted = [call.nodes[0].type, *(node.type for node in call.scalars)]
    if [shape.element_type for shape in given] != wanted or any(not shape.is_scalar for shape in given[1:]):
        raise QuantizeCallError(
            f"the operands are {', '.join(map(str, given))}; the string asks for a tensor of {wanted[0]}"
            + "".join(f", {type_}[]" for type_ in wanted[1:])
        )
    if given[0].rank < 2 and any(node.op == "store_transposed" for node in call.results):
        raise QuantizeCallError(f"store_transposed exchanges the last two dimensions, and x is {given[0]}")
    results = call.result_shapes(given[0])
    if (
        not instruction.shape.is_tuple
        or not all(one.compatible(other) for one, other in zip(instruction.shape.tuple_shapes, results, strict=False))
        or len(instruction.shape.tuple_shapes) != len(results)
    ):
        raise QuantizeCallError(f"the result is {instruction.shape}; the string makes ({', '.join(map(str, results))})")
