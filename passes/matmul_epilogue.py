"""What follows a dot and can be computed in its cuBLASLt call: captured like a convolution's, then told in its terms.

A graph is a list of steps; a call has one place for each (`xla_fp8.matmul`): the operands' scales, a matrix, a bias, an
activation, the amax, the result's scale. `MatmulCapture` takes the furthest output whose steps fit into these places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from xla_fp8.graph import Node
from xla_fp8.hlo import HloInstruction
from xla_fp8.passes.base import Position, Refusal, described
from xla_fp8.passes.dequantization import Scale
from xla_fp8.passes.epilogue import Epilogue, EpilogueCapture, Op, Side, Step
from xla_fp8.passes.values import ChannelVector, Scalar, channel_vector_of

_SCALES = ("scale", "invscale")
_PLACES = (
    "cuBLASLt computes scales, then adds a matrix and a bias, then relu or gelu (tanh), then the scale of an FP8 result"
)
_ACTIVATIONS = ("relu", "gelu_tanh")
_EXACT_IN = {"bf16": ("f32",), "f16": ("f32",), "f8e4m3fn": ("bf16", "f16", "f32"), "f8e5m2": ("bf16", "f16", "f32")}
"""Element type → other types that hold every value of it."""
_MATRIX_TYPES = {"f32": ("f32",), "bf16": ("bf16",), "f16": ("f16",)}
_BIAS_TYPES = {"f32": ("bf16",), "bf16": ("bf16",), "f16": ("f16",)}
_HALF_TYPES = ("bf16", "f16")
"""What a matrix and a bias may be where the result is FP8, both alike (table of types of cublasLtMatmul)."""


@dataclasses.dataclass(frozen=True)
class Factor:
    """A number that a scale multiplies by, or divides by."""

    value: Scalar
    inverse: bool


@dataclasses.dataclass(frozen=True)
class Addend:
    """A matrix or bias, and the type in which the call reads it: no value of it is rounded on the way."""

    value: HloInstruction | ChannelVector
    type: str


@dataclasses.dataclass(frozen=True)
class Places:
    """The steps behind a dot in the places of its call.

    Attributes:
        operand_factors: scales behind the dot, to be multiplied with the operands'.
        matrix, bias, activation: as of `MatmulCall`.
        result_factors: scales of the result.
        amax_factors: scales of the amax, behind the call.
    """

    operand_factors: tuple[Factor, ...] = ()
    matrix: Addend | None = None
    bias: Addend | None = None
    activation: str = ""
    result_factors: tuple[Factor, ...] = ()
    amax_factors: tuple[Factor, ...] = ()


class MatmulCapture(EpilogueCapture):
    """Captures what follows one dot.

    Args:
        dot: the dot, whose operands' scales are not part of the capture.
        operand_types: FP8 types of its operands.
        column: the dimension along which a bias runs; None where there is none.
        has_padded_rows: whether the call has rows that the dot has not.
        position: of an instruction in the computation, operands before users.
        has_gelu: whether the target's cuBLASLt can do gelu.
    """

    kind = "dot"

    def __init__(
        self,
        dot: HloInstruction,
        operand_types: Sequence[str],
        column: int | None,
        has_padded_rows: bool,
        position: Callable[[HloInstruction], Position],
        has_gelu: bool,
    ) -> None:
        super().__init__(dot, (), -1 if column is None else column, position, extended=True)
        self.operand_types = tuple(operand_types)
        self.has_padded_rows = has_padded_rows
        self.has_gelu = has_gelu

    def addition(self, instruction: HloInstruction, value: HloInstruction, other: HloInstruction) -> Op | None:
        if instruction.opcode == "subtract":
            return None
        vector = channel_vector_of(other)
        if vector and vector.dimension == self.channel:
            return Op("bias", (value,), (vector,))
        if other.opcode == "broadcast":
            self.stop(
                "cublas-epilogue",
                instruction,
                "adds a broadcast that is no bias: one number for each column",
                "add it behind the dot's last step; as a matrix it would be written to memory first",
            )
            return None
        return Op("add", (value,), (other,))

    def unknown_operation(self, output: Step) -> Refusal | None:
        found = super().unknown_operation(output)
        return None if found is None else _without_place(found)

    def problem(self, output: Step, needed: list[Step], aux: tuple[Step, ...]) -> Refusal | None:
        if (found := super().problem(output, needed, aux)) is not None:
            if found.rule == "two-endpoints":
                return dataclasses.replace(found, advice="let only one of them use it")
            return _without_place(found) if found.rule == "unknown-operation" else found
        places = self.places(self.build(output, needed, aux, None))
        return places if isinstance(places, Refusal) else None

    def places(self, epilogue: Epilogue) -> Places | Refusal:
        """The steps of a capture as places of the call, or the first one that has none."""
        output = epilogue.output
        type_ = output.shape.element_type
        if type_ == "f8e5m2" and "f8e5m2" not in self.operand_types:
            return Refusal.of(
                "cublas-epilogue",
                output,
                "is f8e5m2, which cuBLASLt stores only where an operand is f8e5m2 too",
                "store float8_e4m3fn",
            )
        steps = _main_steps(epilogue)
        if steps is None:
            return Refusal.of(
                "cublas-epilogue", output, "depends on the dot in several ways", "one step behind the other"
            )
        amax = [node.operands[0] for node in epilogue.graph.nodes if node.op == "amax"]
        if any(node.op == "copy" for node in epilogue.graph.nodes) or len(amax) > 1:
            return Refusal.of(
                "cublas-epilogue", output, "would be one result of several", "let only one of them use the dot"
            )
        if amax and not output.shape.is_fp8:
            return Refusal.of(
                "cublas-epilogue", output, f"is {type_}: cuBLASLt finds the amax of an FP8 result alone", "store FP8"
            )
        if amax and self.has_padded_rows and any(node.op == "bias" for node, _ in steps):
            return Refusal.of(
                "cublas-epilogue",
                output,
                "has an amax that would be of rows of padding too, to which the bias is added as well",
                "use a multiple of 16 rows, or take the amax in front of the bias",
            )
        uids = [epilogue.graph.nodes[0].uid, *(node.uid for node, _ in steps)]
        filled = self._filled(steps, output, uids.index(amax[0]) if amax else None)
        return filled if isinstance(filled, Refusal) else self._typed(filled, type_, output)

    def _filled(
        self, steps: Sequence[tuple[Node, Side | None]], output: HloInstruction, amax: int | None
    ) -> Places | Refusal:
        """Steps to places.

        The scale of an FP8 result is what stands behind the last addition or activation. An amax of scaled values is
        that of the values, scaled: a multiplication keeps the order of numbers, so these are the same bits. As a scale
        of an operand it would be in front of the sums; and where jit leaves the call to XLA, XLA simplifies a scale of
        1 away and then finds no FP8 matmul with an amax.

        Args:
            amax: behind how many steps the amax is taken; None where it is not.
        """
        last = max((number for number, (node, _) in enumerate(steps, 1) if node.op not in _SCALES), default=0)
        if amax is not None and amax != last and (amax < last or last > 0):
            return Refusal.of(
                "cublas-epilogue",
                output,
                "has an amax that is not of the value in front of its own scale",
                "take the amax behind the last addition or activation, and scale behind it",
            )
        places = Places()
        for number, (node, side) in enumerate(steps, 1):
            if node.op in _SCALES and isinstance(side, Scalar):
                factor = Factor(side, node.op == "invscale")
                if output.shape.is_fp8 and number > last:
                    places = dataclasses.replace(places, result_factors=(*places.result_factors, factor))
                    if amax is not None and number <= amax:
                        places = dataclasses.replace(places, amax_factors=places.result_factors)
                elif places.matrix or places.bias or places.activation:
                    return Refusal.of(
                        "cublas-epilogue",
                        output,
                        "is scaled behind an addition or activation and is not FP8",
                        "scale in front of these",
                    )
                else:
                    places = dataclasses.replace(places, operand_factors=(*places.operand_factors, factor))
            elif node.op == "add" and isinstance(side, HloInstruction) and not (places.matrix or places.activation):
                places = dataclasses.replace(places, matrix=Addend(side, ""))
            elif node.op == "bias" and isinstance(side, ChannelVector) and not (places.bias or places.activation):
                places = dataclasses.replace(places, bias=Addend(side, ""))
            elif node.op in _ACTIVATIONS and not places.activation and (node.op != "gelu_tanh" or self.has_gelu):
                places = dataclasses.replace(places, activation=node.op)
            else:
                return Refusal.of(
                    "cublas-epilogue", output, f"needs {node.op} where cuBLASLt has no place for it", _PLACES
                )
        return places

    def _typed(self, places: Places, type_: str, output: HloInstruction) -> Places | Refusal:
        """The matrix and the bias in types that the call reads beside a result of type `type_`."""
        choices = [(_MATRIX_TYPES[type_], _BIAS_TYPES[type_])] if type_ in _MATRIX_TYPES else []
        choices = choices or [((half,), (half,)) for half in _HALF_TYPES]
        for matrix_types, bias_types in choices:
            matrix = _addend(places.matrix, matrix_types)
            bias = _addend(places.bias, bias_types)
            if (matrix is None) == (places.matrix is None) and (bias is None) == (places.bias is None):
                return dataclasses.replace(places, matrix=matrix, bias=bias)
        wanted = " or ".join(dict.fromkeys(t for _, bias_types in choices for t in bias_types))
        return Refusal.of(
            "added-type",
            output,
            f"is {type_}: it adds a matrix or bias of a type that cuBLASLt does not read beside that",
            f"keep what is added in {wanted}",
        )


def _without_place(found: Refusal) -> Refusal:
    """What a graph has no operation for, in the words of cuBLASLt."""
    reason = f"{described(found.instruction)} is, with what follows it, nothing that cuBLASLt computes"
    return dataclasses.replace(found, rule="cublas-epilogue", reason=reason, advice=_PLACES)


def operand_factors(scales: Sequence[Scale]) -> tuple[Factor, ...]:
    """The scales of an operand; all are scalars, since none was looked for along a channel."""
    return tuple(Factor(scale.value, scale.inverse) for scale in scales if isinstance(scale.value, Scalar))


def _main_steps(epilogue: Epilogue) -> list[tuple[Node, Side | None]] | None:
    """The nodes between dot and output with their side operands; None where they are no single line."""
    sides = {}
    for side, value in zip(epilogue.graph.side_operands(), epilogue.sides, strict=True):
        sides[side.node] = value
    steps: list[tuple[Node, Side | None]] = []
    current = epilogue.graph.nodes[0].uid
    for node in epilogue.graph.nodes[1:]:
        if node.is_aux:
            continue
        if node.operands != (current,):
            return None
        current = node.uid
        steps.append((node, sides.get(node.uid)))
    return steps


def _addend(addend: Addend | None, types: Sequence[str]) -> Addend | None:
    """`addend` in one of `types`, without rounding it; None where it is none or cannot be."""
    if addend is None:
        return None
    value = addend.value
    if isinstance(value, ChannelVector):
        path = [value.source.shape.element_type, *value.converts]
        while len(path) > 1 and _holds(path[-1], path[-2]):
            path.pop()
        value, held = dataclasses.replace(value, converts=tuple(path[1:])), path[-1]
    else:
        while value.opcode == "convert" and _holds(value.shape.element_type, value.operand(0).shape.element_type):
            value = value.operand(0)
        held = value.shape.element_type
    return next((Addend(value, type_) for type_ in types if _holds(type_, held)), None)


def _holds(wide: str, narrow: str) -> bool:
    """Whether every value of type `narrow` is one of `wide`."""
    return wide == narrow or wide in _EXACT_IN.get(narrow, ())
