"""The verifier: every rule refuses what breaks it, says where, and takes its correct neighbour."""

from __future__ import annotations

import pytest

from xla_fp8 import hlo

HEAD = """HloModule m
add_f32 {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}
less {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = pred[] compare(a, b), direction=LT
}
negate_4 {
  p = f32[4] parameter(0)
  ROOT n = f32[4] negate(p)
}
is_big {
  p = f32[4] parameter(0)
  ROOT c = pred[] constant(true)
}
"""
BODY = """ENTRY e {{
  v = f32[4]{{0}} parameter(0)
  w = f32[4]{{0}} parameter(1)
  m = f32[2,3]{{1,0}} parameter(2)
  h = bf16[4]{{0}} parameter(3)
  i = s32[] parameter(4)
  p = pred[] parameter(5)
  q = pred[4]{{0}} parameter(6)
  x = f32[8,10,12,16]{{3,2,1,0}} parameter(7)
  k = f32[3,3,16,32]{{3,2,1,0}} parameter(8)
  t = (f32[4], s32[]) parameter(9)
  z = f32[] constant(0)
  {line}
}}
"""
CONV = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f"

# Opcode -> instructions that keep its rule, instructions that break it (with a word of the message).
RULES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "add": (
        ["f32[4] add(v, w)", "f32[4]{0} add(v, v)"],
        [
            ("f32[4] add(v, h)", "same type"),
            ("f32[4] add(v, m)", "same type and sizes"),
            ("bf16[4] add(v, w)", "expected f32[4]"),
            ("f32[5] add(v, w)", "expected f32[4]"),
            ("f32[4] add(v)", "takes 2 operands, found 1"),
        ],
    ),
    "compare": (["pred[4] compare(v, w), direction=LT"], [("f32[4] compare(v, w), direction=LT", "expected pred[4]")]),
    "complex": (["c64[4] complex(v, w)"], [("f32[4] complex(v, w)", "expected c64[4]")]),
    "negate": (["f32[4] negate(v)"], [("f32[3] negate(v)", "expected f32[4]"), ("bf16[4] negate(v)", "expected f32")]),
    "convert": (["bf16[4] convert(v)", "f8e4m3fn[4] convert(v)"], [("bf16[3] convert(v)", "expected bf16[4]")]),
    "is-finite": (["pred[4] is-finite(v)"], [("f32[4] is-finite(v)", "expected pred[4]")]),
    "bitcast-convert": (
        ["s32[4] bitcast-convert(v)", "s8[4,4] bitcast-convert(v)", "c128[] bitcast-convert(v)"],
        [("s8[4] bitcast-convert(v)", "expected s8[4,4]"), ("s32[3] bitcast-convert(v)", "expected s32[4]")],
    ),
    "select": (
        ["f32[4] select(q, v, w)", "f32[4] select(p, v, w)"],
        [
            ("f32[4] select(v, v, w)", "expected pred"),
            ("f32[4] select(q, v, h)", "same shape"),
            ("f32[2,3] select(q, m, m)", "scalar or have the sizes"),
            ("bf16[4] select(q, v, w)", "the second operand is f32[4]"),
        ],
    ),
    "clamp": (
        ["f32[4] clamp(z, v, z)", "f32[4] clamp(v, w, z)"],
        [("f32[2,3] clamp(v, m, z)", "scalar or have the sizes"), ("bf16[4] clamp(z, h, z)", "same type")],
    ),
    "broadcast": (
        [
            "f32[4,7] broadcast(v), dimensions={0}",
            "f32[7,4] broadcast(v), dimensions={1}",
            "f32[2] broadcast(z), dimensions={}",
        ],
        [
            ("f32[4,7] broadcast(v), dimensions={1}", "does not fit"),
            ("f32[4,7] broadcast(v), dimensions={}", "one entry for each dimension"),
            ("f32[4,7] broadcast(v), dimensions={2}", "distinct dimensions of rank 2"),
            ("f32[2,3] broadcast(m), dimensions={0,0}", "distinct dimensions"),
            ("bf16[4,7] broadcast(v), dimensions={0}", "same type"),
        ],
    ),
    "reshape": (["f32[3,2] reshape(m)"], [("f32[5] reshape(m)", "6 elements"), ("bf16[6] reshape(m)", "same type")]),
    "transpose": (
        ["f32[3,2] transpose(m), dimensions={1,0}"],
        [
            ("f32[2,3] transpose(m), dimensions={1,0}", "expected f32[3,2]"),
            ("f32[2,3] transpose(m), dimensions={0,0}", "permutation"),
            ("f32[2,3] transpose(m)", "permutation"),
        ],
    ),
    "reverse": (["f32[4] reverse(v), dimensions={0}"], [("f32[4] reverse(v), dimensions={1}", "distinct dimensions")]),
    "concatenate": (
        ["f32[8] concatenate(v, w), dimensions={0}", "f32[2,6] concatenate(m, m), dimensions={1}"],
        [
            ("f32[4] concatenate(v, w), dimensions={0}", "expected f32[8]"),
            ("f32[8] concatenate(v, h), dimensions={0}", "operand h"),
            ("f32[8] concatenate(v, m), dimensions={0}", "operand m"),
            ("f32[4,6] concatenate(m, m), dimensions={0,1}", "along one dimension"),
        ],
    ),
    "slice": (
        ["f32[2] slice(v), slice={[0:4:2]}", "f32[1,3] slice(m), slice={[1:2], [0:3]}"],
        [
            ("f32[3] slice(v), slice={[0:4:2]}", "expected f32[2]"),
            ("f32[4] slice(v), slice={[1:5]}", "not inside"),
            ("f32[4] slice(m), slice={[0:2]}", "one range for each dimension"),
        ],
    ),
    "dynamic-slice": (
        ["f32[2] dynamic-slice(v, i), dynamic_slice_sizes={2}"],
        [
            ("f32[3] dynamic-slice(v, i), dynamic_slice_sizes={2}", "expected f32[2]"),
            ("f32[5] dynamic-slice(v, i), dynamic_slice_sizes={5}", "does not fit inside"),
            ("f32[1,1] dynamic-slice(m, i), dynamic_slice_sizes={1,1}", "1 start indices"),
            ("f32[2] dynamic-slice(v, z), dynamic_slice_sizes={2}", "integer scalar"),
        ],
    ),
    "dynamic-update-slice": (
        ["f32[4] dynamic-update-slice(v, w, i)"],
        [("f32[4] dynamic-update-slice(v, h, i)", "same type"), ("f32[4] dynamic-update-slice(v, x, i)", "rank")],
    ),
    "pad": (
        ["f32[9] pad(v, z), padding=1_1_1", "f32[2,5] pad(m, z), padding=0_0x1_1", "f32[2] pad(v, z), padding=-1_-1"],
        [
            ("f32[6] pad(v, z), padding=1_2", "expected f32[7]"),
            ("f32[6] pad(v, i), padding=1_1", "expected f32[]"),
            ("f32[6] pad(v, z), padding=1_1x1_1", "for each dimension"),
            ("f32[6] pad(v, z), padding=a_b", "attribute"),
        ],
    ),
    "iota": (["s32[4] iota(), iota_dimension=0"], [("s32[4] iota(), iota_dimension=1", "iota_dimension=1")]),
    "constant": (
        ["f32[2] constant({1, 2})", "f32[9] constant({...})", "token[] constant(x)"],
        [("f32[3] constant({1, 2})", "needs 3 elements"), ("s8[] constant(200)", "not a literal of s8")],
    ),
    "dot": (
        [
            "f32[3,3] dot(m, m), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
            "f32[2] dot(m, m), lhs_batch_dims={0}, rhs_batch_dims={0}, "
            "lhs_contracting_dims={1}, rhs_contracting_dims={1}",
            "f32[2,3,4] dot(m, v)",
        ],
        [
            ("f32[2,2] dot(m, m), lhs_contracting_dims={0}, rhs_contracting_dims={0}", "expected f32[3,3]"),
            ("f32[3,2] dot(m, m), lhs_contracting_dims={0}, rhs_contracting_dims={1}", "have sizes (2,), (3,)"),
            ("f32[3] dot(m, v), lhs_contracting_dims={2}, rhs_contracting_dims={0}", "not distinct dimensions"),
        ],
    ),
    "convolution": (
        [
            f"f32[8,10,12,32] convolution(x, k), {CONV}",
            "f32[8,4,5,32] convolution(x, k), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f",
            "f32[8,6,8,32] convolution(x, k), window={size=3x3 rhs_dilate=2x2}, dim_labels=b01f_01io->b01f",
            "f32[8,17,21,32] convolution(x, k), window={size=3x3 lhs_dilate=2x2}, dim_labels=b01f_01io->b01f",
            "f32[4,8,10,32] convolution(x, k), window={size=3x3}, dim_labels=b01f_01io->b01f, batch_group_count=2",
            "f32[8,32,8,10] convolution(x, k), window={size=3x3}, dim_labels=b01f_01io->bf01",
        ],
        [
            (f"f32[8,8,10,32] convolution(x, k), {CONV}", "expected f32[8,10,12,32]"),
            ("f32[8,8,10,32] convolution(x, k), window={size=3x3}, dim_labels=b01f_01oi->b01f", "input features"),
            ("f32[8,8,10,32] convolution(x, k), window={size=2x3}, dim_labels=b01f_01io->b01f", "the window is"),
            (
                "f32[8,8,10,32] convolution(x, k), window={size=3}, dim_labels=b01f_01io->b01f",
                "window has 1 dimensions",
            ),
            ("f32[8,8,32] convolution(x, k), window={size=3}, dim_labels=b0f_0io->b0f", "dim_labels="),
            (f"f32[8,10,12,32] convolution(x, k), {CONV}, feature_group_count=3", "input features"),
            (f"f32[8,10,12,32] convolution(x, k), {CONV}, batch_group_count=3", "not divisible"),
            (f"f32[8,10,12,32] convolution(x, k), {CONV}, feature_group_count=2, batch_group_count=2", "one of them 1"),
            ("f32[8,10,12,32] convolution(x, k), window={size=3x3 pad=1_1x1_1}", "no attribute 'dim_labels'"),
        ],
    ),
    "reduce": (
        [
            "f32[3] reduce(m, z), dimensions={0}, to_apply=add_f32",
            "f32[] reduce(v, z), dimensions={0}, to_apply=add_f32",
        ],
        [
            ("f32[2] reduce(m, z), dimensions={0}, to_apply=add_f32", "expected f32[3]"),
            ("f32[3] reduce(m, z), dimensions={2}, to_apply=add_f32", "distinct dimensions"),
            ("f32[3] reduce(m, v), dimensions={0}, to_apply=add_f32", "initial value"),
            ("f32[3] reduce(m), dimensions={0}, to_apply=add_f32", "as many initial values"),
        ],
    ),
    "reduce-window": (
        ["f32[2] reduce-window(v, z), window={size=2 stride=2}, to_apply=add_f32"],
        [
            ("f32[3] reduce-window(v, z), window={size=2 stride=2}, to_apply=add_f32", "expected f32[2]"),
            ("f32[2] reduce-window(v, z), window={size=2x2}, to_apply=add_f32", "window has 2 dimensions"),
        ],
    ),
    "select-and-scatter": (
        ["f32[4] select-and-scatter(v, v, z), window={size=1}, select=less, scatter=add_f32"],
        [
            ("f32[4] select-and-scatter(v, v, z), window={size=2}, select=less, scatter=add_f32", "source"),
            ("f32[3] select-and-scatter(v, v, z), window={size=1}, select=less, scatter=add_f32", "expected f32[4]"),
        ],
    ),
    "sort": (
        ["f32[4] sort(v), dimensions={0}, to_apply=less"],
        [("f32[3] sort(v), dimensions={0}, to_apply=less", "f32[4]")],
    ),
    "tuple": (
        ["(f32[4]{0}, s32[]) tuple(v, i)", "() tuple()"],
        [("(f32[4], f32[]) tuple(v, i)", "element 1"), ("(f32[4]) tuple(v, i)", "2 operands")],
    ),
    "get-tuple-element": (
        ["s32[] get-tuple-element(t), index=1"],
        [
            ("s32[] get-tuple-element(t), index=0", "element 0"),
            ("s32[] get-tuple-element(t), index=2", "index=2"),
            ("f32[4] get-tuple-element(v), index=0", "not a tuple"),
        ],
    ),
    "after-all": (["token[] after-all()"], [("f32[] after-all()", "token")]),
    "get-dimension-size": (
        ["s32[] get-dimension-size(v), dimensions={0}"],
        [("f32[] get-dimension-size(v), dimensions={0}", "expected s32[]")],
    ),
    "calls": (
        [
            "f32[4] call(v), to_apply=negate_4",
            "f32[4] fusion(v), kind=kLoop, calls=negate_4",
            "f32[4] while(v), condition=is_big, body=negate_4",
            "f32[4] conditional(p, v, w), true_computation=negate_4, false_computation=negate_4",
            "f32[4] conditional(i, v, w), branch_computations={negate_4, negate_4}",
            "f32[4] map(v, w), dimensions={0}, to_apply=add_f32",
            "f32[4] all-reduce(v), replica_groups={}, to_apply=add_f32",
            'f32[4] custom-call(v), custom_call_target="t", called_computations={add_f32, less}',
        ],
        [
            ("f32[4] call(v), to_apply=nothing", "no computation 'nothing'"),
            ("f32[4] call(v, w), to_apply=negate_4", "1 parameters, but is given 2"),
            ("f32[2,3] call(m), to_apply=negate_4", "parameter p of negate_4"),
            ("f32[3] call(v), to_apply=negate_4", "returns f32[4]"),
            ("f32[4] while(v), condition=negate_4, body=negate_4", "expected pred[]"),
            ("f32[4] while(v), condition=is_big, body=is_big", "returns pred[]"),
            ("f32[4] while(v), condition=is_big", "needs a body and a condition"),
            ("f32[4] conditional(z, v, w), branch_computations={negate_4, negate_4}", "expected pred[] or s32[]"),
            ("f32[4] conditional(i, v), branch_computations={negate_4, negate_4}", "do not agree"),
            ("f32[2,3] conditional(p, v, v), true_computation=negate_4, false_computation=negate_4", "returns f32[4]"),
            ("f32[3] reduce(m, z), dimensions={0}, to_apply=negate_4", "expected 2 scalars"),
            ("f32[4] sort(v), dimensions={0}, to_apply=add_f32", "expected pred[]"),
            ("f32[4] map(v), dimensions={0}, to_apply=add_f32", "2 parameters, expected 1"),
            ("f32[4] all-reduce(v), replica_groups={}, to_apply=negate_4", "expected 2 scalars"),
        ],
    ),
    "layout": (
        ["f32[2,3]{0,1} copy(m)", "f32[2,3]{1,0:T(8)} copy(m)"],
        [("f32[2,3]{0,0} copy(m)", "not a permutation"), ("f32[2,3]{0} copy(m)", "not a permutation")],
    ),
    "control-predecessors": (
        ["f32[4] negate(v), control-predecessors={w, i}"],
        [("f32[4] negate(v), control-predecessors={nothing}", "no instruction 'nothing'")],
    ),
}


