"""What the tests of HTML reports share: a module whose metadata names a real file, and a strict reader of pages."""

from __future__ import annotations

import dataclasses
from html.parser import HTMLParser
from pathlib import Path

import pytest

from xla_fp8 import hlo, passes
from xla_fp8.report import Modules, Report

SOURCE = """\
import jax


def layer(x, w):  # <&>
    y = conv(x, w)
    y = y.astype("f8")
    s = sin(x)
    return conv(s, w)
"""

MODULE = """
HloModule m

ENTRY main {
  x = f8e4m3fn[2,8,8,16]{3,2,1,0} parameter(0)
  w = f8e4m3fn[32,3,3,16]{3,2,1,0} parameter(1)
  x_wide = f32[2,8,8,16]{3,2,1,0} convert(x), metadata={AT:5}
  w_wide = f32[32,3,3,16]{3,2,1,0} convert(w), metadata={AT:5}
  conv.1 = f32[2,8,8,32]{3,2,1,0} convolution(x_wide, w_wide), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, metadata={AT:5}
  y = f8e4m3fn[2,8,8,32]{3,2,1,0} convert(conv.1), metadata={AT:6}
  sine = f32[2,8,8,16]{3,2,1,0} sine(x_wide), metadata={AT:7}
  conv.2 = f32[2,8,8,32]{3,2,1,0} convolution(sine, w_wide), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, metadata={AT:8}
  y_wide = f32[2,8,8,32]{3,2,1,0} convert(y), metadata={AT:8}
  w2 = f8e4m3fn[8,3,3,32]{3,2,1,0} parameter(2)
  w2_wide = f32[8,3,3,32]{3,2,1,0} convert(w2)
  conv.3 = f32[2,8,8,8]{3,2,1,0} convolution(y_wide, w2_wide), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, metadata={AT:8}
  ROOT r = (f32[2,8,8,8]{3,2,1,0}, f32[2,8,8,32]{3,2,1,0}) tuple(conv.3, conv.2)
}
"""  # noqa: E501


@dataclasses.dataclass(frozen=True)
class Explained:
    """A report, the modules that it is about, and the file that their metadata names."""

    report: Report
    modules: Modules
    source: Path


@pytest.fixture
def explained(tmp_path: Path) -> Explained:
    """conv.1 and conv.3 are rewritten, the first into the second's input; conv.2 is refused because of sine."""
    source = tmp_path / "model.py"
    source.write_text(SOURCE)
    text = MODULE.replace("AT:", f'op_name="f" source_file="{source}" source_line=')
    module = hlo.parse(text)
    before = module.clone()
    report = passes.run(module, target="h200")
    assert [entry.instruction for entry in report.rewritten] == ["conv.1", "conv.3"]
    assert [entry.instruction for entry in report.refused] == ["conv.2"]
    return Explained(report, Modules(before, module), source)


_VOID = ("meta",)


class PageReader(HTMLParser):
    """Reads a page, strictly: tags close in order, ids are there once, links lead to one, nothing is loaded.

    Attributes:
        ids: in the order of the page.
        boxes: of each picture link its attributes.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.boxes: list[dict[str, str]] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []
        assert len(set(self.ids)) == len(self.ids)
        assert {link for link in self.links if link != "#"} <= {f"#{name}" for name in self.ids}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        assert "src" not in values, "nothing is loaded"
        assert tag not in ("link", "img", "iframe")
        if tag not in _VOID:
            self._open.append(tag)
        if "id" in values:
            self.ids.append(values["id"])
        if "href" in values:
            assert values["href"].startswith("#")
            self.links.append(values["href"])
        if "data-hlo" in values:
            self.boxes.append(values)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag


@pytest.fixture
def read_page() -> type[PageReader]:
    return PageReader
