"""The user's source lines around those that a report names, as far as they can be read here."""

from __future__ import annotations

import linecache
import os
from collections import defaultdict

_AROUND = 4
_LONGEST = 300  # characters of one line


class SourceText:
    """Collects lines that are wanted, and reads them.

    Only Python is read (.py files, and cells of a notebook that runs here): a dump can name any file, and what is read
    goes into a page that is passed on.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, set[int]] = defaultdict(set)

    def has(self, file: str, line: int) -> bool:
        """Whether that line can be read; it is then among those of `windows`."""
        if not 0 < line <= len(_lines(file)):
            return False
        self._wanted[file].add(line)
        return True

    def number(self, file: str) -> int:
        """The position of a file among those of `windows`."""
        return list(self._wanted).index(file)

    def windows(self) -> dict[str, list[list[tuple[int, str]]]]:
        """Of each file the runs of (line number, text) around the wanted lines."""
        return {file: _windows(_lines(file), wanted) for file, wanted in self._wanted.items()}


def _lines(file: str) -> list[str]:
    if not file.endswith(".py") and not file.startswith("<ipython"):
        return []
    linecache.checkcache(file)
    return linecache.getlines(file if file.startswith("<") else os.path.abspath(file)) or linecache.getlines(file)


def _windows(lines: list[str], wanted: set[int]) -> list[list[tuple[int, str]]]:
    near = {n for line in wanted for n in range(line - _AROUND, line + _AROUND + 1) if 0 < n <= len(lines)}
    windows: list[list[tuple[int, str]]] = []
    for number in sorted(near):
        if number - 1 not in near:
            windows.append([])
        windows[-1].append((number, lines[number - 1].rstrip()[:_LONGEST]))
    return windows