@pytest.mark.parametrize("line", [line for good, _ in RULES.values() for line in good])
def test_accepts(line: str) -> None:
    hlo.verify(hlo.parse(HEAD + BODY.format(line=f"ROOT r = {line}")))


@pytest.mark.parametrize(
    ("rule", "line", "message"), [(rule, line, word) for rule, (_, bad) in RULES.items() for line, word in bad]
)
def test_refuses(rule: str, line: str, message: str) -> None:
    module = hlo.parse(HEAD + BODY.format(line=f'ROOT r = {line}, metadata={{source_file="user.py" source_line=7}}'))
    with pytest.raises(hlo.HloVerifyError) as caught:
        hlo.verify(module)
    error = caught.value
    assert message in error.message
    assert (error.rule, error.computation, error.instruction, error.source) == (rule, "e", "r", "user.py:7")
    for part in ("computation e", "instruction r", f"rule {rule!r}", "user.py:7", "r = ", message):
        assert part in str(error)


def small() -> hlo.HloModule:
    return hlo.parse(
        "HloModule m\nf {\n  p = f32[] parameter(0)\n  ROOT c = f32[] call(p), to_apply=g\n}\n"
        "g {\n  p = f32[] parameter(0)\n  ROOT n = f32[] negate(p)\n}\n"
        "ENTRY e {\n  x = f32[] parameter(0)\n  y = f32[] negate(x)\n  z = f32[] abs(y)\n  ROOT r = f32[] add(y, z)\n}"
    )


