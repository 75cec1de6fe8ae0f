"""Changing a computation: operands, users, order, names, root and control dependencies stay in step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from xla_fp8 import hlo

F32 = hlo.Shape.array("f32", (2,))


def diamond() -> hlo.HloComputation:
    return hlo.parse(
        "HloModule m\n\nENTRY %e (x: f32[2]) -> f32[2] {\n  %x = f32[2]{0} parameter(0)\n  %a = f32[2]{0} negate(%x)\n"
        "  %b = f32[2]{0} abs(%x)\n  %c = f32[2]{0} add(%a, %b)\n  ROOT %r = f32[2]{0} multiply(%c, %c)\n}\n"
    ).entry


def names(instructions: object) -> list[str]:
    return [i.name for i in instructions]  # type: ignore[attr-defined]


class RandomEdits(RuleBasedStateMachine):
    """Any sequence of edits leaves a module that verifies, and that reads back as it is printed."""

    instructions = Bundle("instructions")

    def __init__(self) -> None:
        super().__init__()
        self.module = hlo.parse(
            "HloModule m\n\nENTRY %e (x: f32[2]) -> f32[2] {\n  ROOT %x = f32[2]{0} parameter(0)\n}\n"
        )
        self.entry = self.module.entry

    def alive(self, *instructions: hlo.HloInstruction) -> bool:
        return all(i.parent is self.entry for i in instructions)

    @rule(target=instructions)
    def the_parameter(self) -> hlo.HloInstruction:
        return self.entry.parameters[0]

    @rule(target=instructions, left=instructions, right=instructions)
    def create(self, left: hlo.HloInstruction, right: hlo.HloInstruction) -> object:
        if not self.alive(left, right):
            return multiple()
        return self.entry.create("add", F32, [left, right], name="n")

    @rule(target=instructions, operand=instructions)
    def insert_before_the_first_user(self, operand: hlo.HloInstruction) -> object:
        if not self.alive(operand) or not operand.users:
            return multiple()
        order = self.entry.instructions
        first = min(operand.users, key=order.index)
        return self.entry.create("negate", F32, [operand], before=first)

    @rule(old=instructions, new=instructions)
    def replace_uses(self, old: hlo.HloInstruction, new: hlo.HloInstruction) -> None:
        if self.alive(old, new) and new not in self.entry.reachable_from([old]):
            order = self.entry.instructions
            if all(order.index(new) < order.index(user) for user in old.users):
                self.entry.replace_all_uses_with(old, new)

    @rule(user=instructions, operand=instructions, data=st.data())
    def set_operand(self, user: hlo.HloInstruction, operand: hlo.HloInstruction, data: st.DataObject) -> None:
        if self.alive(user, operand) and user.operands:
            order = self.entry.instructions
            if order.index(operand) < order.index(user):
                user.set_operand(data.draw(st.integers(0, len(user.operands) - 1)), operand)

    @rule(instruction=instructions)
    def set_root(self, instruction: hlo.HloInstruction) -> None:
        if self.alive(instruction):
            self.entry.set_root(instruction)

    @rule(instruction=instructions)
    def remove(self, instruction: hlo.HloInstruction) -> None:
        if not self.alive(instruction) or instruction.opcode == "parameter":
            return
        if instruction.users or instruction.is_root:
            with pytest.raises(hlo.HloMutationError):
                self.entry.remove(instruction)
        else:
            self.entry.remove(instruction)
            assert instruction.operands == ()

    @rule(instruction=instructions)
    def rename(self, instruction: hlo.HloInstruction) -> None:
        if self.alive(instruction):
            self.entry.rename(instruction, self.entry.unique_name("renamed"))

    @rule()
    def remove_dead(self) -> None:
        before = len(self.entry)
        removed = self.entry.remove_dead()
        assert len(self.entry) == before - removed
        assert all(i.users or i.is_root or i.opcode == "parameter" for i in self.entry)

    @invariant()
    def verifies_and_reads_back(self) -> None:
        hlo.verify(self.module)
        assert len(self.entry) == len(self.entry.instructions)
        printed = hlo.to_text(self.module)
        assert hlo.to_text(hlo.parse(printed)) == printed


def test_random_edits() -> None:
    run_state_machine_as_test(RandomEdits)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=30))
def test_post_order_of_any_graph(edges: list[tuple[int, int]]) -> None:
    module = hlo.parse("ENTRY e {\n  x = f32[2] parameter(0)\n}")
    entry = module.entry
    made = [entry.root]
    for left, right in edges:
        made.append(entry.create("add", F32, [made[left % len(made)], made[right % len(made)]]))
    order = entry.post_order()
    assert set(order) == set(entry)
    position = {i: n for n, i in enumerate(order)}
    assert all(position[o] < position[i] for i in order for o in i.operands)


def test_users_are_unique_and_in_order() -> None:
    entry = diamond()
    assert names(entry.instruction("x").users) == ["a", "b"]
    assert names(entry.instruction("c").users) == ["r"]
    assert entry.instruction("c").use_count == 2
    entry.root.set_operand(0, entry.instruction("a"))
    assert names(entry.instruction("c").users) == ["r"]
    entry.root.set_operand(1, entry.instruction("a"))
    assert names(entry.instruction("c").users) == []
    assert names(entry.instruction("a").users) == ["c", "r"]


def test_replace() -> None:
    entry = diamond()
    new = entry.create("tanh", F32, [entry.instruction("x")], before=entry.instruction("c"))
    entry.replace(entry.instruction("b"), new)
    assert names(entry) == ["x", "a", "tanh", "c", "r"]
    assert names(entry.instruction("c").operands) == ["a", "tanh"]
    assert "b" not in entry
    hlo.verify(entry.module)


def test_replace_root_and_self_use() -> None:
    entry = diamond()
    old = entry.root
    new = entry.create("negate", F32, [old])
    entry.replace_all_uses_with(old, new)
    assert entry.root is new
    assert new.operands == (old,)
    hlo.verify(entry.module)


def test_create_keeps_names_unique_and_copies_metadata() -> None:
    entry = diamond()
    entry.instruction("a").attributes["metadata"] = '{op_name="jit(f)/neg"}'
    made = [
        entry.create(
            "negate", F32, [entry.instruction("x")], name="a", before=entry.root, metadata_from=entry.instruction("a")
        )
        for _ in range(3)
    ]
    assert names(made) == ["a.1", "a.2", "a.3"]
    assert entry.unique_name("a.2") == "a.4"
    assert entry.unique_name("free") == "free"
    assert {i.op_name for i in made} == {"jit(f)/neg"}
    assert hlo.instruction_text(made[0]) == '%a.1 = f32[2]{0} negate(%x), metadata={op_name="jit(f)/neg"}'


def test_refusals() -> None:
    entry, other = diamond(), diamond()
    x, a, c = (entry.instruction(n) for n in "xac")
    wide = entry.create("constant", hlo.Shape.array("f32", (3,)), payload="{1, 2, 3}")
    with pytest.raises(hlo.HloMutationError, match="still has users: c"):
        entry.remove(a)
    with pytest.raises(hlo.HloMutationError, match="is the root"):
        entry.remove(entry.root)
    with pytest.raises(hlo.HloMutationError, match="cannot be replaced by constant of shape"):
        entry.replace_all_uses_with(a, wide)
    with pytest.raises(hlo.HloMutationError, match="not in computation e"):
        entry.replace_all_uses_with(a, other.instruction("b"))
    with pytest.raises(hlo.HloMutationError, match="not in the computation of its new user"):
        c.set_operand(0, other.instruction("b"))
    with pytest.raises(hlo.HloMutationError, match="operand x of a new abs"):
        entry.create("abs", F32, [other.instruction("x")])
    with pytest.raises(hlo.HloMutationError, match="cannot be its root"):
        entry.set_root(other.root)
    with pytest.raises(hlo.HloMutationError, match="already has an instruction x"):
        entry.rename(a, "x")
    with pytest.raises(hlo.HloMutationError, match="already in computation e"):
        entry.add(x)
    with pytest.raises(hlo.HloAttributeError, match="no instruction 'nothing'"):
        entry.instruction("nothing")
    assert names(entry) == ["x", "a", "b", "c", "r", "constant"]
    hlo.verify(entry.module)


def test_a_removed_instruction_is_nowhere() -> None:
    entry = diamond()
    dead = entry.create("negate", F32, [entry.root])
    entry.remove(dead)
    assert dead.parent is None
    assert not dead.is_root
    assert dead not in entry.root.users
    with pytest.raises(hlo.HloMutationError, match="was removed"):
        dead.module  # noqa: B018


def controlled() -> hlo.HloComputation:
    return hlo.parse(
        "HloModule m\nENTRY e {\n  x = f32[2] parameter(0)\n  a = f32[2] negate(x)\n"
        "  b = f32[2] abs(x), control-predecessors={a}\n  ROOT r = f32[2] add(x, b)\n}"
    ).entry


def test_control_dependencies() -> None:
    entry = controlled()
    a, b = entry.instruction("a"), entry.instruction("b")
    assert (b.control_predecessors, a.control_successors) == ((a,), (b,))
    assert a.has_control_dependencies
    assert entry.reachable_from([a]) == {a, b, entry.root}
    assert entry.remove_dead() == 0
    with pytest.raises(hlo.HloMutationError, match="control predecessor of b"):
        entry.remove(a)
    new = entry.create("tanh", F32, [entry.instruction("x")], before=b)
    with pytest.raises(hlo.HloMutationError, match="control dependencies"):
        entry.replace(a, new)
    entry.rename(a, "renamed")
    assert b.control_predecessors == (a,)
    assert hlo.instruction_text(b).endswith("control-predecessors={%renamed}")
    entry.transfer_control_dependencies(a, new)
    assert (b.control_predecessors, new.control_successors, a.control_successors) == ((new,), (b,), ())
    assert entry.remove_dead() == 1
    hlo.verify(entry.module)


def test_post_order_obeys_control_dependencies() -> None:
    entry = controlled()
    entry.instruction("a").attributes["control-predecessors"] = "{b}"
    entry.instruction("b").attributes.pop("control-predecessors")
    order = names(entry.post_order())
    assert order.index("b") < order.index("a")


def test_restore_order() -> None:
    entry = diamond()
    late = entry.create("tanh", F32, [entry.instruction("x")])
    entry.instruction("c").set_operand(0, late)
    with pytest.raises(hlo.HloVerifyError):
        hlo.verify(entry.module)
    root = entry.root
    entry.restore_order()
    hlo.verify(entry.module)
    assert entry.root is root
    assert names(entry) == ["x", "a", "b", "tanh", "c", "r"]


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("d = f32[2] negate(x)", False),
        ('d = f32[2] custom-call(x), custom_call_target="t"', False),
        ('d = f32[2] custom-call(x), custom_call_target="t", custom_call_has_side_effect=true', True),
        ("d = token[] outfeed(x, t), outfeed_shape=f32[2]", True),
        ("d = f32[2] all-reduce(x), replica_groups={}, to_apply=sum", True),
        ("d = f32[2] call(x), to_apply=pure", False),
        ("d = f32[2] call(x), to_apply=impure", True),
        ("d = f32[2] fusion(x), kind=kLoop, calls=indirect", True),
        ("d = f32[2] rng(x, x), distribution=rng_uniform", True),
    ],
)
def test_remove_dead_keeps_side_effects(line: str, kept: bool) -> None:
    module = hlo.parse(
        "HloModule m\nsum {\n  a = f32[] parameter(0)\n  b = f32[] parameter(1)\n  ROOT s = f32[] add(a, b)\n}\n"
        "pure {\n  ROOT p = f32[2] parameter(0)\n}\n"
        "impure {\n  p = f32[2] parameter(0)\n  t = token[] after-all()\n"
        "  ROOT r = f32[2] rng(p, p), distribution=rng_uniform\n}\n"
        "indirect {\n  p = f32[2] parameter(0)\n  ROOT c = f32[2] call(p), to_apply=impure\n}\n"
        f"ENTRY e {{\n  x = f32[2] parameter(0)\n  t = token[] after-all()\n  {line}\n  ROOT r = f32[2] abs(x)\n}}"
    )
    module.entry.remove_dead()
    assert ("d" in module.entry) == kept


def test_module_level_edits() -> None:
    module = hlo.parse(
        "HloModule m\nf {\n  ROOT p = f32[] parameter(0)\n}\nENTRY e {\n  x = f32[] parameter(0)\n"
        "  ROOT c = f32[] call(x), to_apply=f\n}"
    )
    f, entry = module.computation("f"), module.entry
    assert module.called_computations() == {entry, f}
    assert (module.unique_computation_name("g"), module.unique_computation_name("f")) == ("g", "f.1")
    g = hlo.HloComputation("g", module)
    g.create("parameter", hlo.Shape.array("f32"), payload="0")
    module.add_computation(g, before=entry)
    assert names(module.computations) == ["f", "g", "e"]
    entry.root.attributes["to_apply"] = "g"
    assert entry.root.to_apply is g
    module.remove_computation(f)
    hlo.verify(module)
    with pytest.raises(hlo.HloMutationError, match="already has a computation g"):
        module.add_computation(hlo.HloComputation("g", module))
    with pytest.raises(hlo.HloMutationError, match="entry"):
        module.remove_computation(entry)
    with pytest.raises(hlo.HloAttributeError, match="no computation 'f'"):
        module.computation("f")


def test_replace_contents_with() -> None:
    module, other = diamond().module, controlled().module
    text = hlo.to_text(other)
    module.replace_contents_with(other)
    assert hlo.to_text(module) == text
    assert all(c.module is module for c in module.computations)


def test_renamed_computations_are_called_by_their_new_names() -> None:
    module = hlo.parse(
        """HloModule m

%f (x: f32[]) -> f32[] {
  ROOT %x = f32[] parameter(0)
}

%g (f: f32[]) -> f32[] {
  %f = f32[] parameter(0)
  ROOT %r = f32[] call(%f), to_apply=%f, metadata={op_name="f"}
}

ENTRY %main (p: f32[], q: pred[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = pred[] parameter(1)
  ROOT %c = f32[] conditional(%q, %p, %p), branch_computations={%f, %g}
}
"""
    )
    module.rename_computations({"f": "one", "g": "two.f", "main": "entry"})
    assert [computation.name for computation in module.computations] == ["one", "two.f", "entry"]
    assert module.entry.root.attr("branch_computations") == "{%one, %two.f}"
    assert str(module.computation("two.f").root) == 'r = f32[] call(f), to_apply=%one, metadata={op_name="f"}'
    hlo.verify(hlo.parse(hlo.to_text(module)))
