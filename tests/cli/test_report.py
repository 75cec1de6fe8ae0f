"""How a report is rendered: text as it is read, and nothing that HTML or Markdown would take for markup."""

from __future__ import annotations

import json

from xla_fp8.report import Entry, Report

REPORT = Report(
    rewritten=[Entry("conv.1", "convolution", "model.py:42", graph="1:[f32]conv();2:[f8e4m3fn]scale(1);")],
    refused=[
        Entry(
            "conv.17", "convolution", "model.py:57", "no clamp before the convert to f8e4m3fn", "clamp to [-448, 448]"
        ),
        Entry("dot.2", "dot", None, "no FP8", "quantize", is_fp8=False),
    ],
    target="h200",
)

TEXT = """\
rewritten  conv.1   model.py:42  1:[f32]conv();2:[f8e4m3fn]scale(1);

refused    conv.17  model.py:57  no clamp before the convert to f8e4m3fn
           advice: clamp to [-448, 448]

not FP8    dot.2    -

1 rewritten, 1 refused, 1 without FP8 operands; target h200
"""


def test_text() -> None:
    assert str(REPORT) == TEXT


def test_a_narrow_terminal_wraps_sentences_but_no_graph() -> None:
    lines = REPORT.to_text(width=50).splitlines()
    assert lines[0].endswith("2:[f8e4m3fn]scale(1);")
    assert lines[2:5] == [
        "refused    conv.17  model.py:57",
        "           no clamp before the convert to f8e4m3fn",
        "           advice: clamp to [-448, 448]",
    ]


def test_a_graph_that_stops_early_says_why() -> None:
    entry = Entry("c", "convolution", None, "add.2 has two users", "use it once", graph="1:[f32]conv();")
    assert str(Report(rewritten=[entry])).splitlines()[:3] == [
        "rewritten  c  1:[f32]conv();",
        "           stops because: add.2 has two users",
        "           advice: use it once",
    ]


def test_every_painted_text_is_painted_in_a_known_role() -> None:
    from xla_fp8.report.text import ROLES

    used: set[str] = set()

    def paint(text: str, role: str) -> str:
        used.add(role)
        return text

    report = Report(REPORT.rewritten, REPORT.refused, has_metadata=False)
    assert report.to_text(paint=paint).count("note: no source lines") == 1
    assert used == set(ROLES)


def test_nothing_to_report() -> None:
    assert str(Report()).splitlines()[0] == "no convolutions and no dots"


def test_json() -> None:
    report = json.loads(REPORT.to_json())
    assert [entry["instruction"] for entry in report["refused"]] == ["conv.17", "dot.2"]


def test_markup_in_names_is_text_in_html_and_markdown() -> None:
    report = Report(refused=[Entry("<b>", "convolution", "a|b.py:1", "x < y & *z* | w", "use `q`")])
    page = report.to_html()
    assert "<b>" not in page
    assert "x &lt; y &amp; *z* | w" in page
    assert "<b>" not in report._repr_html_()
    (row,) = [line for line in report.to_markdown().splitlines() if "b.py" in line]
    assert row == r"| `<b>` | `a\|b.py:1` | x \< y & \*z\* \| w | use \`q\` |"


def test_a_source_too_long_for_its_column_is_shown_all_the_same() -> None:
    source = f"/home/{'deep/' * 20}model.py:42"
    report = Report(rewritten=[Entry("conv", "convolution", source, graph="1:[f32]conv();")])
    assert source in str(report)
