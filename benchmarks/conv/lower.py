"""Lowers every program for CUDA on a machine without a GPU: what would fail there for lack of support fails here."""

from __future__ import annotations

import time
from collections.abc import Sequence

from benchmarks.conv.programs import KERNELS, TARGET, Case, program
from benchmarks.conv.timing import short
from xla_fp8.backends.mosaic.backend import MosaicBackend


def run(rows: Sequence[Case]) -> None:
    """Prints what does not lower, and how long each takes."""
    for case in rows:
        parts = []
        for contestant in case.contestants:
            start = time.perf_counter()
            try:
                if contestant == "cudnn":
                    continue  # asks the device
                backend = MosaicBackend("highest" if contestant == "highest" else "default")
                kernel = contestant in KERNELS
                configs = backend.configs(case.call, TARGET) if kernel else (None,)
                found = program(case, contestant, backend, configs[0])
                size = len(found.lower("cuda").as_text())
                parts.append(
                    f"{contestant} {len(configs)} configs, {size >> 10} KB, {time.perf_counter() - start:.1f} s"
                )
            except Exception as error:
                parts.append(f"{contestant} ERROR {short(error)}")
        print(f"{case.name:48} {'; '.join(parts)}", flush=True)
