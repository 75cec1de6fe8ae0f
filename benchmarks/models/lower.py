"""Lowers rows for CUDA on a machine without a GPU: what would fail there for lack of support fails here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from benchmarks.models.programs import program_of
from benchmarks.models.rows import Row


def run(rows: Sequence[Row], tiny: bool) -> None:
    """Prints how long each takes, what was rewritten, or why it does not lower."""
    for row in rows:
        start = time.perf_counter()
        reports: list[Any] = []
        try:
            text = program_of(row, tiny).lower(reports.append, ("cuda",)).as_text()
        except Exception as error:
            print(f"{row.name:36} {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        summary = "; ".join(str(report.summary) for report in reports)
        print(f"{row.name:36} {time.perf_counter() - start:6.1f} s {len(text) >> 10:8} KB  {summary}", flush=True)
