"""XLA's autotuning of its FP8 convolutions, in many processes: each compiles some of the chains of a network alone.

What it finds is in a folder, by instruction, so that whoever compiles the whole network finds it there. A chain is what
`xla_fp8` would rewrite: a convolution or dot from the FP8 tensors that it reads to what ends it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core

from benchmarks.models.programs import program_of, structs
from benchmarks.models.rows import Row
from benchmarks.models.scheduler import ROOT, Settings, is_xla_fp8
from xla_fp8 import _jax_compat
from xla_fp8.api.rewrite import make_options
from xla_fp8.tracing.equations import bodies
from xla_fp8.tracing.hlo_of_region import Structure, structure_of
from xla_fp8.tracing.region import cut_closed, is_region


def run(settings: Settings, rows: Sequence[Row]) -> None:
    """Starts the processes, and ends them in time: what they found by then is kept."""
    tuned = list(filter(is_xla_fp8, rows))
    environment = settings.environment(tuned[0], None)  # on whichever GPU is visible
    command = [sys.executable, "-P", "-m", "benchmarks.models", "chains", "--workers", str(settings.workers)]
    command += ["--only", ";".join(row.name for row in tuned), *(["--tiny"] if settings.tiny else [])]
    end = time.monotonic() + settings.seconds
    processes = [
        subprocess.Popen([*command, "--part", str(part)], env=environment, cwd=ROOT) for part in range(settings.workers)
    ]
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    files = sum(1 for path in (settings.out / "autotune").rglob("*") if path.is_file())
    print(f"{files} files in the folder of XLA's autotuning", flush=True)


def compile_chains(rows: Sequence[Row], part: int, parts: int, tiny: bool) -> None:
    """Compiles every `parts`-th of the distinct chains of all rows."""
    seen: dict[Any, None] = {}
    for row in rows:
        for structure in chains(row, tiny):
            if structure.equations in seen:
                continue
            number = len(seen)
            seen[structure.equations] = None
            if number % parts == part:
                start = time.perf_counter()
                jitted = jax.jit(core.jaxpr_as_fun(structure.jaxpr))
                jitted.lower(*structure.jaxpr.in_avals).compile()
                print(f"{row.name}: chain {number}, {time.perf_counter() - start:.1f} s", flush=True)


def chains(row: Row, tiny: bool) -> Iterator[Structure]:
    """The FP8 chains of a row, each kind once, in the order of the program."""
    program = program_of(row, tiny)
    traced = jax.jit(program.function).trace(structs(program.state), structs(program.batch))
    cut = cut_closed(traced.jaxpr, make_options(backend="reference"))
    yield from dict.fromkeys(_structures(cut))


def _structures(jaxpr: Any) -> Iterator[Structure]:
    for equation in _jax_compat.open_jaxpr(jaxpr).eqns:
        if is_region(equation):
            yield structure_of(equation.params["jaxpr"], None)
        else:
            for body in bodies(equation):
                yield from _structures(body)
