"""The folder that the phases share, and the variables with which their processes find it. Imports no JAX."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TUNED = "tuned.json"
RESULTS = "results.json"


@dataclasses.dataclass(frozen=True)
class Settings:
    """
    Attributes:
        out: folder of everything that is left.
        seconds: after which all processes are stopped.
        workers: XLA's processes on each GPU.
        kernel_workers: processes that tune this project's kernels.
        configs: of a kernel that are tried on each shape.
    """

    out: Path
    seconds: float
    workers: int
    kernel_workers: int
    configs: int
    tiny: bool


def environment(out: Path, gpu: str | None, cached: bool = True) -> dict[str, str]:
    """The variables of a process that tunes or measures: one GPU, and the caches in `out`."""
    return {
        **os.environ,
        **({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FP8_CACHE_DIR": str(out / "choices"),
        "XLA_FP8_AUTOTUNE": "0",
        "JAX_COMPILATION_CACHE_DIR": str(out / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "JAX_ENABLE_COMPILATION_CACHE": "true" if cached else "false",
    }


def load_tuned(out: Path) -> dict[str, Any]:
    """What was tuned before: "case / contestant" → its answer."""
    path = out / TUNED
    return json.loads(path.read_text()) if path.exists() else {}


def write(path: Path, content: Any) -> None:
    """A JSON file, whole or not at all."""
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1))
    temporary.replace(path)


@contextlib.contextmanager
def alone(out: Path, gpu: object) -> Iterator[None]:
    """No other process of this benchmark uses the GPU meanwhile, but to load programs and to run each once."""
    with (out / f"gpu{gpu}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