def broken(module: hlo.HloModule, rule: str) -> hlo.HloVerifyError:
    with pytest.raises(hlo.HloVerifyError) as caught:
        hlo.verify(module)
    assert caught.value.rule == rule
    return caught.value


def test_small_is_well() -> None:
    hlo.verify(small())


def test_use_before_definition() -> None:
    module = small()
    entry = module.entry
    late = entry.create("abs", hlo.Shape.array("f32"), [entry.instruction("x")], name="late")
    entry.instruction("z").set_operand(0, late)
    assert "operand late comes later" in broken(module, "operands").message


def test_operand_of_another_computation() -> None:
    module = small()
    module.entry.instruction("z")._operands = (module.computation("g").root,)
    assert "operand n is not in this computation" in broken(module, "operands").message


def test_operand_that_does_not_know_its_user() -> None:
    module = small()
    module.entry.instruction("y")._user_set().clear()
    assert "does not have it as a user" in broken(module, "users").message


def test_user_that_does_not_know_its_operand() -> None:
    module = small()
    module.entry.instruction("x")._user_set()[module.entry.root] = None
    assert "user r does not have it as an operand" in broken(module, "users").message


def test_names_in_step() -> None:
    module = small()
    module.entry.instruction("y").name = "z"
    broken(module, "names")
    module = small()
    module.entry._names["ghost"] = module.entry.root
    assert "ghost" in broken(module, "names").message
    module = small()
    module.computation("f").name = "h"
    broken(module, "names")


