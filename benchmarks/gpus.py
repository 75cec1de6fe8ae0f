"""The GPUs that a benchmark may use. Imports no JAX: whoever asks sets the variables of processes that will."""

from __future__ import annotations

import os
import subprocess


def gpus_here() -> tuple[str, ...]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: somebody else may use the others."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip())
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ()
    return tuple(str(n) for n in range(sum(line.startswith("GPU ") for line in listed.splitlines())))
