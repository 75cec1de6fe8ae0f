"""Is a module well-formed HLO? What XLA's hlo_verifier.cc asks of users, calls and shapes.

jaxlib's parser accepts an add of different shapes and offers no verifier, so a pass that made a mistake would only be
found out when XLA compiles, if at all.
"""

from __future__ import annotations

from xla_fp8.hlo.call_rules import broken_call_rule
from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.errors import HloError, HloVerifyError
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.module import HloModule
from xla_fp8.hlo.printer import instruction_text
from xla_fp8.hlo.shape import Shape, scan_shape, skip_space
from xla_fp8.hlo.shape_rules import broken_rule, shapes_agree


def verify(module: HloModule) -> None:
    """Checks users, order, names, roots, parameters, calls, control dependencies, layouts, and shapes by opcode.

    Unknown opcodes pass. Linear in the number of instructions, without recursion.

    Raises:
        HloVerifyError: naming computation, instruction, rule and, where the metadata has it, the user's source line.
    """
    _Verifier(module).run()


class _Verifier:
    def __init__(self, module: HloModule) -> None:
        self.module = module
        # Parsed shapes are shared between instructions: each needs its layouts looked at once.
        self.good_shapes: set[int] = set()

    def run(self) -> None:
        module = self.module
        if not module.computations:
            raise HloVerifyError("entry", "the module has no computations")
        calls: dict[HloComputation, list[HloComputation]] = {}
        for name, computation in module._computations.items():
            if computation.name != name or computation.module is not module:
                raise HloVerifyError("names", f"the module knows it as {name}", computation.name)
            calls[computation] = self.computation(computation)
        _check_recursion(calls)
        self.header()

    # ---------------------------------------------------------------- computations

    def computation(self, computation: HloComputation) -> list[HloComputation]:
        """Checks one computation; returns what it calls."""
        if len(computation) == 0:
            raise HloVerifyError("root", "the computation has no instructions", computation.name)
        defined: set[HloInstruction] = set()
        called: list[HloComputation] = []
        edges = 0
        for instruction in computation:
            if computation._names.get(instruction.name) is not instruction or instruction.parent is not computation:
                raise self.error(instruction, "names", "the computation knows another instruction by this name")
            try:
                self.operands(instruction, defined)
                self.shape(instruction)
                called += self.calls(instruction)
            except HloVerifyError:
                raise
            except HloError as error:
                raise self.error(instruction, "attributes", str(error)) from None
            edges += len(instruction._user_set())
            defined.add(instruction)
        if len(computation._names) != len(defined):
            extra = next(name for name, i in computation._names.items() if i not in defined or i.name != name)
            raise HloVerifyError("names", f"{extra} has a name but no place", computation.name)
        if edges != sum(len(set(i._operands)) for i in defined):
            self.stray_user(computation)
        if computation.root not in defined:
            raise self.error(computation.root, "root", f"the root of {computation.name} is not in it")
        self.parameters(computation)
        return called

    def operands(self, instruction: HloInstruction, defined: set[HloInstruction]) -> None:
        for operand in instruction._operands:
            if operand not in defined:
                why = "comes later" if operand.parent is instruction.parent else "is not in this computation"
                raise self.error(instruction, "operands", f"operand {operand.name} {why}")
            if instruction not in operand._user_set():
                raise self.error(instruction, "users", f"operand {operand.name} does not have it as a user")
        if instruction.has_attribute("control-predecessors"):
            try:
                predecessors = instruction.control_predecessors
            except HloError as error:
                raise self.error(instruction, "control-predecessors", str(error)) from None
            for predecessor in predecessors:
                # A predecessor that comes first also rules out cycles; XLA's parser asks for it too.
                if predecessor not in defined:
                    raise self.error(instruction, "control-predecessors", f"{predecessor.name} does not come before it")

    def stray_user(self, computation: HloComputation) -> None:
        for instruction in computation:
            for user in instruction._user_set():
                if instruction not in user._operands:
                    raise self.error(instruction, "users", f"user {user.name} does not have it as an operand")

    def parameters(self, computation: HloComputation) -> None:
        parameters = [i for i in computation if i.opcode == "parameter"]
        try:
            parameters.sort(key=lambda i: i.parameter_number)
        except HloError as error:
            raise HloVerifyError("parameters", str(error), computation.name) from None
        for number, parameter in enumerate(parameters):
            if parameter.parameter_number != number:
                raise self.error(
                    parameter,
                    "parameters",
                    f"parameter numbers must be 0 to {len(parameters) - 1}, once each; found "
                    f"{', '.join(p.payload for p in parameters[:20])}",
                )

    # ---------------------------------------------------------------- shapes and calls

    def shape(self, instruction: HloInstruction) -> None:
        shape = instruction._shape
        if shape is None:
            return
        if id(shape) not in self.good_shapes:
            if wrong := _broken_layout(shape):
                raise self.error(instruction, "layout", wrong)
            self.good_shapes.add(id(shape))
        if all(operand._shape is not None for operand in instruction._operands) and (wrong := broken_rule(instruction)):
            raise self.error(instruction, instruction.opcode, wrong)

    def calls(self, instruction: HloInstruction) -> tuple[HloComputation, ...]:
        try:
            called = instruction.called_computations
            shapes_known = called and all(i._shape is not None for i in (instruction, *instruction._operands))
            wrong = broken_call_rule(instruction, called) if shapes_known else None
        except HloError as error:
            wrong = str(error)
        if wrong:
            raise self.error(instruction, "calls", wrong)
        return called

    # ---------------------------------------------------------------- header

    def header(self) -> None:
        attributes, entry = self.module.attributes, self.module.entry
        if attributes.get("is_scheduled", "true") not in ("true", "false"):
            raise HloVerifyError("is_scheduled", f"expected true or false, found {attributes['is_scheduled']!r}")
        text = attributes.get("entry_computation_layout")
        if text is None:
            return
        try:
            arguments, result = _parse_signature(text)
        except HloError as error:
            raise HloVerifyError("entry_computation_layout", str(error), entry.name) from None
        parameters = entry.parameters
        if len(arguments) != len(parameters):
            raise HloVerifyError(
                "entry_computation_layout",
                f"it has {len(arguments)} parameters, the computation {len(parameters)}",
                entry.name,
            )
        for shape, instruction in zip((*arguments, result), (*parameters, entry.root), strict=True):
            if wrong := _broken_layout(shape):
                raise HloVerifyError("entry_computation_layout", wrong, entry.name)
            if instruction.has_shape and not shapes_agree(shape, instruction.shape):
                raise self.error(
                    instruction,
                    "entry_computation_layout",
                    f"it says {shape}, but the {'parameter' if instruction.opcode == 'parameter' else 'root'} "
                    f"is {instruction.shape}",
                )

    def error(self, instruction: HloInstruction, rule: str, message: str) -> HloVerifyError:
        computation = instruction.parent.name if instruction.parent is not None else None
        source: str | None = None
        text = ""
        try:
            text = instruction_text(instruction)
            location = self.module.source_location(instruction)
            source = str(location) if location is not None else None
        except HloError:
            pass  # the metadata may be what is broken; the rule is the news
        return HloVerifyError(rule, message, computation, instruction.name, source, text)


