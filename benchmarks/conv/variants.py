"""Some rows in one process, tuned and measured at once: many configs of this project's kernel, while nothing else runs.

For what the two phases do not tell: how good the order of `configs.generate` is, and what a schedule or an epilogue
costs. XLA tunes its contestants meanwhile in threads; those that take too long are left out.
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.conv.measure import Measuring, describe
from benchmarks.conv.programs import CHAIN, PEERS, TARGET, Case, backend_of, calls, operands_of, program
from benchmarks.conv.timing import Contestant, Inputs, Timing, agreement, short, time_in_turn
from xla_fp8.backends.mosaic import configs
from xla_fp8.backends.mosaic.configs import Config
from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of
from xla_fp8.backends.mosaic.problem import Problem, problem_of

_MEASURING = 0.35
"""Of the time: it is kept for measuring, when compiling takes long."""


def run(out: Path, seconds: float, rows: Sequence[Case], alone: Sequence[Case], limit: int) -> None:
    """Adds rows to results.json: of mosaic the fastest config, with the times of all as those of its tuning.

    Args:
        rows: measured beside XLA's contestants.
        alone: measured without XLA's FP8, which alone takes long to tune.
        limit: configs of mosaic for each row.
    """
    start = time.monotonic()
    end = start + seconds
    measuring = Measuring(out, seconds)
    pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
    # XLA's first: they take the longest, and use one core each.
    xla = [(case, (*PEERS, CHAIN)) for case in rows] + [(case, ("xla_bf16", CHAIN)) for case in alone]
    others = {
        (case.name, name): pool.submit(program(case, name).compile)
        for case, wanted in xla
        for name in case.contestants
        if name in wanted
    }
    kernels: dict[tuple[str, str], concurrent.futures.Future[Any]] = {}
    firsts: dict[str, str] = {}
    deadline = end - _MEASURING * seconds
    for case in (*rows, *alone):
        chosen = _chosen(case, limit)
        firsts[case.name] = str(chosen[0])
        for config in chosen:
            if time.monotonic() < deadline:
                lowered = program(case, "mosaic", backend_of("mosaic"), config).lower()
                kernels[case.name, str(config)] = pool.submit(lowered.compile)
    futures = others | kernels
    concurrent.futures.wait(futures.values(), timeout=max(0, deadline - time.monotonic()))
    late = [" / ".join(key) for key, future in futures.items() if not future.done()]
    print(
        f"{time.monotonic() - start:.0f} s: {len(futures)} programs, not compiled in time: {late or 'none'}", flush=True
    )
    measuring.measure_ceilings()
    inputs = {case.shape: Inputs(case.shape.product[2]) for case in (*rows, *alone)}
    for case in (*rows, *alone):
        if time.monotonic() > end - 2:
            print(f"out of time before {case.name}")
            break
        done = {key[1]: future for key, future in futures.items() if key[0] == case.name and future.done()}
        row = measuring.bare_row(case)
        row["contestants"] = _measure(case, done, inputs[case.shape], firsts[case.name])
        measuring.rows[case.name] = row
        measuring.save()
        print(f"{time.monotonic() - start:5.0f} s  {describe(row)}", flush=True)
    pool.shutdown(wait=False, cancel_futures=True)


def _measure(
    case: Case, compiled: dict[str, concurrent.futures.Future[Any]], inputs: Inputs, first: str
) -> dict[str, dict[str, Any]]:
    problems: dict[str, str] = {}
    entrants: dict[str, Contestant] = {}
    for name, future in compiled.items():
        operands = operands_of(case, name if name in case.contestants else "mosaic")
        try:
            entrants[name] = Contestant(future.result(), inputs.of(operands), calls(operands))
        except Exception as error:
            problems[name] = short(error)
    jax.block_until_ready([entrant.arguments for entrant in entrants.values()])
    timings = time_in_turn(entrants)
    problems |= {name: found for name, found in timings.items() if isinstance(found, str)}
    times = {name: found for name, found in timings.items() if isinstance(found, Timing)}
    facts: dict[str, dict[str, Any]] = {
        name: _facts(times[name]) if name in times else {"problem": problems[name]}
        for name in compiled
        if name in case.contestants
    }
    mine = {name: found for name, found in times.items() if name not in case.contestants}
    for name, found in sorted(mine.items(), key=lambda item: item[1].us):
        print(f"    {found.us:8.2f} us  spread {found.spread:6.2f}{' ~' if found.host_bound else '  '} {name}")
    if mine:
        best = min(mine, key=lambda name: mine[name].us)
        facts["mosaic"] = _facts(mine[best]) | {
            "config": best,
            "first": mine[first].us if first in mine else None,
            "tuned_us": {name: found.us for name, found in mine.items()},
            "problems": {name: text for name, text in problems.items() if name not in case.contestants},
        }
        if "xla_fp8" in times:
            expected, got = (_first_outputs(entrants[name]) for name in ("xla_fp8", best))
            facts["mosaic"] |= agreement(expected, got)
    return facts


def _facts(timing: Timing) -> dict[str, Any]:
    return {"problem": "", "us": timing.us, "spread": timing.spread, "host_bound": timing.host_bound}


def _first_outputs(contestant: Contestant) -> list[jax.Array]:
    return jax.tree.leaves(contestant.executable(*contestant.arguments)[0])


def _chosen(case: Case, limit: int) -> list[Config]:
    """What the autotuner would time, and the best guess of each kind of schedule beside, `limit` in all."""
    if jax.default_backend() == "cpu":
        return list(backend_of("mosaic").configs(case.call, TARGET))  # type: ignore[arg-type]
    problem, chain = problem_of(case.call), epilogue_of(case.call)
    assert isinstance(problem, Problem)
    assert isinstance(chain, Epilogue)
    return list(dict.fromkeys(_variants(problem, chain, limit)))[:limit]


def _variants(problem: Problem, epilogue: Epilogue, limit: int) -> Iterator[Config]:
    generated = configs.generate(problem, epilogue.footprint, limit=512)
    yield from generated[: limit // 2 + 1]
    kinds: dict[tuple[bool, bool, bool, bool], Config] = {}
    for config in generated:
        kinds.setdefault((config.taps > 1, config.resident > 0, config.pingpong, config.splits > 1), config)
    yield from kinds.values()
    yield from generated
