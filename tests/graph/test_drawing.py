"""Drawings: what is in them, in each format."""

from __future__ import annotations

import html.parser
import xml.etree.ElementTree

import pytest

from xla_fp8 import hlo
from xla_fp8.graph import GraphError, draw, graph_of
from xla_fp8.graph.pictures import Before

BEFORE = """
HloModule m

max {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT m = f32[] maximum(a, b)
}

ENTRY main {
  x = f8e4m3fn[1,8,8,16]{3,2,1,0} parameter(0)
  w = f8e4m3fn[3,3,16,16]{3,2,1,0} parameter(1)
  s = f32[] parameter(2)
  x_wide = f32[1,8,8,16]{3,2,1,0} convert(x)
  w_wide = f32[3,3,16,16]{3,2,1,0} convert(w)
  conv = f32[1,8,8,16]{3,2,1,0} convolution(x_wide, w_wide), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  s_all = f32[1,8,8,16]{3,2,1,0} broadcast(s), dimensions={}
  y = f32[1,8,8,16]{3,2,1,0} multiply(conv, s_all)
  size = f32[1,8,8,16]{3,2,1,0} abs(y)
  zero = f32[] constant(0)
  amax = f32[] reduce(size, zero), dimensions={0,1,2,3}, to_apply=max
  low = f32[] constant(-448)
  high = f32[] constant(448)
  lows = f32[1,8,8,16]{3,2,1,0} broadcast(low), dimensions={}
  highs = f32[1,8,8,16]{3,2,1,0} broadcast(high), dimensions={}
  y_in_range = f32[1,8,8,16]{3,2,1,0} clamp(lows, y, highs)
  y8 = f8e4m3fn[1,8,8,16]{3,2,1,0} convert(y_in_range)
  y8_wide = f32[1,8,8,16]{3,2,1,0} convert(y8)
  root_mean = f32[] sqrt(amax)
  ROOT result = (f32[1,8,8,16]{3,2,1,0}, f32[]) tuple(y8_wide, root_mean)
}
"""

AFTER = """
HloModule m

ENTRY main {
  x = f8e4m3fn[1,8,8,16]{3,2,1,0} parameter(0)
  w = f8e4m3fn[3,3,16,16]{3,2,1,0} parameter(1)
  s = f32[] parameter(2)
  cudnn-conv = (f8e4m3fn[1,8,8,16]{3,2,1,0}, f32[], u8[0]{0}) custom-call(x, w, s), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForwardGraph", backend_config={"cudnn_conv_backend_config":{"serialized_graph":"1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(2);"}}
  get-tuple-element = f8e4m3fn[1,8,8,16]{3,2,1,0} get-tuple-element(cudnn-conv), index=0
  get-tuple-element.1 = f32[] get-tuple-element(cudnn-conv), index=1
  y8_wide = f32[1,8,8,16]{3,2,1,0} convert(get-tuple-element)
  root_mean = f32[] sqrt(get-tuple-element.1)
  ROOT result = (f32[1,8,8,16]{3,2,1,0}, f32[]) tuple(y8_wide, root_mean)
}
"""  # noqa: E501

TEXT = """\
%cudnn-conv in %main, window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f
  before:
    %x           parameter f8e4m3fn[1,8,8,16]
    %w           parameter f8e4m3fn[3,3,16,16]
    %s           parameter f32[]
    %x_wide      convert f32[1,8,8,16]          <- %x
    %w_wide      convert f32[3,3,16,16]         <- %w
    %conv        convolution f32[1,8,8,16]      <- %x_wide, %w_wide
    %s_all       broadcast f32[1,8,8,16]        <- %s
    %y           multiply f32[1,8,8,16]         <- %conv, %s_all
    %size        abs f32[1,8,8,16]              <- %y
    %zero        constant(0) f32[]
    %amax        reduce f32[]                   <- %size, %zero
    %low         constant(-448) f32[]
    %high        constant(448) f32[]
    %lows        broadcast f32[1,8,8,16]        <- %low
    %highs       broadcast f32[1,8,8,16]        <- %high
    %y_in_range  clamp f32[1,8,8,16]            <- %lows, %y, %highs
    %y8          convert f8e4m3fn[1,8,8,16]     <- %y_in_range
    %root_mean   sqrt f32[]                     <- %amax
    %y8_wide     convert f32[1,8,8,16]          <- %y8
  after:
    %x                    parameter f8e4m3fn[1,8,8,16]
    %w                    parameter f8e4m3fn[3,3,16,16]
    #1 conv               f32                                    <- %x, %w
    %s                    parameter f32[]
    #2 scale              f8e4m3fn                               <- #1 conv, %s
    #3 amax               f32                                    <- #2 scale
    %get-tuple-element    get-tuple-element f8e4m3fn[1,8,8,16]   <- #2 scale
    %y8_wide              convert f32[1,8,8,16]                  <- %get-tuple-element
    %get-tuple-element.1  get-tuple-element f32[]                <- #3 amax
    %root_mean            sqrt f32[]                             <- %get-tuple-element.1
"""


def test_text() -> None:
    drawn = draw(hlo.parse(AFTER), before=hlo.parse(BEFORE))
    assert [line.split() for line in drawn.splitlines()] == [line.split() for line in TEXT.splitlines()]


def test_text_is_aligned() -> None:
    rows = [line for line in draw(hlo.parse(AFTER)).splitlines() if "<-" in line]
    assert len({row.index("<-") for row in rows}) == 1


def test_without_the_module_before() -> None:
    drawn = draw(hlo.parse(AFTER))
    assert "before:" not in drawn
    assert "#3 amax" in drawn


def test_a_module_without_graphs() -> None:
    for format in ("text", "dot", "html"):
        assert "No custom call of this module has a serialized graph." in draw(hlo.parse(BEFORE), format)


