"""The documentation: every relative link and anchor leads somewhere, and every Python block compiles."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def tokens(page: Path) -> Iterator[Token]:
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        yield token
        yield from token.children or ()


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    found: set[str] = set()
    stream = list(tokens(page))
    for opening, inline in itertools.pairwise(stream):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or ())
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            repeats = sum(1 for anchor in found if re.fullmatch(re.escape(slug) + r"(-\d+)?", anchor))
            found.add(f"{slug}-{repeats}" if repeats else slug)
    return found


def broken_links(page: Path) -> list[str]:
    """Returns the relative links of a page whose file or anchor is not there."""
    broken = []
    for token in tokens(page):
        link = str(token.attrs.get("href") or token.attrs.get("src") or "")
        if not link or re.match(r"[a-z][a-z+.-]*:", link):
            continue  # no link, or one to another site
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    return broken


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_blocks_compile(page: Path) -> None:
    for token in tokens(page):
        if token.type == "fence" and token.info.split()[:1] == ["python"]:
            first_line = (token.map or [0])[0] + 1  # a SyntaxError then names the line of the page
            compile("\n" * first_line + token.content, str(page), "exec")


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n\n[a](page.md#one-two) [b](#three) [c](no.md) [d](https://x.invalid/#y) ![e](no.png)\n"
    )
    assert broken_links(page) == ["#three", "no.md", "no.png"]
