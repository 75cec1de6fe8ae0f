"""HLO text to a module, in pure Python.

Dumps are written by XLA's printer, one instruction a line, so a single regular expression reads nearly every
instruction. What it does not recognise (hand-written text, nested instructions, attributes over several lines) is read
by a slower scanner that follows XLA's own grammar (hlo_parser.cc, hlo_lexer.cc). Both keep attributes as text.

The parser reads what XLA's parser reads; it does not reject everything that XLA's rejects: `xla_process` asks XLA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator

from xla_fp8.hlo.attributes import AttributeMap, AttributeScanError, scan_attributes, scan_brackets
from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.errors import HloError, HloParseError
from xla_fp8.hlo.garbage import collection_paused
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.module import HloModule, PrintStyle
from xla_fp8.hlo.opcodes import COMPUTATION_ATTRIBUTES, LITERAL_OPCODES
from xla_fp8.hlo.shape import SPACE, Shape, scan_shape, skip_space, strip_comments
from xla_fp8.hlo.shape_inference import infer_shape
from xla_fp8.hlo.stack_frames import SECTIONS, StackFrameTables

_NAME = r"[A-Za-z_][\w.\-]*+"
# In XLA's lexer a colon right behind a bare name belongs to it.
_NAME_RE = re.compile(rf"%({_NAME})|({_NAME}):?+")
_OPCODE_RE = re.compile(r"[a-z][a-z0-9\-]*+")
_SHAPE_START_RE = re.compile(r"\(|b\(|[a-z][a-z0-9_]*+\s*\[")
_ELEMENT_RE = re.compile(rf"#{SPACE}([0-9]++)")
_INDEX_COMMENT_RE = re.compile(r"/\*index=\d+\*/")
_TYPED_OPERANDS_RE = re.compile(r"[\]})]\s+%")
_PERCENT_NAME_RE = re.compile(rf"%({_NAME})")
# A table: numbers, each with a string or a record in braces behind it. XLA forgives a number without.
_SECTION_RE = re.compile(
    rf"({'|'.join(SECTIONS)})(?![\w.\-])((?:{SPACE}-?[0-9]++(?:{SPACE}(?:\"(?:[^\"\\]|\\.)*+\"|\{{[^{{}}\"]*+\}}))?)*+)",
    re.S,
)
_ROOT_RE = re.compile(r"ROOT(?![\w.\-])")
_ENTRY_RE = re.compile(r"ENTRY(?![\w.\-])")
_HEADER_RE = re.compile(r"HloModule(?![\w.\-])")
_COMPUTATION_START_RE = re.compile(rf"ENTRY(?![\w.\-])|%?{_NAME}\s*[{{(]")
_NESTED_BODY_RE = re.compile(rf"(?:ROOT\s+)?%?{_NAME}:?\s*=")

# Instructions inside operands, and computations inside attributes, that may stand inside each other: XLA's parser
# recurses too, and nobody writes more.
_MAX_NESTING = 100

_TEXT = r'[^()"\r\n]*+'
# A line that ends in a comma, or is followed by one or by a comment, is not the whole instruction; one with a star may
# have a comment that only the slow scanner understands.
_INSTRUCTION_LINE_RE = re.compile(
    r"\s*+(ROOT )?%?"
    rf"({_NAME}) = "
    r"([a-z][a-z0-9]*+\[[^\]\n]*+\](?:\{[^{}\n]*+\})?|\([^()\n]*+(?:\([^()\n]*+\)[^()\n]*+)*+\)) "
    r"([a-z][a-z0-9\-]*+)"
    rf"\(({_TEXT}(?:\({_TEXT}\){_TEXT})*+)\)"
    r"(|, [^\r\n\t*]*+)(?<![,=\s])\r?\n(?!\s*+[,/])"
)
# What attributes look like when every string in them ends: asked only where there is a backslash.
_STRINGS_CLOSED_RE = re.compile(r'[^"]*+(?:"(?:[^"\\]|\\.)*+"[^"]*+)*+')
_SIGNATURE = r"\([^()\n]*+(?:\([^()\n]*+\)[^()\n]*+)*+\)"
_COMPUTATION_LINE_RE = re.compile(rf"(ENTRY )?%?({_NAME}) (?:{_SIGNATURE} -> ([^ {{}}\n]++|\([^{{}}\n]*\)) )?\{{\r?\n")


def parse(text: str, filename: str | None = None) -> HloModule:
    """Reads a module, computations without a header, or one instruction.

    Args:
        text: HLO text in any form that XLA's parser reads.
        filename: for messages.

    Raises:
        HloParseError: with file, line, column, the line itself and a caret.
    """
    with collection_paused():
        return _Parser(text, filename).read()


class _Parser:
    def __init__(self, text: str, filename: str | None) -> None:
        self.text = text
        self.filename = filename
        self.position = 0
        self.module = HloModule("", filename)
        self.shapes: dict[str, Shape] = {}
        self.elements: dict[tuple[HloInstruction, int], HloInstruction] = {}
        self.anonymous: dict[str, int] = {}
        self.nesting = 0
        self.operand_types = False
        self.lone_entry: HloComputation | None = None

    # ---------------------------------------------------------------- module

    def read(self) -> HloModule:
        text, module = self.text, self.module
        self.skip()
        if self.at_end():
            raise self.error("the text is empty: expected HloModule, ENTRY or a computation")
        if _HEADER_RE.match(text, self.position):
            self.header()
        elif not self.starts_computation():
            self.single_instruction()
            return module
        self.skip()
        while not self.at_end():
            self.computation()
            self.skip()
        if not module.computations:
            raise self.error("the module has no computations")
        # XLA's name for text without a header.
        module.name = module.name or f"module_{module.entry.name}"
        module.style = dataclasses.replace(module.style, operand_types=self.operand_types)
        return module

    def header(self) -> None:
        module = self.module
        self.position += len("HloModule")
        module.name = self.name("a module name")
        module.attributes = self.attributes()
        sections: list[tuple[str, str]] = []
        self.skip()
        while match := _SECTION_RE.match(self.text, self.position):
            sections.append((match[1], match[2].strip()))
            self.position = match.end()
            self.skip()
        module.tables = StackFrameTables(tuple(sections))

    def starts_computation(self) -> bool:
        """Whether `ENTRY`, `name {` or `name (` follows, rather than a lone instruction."""
        match = _COMPUTATION_START_RE.match(self.text, self.position)
        if match is None or match.group().startswith("ENTRY"):
            return match is not None
        if match.group().endswith("{"):
            return True
        # `name (...) -> shape {` is a computation; `opcode(...)` alone would not be HLO.
        return "->" in self.text[match.end() : self.text.find("{", match.end())]

    def single_instruction(self) -> None:
        """A lone `x = f32[2] add(f32[2] a, f32[2] b)`: operands that are not defined become parameters.

        Names, the schedule and the default layouts are what XLA's parser makes of such text.
        """
        module = self.module
        module.name = "_"
        computation = HloComputation("_", module)
        module.add_computation(computation)
        module.set_entry(computation)
        self.lone_entry = computation
        if _SHAPE_START_RE.match(self.text, self.position):
            instruction = self.rhs(computation, "_", self.position, make_parameters=True)
        else:
            instruction = self.instruction(computation, make_parameters=True)
        self.skip()
        if not self.at_end():
            raise self.error("expected the end of the text after a single instruction; is the HloModule line missing?")
        computation.set_root(instruction)
        module.attributes["is_scheduled"] = "true"
        if instruction.has_shape:
            arguments = ", ".join(str(p.shape.with_default_layout()) for p in computation.parameters)
            result = instruction.shape.with_default_layout()
            module.attributes["entry_computation_layout"] = f"{{({arguments})->{result}}}"

    # ---------------------------------------------------------------- computations

    def computation(self) -> None:
        text, module, start = self.text, self.module, self.position
        entry_at = _ENTRY_RE.match(text, start)
        name_at = skip_space(text, entry_at.end()) if entry_at else start
        if not module.computations and module.style.percent:
            module.style = PrintStyle(percent=text.startswith("%", name_at))
        line = _COMPUTATION_LINE_RE.match(text, start)
        if line and (line[3] is None or self.known_shape(line[3])):
            name, has_program_shape, self.position = line[2], line[3] is not None, line.end()
        else:
            self.position = name_at
            name = self.name("a computation name")
            self.skip()
            has_program_shape = text.startswith("(", self.position)
            if has_program_shape:
                self.position = self.brackets()
                self.expect("->")
                self.shape()
            self.expect("{", f"at the start of computation {name}")
        computation = HloComputation(name, module, has_program_shape)
        self.instructions(computation)
        self.skip()
        if text.startswith(",", self.position):
            computation.trailing_attributes = self.attributes()
        if entry_at:
            if module.has_marked_entry:
                raise self.error("expects only one ENTRY", start)
            module.set_entry(computation)
        try:
            module.add_computation(computation)
        except HloError:
            raise self.error(f"computation {name} is already defined", name_at) from None

    def known_shape(self, text: str) -> Shape | None:
        """The shape that `text` spells, parsed once; None where it is none."""
        shape = self.shapes.get(text)
        if shape is None:
            try:
                shape = self.shapes[text] = Shape.parse(text)
            except HloError:
                return None
        return shape

    def instructions(self, computation: HloComputation) -> None:
        """Reads instructions up to and with the closing brace."""
        text, names, shapes = self.text, computation._names, self.shapes
        match_line, append, named = _INSTRUCTION_LINE_RE.match, computation._append_parsed, names.__getitem__
        literal_opcodes = LITERAL_OPCODES
        opcodes: dict[str, str] = {}
        position = self.position
        while True:
            # The hot loop of the parser. Anything unusual breaks out of it and is read again by `instruction`.
            while line := match_line(text, position):
                root, name, shape_text, opcode, arguments, attributes = line.groups()
                if name in names:
                    break
                if attributes and (
                    attributes.count("{") != attributes.count("}")
                    or "//" in attributes
                    or " =" in attributes  # the next instruction, on the same line
                    or (
                        not _STRINGS_CLOSED_RE.fullmatch(attributes)
                        if "\\" in attributes
                        else attributes.count('"') & 1
                    )
                ):
                    break
                operands: tuple[HloInstruction, ...] = ()
                payload = ""
                if opcode in literal_opcodes:
                    payload = arguments
                    if opcode == "parameter" and not payload.isdecimal():
                        break
                elif arguments:
                    try:
                        operands = tuple(map(named, arguments.replace("%", "").split(", ")))
                    except KeyError:
                        resolved = self.plain_operands(arguments, names)
                        if resolved is None:
                            break
                        operands = resolved
                shape = shapes.get(shape_text) or self.known_shape(shape_text)
                if shape is None:
                    break
                opcode = opcodes.setdefault(opcode, opcode)
                instruction = HloInstruction(name, opcode, shape, operands, payload, attributes, computation)
                names[name] = instruction
                append(instruction)
                if root:
                    if computation._root is not None:
                        raise self.error("one computation should have only one ROOT", skip_space(text, position))
                    computation._root = instruction
                position = line.end()
            self.position = position
            self.skip()
            if text.startswith("}", self.position):
                if computation._first is None:
                    raise self.error(f"computation {computation.name} has no instructions")
                self.position += 1
                return
            if self.at_end():
                raise self.error(f"computation {computation.name} is not closed with '}}'")
            self.instruction(computation)
            position = self.position

    def plain_operands(self, arguments: str, names: dict[str, HloInstruction]) -> tuple[HloInstruction, ...] | None:
        """Operands written with `/*index=5*/` or with their types before `%name`; None where it is neither."""
        if "/*" in arguments:
            arguments = _INDEX_COMMENT_RE.sub("", arguments)
            if "/*" in arguments:
                return None
        if _TYPED_OPERANDS_RE.search(arguments):
            *pieces, rest = _PERCENT_NAME_RE.split(", " + arguments)
            types, found = pieces[::2], pieces[1::2]
            if rest or not all(t.startswith(", ") and t.endswith(" ") and self.known_shape(t[2:-1]) for t in types):
                return None
            self.operand_types = True
        else:
            found = arguments.replace("%", "").split(", ")
        try:
            return tuple([names[name] for name in found])
        except KeyError:
            return None

    # ---------------------------------------------------------------- one instruction, any form

    def instruction(self, computation: HloComputation, make_parameters: bool = False) -> HloInstruction:
        start = self.position
        is_root = bool(_ROOT_RE.match(self.text, start))
        if is_root:
            self.position += len("ROOT")
            self.skip()
        name_at = self.position
        name = self.name("an instruction name")
        self.expect("=", f"after instruction name {name!r}")
        instruction = self.rhs(computation, name, name_at, make_parameters)
        if is_root:
            if computation._root is not None:
                raise self.error("one computation should have only one ROOT", start)
            computation._root = instruction
        return instruction

    def rhs(
        self,
        computation: HloComputation,
        name: str,
        name_at: int,
        make_parameters: bool = False,
        allow_attributes: bool = True,
    ) -> HloInstruction:
        """`[shape] opcode(operands)[, attributes]`; a nested instruction has no name and gets one."""
        self.skip()
        shape = self.shape() if _SHAPE_START_RE.match(self.text, self.position) else None
        self.skip()
        opcode_at = self.position
        match = _OPCODE_RE.match(self.text, self.position)
        if not match:
            raise self.error("expects opcode")
        opcode = match.group()
        self.position = match.end()
        self.skip()
        if not self.text.startswith("(", self.position):
            raise self.error(f"expects '(' after opcode {opcode}")
        operands: list[HloInstruction] = []
        payload = ""
        if opcode in LITERAL_OPCODES:
            begin = self.position + 1
            self.position = self.brackets()
            payload = self.text[begin : self.position - 1].strip()
            if opcode == "parameter":
                payload = strip_comments(payload).strip()
                if not payload.isdecimal():
                    raise self.error(f"expects a parameter number, found {payload[:20]!r}", begin)
        else:
            operands = self.operands(computation, make_parameters)
        attributes = self.attributes() if allow_attributes else AttributeMap()
        name = name or self.anonymous_name(computation, opcode)
        if name in computation._names:
            raise self.error(f"instruction {name} is already defined", name_at)
        instruction = HloInstruction(name, opcode, shape, tuple(operands), payload, "", computation)
        instruction._attributes = attributes
        if shape is None:
            if opcode in LITERAL_OPCODES:
                raise self.error(f"cannot infer shape for opcode: {opcode}", opcode_at)
            instruction._shape = infer_shape(instruction)
        computation._names[name] = instruction
        computation._append_parsed(instruction)
        return instruction

    def operands(self, computation: HloComputation, make_parameters: bool) -> list[HloInstruction]:
        """`(name, shape name, nested instruction, ...)`."""
        operands: list[HloInstruction] = []
        self.position += 1
        self.skip()
        first = True
        while not self.text.startswith(")", self.position):
            if not first:
                self.expect(",", "between operands")
            first = False
            operand = self.operand(computation, make_parameters)
            if operand is not None:
                operands.append(operand)
            self.skip()
        self.position += 1
        return operands

    def operand(self, computation: HloComputation, make_parameters: bool) -> HloInstruction | None:
        self.skip()
        start = self.position
        shape = self.shape() if _SHAPE_START_RE.match(self.text, start) else None
        self.skip()
        match = _NAME_RE.match(self.text, self.position)
        if match:
            after = skip_space(self.text, match.end())
            if element := _ELEMENT_RE.match(self.text, after):
                return self.tuple_element(computation, match[1] or match[2], element)
            if self.text[after : after + 1] in (",", ")"):
                name = match[1] or match[2]
                found = computation._names.get(name)
                if found is None and make_parameters and shape is not None:
                    found = self.missing_parameter(computation, name, shape)
                if found is None:
                    raise self.error(f"instruction does not exist: {name}")
                self.position = match.end()
                return found
        elif make_parameters and shape is not None:
            return self.missing_parameter(computation, "", shape)
        if match is None and self.text[self.position : self.position + 1] in (",", ")"):
            return None  # XLA's parser goes on where nothing stands between two commas
        if match is None or match[2] is None:
            raise self.error("expects an operand: a name, or a nested instruction")
        self.position = start
        with self.nested():
            return self.rhs(computation, "", start, make_parameters, allow_attributes=False)

    def tuple_element(self, computation: HloComputation, name: str, index: re.Match[str]) -> HloInstruction:
        """`%tuple#1`, as XLA dumps since 2026 write an element of a tuple: its get-tuple-element is not in the text."""
        source = computation._names.get(name)
        if source is None:
            raise self.error(f"instruction does not exist: {name}")
        number = int(index[1])
        if not source.has_shape or not source.shape.is_tuple or number >= len(source.shape.tuple_shapes):
            raise self.error(f"{name} has no element {number}")
        self.position = index.end()
        found = self.elements.get((source, number))
        if found is None:
            # The text may define the name XLA would give it further down.
            element_name, suffix = f"{name}_{number}", 0
            while element_name in computation._names or f"{element_name} =" in self.text:
                suffix += 1
                element_name = f"{name}_{number}.{suffix}"
            shape = source.shape.tuple_shapes[number]
            text = f", index={number}"
            found = HloInstruction(element_name, "get-tuple-element", shape, (source,), "", text, computation)
            computation._names[element_name] = found
            computation._append_parsed(found)
            self.elements[source, number] = found
        return found

    @staticmethod
    def missing_parameter(computation: HloComputation, name: str, shape: Shape) -> HloInstruction:
        number = sum(i.opcode == "parameter" for i in computation)
        name = name or f"_{number}"
        parameter = HloInstruction(name, "parameter", shape, (), str(number), "", computation)
        computation._names[name] = parameter
        computation._append_parsed(parameter)
        return parameter

    def anonymous_name(self, computation: HloComputation, opcode: str) -> str:
        """A name for an instruction that has none, as XLA's NameUniquer numbers them."""
        number = self.anonymous.get(opcode, 0)
        while (name := f"{opcode}.anon.{number}" if number else f"{opcode}.anon") in computation._names:
            number += 1
        self.anonymous[opcode] = number + 1
        return name

    def nested_computations(self, start: int) -> str:
        """`{instructions}`, or a list of names and such bodies in braces: bodies become computations of the module.

        Returns the text with their names instead.
        """
        self.position = start + 1
        self.skip()
        if _NESTED_BODY_RE.match(self.text, self.position):
            return self.nested_computation()
        names: list[str] = []
        percent = "%" if self.module.style.percent else ""
        while not self.text.startswith("}", self.position):
            if names:
                self.expect(",", "between computations")
                self.skip()
            if self.text.startswith("{", self.position):
                self.position += 1
                names.append(self.nested_computation())
            else:
                names.append(percent + self.name("a computation name"))
            self.skip()
        self.position += 1
        return "{" + ", ".join(names) + "}"

    def nested_computation(self) -> str:
        module = self.module
        percent = "%" if module.style.percent else ""
        computation = HloComputation("", module)
        with self.nested():
            self.instructions(computation)
        computation.name = module.unique_computation_name("_")
        # A lone instruction's computation is in the module already, and what it calls must come before it.
        module.add_computation(computation, before=self.lone_entry)
        return percent + computation.name

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        if self.nesting >= _MAX_NESTING:
            raise self.error(f"nested more than {_MAX_NESTING} levels deep")
        self.nesting += 1
        yield
        self.nesting -= 1

    # ---------------------------------------------------------------- tokens

    def skip(self) -> None:
        self.position = skip_space(self.text, self.position)

    def at_end(self) -> bool:
        return self.position >= len(self.text)

    def name(self, what: str) -> str:
        self.skip()
        match = _NAME_RE.match(self.text, self.position)
        if not match:
            raise self.error(f"expects {what}")
        self.position = match.end()
        return match[1] or match[2]

    def expect(self, token: str, context: str = "") -> None:
        self.skip()
        if not self.text.startswith(token, self.position):
            raise self.error(f"expects {token!r}{' ' if context else ''}{context}")
        self.position += len(token)

    def shape(self) -> Shape:
        try:
            shape, self.position = scan_shape(self.text, self.position)
        except HloError as error:
            raise self.error(str(error)) from None
        return shape

    def brackets(self) -> int:
        try:
            return scan_brackets(self.text, self.position)
        except AttributeScanError as error:
            raise self.error(error.message, error.position) from None

    def attributes(self) -> AttributeMap:
        starts: dict[str, int] = {}
        try:
            attributes, end = scan_attributes(self.text, self.position, starts=starts)
        except AttributeScanError as error:
            raise self.error(error.message, error.position) from None
        for name, value in attributes.items():
            if name in COMPUTATION_ATTRIBUTES and "=" in value:
                attributes[name] = self.nested_computations(starts[name])
        self.position = end
        return attributes

    def error(self, message: str, position: int | None = None) -> HloParseError:
        return HloParseError.at(message, self.text, self.position if position is None else position, self.filename)