def test_two_convolutions_each_have_their_own_before() -> None:
    """The second reads the FP8 output of the first; neither picture holds the other's convolution."""
    module_before, module_after = hlo.parse(_chained(BEFORE_LAYERS)), hlo.parse(_chained(AFTER_LAYERS))
    first, second = draw(module_after, before=module_before).split("\n\n")
    assert "%conv.a " in first
    assert "%conv.b " not in first
    assert "%conv.b " in second
    assert "%conv.a " not in second
    assert "%c.a " in second, "the first one's output is the second one's operand"


BEFORE_LAYERS = """
  w.{i} = f32[1,16,16] convert(w)
  x.{i} = f32[4,2,16] convert({x})
  conv.{i} = f32[4,2,16] convolution(x.{i}, w.{i}), window={{size=1}}, dim_labels=b0f_0io->b0f
  c.{i} = f8e4m3fn[4,2,16] convert(conv.{i})
"""
AFTER_LAYERS = """
  call.{i} = (f8e4m3fn[4,2,16], u8[0]) custom-call({x}, w), window={{size=1}}, dim_labels=b0f_0io->b0f, custom_call_target="__cudnn$convForwardGraph", backend_config={{"cudnn_conv_backend_config":{{"serialized_graph":"1:[f8e4m3fn]conv();"}}}}
  g.{i} = f8e4m3fn[4,2,16] get-tuple-element(call.{i}), index=0
"""  # noqa: E501


def _chained(layer: str) -> str:
    result = "c" if "convolution" in layer else "g"
    layers = layer.format(i="a", x="x") + layer.format(i="b", x=f"{result}.a")
    parameters = "x = f8e4m3fn[4,2,16] parameter(0)\n  w = f8e4m3fn[1,16,16] parameter(1)"
    return f"HloModule m\n\nENTRY main {{\n  {parameters}{layers}  ROOT r = f32[4,2,16] convert({result}.b)\n}}\n"


def test_of_what_stands_above_other_users_are_not_drawn() -> None:
    others = "".join(f"  other.{i} = f32[1,8,8,16] negate(x_wide)\n" for i in range(9))
    module = hlo.parse(BEFORE.replace("  root_mean", f"{others}  root_mean"))
    flow = Before(module, module).around(module.entry.instruction("conv"))
    assert {"%conv", "%x_wide", "%w_wide", "%y", "%s_all", "%size"} <= set(flow.boxes)
    assert not any(title.startswith("%other") for title in flow.boxes)


def test_dot_says_every_box_and_arrow() -> None:
    drawn = draw(hlo.parse(AFTER), "dot", hlo.parse(BEFORE))
    assert drawn.startswith("digraph ")
    assert drawn.count("subgraph") == 3
    assert '"0 after #2 scale" [label="#2 scale\\nf8e4m3fn", fillcolor="#d7e8ff"];' in drawn
    assert '"0 after #2 scale" -> "0 after #3 amax";' in drawn
    assert '"0 before %conv" -> "0 before %y";' in drawn


def test_svg_is_one_image_of_every_box_and_arrow() -> None:
    drawn = draw(hlo.parse(AFTER), "svg", hlo.parse(BEFORE))
    root = xml.etree.ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert texts.count("before") == texts.count("after") == 1
    assert "#3 amax" in texts
    boxes = [g for g in root.iter(f"{space}g") if (g.get("class") or "").startswith("box ")]
    rows = [line for line in TEXT.splitlines() if line.startswith("    ")]
    assert len(boxes) == len(rows)
    tips = [path for path in root.iter(f"{space}path") if path.get("class") == "tip"]
    assert len(tips) == sum(row.count(",") + 1 for row in (r.partition("<-")[2] for r in rows) if row)


def test_html_is_one_page_of_images() -> None:
    page = draw(hlo.parse(AFTER), "html", hlo.parse(BEFORE))
    assert _unclosed(page) == []
    assert page.count("<svg") == 2
    assert "b01f_01io-&gt;b01f" in page
    assert "http" not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")


def _unclosed(page: str) -> list[str]:
    class Reader(html.parser.HTMLParser):
        open_tags: list[str]

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag != "meta":
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    reader = Reader()
    reader.open_tags = []
    reader.feed(page)
    return reader.open_tags


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(GraphError, match="unknown format 'png'; the formats are text, dot, svg, html"):
        draw(hlo.parse(AFTER), "png")  # type: ignore[arg-type]


def test_graph_of() -> None:
    calls = {i.name: graph_of(i) for i in hlo.parse(AFTER).entry}
    assert str(calls.pop("cudnn-conv")) == "1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(2);"
    assert set(calls.values()) == {None}


@pytest.mark.parametrize("config", ["{}", '{"cudnn_conv_backend_config":{}}', '{"cudnn_conv_backend_config":[]}'])
def test_graph_of_a_call_without_a_graph(config: str) -> None:
    start, end = AFTER.index("backend_config="), AFTER.index("}}\n", AFTER.index("backend_config=")) + 2
    module = hlo.parse(AFTER[:start] + f"backend_config={config}" + AFTER[end:])
    assert graph_of(module.entry.instruction("cudnn-conv")) is None


def test_a_bad_graph_names_the_instruction() -> None:
    module = hlo.parse(AFTER.replace("scale(1)", "swish(1)"))
    with pytest.raises(GraphError, match=r"custom call %cudnn-conv: graph string, offset 26: unknown op 'swish'"):
        draw(module)
    module = hlo.parse(AFTER.replace("custom-call(x, w, s)", "custom-call(x, w)"))
    with pytest.raises(GraphError, match=r"custom call %cudnn-conv has 2 operands, but its graph .* needs 3"):
        draw(module)
