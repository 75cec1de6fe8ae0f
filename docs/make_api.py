"""The pages of the API reference, from signatures and docstrings; `make docs` puts them into the site.

python docs/make_api.py FOLDER      writes them there
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODULES = {
    "xla_fp8": "Functions, arrays and layers: what most programs need.",
    "xla_fp8.models": "What to hand to a layer of Flax, to have that layer in FP8.",
    "xla_fp8.models.report": "What became of the layers of a model.",
    "xla_fp8.models.comparison": "What FP8 costs each layer of a model.",
    "xla_fp8.passes": "HLO in, HLO out.",
    "xla_fp8.report": "What passes did, as data.",
    "xla_fp8.target": "What passes assume of a device.",
    "xla_fp8.hlo": "HLO text as Python objects.",
    "xla_fp8.match": "The pattern matcher; [its own page](matcher.md) teaches it.",
    "xla_fp8.graph": "The [graph string](graph-string.md).",
    "xla_fp8.backends.protocol": "What a backend is, for one of your own.",
}
"""Public modules, and what each is for; of those without `__all__`, what they define."""

_SECTION_RE = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")
_LISTS = ("Args", "Attributes", "Raises")
_ITEM_RE = re.compile(r"^    ([\w*][\w*, .]*): ")
_LONGEST = 90


def pages() -> dict[str, str]:
    """File name → Markdown: a page for each module, and one that lists them."""
    links = [f"- [{name}]({_file(name)}): {text}" for name, text in MODULES.items()]
    found = {
        "api.md": "# API reference\n\nWhat is public is on these pages and follows the [deprecation policy]"
        "(deprecation.md); everything else may change in any release.\n\n" + "\n".join(links) + "\n"
    }
    for name, text in MODULES.items():
        module = importlib.import_module(name)
        entries = (_entry(module, public) for public in public_names(module))
        found[_file(name)] = "\n".join([f"# {name}\n\n{text}\n", *entries])
    return found


def _file(module: str) -> str:
    return f"api-{module.replace('.', '-')}.md"


def public_names(module: Any) -> list[str]:
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if not name.startswith("_")]
    own = (n for n, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__)
    return [name for name in own if not name.startswith("_")]


def _entry(module: Any, name: str) -> str:
    value = getattr(module, name)
    heading = f"## {name}\n"
    if not (inspect.isfunction(value) or inspect.isclass(value)):
        return f"{heading}\n`{type(value).__name__}`\n"
    parts = [heading, f"```py\n{_header(name, value)}\n```\n", rendered(inspect.getdoc(value) or "")]
    if inspect.isclass(value):
        members = list(_members(value))
        parts += ["**Members**\n", *members, ""] if members else []
    return "\n".join(parts)


def _header(name: str, value: Any) -> str:
    if inspect.isclass(value):
        bases = [base.__name__ for base in value.__bases__ if base is not object]
        if issubclass(value, Exception) or inspect.isabstract(value):
            return f"class {name}({', '.join(bases)})"
        return f"class {name}{_signature(value, is_class=True)}"
    return f"{name}{_signature(value)}"


def _signature(value: Any, *, is_class: bool = False) -> str:
    """Parameters on one line, or one a line where that is long. Defaults that are objects are shown as `...`."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    shown: list[str] = []
    previous = None
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and previous not in (parameter.kind, parameter.VAR_POSITIONAL):
            shown.append("*")
        previous = parameter.kind
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        shown.append(f"{stars}{parameter.name}{_annotation(': ', parameter.annotation)}{default}")
    result = "" if is_class else _annotation(" -> ", signature.return_annotation)
    line = f"({', '.join(shown)}){result}"
    return line if len(line) <= _LONGEST else "(\n    " + ",\n    ".join(shown) + f",\n){result}"


def _annotation(before: str, annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return before + (annotation if isinstance(annotation, str) else inspect.formatannotation(annotation))


def _default(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, (bool, int, float, str, tuple)) else "..."


def _members(cls: type) -> Iterator[str]:
    """A line for each public method and property that has a docstring of its own."""
    for name, member in vars(cls).items():
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        is_property = isinstance(member, property) or type(member).__name__ == "cached_property"
        text = inspect.getdoc(function) if is_property or inspect.isfunction(function) else None
        if name.startswith("_") or not text:
            continue
        summary = " ".join(text.partition("\n\n")[0].split())
        shown = name if is_property else f"{name}{_short_signature(function)}"
        yield f"- `{shown}`: {summary}"


def _short_signature(function: Any) -> str:
    names = [p.name for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    return f"({', '.join(names)})"


def rendered(text: str) -> str:
    """A docstring as Markdown: the items of its sections become lists, what stands behind `::` a block."""
    lines, section = [], ""
    for line in text.splitlines():
        if match := _SECTION_RE.match(line):
            section = match[1]
            lines += [f"**{section}**", ""]
        elif section and line.startswith("    "):
            lines.append(_item(line) if section in _LISTS else line[4:])
        else:
            section = section if not line else ""
            lines.append(re.sub("::$", ":", line))
    return "\n".join(lines).rstrip() + "\n"


def _item(line: str) -> str:
    match = _ITEM_RE.match(line)
    return f"- `{match[1]}`: {line[match.end() :]}" if match else f"  {line.strip()}"


if __name__ == "__main__":
    for name, text in pages().items():
        (Path(sys.argv[1]) / name).write_text(text)
