"""The second phase: one process measures every tuned row, all contestants of a row in turn. Nothing is tuned here."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.conv import executables, state
from benchmarks.conv.programs import KERNELS, MAIN, PEERS, Case, calls, operands_of, program
from benchmarks.conv.shapes import Shape
from benchmarks.conv.timing import Contestant, Inputs, Timing, agreement, copier, short, time_in_turn

_BATCH = 12
"""Rows whose programs are loaded together, in threads, and then measured while nothing else runs."""


def ceilings() -> dict[str, float | None]:
    """A matrix product that is all tensor core, and a copy that is all memory: the best of three times of each.

    What else goes on, such as other processes that get hold of the GPU, makes both slower and never faster.
    """
    size = 8192 if jax.default_backend() != "cpu" else 64
    case = Case(Shape(1, 1, size, size, 1, size), MAIN, (), ("gemm",))
    found = program(case, "gemm")
    copy, copied = copier()
    product = Contestant(found.compile(), Inputs(size).of(found.operands), calls(found.operands))
    times = [time_in_turn({"gemm": product, "copy": copy}) for _ in range(3)]

    def least(name: str) -> float | None:
        return min((timing.us for found in times if isinstance(timing := found[name], Timing)), default=None)

    gemm, copying = least("gemm"), least("copy")
    return {
        "copy_bytes_per_s": copied / copying * 1e6 if copying else None,
        "gemm_tflops": case.shape.flops / gemm / 1e6 if gemm else None,
    }


def best(ceilings: dict[str, float | None], others: dict[str, float | None]) -> dict[str, float | None]:
    """Of each ceiling the higher."""
    return {name: max(ceilings.get(name) or 0, others.get(name) or 0) or None for name in {**ceilings, **others}}


def about(process: str) -> dict[str, str]:
    """Of results.json: what it was measured on."""
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "process": process}


def bare_row(case: Case, process: str) -> dict[str, Any]:
    """A row of results.json without its contestants."""
    return {
        "shape": str(case.shape),
        "epilogue": case.epilogue,
        "networks": case.networks,
        "product": case.shape.product,
        "flops": case.shape.flops,
        "bytes": case.bytes,
        "process": process,
    }


class Measuring:
    """The rows measured so far, in a file that is written after each."""

    def __init__(self, out: Path, seconds: float) -> None:
        self.out = out
        self.path = out / state.RESULTS
        self.end = time.monotonic() + seconds
        self.began = time.monotonic()
        self.tuned = state.load_tuned(out)
        self.process = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        earlier = json.loads(self.path.read_text()) if self.path.exists() else {}
        self.rows: dict[str, Any] = earlier.get("rows", {})
        self.about = about(self.process)
        self.ceilings: dict[str, Any] = {}

    def run(self, rows: Sequence[Case]) -> None:
        needed = {case.name: {"mosaic", *PEERS}.intersection(case.contestants) for case in rows}
        able = [case for case in rows if all(f"{case.name} / {name}" in self.tuned for name in needed[case.name])]
        todo = [case for case in able if case.name not in self.rows]
        print(f"{len(rows)} rows, {len(able)} of them tuned, {len(todo)} to measure", flush=True)
        self.ceilings = ceilings()
        print(f"ceilings: {self.ceilings}", flush=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for start in range(0, len(todo), _BATCH):
                batch = todo[start : start + _BATCH]
                if self.end - time.monotonic() < 25:
                    print(f"out of time before {batch[0].name}")
                    break
                self.measure_batch(batch, pool)
        processes = {row["process"] for row in self.rows.values()}
        print(f"{len(self.rows)} rows, measured in {len(processes)} processes; {time.monotonic() - self.began:.0f} s")

    def measure_batch(self, batch: Sequence[Case], pool: concurrent.futures.Executor) -> None:
        start = time.monotonic()
        futures = {
            (case.name, name): pool.submit(executables.load, self.out, case, name, answer.get("config", ""))
            for case in batch
            for name in case.contestants
            if (answer := self.answer(case, name))["problem"] == ""
        }
        concurrent.futures.wait(futures.values())
        print(f"  {len(futures)} programs loaded in {time.monotonic() - start:.1f} s", flush=True)
        for case in batch:
            row = bare_row(case, self.process)
            row["contestants"] = {name: dict(self.answer(case, name)) for name in case.contestants}
            executables_of: dict[str, Any] = {}
            for name, facts in row["contestants"].items():
                if (future := futures.get((case.name, name))) is not None:
                    try:
                        executables_of[name] = future.result()
                    except Exception as error:
                        facts["problem"] = short(error)
            self.measure_row(case, row["contestants"], executables_of)
            self.rows[case.name] = row
            self.save()
            print(f"{time.monotonic() - self.began:5.0f} s  {describe(row)}", flush=True)

    def answer(self, case: Case, contestant: str) -> dict[str, Any]:
        """What the tuning of one contestant said."""
        answer = self.tuned.get(f"{case.name} / {contestant}", {"problem": "not tuned"})
        # "us" will be the time measured here.
        return {("tuned_us" if name == "us" else name): value for name, value in answer.items()}

    def measure_row(self, case: Case, row: dict[str, dict[str, Any]], loaded: dict[str, Any]) -> None:
        inputs = Inputs(case.shape.product[2])
        contestants = {}
        for name, executable in loaded.items():
            operands = operands_of(case, name)
            contestants[name] = Contestant(executable, inputs.of(operands), calls(operands))
        jax.block_until_ready([contestant.arguments for contestant in contestants.values()])
        for name, timing in time_in_turn(contestants).items():
            row[name] |= dataclasses.asdict(timing) if isinstance(timing, Timing) else {"problem": timing}
        if "us" in row.get("xla_fp8", {}):
            expected = first_outputs(contestants["xla_fp8"])
            for name in KERNELS:
                if "us" in row.get(name, {}):
                    row[name] |= agreement(expected, first_outputs(contestants[name]))

    def save(self) -> None:
        state.write(self.path, {"about": self.about, "ceilings": self.ceilings, "rows": self.rows})


def first_outputs(contestant: Contestant) -> list[jax.Array]:
    return jax.tree.leaves(contestant.executable(*contestant.arguments)[0])


def describe(row: dict[str, Any]) -> str:
    """A row as one line."""
    parts = [f"{row['shape']} {row['epilogue']:24}"]
    for name, facts in row["contestants"].items():
        if "us" in facts:
            parts.append(f"{name} {facts['us']:.1f}{'~' if facts['host_bound'] else ''}")
        else:
            parts.append(f"{name} - ({facts['problem'][:60]})")
    return "  ".join(parts)
