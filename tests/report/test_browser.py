"""The page in a real browser: what a click on a box shows, where its links lead, and that a big page opens.

Chromium runs the page with a script of the test behind it, which clicks and writes down what it finds, and prints the
document when it is done. Without Chromium these tests are skipped.
"""

from __future__ import annotations

import gzip
import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from xla_fp8 import hlo, passes
from xla_fp8.report import Entry, Modules, Report

Browse = Callable[[str, str], dict[str, Any]]

DUMPS = Path(__file__).resolve().parents[2] / "hlo_fixtures" / "dumps"

HEAD = "<head><script>var errors = []; addEventListener('error', (e) => errors.push(e.message));</script>"
TAIL = """
<pre id="found"></pre>
<script>
addEventListener("load", () => {
  const found = {};
  const panel = document.getElementById("inspector");
  const click = (element) => element.dispatchEvent(new MouseEvent("click", {bubbles: true, cancelable: true}));
  const shows = (selector) => panel.querySelector(selector).textContent;
  try { CHECKS } catch (error) { errors.push(String(error)); }
  found.errors = errors;
  found.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  found.milliseconds = performance.now();
  document.getElementById("found").textContent = JSON.stringify(found);
});
</script>
</body>"""


@pytest.fixture
def browse(tmp_path: Path) -> Browse:
    """Opens a page, runs checks that fill `found`, and returns it."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("needs Chromium to open the page (Debian: apt install chromium)")

    def run(page: str, checks: str) -> dict[str, Any]:
        path = tmp_path / "page.html"
        path.write_text(page.replace("<head>", HEAD).replace("</body>", TAIL.replace("CHECKS", checks)))
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom", profile)
        done = subprocess.run(
            [program, *options, path.as_uri()], capture_output=True, text=True, timeout=120, check=False
        )
        match = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
        assert match, done.stderr[-2000:]
        found = json.loads(html.unescape(match[1]))
        assert found["errors"] == []
        assert found["loaded"] == []
        return found

    return run


def test_a_click_shows_the_instruction_its_entry_and_its_source(browse: Browse, explained) -> None:
    found = browse(
        explained.report.to_html(modules=explained.modules),
        """
        const boxes = [...document.querySelectorAll(".refused a[data-hlo]")];
        const box = boxes.find((a) => a.dataset.hlo.startsWith("sine"));
        found.hidden = panel.hidden;
        click(box.querySelector("rect"));
        found.shown = !panel.hidden && panel.getBoundingClientRect().height > 50;
        found.hlo = shows(".hlo"); found.entry = shows(".to-entry"); found.at = shows(".to-source");
        found.line = shows(".hit"); found.stayed = location.hash;
        click(panel.querySelector(".to-entry"));
        found.target = document.querySelector(":target").dataset.title;
        click(panel.querySelector(".to-source"));
        found.target_line = document.querySelector(":target").textContent;
        document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape"}));
        found.closed = panel.hidden;
        """,
    )
    assert (found["hidden"], found["shown"], found["closed"]) == (True, True, True)
    assert found["hlo"] == "sine = f32[2,8,8,16]{3,2,1,0} sine(x_wide)"
    assert found["stayed"] == "", "with the script a click does not jump"
    assert (found["entry"], found["target"]) == ("report: refused conv.2", "refused conv.2")
    assert found["at"] == f"{explained.source}:7"
    assert found["line"] == found["target_line"] == "7    s = sin(x)"


def test_the_overview_leads_to_the_entries(browse: Browse, explained) -> None:
    found = browse(
        explained.report.to_html(modules=explained.modules),
        """
        found.targets = [...document.querySelectorAll(".overview a")].map((box) => {
          click(box);
          return [box.querySelector("text").textContent, document.querySelector(":target").dataset.title];
        });
        """,
    )
    titles = [["conv.1", "rewritten conv.1"], ["conv.2", "refused conv.2"], ["conv.3", "rewritten conv.3"]]
    assert found["targets"] == titles


def test_every_box_can_be_hit_where_it_is_drawn(browse: Browse, explained) -> None:
    found = browse(
        explained.report.to_html(modules=explained.modules),
        """
        found.hit = 0; found.missed = [];
        for (const box of document.querySelectorAll("svg a")) {
          const rect = box.querySelector("rect");
          rect.scrollIntoView({block: "center", inline: "center"});
          const {x, y, width, height} = rect.getBoundingClientRect();
          const top = document.elementFromPoint(x + width / 2, y + height / 2);
          if (top && box.contains(top)) found.hit++; else found.missed.push(box.textContent);
          for (const text of box.querySelectorAll("text"))
            if (text.getBoundingClientRect().width > width) found.missed.push("text of " + box.textContent);
        }
        """,
    )
    assert found["missed"] == []
    assert found["hit"] > 20


def test_two_outputs_of_a_notebook_lead_to_their_own_lines(browse: Browse, explained) -> None:
    other = Report(refused=[Entry("other", "convolution", f"{explained.source}:8")])
    found = browse(
        f"<html><head></head><body>{explained.report._repr_html_()}{other._repr_html_()}</body></html>",
        """
        found.lines = [...document.querySelectorAll(".where a")].map((link) => {
          click(link);
          const line = document.querySelector("span:target");
          return [link.textContent, line.textContent, line.closest(".xla-fp8") === link.closest(".xla-fp8")];
        });
        """,
    )
    assert [line[1] for line in found["lines"]] == [
        "8    return conv(s, w)",
        "5    y = conv(x, w)",
        "8    return conv(s, w)",
        "8    return conv(s, w)",
    ]
    assert all(is_own for *_, is_own in found["lines"])


def test_a_network_opens_and_answers_clicks(browse: Browse) -> None:
    module = hlo.parse(gzip.decompress((DUMPS / "resnet50_training_step.hlo.gz").read_bytes()).decode())
    before = module.clone()
    report = passes.run(module, target="h200")
    found = browse(
        report.to_html(modules=Modules(before, module)),
        """
        const last = [...document.querySelectorAll("article")].at(-1);
        last.querySelector("details").open = true;
        last.scrollIntoView();
        const start = performance.now();
        click(last.querySelector("a[data-hlo]"));
        found.click = performance.now() - start;
        found.hlo = shows(".hlo");
        found.entry = shows(".to-entry");
        """,
    )
    assert found["hlo"]
    assert found["entry"].startswith("report: ")
    assert found["click"] < 1000
    assert found["milliseconds"] < 30_000
