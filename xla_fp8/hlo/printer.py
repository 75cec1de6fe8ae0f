"""HLO text from a module: XLA's own form, so that an unchanged module comes back as it was written."""

from __future__ import annotations

from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.module import HloModule
from xla_fp8.hlo.opcodes import LITERAL_OPCODES
from xla_fp8.hlo.stack_frames import StackFrameTables


def to_text(module: HloModule) -> str:
    """The module as text that XLA's parser reads.

    Every attribute is printed as it was read; names have `%` where the input's had.
    """
    percent = "%" if module.style.percent else ""
    pieces: list[str] = []
    if module.name is not None:
        pieces.append(f"HloModule {module.name}")
        if module.attributes:
            pieces.append(f", {module.attributes}")
        pieces.append("\n\n")
        pieces.append(_tables_text(module.tables))
    entry = module.entry if module.has_marked_entry else None
    for computation in module.computations:
        _print_computation(computation, computation is entry, percent, pieces)
        pieces.append("\n")
    return "".join(pieces)


def instruction_text(instruction: HloInstruction) -> str:
    """One instruction as a line of text, without indentation or ROOT."""
    percent = "%" if instruction.parent is not None and instruction.module.style.percent else ""
    shape = f"{instruction._shape} " if instruction._shape is not None else ""
    return (
        f"{percent}{instruction.name} = {shape}{instruction.opcode}"
        f"({_operand_text(instruction, percent)}){instruction.attribute_text}"
    )


def _tables_text(tables: StackFrameTables) -> str:
    return "".join(f"{name}\n{text}\n\n" for name, text in tables.sections) + ("\n" if tables else "")


def _print_computation(computation: HloComputation, is_entry: bool, percent: str, pieces: list[str]) -> None:
    entry = "ENTRY " if is_entry else ""
    pieces.append(f"{entry}{percent}{computation.name} {_program_shape(computation)}{{\n")
    root = computation._root
    instruction = computation._first
    while instruction is not None:
        # The hot loop of the printer: the two commonest operand counts are spelled out.
        operands = instruction._operands
        count = len(operands)
        if count == 1:
            arguments = percent + operands[0].name
        elif count == 2:
            arguments = f"{percent}{operands[0].name}, {percent}{operands[1].name}"
        else:
            arguments = _operand_text(instruction, percent)
        shape = f"{instruction._shape} " if instruction._shape is not None else ""
        attributes = instruction._attribute_text if instruction._attributes is None else instruction.attribute_text
        marker = "  ROOT " if instruction is root else "  "
        pieces.append(f"{marker}{percent}{instruction.name} = {shape}{instruction.opcode}({arguments}){attributes}\n")
        instruction = instruction._next
    trailing = f", {computation.trailing_attributes}" if computation.trailing_attributes else ""
    pieces.append(f"}}{trailing}\n")


def _operand_text(instruction: HloInstruction, percent: str) -> str:
    if instruction.opcode in LITERAL_OPCODES:
        return instruction.payload
    operands = instruction._operands
    if len(operands) <= 5:
        return ", ".join([percent + operand.name for operand in operands])
    return ", ".join(
        [
            f"/*index={i}*/{percent}{operand.name}" if i and i % 5 == 0 else percent + operand.name
            for i, operand in enumerate(operands)
        ]
    )


def _program_shape(computation: HloComputation) -> str:
    if not computation.has_program_shape:
        return ""
    parameters = [f"{p.name}: {_without_layout(str(p.shape))}" for p in computation.parameters]
    return f"({', '.join(parameters)}) -> {_without_layout(str(computation.root.shape))} "


def _without_layout(shape: str) -> str:
    """A shape's text without layouts, as XLA prints it in a computation's signature."""
    while (opening := shape.find("{")) >= 0:
        depth, position = 1, opening + 1
        while depth:
            depth += {"{": 1, "}": -1}.get(shape[position], 0)
            position += 1
        shape = shape[:opening] + shape[position:]
    return shape
