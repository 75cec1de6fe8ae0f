"""What mkdocs changes of the pages, which are written for GitHub: their fences, their anchors, and links out of docs/.

README.md and CHANGELOG.md, which stand outside of docs/, become pages of the site: index.md and changelog.md. The API
reference is made when the site is built.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = {"index.md": "README.md", "changelog.md": "CHANGELOG.md"}

_FENCE_RE = re.compile(r"^(```+\w+) .*$", re.MULTILINE)
_LINK_RE = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def slug(text: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, source in FROM_ROOT.items():
        files.append(File.generated(config, name, content=(ROOT / source).read_text()))
    for name, text in _make_api().items():
        files.append(File.generated(config, name, content=text))
    return files


def _make_api() -> dict[str, str]:
    pages: dict[str, str] = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["pages"]()
    return pages


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Fences with more than a language are no fences to Python-Markdown: "text output", "python title"."""
    home = ROOT if page.file.src_uri in FROM_ROOT else ROOT / "docs"
    return _LINK_RE.sub(lambda match: _link(match, home), _FENCE_RE.sub(r"\1", markdown))


def _link(match: re.Match[str], home: Path) -> str:
    """A link as the site has it: the text alone where it leads to a file that is no part of the site."""
    text, path, anchor = match[1], match[2], match[3] or ""
    target = (home / path).resolve()
    if ":" in path or not target.is_relative_to(ROOT):
        return match[0]
    for name, source in FROM_ROOT.items():
        if target == ROOT / source:
            return f"[{text}]({name}{anchor})"
    if not target.is_relative_to(ROOT / "docs"):
        return text
    return f"[{text}]({target.relative_to(ROOT / 'docs')}{anchor})"
