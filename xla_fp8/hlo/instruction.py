"""One HLO instruction: name, opcode, shape, operands, users, attributes.

Operand and user lists are kept in step by the methods here and by the computation's; nothing else writes them.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from xla_fp8.hlo import literal
from xla_fp8.hlo.attributes import (
    AttributeMap,
    ConvolutionDimensionNumbers,
    OpMetadata,
    Window,
    format_int_list,
    parse_int_list,
    unquote,
)
from xla_fp8.hlo.errors import HloAttributeError, HloMutationError
from xla_fp8.hlo.opcodes import COMPUTATION_ATTRIBUTES, LITERAL_OPCODES, SIDE_EFFECTS
from xla_fp8.hlo.shape import Shape

if TYPE_CHECKING:
    import numpy as np

    from xla_fp8.hlo.computation import HloComputation
    from xla_fp8.hlo.module import HloModule

_COMPUTATION_NAME_RE = re.compile(r"%?([A-Za-z_][\w.\-]*)")
_COMPUTATION_ATTRIBUTE_RE = re.compile(rf"(?:{'|'.join(COMPUTATION_ATTRIBUTES)})=")


class HloInstruction:
    """An instruction of a computation. Made by `HloComputation.create` and the parser.

    Attributes:
        name: without the leading `%`.
        opcode: XLA's spelling (`get-tuple-element`, `all-reduce-start`, ...); unknown ones are carried through.
        shape: the result's shape; None only in hand-written text that leaves it to XLA to infer.
        payload: what a `constant` or `parameter` has between its parentheses; "" for others.
        parent: the computation it is in, None once removed.
    """

    __slots__ = (
        "_attribute_text",
        "_attributes",
        "_next",
        "_operands",
        "_previous",
        "_shape",
        "_users",
        "name",
        "opcode",
        "parent",
        "payload",
    )

    def __init__(
        self,
        name: str,
        opcode: str,
        shape: Shape | None,
        operands: tuple[HloInstruction, ...],
        payload: str,
        attribute_text: str,
        parent: HloComputation | None,
    ) -> None:
        self.name = name
        self.opcode = opcode
        self._shape = shape
        self._operands = operands
        self.payload = payload
        # As parsed, with its leading ", "; turned into a map when first asked for.
        self._attribute_text = attribute_text
        self._attributes: AttributeMap | None = None
        self.parent = parent
        # A dict used as an ordered set: removing one of 100,000 users must not search a list. None until somebody asks:
        # a module that is only read and printed needs no users (`_user_set`).
        self._users: dict[HloInstruction, None] | None = None
        self._previous: HloInstruction | None = None
        self._next: HloInstruction | None = None
        if parent is None:
            for operand in operands:
                operand._user_set()[self] = None

    def _user_set(self) -> dict[HloInstruction, None]:
        """The users, in step from the first time that anybody asks for those of any instruction beside this one."""
        if self._users is None:
            if self.parent is None:
                self._users = {}
            else:
                self.parent._find_users()
                assert self._users is not None
        return self._users

    # ---------------------------------------------------------------- shape, operands, users

    @property
    def shape(self) -> Shape:
        """The result's shape. Raises HloAttributeError where the text left it out and it was not inferred."""
        if self._shape is None:
            raise HloAttributeError(f"{self.name}: the text gives no shape for this {self.opcode}")
        return self._shape

    @shape.setter
    def shape(self, shape: Shape) -> None:
        self._shape = shape

    @property
    def has_shape(self) -> bool:
        """False for an instruction whose shape the text leaves to XLA (`x = add(a, b)`) and we did not infer."""
        return self._shape is not None

    @property
    def operands(self) -> tuple[HloInstruction, ...]:
        return self._operands

    def operand(self, index: int) -> HloInstruction:
        """Raises HloAttributeError where there is none: XLA takes custom calls with any number of operands."""
        try:
            return self._operands[index]
        except IndexError:
            raise HloAttributeError(f"{self.name}: {self.opcode} has no operand {index}") from None

    @property
    def users(self) -> tuple[HloInstruction, ...]:
        """Every instruction that has this one as an operand, once each, in the order they came to be."""
        return tuple(self._user_set())

    @property
    def user_count(self) -> int:
        return len(self._user_set())

    @property
    def use_count(self) -> int:
        """Operand slots that hold this instruction: `add(x, x)` is one user and two uses."""
        return sum(operand is self for user in self._user_set() for operand in user._operands)

    def set_operand(self, index: int, new: HloInstruction) -> None:
        """Puts `new` into operand slot `index`."""
        operands = list(self._operands)
        operands[index] = new
        self.set_operands(operands)

    def set_operands(self, operands: list[HloInstruction]) -> None:
        """Replaces all operands at once."""
        for operand in operands:
            if operand.parent is not self.parent:
                raise HloMutationError(f"{operand.name} is not in the computation of its new user {self.name}")
        for old in self._operands:
            old._user_set().pop(self, None)
        self._operands = tuple(operands)
        for operand in operands:
            operand._user_set()[self] = None

    @property
    def is_root(self) -> bool:
        return self.parent is not None and self.parent.root is self

    @property
    def module(self) -> HloModule:
        """The module this instruction is in. Raises HloMutationError once it was removed."""
        if self.parent is None:
            raise HloMutationError(f"{self.name} was removed from its computation")
        return self.parent.module

    # ---------------------------------------------------------------- attributes

    @property
    def attributes(self) -> AttributeMap:
        """Attribute name → text, in the order written; change it freely."""
        if self._attributes is None:
            self._attributes = AttributeMap.parse(self._attribute_text)
            self._attribute_text = ""
        return self._attributes

    @property
    def attribute_text(self) -> str:
        """What is printed after the operands: "" or `, name=value, ...`."""
        if self._attributes is None:
            return self._attribute_text
        return f", {self._attributes}" if self._attributes else ""

    def has_attribute(self, name: str) -> bool:
        """Whether the attribute is there; does not parse the others when its name is nowhere in the text."""
        if self._attributes is None and f"{name}=" not in self._attribute_text:
            return False
        return name in self.attributes

    def attr(self, name: str, default: str | None = None) -> str | None:
        """The attribute's text, or `default`."""
        return self.attributes.get(name, default) if self.has_attribute(name) else default

    def _required(self, name: str) -> str:
        value = self.attr(name)
        if value is None:
            raise HloAttributeError(f"{self.name}: {self.opcode} has no attribute {name!r}")
        return value

    def _int(self, name: str, default: int) -> int:
        value = self.attr(name)
        try:
            return default if value is None else int(value)
        except ValueError:
            raise HloAttributeError(f"{self.name}: expected {name} to be an integer, found {value!r}") from None

    @property
    def dimensions(self) -> tuple[int, ...]:
        """`dimensions={0,1}`; empty where there is none."""
        return parse_int_list(self.attr("dimensions") or "{}")

    @dimensions.setter
    def dimensions(self, value: tuple[int, ...]) -> None:
        self.attributes["dimensions"] = format_int_list(value)

    @property
    def window(self) -> Window:
        """The window of a convolution, reduce-window, ...; no dimensions where there is none."""
        return Window.parse(self.attr("window") or "{}")

    @property
    def dim_labels(self) -> ConvolutionDimensionNumbers:
        return ConvolutionDimensionNumbers.parse(self._required("dim_labels"))

    @property
    def feature_group_count(self) -> int:
        return self._int("feature_group_count", 1)

    @property
    def operand_precision(self) -> tuple[str, ...]:
        """Of each operand of a dot or convolution: `default`, `high` or `highest`; JAX writes `precision` there.

        Empty where there is none, which XLA takes for `default`.
        """
        text = self.attr("operand_precision") or "{}"
        return tuple(part.strip() for part in text.strip("{} ").split(",") if part.strip())

    @property
    def batch_group_count(self) -> int:
        return self._int("batch_group_count", 1)

    @property
    def custom_call_target(self) -> str:
        """The target of a custom call; "" for other instructions."""
        return unquote(self.attr("custom_call_target") or '""')

    @property
    def backend_config(self) -> dict[str, Any]:
        """The backend_config as JSON; empty where there is none. Raises HloAttributeError when it is not JSON."""
        text = self.attr("backend_config")
        if not text:
            return {}
        try:
            value = json.loads(unquote(text) if text.startswith('"') else text)
        except ValueError:
            raise HloAttributeError(f"{self.name}: backend_config is not JSON: {text[:80]!r}") from None
        if not isinstance(value, dict):
            raise HloAttributeError(f"{self.name}: backend_config is not a JSON object: {text[:80]!r}")
        return value

    @property
    def metadata(self) -> OpMetadata:
        return OpMetadata.parse(self.attr("metadata") or "")

    @property
    def op_name(self) -> str:
        """JAX's name for what this instruction came from, e.g. `jit(f)/conv_general_dilated`."""
        return self.metadata.op_name

    @property
    def sharding(self) -> str | None:
        return self.attr("sharding")

    @property
    def comparison_direction(self) -> str:
        """EQ, NE, GE, GT, LE or LT of a compare."""
        return self._required("direction")

    @property
    def tuple_index(self) -> int:
        """The index of a get-tuple-element."""
        return self._int("index", 0)

    # ---------------------------------------------------------------- literals

    @property
    def parameter_number(self) -> int:
        if self.opcode != "parameter":
            raise HloAttributeError(f"{self.name} is a {self.opcode}, not a parameter")
        try:
            return int(self.payload)
        except ValueError:
            raise HloAttributeError(f"{self.name}: parameter number {self.payload!r} is not an integer") from None

    @property
    def is_elided_constant(self) -> bool:
        """A `constant({...})`: the dump left the value out."""
        return self.opcode == "constant" and "..." in self.payload

    def constant_value(self) -> np.ndarray[Any, Any] | None:
        """A constant's value; None for an elided one, for tuples and for other instructions.

        Raises HloAttributeError where the literal does not fit the shape.
        """
        if self.opcode != "constant" or self.is_elided_constant or not self.shape.is_array:
            return None
        return literal.parse(self.payload, self.shape)

    # ---------------------------------------------------------------- calls, control, effects

    @property
    def called_computation_names(self) -> tuple[str, ...]:
        """Names of the computations that the attributes mention, in order."""
        names: list[str] = []
        if self.opcode in LITERAL_OPCODES:
            return ()
        if self._attributes is None and not _COMPUTATION_ATTRIBUTE_RE.search(self._attribute_text):
            return ()
        for attribute in COMPUTATION_ATTRIBUTES:
            text = self.attr(attribute)
            if text is not None:
                names.extend(_COMPUTATION_NAME_RE.findall(text))
        return tuple(names)

    @property
    def called_computations(self) -> tuple[HloComputation, ...]:
        """The computations called. Raises HloAttributeError when one is not in the module."""
        return tuple(self.module.computation(name) for name in self.called_computation_names)

    @property
    def to_apply(self) -> HloComputation:
        """The computation of a call, reduce, ...: the first that is called."""
        called = self.called_computations
        if not called:
            raise HloAttributeError(f"{self.name}: {self.opcode} names no computation")
        return called[0]

    @property
    def control_predecessors(self) -> tuple[HloInstruction, ...]:
        text = self.attr("control-predecessors")
        if text is None or self.parent is None:
            return ()
        return tuple(self.parent.instruction(name) for name in _COMPUTATION_NAME_RE.findall(text))

    @property
    def control_successors(self) -> tuple[HloInstruction, ...]:
        return self.parent.control_successors(self) if self.parent is not None else ()

    @property
    def has_control_dependencies(self) -> bool:
        return bool(self.control_predecessors or self.control_successors)

    @property
    def has_side_effect(self) -> bool:
        """Whether it must stay although nobody uses it (its own effect or one inside what it calls)."""
        if self.opcode in SIDE_EFFECTS:
            return True
        if self.opcode == "custom-call":
            return self.attr("custom_call_has_side_effect") == "true"
        if self.opcode in ("call", "while", "conditional", "fusion") or self.opcode.startswith("async"):
            return any(computation.has_side_effect for computation in self.called_computations)
        return False

    def __repr__(self) -> str:
        operands = self.payload if self.opcode in LITERAL_OPCODES else ", ".join(o.name for o in self._operands)
        return f"{self.name} = {self._shape or '?'} {self.opcode}({operands}){self.attribute_text}"
