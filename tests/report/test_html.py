"""The page of a report: entries, pictures, links and source lines; and what a notebook shows of it."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from xla_fp8 import hlo, passes
from xla_fp8.report import Entry, Modules, Report
from xla_fp8.report.source_text import SourceText

DUMPS = Path(__file__).resolve().parents[2] / "hlo_fixtures" / "dumps"


def test_boxes_lead_to_their_entry_and_their_source_line(explained, read_page) -> None:
    page = explained.report.to_html(modules=explained.modules)
    reader = read_page(page)
    assert page.count("<article") == 3
    ids = {match[2]: match[1] for match in re.finditer(r'<article .*? id="(.*?)" data-title="\w+ (.*?)"', page)}
    (first,) = {(box["data-entry"], box["data-source"]) for box in reader.boxes if "conv.1 = " in box["data-hlo"]}
    assert first == (ids["conv.1"], "s0-5")
    sine = [box for box in reader.boxes if box["data-hlo"].startswith("sine")]
    assert sine[0]["href"] == "#s0-7"
    assert {box["data-at"] for box in sine} == {f"{explained.source}:7"}


def test_a_refusal_has_its_rule_and_what_to_change_and_its_fault_is_marked(explained) -> None:
    page = explained.report.to_html(modules=explained.modules)
    (article,) = re.findall(r'<article class="entry refused".*?</article>', page, re.DOTALL)
    (refusal,) = explained.report.refused
    assert f"<code>{refusal.rule}</code>" in article
    assert f"<strong>What to change:</strong> {refusal.advice}" in article
    (marked,) = re.findall(r'class="box \w+ marked"><title>(%\S+):', article)
    assert marked == "%sine"


def test_the_overview_says_what_feeds_what(explained) -> None:
    page = explained.report.to_html(modules=explained.modules)
    overview = page[page.index('class="overview"') : page.index("</details>")]
    assert overview.count("<a ") == 3
    assert overview.count('class="tip"') == 1, "conv.1 feeds conv.3"


def test_the_source_around_a_line_is_in_the_page_once_and_escaped(explained) -> None:
    page = explained.report.to_html(modules=explained.modules)
    assert page.count('<span id="s0-4"><i>4</i>def layer(x, w):  # &lt;&amp;&gt;</span>') == 1


def test_a_file_that_is_not_there_or_not_python_is_named_only(tmp_path: Path, read_page) -> None:
    (tmp_path / "secret.txt").write_text("the password\n" * 9)
    entries = [
        Entry(f"c.{i}", "convolution", f"{tmp_path}/{name}:3") for i, name in enumerate(("gone.py", "secret.txt"))
    ]
    page = Report(refused=entries).to_html()
    assert "the password" not in page
    assert f"{tmp_path}/secret.txt:3" in page
    read_page(page)


def test_windows_join_where_they_meet(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    path.write_text("".join(f"line{n}\n" for n in range(1, 61)))
    sources = SourceText()
    assert all(sources.has(str(path), line) for line in (10, 16, 40))
    assert not sources.has(str(path), 61)
    (windows,) = sources.windows().values()
    assert [(w[0][0], w[-1][0]) for w in windows] == [(6, 20), (36, 44)]


def test_without_modules_the_graphs_are_drawn(explained, read_page) -> None:
    page = explained.report.to_html()
    read_page(page)
    assert page.count("<svg") == 2
    assert "#1 conv" in page


def test_a_notebook_shows_the_same_without_a_script(explained, read_page) -> None:
    shown = explained.report._repr_html_()
    read_page(shown)
    assert "<script" not in shown
    assert shown.count("<article") == 3
    assert "def layer" in shown
    other = Report(refused=[Entry("c", "convolution", None)])._repr_html_()
    mine, others = read_page(shown).ids, read_page(other).ids
    assert not set(mine) & set(others), "two outputs of one notebook are one page"


def test_a_matmul_call_is_one_box(read_page) -> None:
    module = hlo.parse((DUMPS.parent / "gemm-rewriter" / "bias.hlo").read_text())
    before = module.clone()
    report = passes.run(module, ["gemm-rewriter"], target="h200")
    assert report.rewritten
    page = report.to_html(modules=Modules(before, module))
    read_page(page)
    assert re.search(r'class="box node"><title>%\S+: (?:ROOT )?custom-call', page)


@pytest.mark.parametrize("dump", ["resnet50_forward", "resnet50_training_step", "unet_block_training_step"])
def test_a_network_is_a_page_of_neighbourhoods(dump: str, read_page) -> None:
    module = hlo.parse(gzip.decompress((DUMPS / f"{dump}.hlo.gz").read_bytes()).decode())
    before = module.clone()
    report = passes.run(module, target="h200")
    page = report.to_html(modules=Modules(before, module))
    read_page(page)
    entries = len(report.rewritten) + len(report.refused)
    assert page.count("<article") == entries
    assert page.count("<svg") >= entries + 1
    assert len(page) < 50_000 * entries