def test_root_in_another_computation() -> None:
    module = small()
    module.entry._root = module.computation("g").root
    assert "is not in it" in broken(module, "root").message


@pytest.mark.parametrize("numbers", [("0", "0"), ("1", "2"), ("0", "2")])
def test_parameter_numbers(numbers: tuple[str, str]) -> None:
    text = "HloModule m\nENTRY e {{\n  x = f32[] parameter({})\n  y = f32[] parameter({})\n}}"
    assert "0 to 1, once each" in broken(hlo.parse(text.format(*numbers)), "parameters").message


def test_control_cycle() -> None:
    module = small()
    module.entry.instruction("y").attributes["control-predecessors"] = "{%z}"
    assert "z does not come before it" in broken(module, "control-predecessors").message


def test_recursion() -> None:
    module = small()
    module.computation("g").root.attributes["to_apply"] = "f"
    assert "in a circle: f -> g -> f" in broken(module, "recursion").message


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("{(f32[])->f32[]}", ""),
        ("{()->f32[]}", "0 parameters, the computation 1"),
        ("{(f32[2]{0})->f32[]}", "it says f32[2]{0}"),
        ("{(f32[])->bf16[]}", "the root is f32[]"),
        ("{(f32[])}", "expected {(parameters)->result}"),
        ("{(f32[])->f32[]{0}}", "not a permutation"),
    ],
)
def test_entry_computation_layout(layout: str, message: str) -> None:
    module = small()
    module.attributes["entry_computation_layout"] = layout
    if message:
        assert message in broken(module, "entry_computation_layout").message
    else:
        hlo.verify(module)


