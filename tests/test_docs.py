"""The documentation: links lead somewhere, code blocks run and print what the pages show, tables match the source."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.scripts import ROOT, load_script
from xla_fp8 import hlo
from xla_fp8.backends.executable import Executable
from xla_fp8.graph import OPS, OpSpec
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.passes import Context
from xla_fp8.target import Target

run_pages = load_script("docs/run_pages.py")
make_diagrams = load_script("docs/make_diagrams.py")
make_api = load_script("docs/make_api.py")
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


PAGES_WITH_BLOCKS = [page for page in PAGES if run_pages.blocks(page.read_text())]


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=page_name)
def test_blocks_run_and_print_what_the_page_shows(page: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:  # a short path: pytest's own would fill the lines of a report
        outputs = list(run_pages.run_page(page, Path(scratch)))
    differences = [run_pages.difference(page, output) for output in outputs if not output.agrees]
    assert not differences, "\n\n".join(
        [*differences, f"python docs/run_pages.py --update {page_name(page)} puts the real output in; read it first"]
    )


@pytest.mark.parametrize("type_", ["f32", "bf16", "f16", "s32"])
def test_the_pass_that_a_page_writes_keeps_every_value(type_: str) -> None:
    (code, *_) = (
        t.content for t in tokens(ROOT / "docs/writing-a-pass.md") if t.type == "fence" and t.info == "python"
    )
    names: dict[str, Any] = {}
    exec(code, names)
    values = np.array([1, -3, 7.7, 1000, -30000], numpy_dtype(type_))
    powers = range(8) if type_ == "s32" else range(-14, 16)
    rewritten = 0
    for divisor in (2**power if type_ == "s32" else 2.0**power for power in powers):
        text = (
            f"HloModule m\n\nENTRY main {{\n  x = {type_}[5] parameter(0)\n  c = {type_}[] constant({divisor!r})\n"
            f"  b = {type_}[5] broadcast(c), dimensions={{}}\n"
            f"  ROOT y = {type_}[5] divide(x, b), sharding={{replicated}}\n}}\n"
        )
        module = hlo.parse(text)
        rewritten += names["PowerOfTwoDivision"](Context()).run(module, Target.parse("h200"))
        hlo.verify(module)
        assert module.entry.root.sharding == "{replicated}"
        np.testing.assert_array_equal(*(Executable(m, "cpu")(values)[0] for m in (module, hlo.parse(text))))
    assert (rewritten > 0) == (type_ != "s32")


def test_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:^|\$ |`)make ([a-z][\w-]*)(?=[`\s])", code_of(page), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page_name(page)}: there is no make {target}"


def code_of(page: Path) -> str:
    """The fenced blocks and code spans of a page."""
    return "\n".join(f"{t.content} " for t in tokens(page) if t.type in ("fence", "code_inline"))


def table(page: Path, heading: str) -> list[list[str]]:
    """The body rows of the first table behind a heading, each cell as Markdown text."""
    _, found, rest = page.read_text().partition(f"# {heading}\n")
    assert found, f"{page_name(page)} has no heading {heading!r}"
    match = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert match, f"no table behind {heading!r}"
    return [
        [cell.strip().replace(r"\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
        for row in match[0].splitlines()[2:]
    ]


def op_row(spec: OpSpec) -> list[str]:
    """An op of the graph string as a row of the table in graph-string.md."""
    counts = " or ".join(map(str, spec.operand_counts))
    sides = ", ".join(spec.sides)
    if sides and len(spec.operand_counts) > 1:
        sides += f"; none with {max(spec.operand_counts)}"
    return [f"`{spec.name}`", spec.dialect, counts, sides, spec.output.replace("_", " "), f"`{spec.meaning}`"]


def test_the_table_of_graph_ops_is_that_of_the_source() -> None:
    rows = table(ROOT / "docs" / "graph-string.md", "The ops")
    assert rows == [op_row(spec) for spec in OPS.values()]


@pytest.mark.parametrize("name", make_diagrams.FILES)
def test_diagrams_are_drawn_from_the_source(name: str) -> None:
    drawn = make_diagrams.FILES[name]()
    assert (make_diagrams.DIAGRAMS / name).read_text() == drawn, "run: python docs/make_diagrams.py"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    shown = set(re.findall(r"\b([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= shown
    assert set(make_api.pages()) <= shown


@pytest.mark.parametrize("name", make_api.MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    public = {n: getattr(module, n) for n in make_api.public_names(module)}
    assert [n for n, value in public.items() if callable(value) and not inspect.getdoc(value)] == []


DOCSTRING = """
Adds, as in::

    add(1, 2)

