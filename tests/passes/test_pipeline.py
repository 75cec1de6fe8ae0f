"""The pipeline as Python calls it: what run leaves behind, its options, and its errors."""

from __future__ import annotations

import pytest

from xla_fp8 import hlo, passes
from xla_fp8.graph import graph_of
from xla_fp8.passes import PipelineOptions
from xla_fp8.passes.pipeline import PASSES
from xla_fp8.target import GraphCall, Target

FP8 = """HloModule m

clip {
  x = f32[2,8,8,16] parameter(0)
  low = f32[] constant(-448)
  lows = f32[2,8,8,16] broadcast(low), dimensions={}
  high = f32[] constant(448)
  highs = f32[2,8,8,16] broadcast(high), dimensions={}
  max = f32[2,8,8,16] maximum(x, lows)
  ROOT min = f32[2,8,8,16] minimum(max, highs)
}

ENTRY main {
  x = f8e4m3fn[2,8,8,16] parameter(0)
  w = f8e4m3fn[16,3,3,16] parameter(1)
  scale = f32[] parameter(2)
  x_wide = f32[2,8,8,16] convert(x)
  w_wide = f32[16,3,3,16] convert(w)
  conv = f32[2,8,8,16] convolution(x_wide, w_wide), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f
  scales = f32[2,8,8,16] broadcast(scale), dimensions={}
  scaled = f32[2,8,8,16] multiply(conv, scales)
  clipped = f32[2,8,8,16] call(scaled), to_apply=clip
  ROOT y = f8e4m3fn[2,8,8,16] convert(clipped)
}
"""
WIDE = FP8.replace("f8e4m3fn", "bf16")


def test_the_graph_is_there_and_the_module_verifies() -> None:
    module = hlo.parse(FP8)
    report = passes.run(module, target="h200")
    hlo.verify(module)
    assert report.changed
    assert [entry.instruction for entry in report.rewritten] == ["conv"]
    call = module.entry.instruction("conv")
    assert str(graph_of(call)) == "1:[f32]conv();2:[f8e4m3fn]scale(1);"
    assert [operand.name for operand in call.operands] == ["x", "w", "scale"]
    assert [computation.name for computation in module.computations] == ["main"]


@pytest.mark.parametrize("text", [WIDE, FP8])
def test_a_module_in_which_nothing_is_rewritten_is_left_as_it_was(text: str) -> None:
    module = hlo.parse(text)
    before = hlo.to_text(module)
    report = passes.run(module, target="a100")
    assert not report.changed
    assert not report.rewritten
    assert hlo.to_text(module) == before


def test_a_module_without_fp8_runs_no_pass() -> None:
    report = passes.run(hlo.parse(WIDE), target="h200")
    assert report.timings == []
    assert [entry.rule for entry in report.refused] == ["not-fp8"]
    assert report.refused_fp8 == []


def test_running_twice_changes_nothing_more() -> None:
    module = hlo.parse(FP8)
    passes.run(module, target="h200")
    once = hlo.to_text(module)
    report = passes.run(module, target="h200")
    assert not report.changed
    assert hlo.to_text(module) == once


def test_explicit_passes_run_on_any_module() -> None:
    module = hlo.parse(WIDE)
    report = passes.run(module, ["call-inliner", "dce"], "h200")
    assert report.changed
    assert [timing.name for timing in report.timings] == ["call-inliner", "dce"]
    assert all(instruction.opcode != "call" for instruction in module.entry)


def test_no_pass_changes_nothing() -> None:
    module = hlo.parse(FP8)
    before = hlo.to_text(module)
    assert not passes.run(module, [], "h200").changed
    assert hlo.to_text(module) == before


def test_fuel_stops_rewriting() -> None:
    counts = []
    for fuel in range(7):
        module = hlo.parse(FP8)
        report = passes.run(module, target="h200", options=PipelineOptions(fuel=fuel, verify_each=True))
        assert sum(timing.rewrites for timing in report.timings) <= fuel
        counts.append(len(report.rewritten))
    assert counts[0] == 0
    assert counts[-1] == 1


def test_printing_around_passes() -> None:
    printed: list[str] = []
    options = PipelineOptions(print_before=frozenset({"dce"}), print_after=frozenset({"simplify"}), emit=printed.append)
    passes.run(hlo.parse(FP8), target="h200", options=options)
    assert [text.split("\n", 1)[0] for text in printed] == ["// after simplify", "// before dce"]
    assert "clamp(" in printed[0]
    every: list[str] = []
    options = PipelineOptions(print_before_all=True, print_after_all=True, emit=every.append)
    passes.run(hlo.parse(FP8), target="h200", options=options)
    assert len(every) == 2 * len(passes.DEFAULT_PIPELINE)