def test_is_scheduled() -> None:
    module = small()
    module.attributes["is_scheduled"] = "true"
    hlo.verify(module)
    module.attributes["is_scheduled"] = "maybe"
    broken(module, "is_scheduled")


def test_broken_attribute_text() -> None:
    module = hlo.parse("HloModule m\nENTRY e {\n  x = f32[] parameter(0), control-predecessors={}, a=1, a=2\n}")
    assert "already exists" in broken(module, "attributes").message


@pytest.mark.parametrize(
    "line",
    [
        "f32[?,3] add(u, u)",
        "f32[4,3] add(u, d)",
        "f32[<=4,3] negate(d)",
        "f32[<=4,4] pad(d, z), padding=0_0x0_1",
        "f32[12] reshape(u)",
        "f32[?,6] concatenate(u, u), dimensions={1}",
        "f32[3] reduce(u, z), dimensions={0}, to_apply=add_f32",
        "f32[3,<=4] transpose(d), dimensions={1,0}",
    ],
)
def test_dynamic_dimensions_raise_no_false_alarm(line: str) -> None:
    parameters = "u = f32[?,3] parameter(0)\n  d = f32[<=4,3] parameter(1)\n  z = f32[] constant(0)"
    hlo.verify(hlo.parse(f"{HEAD}ENTRY e {{\n  {parameters}\n  ROOT r = {line}\n}}"))


def test_shapes_that_are_not_known_are_not_compared() -> None:
    body = "x = f32[4] parameter(0)\n  g = gather(x, x), slice_sizes={1}\n  ROOT r = f32[9] add(g, x)"
    hlo.verify(hlo.parse(f"ENTRY e {{\n  {body}\n}}"))