Args:
    a, b: numbers, one of which
        may be large.

Returns:
    The sum.

Raises:
    TypeError: no number.

More.
"""

MARKDOWN = """\
Adds, as in:

    add(1, 2)

**Args**

- `a, b`: numbers, one of which
  may be large.

**Returns**

The sum.

**Raises**

- `TypeError`: no number.

More.
"""


def test_a_docstring_becomes_markdown() -> None:
    assert make_api.rendered(inspect.cleandoc(DOCSTRING)) == MARKDOWN


def test_every_rule_of_a_refusal_has_its_row() -> None:
    documented = {row[0].strip("`") for row in table(ROOT / "docs" / "report.md", "The rules")}
    assert documented == rules_in_source()


def rules_in_source() -> set[str]:
    """The first arguments of `Refusal(...)` and of what makes one there; `rule=` where an entry is made."""
    makers = ("Refusal", "Refusal.of", "refusal", "refuse", "stop")
    rules: set[str] = set()
    for file in sorted([*(ROOT / "passes").glob("*.py"), *(ROOT / "xla_fp8" / "tracing").glob("*.py")]):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if f".{ast.unparse(node.func)}".endswith(tuple(f".{maker}" for maker in makers)) and node.args:
                rules |= _texts(node.args[0])
            for keyword in node.keywords:
                if keyword.arg == "rule":
                    rules |= _texts(keyword.value)
    return rules


def _texts(argument: ast.expr) -> set[str]:
    """The rule names that an argument can be; variables are filled in where the name is made."""
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return {argument.value}
    if isinstance(argument, ast.IfExp):
        return (_texts(argument.body) | _texts(argument.orelse)) - {""}
    if isinstance(argument, ast.JoinedStr):  # f"{kind}-gradient"
        assert ast.unparse(argument) == "f'{kind}-gradient'", f"say here what {ast.unparse(argument)} can be"
        return {"input-gradient", "filter-gradient"}
    return set()


@pytest.mark.parametrize(
    ("shown", "real", "agrees"),
    [
        ("a b", "a  b\n", True),
        ("a ... d", "a b\nc d", True),
        ("...\nc", "a\nb\nc\n", True),
        ("a", "a b", False),
        ("?", "a", False),
    ],
)
def test_matches(shown: str, real: str, agrees: bool) -> None:
    assert run_pages.matches(shown, real) is agrees


def test_a_page_that_lies_is_found_and_updated(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 1\nprint(x + 1)\n```\n\n```text output\n3\n```\n\n"
        "```console\n$ xla-fp8 passes --no-such-option  # exits with 2\n$ echo two words\none\n```\n"
    )
    outputs = list(run_pages.run_page(page, tmp_path))
    assert [(o.line, o.shown, o.real) for o in outputs] == [(7, "3\n", "2\n"), (12, "one\n", "two words\n")]
    page.write_text(run_pages.updated(page.read_text(), outputs))
    assert all(output.agrees for output in run_pages.run_page(page, tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("```python\n\nraise ValueError('no')\n```\n", "page.md:2: ValueError: no"),
        ("```console\n$ xla-fp8 opt nowhere.hlo\n```\n", "page.md:2: `xla-fp8 opt nowhere.hlo` ends with 1, not 0"),
    ],
)
def test_a_block_that_fails_is_found(text: str, message: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(run_pages.PageError, match=re.escape(message)):
        list(run_pages.run_page(page, tmp_path))


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n\n[a](page.md#one-two) [b](#three) [c](no.md) [d](https://x.invalid/#y) ![e](no.png)\n"
    )
    assert broken_links(page) == ["#three", "no.md", "no.png"]