def test_an_unknown_pass_is_answered_with_those_there_are() -> None:
    with pytest.raises(passes.UnknownPassError, match=r"unknown pass 'dec'; the passes are: call-inliner, .*dce"):
        passes.parse_pipeline("dce,dec")
    for names in (["nothing"], "dce,nothing"):
        with pytest.raises(passes.UnknownPassError, match="unknown pass 'nothing'"):
            passes.run(hlo.parse(FP8), names, "h200")
    assert passes.parse_pipeline(" dce, simplify,") == ("dce", "simplify")
    assert passes.parse_pipeline("") == ()


def test_an_unknown_dialect_is_an_error() -> None:
    with pytest.raises(passes.PassError, match="unknown dialect 'cuda'"):
        passes.run(hlo.parse(FP8), target="h200", dialect="cuda")


def test_verify_each_names_the_pass_that_broke_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaker(passes.Pass):
        """Gives the root another shape."""

        name = "breaker"

        def run(self, module: hlo.HloModule, target: Target) -> bool:
            module.entry.instruction("scaled").shape = hlo.Shape.array("f32", (2,))
            return True

    monkeypatch.setitem(PASSES, "breaker", Breaker)
    with pytest.raises(passes.PassError, match=r"pass breaker left a module that does not verify.*scaled"):
        passes.run(hlo.parse(FP8), ["dce", "breaker"], "h200", options=PipelineOptions(verify_each=True))


def test_a_backend_is_asked_about_every_graph_and_its_no_is_a_refusal() -> None:
    class No:
        ok = False
        reason = "no plan for 16 channels"

    asked: list[GraphCall] = []

    def supports(call: GraphCall) -> No:
        asked.append(call)
        return No()

    module = hlo.parse(FP8)
    before = hlo.to_text(module)
    report = passes.run(module, target=Target("picky", (9, 0), supports=supports))
    assert [entry.reason for entry in report.refused] == ["no plan for 16 channels"]
    assert hlo.to_text(module) == before
    (call,) = asked
    assert report.refused[0].advice == "see what the backends run: docs/backends.md"
    assert str(call.graph) == "1:[f32]conv();2:[f8e4m3fn]scale(1);"
    assert [str(shape.element_type) for shape in call.operand_shapes] == ["f8e4m3fn", "f8e4m3fn", "f32"]
    assert [str(shape.element_type) for shape in call.output_shapes] == ["f8e4m3fn"]


def test_the_advice_of_a_refusal_is_the_backends_own() -> None:
    class No:
        ok = False
        reason = "no plan for 16 channels"
        advice = "use 32"

    report = passes.run(hlo.parse(FP8), target=Target("picky", (9, 0), supports=lambda call: No()))
    assert [entry.advice for entry in report.refused] == ["use 32"]


def test_every_pass_shows_before_and_after() -> None:
    for name, cls in PASSES.items():
        doc = cls.__doc__ or ""
        assert cls.name == name
        assert "Before::" in doc, name
        assert "After::" in doc, name


def test_names_metadata_and_control_dependencies_survive() -> None:
    text = FP8.replace(
        "  ROOT y =", "  other = f32[2,8,8,16] negate(x_wide), control-predecessors={conv}\n  ROOT y ="
    ).replace(
        "dim_labels=b01f_o01i->b01f",
        'dim_labels=b01f_o01i->b01f, metadata={op_name="c" source_file="f.py" source_line=3}',
    )
    module = hlo.parse(text)
    report = passes.run(module, target="h200", options=PipelineOptions(verify_each=True))
    assert [entry.source for entry in report.rewritten] == ["f.py:3"]
    call = module.entry.instruction("conv")
    assert call.metadata.op_name == "c"
    other = module.entry.instruction("other")
    assert other.control_predecessors == (call,)
    assert module.entry.root.name == "y"


def test_a_module_that_is_not_sound_is_refused_before_any_pass() -> None:
    module = hlo.parse(FP8.replace("scaled = f32[2,8,8,16]", "scaled = f32[2,8,8,17]"))
    before = hlo.to_text(module)
    with pytest.raises(hlo.HloVerifyError, match="scaled"):
        passes.run(module, target="h200")
    assert hlo.to_text(module) == before
