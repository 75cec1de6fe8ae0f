"""Lowers rows for CUDA on a machine without a GPU: what would fail there for lack of support fails here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.models.programs import program_of
from benchmarks.models.rows import Row


def _ignored(report: object) -> None:
    """What the report says of this machine is of no interest."""


def run(rows: Sequence[Row], tiny: bool) -> None:
    """Prints how long each takes, what was rewritten, or why it does not lower."""
    for row in rows:
        start = time.perf_counter()
        try:
            text = program_of(row, tiny).lower(_ignored, ("cuda",)).as_text()
        except Exception as error:
            print(f"{row.name:36} {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        kernels = text.count("@mosaic_gpu") + text.count('name = "depthwise_')
        took = time.perf_counter() - start
        print(f"{row.name:36} {took:6.1f} s {len(text) >> 10:8} KB, {kernels} kernels of this project", flush=True)
