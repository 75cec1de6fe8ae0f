"""The walk that the rewriting passes share: its work does not grow with the rewrites, and its order stays one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from xla_fp8 import hlo, passes
from xla_fp8.passes.base import Walk

MAXIMUM = "%maximum {\n  %a = f32[] parameter(0)\n  %b = f32[] parameter(1)\n  ROOT %m = f32[] maximum(%a, %b)\n}\n"


def quantizations(count: int) -> str:
    """One tensor quantized `count` times, each time by its own amax."""
    lines = "".join(
        f"""
  %abs{i} = f32[32,32] abs(%x{i})
  %amax{i} = f32[] reduce(%abs{i}, %zero), dimensions={{0,1}}, to_apply=%maximum
  %scale{i} = f32[] divide(%amax{i}, %high)
  %scales{i} = f32[32,32] broadcast(%scale{i}), dimensions={{}}
  %scaled{i} = f32[32,32] divide(%x{i}, %scales{i})
  %clamped{i} = f32[32,32] clamp(%low, %scaled{i}, %high)
  %q{i} = f8e4m3fn[32,32] convert(%clamped{i})
  %y{i} = f32[32,32] convert(%q{i})
  %z{i} = f32[32,32] convert(%q{i})
  %x{i + 1} = f32[32,32] dot(%y{i}, %z{i}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"""
        for i in range(count)
    )
    return f"""HloModule many

{MAXIMUM}
ENTRY %main {{
  %x0 = f32[32,32] parameter(0)
  %zero = f32[] constant(0)
  %low = f32[] constant(-448)
  %high = f32[] constant(448){lines}
  ROOT %x = f32[32,32] negate(%x{count})
}}
"""


def convolutions(count: int) -> str:
    """A chain of FP8 convolutions, each with a cast behind it."""
    lines = "".join(
        f"""
  %wide{i} = f32[1,4,4,16] convert(%x{i})
  %conv{i} = f32[1,4,4,16] convolution(%wide{i}, %filter), window={{size=1x1}}, dim_labels=b01f_o01i->b01f
  %scaled{i} = f32[1,4,4,16] multiply(%conv{i}, %scales)
  %clamped{i} = f32[1,4,4,16] clamp(%low, %scaled{i}, %high)
  %x{i + 1} = f8e4m3fn[1,4,4,16] convert(%clamped{i})"""
        for i in range(count)
    )
    return f"""HloModule many

ENTRY %main {{
  %x0 = f8e4m3fn[1,4,4,16] parameter(0)
  %w = f8e4m3fn[16,1,1,16] parameter(1)
  %s = f32[] parameter(2)
  %filter = f32[16,1,1,16] convert(%w)
  %scales = f32[1,4,4,16] broadcast(%s), dimensions={{}}
  %low = f32[] constant(-448)
  %high = f32[] constant(448){lines}
  ROOT %x = f32[1,4,4,16] convert(%x{count})
}}
"""


@pytest.mark.parametrize(
    ("text", "pipeline"),
    [
        (quantizations, "dynamic-quantize-rewriter"),
        (quantizations, "gemm-rewriter"),
        (convolutions, "conv-rewriter,cudnn-fused-conv-rewriter"),
    ],
)
def test_no_rewrite_walks_the_whole_computation(text: Any, pipeline: str, monkeypatch: pytest.MonkeyPatch) -> None:
    walks: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(hlo.HloComputation, name)

        def method(self: hlo.HloComputation, *arguments: Any) -> Any:
            if not arguments or arguments[0] is None:
                walks[name] += 1
            return original(self, *arguments)

        return method

    for name in ("post_order", "remove_dead", "__iter__"):
        monkeypatch.setattr(hlo.HloComputation, name, counted(name))
    counts = []
    for size in (3, 40):
        module = hlo.parse(text(size))
        walks.clear()
        report = passes.run(module, pipeline, target="h200", options=passes.PipelineOptions(verify_input=False))
        assert len(report.rewritten) == size
        counts.append(dict(walks))
        hlo.verify(module)
    assert counts[0] == counts[1]


def test_a_result_that_stood_before_an_operand_of_its_call_stays_in_order() -> None:
    """A fused call stands behind all its operands; one of its results may have been read before one of them."""
    module = hlo.parse(
        """HloModule m

ENTRY %main {
  %p = f32[] parameter(0)
  %early = f32[] negate(%p)
  %reader = f32[] abs(%early)
  %side = f32[] sine(%p)
  %late = f32[] add(%early, %side)
  ROOT %t = (f32[], f32[]) tuple(%reader, %late)
}
"""
    )
    entry = module.entry
    walk = Walk(entry)
    early, late, side = (entry.instruction(name) for name in ("early", "late", "side"))
    assert walk.position(early) < walk.position(side)
    pair = entry.create("tuple", hlo.Shape.tuple([early.shape, late.shape]), [entry.instruction("p"), side])
    for index, old in enumerate((early, late)):
        element = entry.create("get-tuple-element", old.shape, [pair], attributes={"index": str(index)})
        entry.replace_all_uses_with(old, element)
    walk.rewritten(pair, [early, late])
    for instruction, operand in ((i, o) for i in entry for o in i.operands):
        assert walk.position(operand) < walk.position(instruction)
    assert walk.finish()
    hlo.verify(module)


def test_dependents_end_in_front_of_the_end() -> None:
    entry = hlo.parse(quantizations(3)).entry
    walk = Walk(entry)
    found = walk.dependents([entry.instruction("amax1")], entry.instruction("q1"))
    assert {i.name for i in found} == {"amax1", "scale1", "scales1", "scaled1", "clamped1"}
