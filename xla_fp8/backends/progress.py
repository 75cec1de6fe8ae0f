"""A line on a terminal that says how far a search for the fastest way to run a call is."""

from __future__ import annotations

import sys


class Progress:
    """A line on a terminal that says what is built, compiled or timed; nothing where stderr is no terminal."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.enabled = total > 1 and sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def show(self, done: int, what: str) -> None:
        if self.enabled:
            filled = 20 * done // self.total
            bar = "#" * filled + "." * (20 - filled)
            print(f"\r\x1b[Kxla_fp8: [{bar}] {done}/{self.total} {what[:60]}", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.enabled:
            # What stdout says next would else come before this, and the line would stay.
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