def _broken_layout(shape: Shape) -> str | None:
    pending = [shape]
    while pending:
        part = pending.pop()
        pending.extend(part.tuple_shapes)
        if part.layout is not None and sorted(part.layout.minor_to_major) != list(range(part.rank)):
            return f"layout {part.layout} of {part} is not a permutation of its {part.rank} dimensions"
    return None


def _parse_signature(text: str) -> tuple[list[Shape], Shape]:
    """`{(f32[2]{0}, pred[])->f32[2]{0}}` → parameter shapes and result shape."""
    position = skip_space(text, 1)
    arguments, end = scan_shape(text, position)
    end = skip_space(text, end)
    if not text.startswith("{") or not arguments.is_tuple or not text.startswith("->", end):
        raise HloError(f"expected {{(parameters)->result}}, found {text[:80]!r}")
    result, end = scan_shape(text, end + 2)
    if text[skip_space(text, end) :].strip() != "}":
        raise HloError(f"expected '}}' after the result, found {text[end : end + 40]!r}")
    return list(arguments.tuple_shapes), result


def _check_recursion(calls: dict[HloComputation, list[HloComputation]]) -> None:
    """Depth-first with an explicit stack: a computation that is met again below itself calls itself."""
    finished: set[HloComputation] = set()
    for start in calls:
        if start in finished:
            continue
        path = {start: iter(calls[start])}
        while path:
            current, rest = next(reversed(path.items()))
            following = next((c for c in rest if c not in finished), None)
            if following is None:
                finished.add(current)
                del path[current]
            elif following in path:
                cycle = " -> ".join(c.name for c in (*path, following))
                raise HloVerifyError("recursion", f"computations call each other in a circle: {cycle}", current.name)
            else:
                path[following] = iter(calls[following])
