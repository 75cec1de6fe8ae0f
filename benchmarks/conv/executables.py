"""Compiled programs on disk: what one process tuned and compiled, another one loads and measures."""

from __future__ import annotations

import gzip
import hashlib
import pickle
from pathlib import Path
from typing import Any

from jax.experimental import serialize_executable

from benchmarks.conv.programs import KERNELS, TARGET, Case, backend_of, program


def _path(out: Path, case: Case, contestant: str) -> Path:
    # This project's kernels are large, and quickly compiled: who carries the folder elsewhere may leave them out.
    folder = out / ("kernels" if contestant in KERNELS else "programs")
    return folder / (hashlib.sha256(f"{case.name} / {contestant}".encode()).hexdigest()[:16] + ".gz")


def store(out: Path, case: Case, contestant: str, executable: Any) -> str:
    """Keeps an executable of `jax.jit(...).lower(...).compile()`; returns why not, or ""."""
    if contestant == "cudnn":
        return "the process that runs it must have made its target"
    path = _path(out, case, contestant)
    path.parent.mkdir(exist_ok=True)
    try:
        path.write_bytes(gzip.compress(pickle.dumps(serialize_executable.serialize(executable)), 3))
    except Exception as error:  # whatever it dies of: it can be compiled again
        return " ".join(str(error).split())[:200]
    return ""


def stored(out: Path, case: Case, contestant: str) -> Any:
    """The executable that `store` kept.

    Raises:
        Exception: there is none, or it does not load here.
    """
    content = _path(out, case, contestant).read_bytes()
    return serialize_executable.deserialize_and_load(*pickle.loads(gzip.decompress(content)))


def load(out: Path, case: Case, contestant: str, config: str = "") -> Any:
    """The executable of a contestant, ready to be called: what was stored, else compiled again.

    XLA's programs are then in JAX's cache, with XLA's choices; of this project's kernels `config` says which.
    """
    try:
        return stored(out, case, contestant)
    except Exception:
        if contestant not in KERNELS:
            return program(case, contestant).compile()
    backend = backend_of(contestant)
    named = getattr(backend, "config_named", None)
    found = (
        named(case.call, TARGET, config)
        if named
        else next(one for one in backend.configs(case.call, TARGET) if str(one) == config)
    )
    return program(case, contestant, backend, found).compile()
