"""call-inliner: the body of a called computation in place of the call."""

from __future__ import annotations

from xla_fp8.hlo import HloComputation, HloInstruction, HloModule
from xla_fp8.hlo.attributes import quote
from xla_fp8.passes.base import Context, Pass, rewritable_computations
from xla_fp8.target import Target

MAX_INSTRUCTIONS = 2_000_000
"""Inlining stops here: calls that call twice what calls twice ... grow a module exponentially."""


class CallInliner(Pass):
    """Inlines calls, so that chains which jit boundaries (jnp.clip, jax.nn.relu) cut are whole again.

    Before::

        %relu (x: f32[8]) -> f32[8] { ... ROOT %max = f32[8] maximum(%x, %zeros) }
        ENTRY %main { ... %call = f32[8] call(%conv), to_apply=%relu }

    After::

        ENTRY %main { ... %max = f32[8] maximum(%conv, %zeros) }

    A call stays where the user asked for it (`frontend_attributes={inlineable="false"}`, or "xla_late"), where it is a
    composite, where it has control dependencies, and where it runs on another thread. As in XLA's call_inliner.cc.
    """

    name = "call-inliner"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        size = module.instruction_count
        # Callees come first in the text, so every body is flat by the time it is inlined.
        for computation in rewritable_computations(module):
            for call in computation.instructions:
                if call.opcode != "call" or not is_inlineable(call):
                    continue
                body = call.to_apply
                size += len(body)
                if size > MAX_INSTRUCTIONS or not self.context.consume_fuel():
                    return changed
                inline_call(call, self.context)
                changed = True
        return changed


def is_inlineable(call: HloInstruction) -> bool:
    """Whether nothing asks for this call to stay a call."""
    frontend = call.attr("frontend_attributes") or ""
    if 'inlineable="false"' in frontend or "xla_late" in frontend or call.attr("is_composite") == "true":
        return False
    if call.has_control_dependencies or not call.has_shape:
        return False
    body = call.to_apply
    if body is call.parent or body.trailing_attributes.get("execution_thread", '"main"') != '"main"':
        return False
    return all(i.has_shape for i in body) and len(body.parameters) == len(call.operands)


def inline_call(call: HloInstruction, context: Context) -> None:
    """Puts a copy of the called computation's instructions before `call` and the root's copy in its place."""
    caller = call.parent
    assert caller is not None
    body = call.to_apply
    clones: dict[HloInstruction, HloInstruction] = {}
    for instruction in body:
        if instruction.opcode == "parameter":
            clones[instruction] = call.operand(instruction.parameter_number)
        else:
            clones[instruction] = clones_of(instruction, clones, caller, call)
            context.moved(clones[instruction], body.name, instruction.name)
    for instruction, clone in clones.items():
        if predecessors := instruction.control_predecessors:
            names = ", ".join(f"%{clones[p].name}" for p in predecessors)
            clone.attributes["control-predecessors"] = f"{{{names}}}"
    root = clones[body.root]
    if (sharding := call.sharding) and root.opcode != "parameter" and root.sharding is None:
        root.attributes["sharding"] = sharding
    caller.replace(call, root)


def clones_of(
    instruction: HloInstruction,
    clones: dict[HloInstruction, HloInstruction],
    caller: HloComputation,
    call: HloInstruction,
) -> HloInstruction:
    """A copy of one instruction in the caller, with the call's place in its metadata."""
    attributes = dict(instruction.attributes)
    attributes.pop("control-predecessors", None)
    if metadata := inlined_metadata(instruction, call):
        attributes["metadata"] = metadata
    return caller.create(
        instruction.opcode,
        instruction.shape,
        [clones[operand] for operand in instruction.operands],
        name=instruction.name,
        before=call,
        payload=instruction.payload,
        attributes=attributes,
    )


def inlined_metadata(instruction: HloInstruction, call: HloInstruction) -> str | None:
    """The callee's metadata under the call's name; the call's source line where the callee has none of its own."""
    own, outer = instruction.metadata, call.metadata
    text = instruction.attr("metadata")
    if not text:
        return call.attr("metadata")
    if outer.op_name and own.op_name and not own.op_name.startswith(outer.op_name):
        text = text.replace(f"op_name={quote(own.op_name)}", f"op_name={quote(f'{outer.op_name}/{own.op_name}')}", 1)
    if not own.stack_frame_id and not own.source_file and outer.stack_frame_id:
        text = f"{text[:-1].rstrip()} stack_frame_id={outer.stack_frame_id}}}"
    return text
