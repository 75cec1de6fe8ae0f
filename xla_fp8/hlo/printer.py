"""HLO text from a module: XLA's own form, so that an unchanged module comes back as it was written."""

from __future__ import annotations

from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.module import HloModule, PrintStyle
from xla_fp8.hlo.opcodes import LITERAL_OPCODES
from xla_fp8.hlo.stack_frames import StackFrameTables


def to_text(module: HloModule) -> str:
    """The module as text that XLA's parser reads.

    Every attribute is printed as it was read; names have `%`, and operands their types, where the input's had.
    """
    attributes = f", {module.attributes}" if module.attributes else ""
    pieces = [f"HloModule {module.name}{attributes}\n\n", _tables_text(module.tables)]
    entry = module.entry if module.has_marked_entry else None
    for computation in module.computations:
        _print_computation(computation, computation is entry, module.style, pieces)
        pieces.append("\n")
    return "".join(pieces)


def computation_text(computation: HloComputation, *, is_entry: bool) -> str:
    """One computation as it stands in the text of its module."""
    pieces: list[str] = []
    _print_computation(computation, is_entry, computation.module.style, pieces)
    return "".join(pieces)


def instruction_text(instruction: HloInstruction) -> str:
    """One instruction as a line of text, without indentation or ROOT."""
    style = instruction.module.style if instruction.parent is not None else PrintStyle(percent=False)
    percent = "%" if style.percent else ""
    shape = f"{instruction._shape} " if instruction._shape is not None else ""
    return (
        f"{percent}{instruction.name} = {shape}{instruction.opcode}"
        f"({_operand_text(instruction, style)}){instruction.attribute_text}"
    )


def _tables_text(tables: StackFrameTables) -> str:
    return "".join(f"{name}\n{text}\n\n" for name, text in tables.sections) + ("\n" if tables else "")


def _print_computation(computation: HloComputation, is_entry: bool, style: PrintStyle, pieces: list[str]) -> None:
    entry = "ENTRY " if is_entry else ""
    percent = "%" if style.percent else ""
    pieces.append(f"{entry}{percent}{computation.name} {_program_shape(computation)}{{\n")
    root = computation._root
    instruction = computation._first
    while instruction is not None:
        # The hot loop of the printer: the two commonest operand counts are spelled out.
        operands = instruction._operands
        count = 0 if style.operand_types else len(operands)
        if count == 1:
            arguments = percent + operands[0].name
        elif count == 2:
            arguments = f"{percent}{operands[0].name}, {percent}{operands[1].name}"
        else:
            arguments = _operand_text(instruction, style)
        shape = f"{instruction._shape} " if instruction._shape is not None else ""
        attributes = instruction._attribute_text if instruction._attributes is None else instruction.attribute_text
        marker = "  ROOT " if instruction is root else "  "
        pieces.append(f"{marker}{percent}{instruction.name} = {shape}{instruction.opcode}({arguments}){attributes}\n")
        instruction = instruction._next
    trailing = f", {computation.trailing_attributes}" if computation.trailing_attributes else ""
    pieces.append(f"}}{trailing}\n")


def _operand_text(instruction: HloInstruction, style: PrintStyle) -> str:
    if instruction.opcode in LITERAL_OPCODES:
        return instruction.payload
    operands = instruction._operands
    percent = "%" if style.percent else ""
    if style.operand_types:
        texts = [f"{o._shape} {percent}{o.name}" if o._shape is not None else percent + o.name for o in operands]
    else:
        texts = [percent + operand.name for operand in operands]
    if style.percent and len(texts) > 5:
        texts = [f"/*index={i}*/{text}" if i and i % 5 == 0 else text for i, text in enumerate(texts)]
    return ", ".join(texts)


def _program_shape(computation: HloComputation) -> str:
    if not (computation.has_program_shape and computation.root.has_shape):
        return ""
    parameters = [f"{p.name}: {p.shape.text_without_layout}" for p in computation.parameters]
    return f"({', '.join(parameters)}) -> {computation.root.shape.text_without_layout} "
