"""Dumps of programs that call functions of this project name the line of the call, not the project's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("call", "w", "x", "hidden"),
    [
        ("fp8_dot(x, w, (((1,), (0,)), ((), ())))", (16, 16), (8, 16), "training.py"),
        ("depthwise_conv(x, w)", (3, 3, 16), (2, 8, 8, 16), "depthwise.py"),
    ],
)
def test_dumps_name_the_line_of_the_call(
    tmp_path: Path, call: str, w: tuple[int, ...], x: tuple[int, ...], hidden: str
) -> None:
    """In a process that does nothing else: what `xla_fp8.jit` imports would hide our lines too."""
    script = tmp_path / "user.py"
    script.write_text(
        "import jax, jax.numpy as jnp, xla_fp8\n"
        "def net(w, x):\n"
        f"    return jnp.sum(xla_fp8.{call})\n"
        f"f = jax.jit(jax.grad(net)).lower(jnp.ones({w}), jnp.ones({x}))\n"
        "print(f.as_text('hlo', debug_info=True))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert "user.py" in done.stdout
    assert hidden not in done.stdout
