"""One row in one process: many configs of this project's kernel beside XLA's programs, timed in turn.

For what the two phases do not tell: how good the order of `configs.generate` is, and what a schedule or an epilogue
costs. Kernels are compiled while others use the GPU; copies and times have it alone.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from benchmarks.conv import executables, state
from benchmarks.conv.measure import bare_row, first_outputs
from benchmarks.conv.programs import KERNELS, TARGET, Case, backend_of, calls, operands_of, program
from benchmarks.conv.timing import Contestant, Inputs, Timing, agreement, short, time_in_turn
from xla_fp8.backends.mosaic import configs
from xla_fp8.backends.mosaic.configs import Config, Footprint
from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of
from xla_fp8.backends.mosaic.problem import Problem, problem_of


def measure(case: Case, out: Path, gpu: str, limit: int, process: str) -> dict[str, Any]:
    """A row of results.json: of mosaic the fastest of `limit` configs, with the times of all as those of its tuning.

    XLA's contestants are those that other processes left in `out`.
    """
    chosen = _chosen(case, limit)
    kernel = backend_of("mosaic")
    problems: dict[str, str] = {}
    compiled: dict[str, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        futures = {str(one): pool.submit(program(case, "mosaic", kernel, one).compile) for one in chosen}
        for name in case.contestants:
            if name not in KERNELS:
                futures[name] = pool.submit(executables.stored, out, case, name)
        for name, future in futures.items():
            try:
                compiled[name] = future.result()
            except FileNotFoundError:
                pass  # not tuned: not in the row
            except Exception as error:
                problems[name] = short(error)
    inputs = Inputs(case.shape.product[2])
    for name in compiled:
        inputs.prepare(_operands(case, name))
    with state.alone(out, gpu):
        contestants = _timed(case, compiled, inputs, problems, str(chosen[0]))
    return bare_row(case, process) | {"contestants": contestants}


def _operands(case: Case, name: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Of a contestant, or of a config of mosaic."""
    return operands_of(case, name if name in case.contestants else "mosaic")


def _timed(
    case: Case, compiled: Mapping[str, Any], inputs: Inputs, problems: dict[str, str], first: str
) -> dict[str, dict[str, Any]]:
    entrants: dict[str, Contestant] = {}
    for name, executable in compiled.items():
        operands = _operands(case, name)
        entrants[name] = Contestant(executable, inputs.of(operands), calls(operands))
    jax.block_until_ready([entrant.arguments for entrant in entrants.values()])
    timings = time_in_turn(entrants)
    problems |= {name: found for name, found in timings.items() if isinstance(found, str)}
    times = {name: found for name, found in timings.items() if isinstance(found, Timing)}
    facts: dict[str, dict[str, Any]] = {
        name: _facts(times[name]) if name in times else {"problem": problems[name]}
        for name in case.contestants
        if name in times or name in problems
    }
    mine = {name: found for name, found in times.items() if name not in case.contestants}
    if mine:
        best = min(mine, key=lambda name: mine[name].us)
        facts["mosaic"] = _facts(mine[best]) | {
            "config": best,
            "first": mine[first].us if first in mine else None,
            "tuned_us": {name: found.us for name, found in mine.items()},
            "spreads": {name: found.spread for name, found in mine.items()},
            "problems": {name: text for name, text in problems.items() if name not in case.contestants},
        }
        if "xla_fp8" in times:
            expected, got = (first_outputs(entrants[name]) for name in ("xla_fp8", best))
            facts["mosaic"] |= agreement(expected, got)
    return facts


def _facts(timing: Timing) -> dict[str, Any]:
    return {"problem": "", "us": timing.us, "spread": timing.spread, "host_bound": timing.host_bound}


def _chosen(case: Case, limit: int) -> list[Config]:
    """What the autotuner would time, and the best guess of each kind of schedule beside, `limit` in all.

    Of the common shapes, from which one learns what an epilogue costs, as many again: the same tiles with other room
    for the epilogue and for the copies.
    """
    if jax.default_backend() == "cpu":
        return list(backend_of("mosaic").configs(case.call, TARGET))  # type: ignore[arg-type]
    problem, chain = problem_of(case.call), epilogue_of(case.call)
    assert isinstance(problem, Problem)
    assert isinstance(chain, Epilogue)
    return choose(problem, chain.footprint, limit, limit if "common" in case.networks else 0)


def choose(problem: Problem, footprint: Footprint, limit: int, more: int) -> list[Config]:
    """`limit` configs of `configs.generate`, its first guess first; then up to `more` with other room."""
    usual = list(dict.fromkeys(_kinds(problem, footprint, limit)))[:limit]
    schedules: dict[tuple[int, int, bool], Config] = {}
    # And the tiles of the shortest epilogue, which may not fit with what the autotuner's have for this one.
    for config in (*usual, *configs.generate(problem, Footprint())):
        schedules.setdefault((config.taps, config.tile_features, config.pingpong), config)
    in_turn = itertools.zip_longest(*(_rooms(config, footprint) for config in schedules.values()))
    others = [config for config in itertools.chain.from_iterable(in_turn) if config and config not in usual]
    return [*usual, *others[:more]]


def _kinds(problem: Problem, footprint: Footprint, limit: int) -> Iterator[Config]:
    generated = configs.generate(problem, footprint, limit=512)
    yield from generated[: limit // 2 + 1]
    kinds: dict[tuple[bool, bool, bool, bool], Config] = {}
    for config in generated:
        kinds.setdefault((config.taps > 1, config.resident > 0, config.pingpong, config.splits > 1), config)
    yield from kinds.values()
    yield from generated


def _rooms(config: Config, footprint: Footprint) -> Iterator[Config]:
    """The same tile with the stages that other blocks of the epilogue leave, then with fewer stages."""

    def room(config: Config) -> tuple[int, int, int]:
        return footprint.columns(config), footprint.slots(config), config.stages

    narrow = configs.MIN_COLUMNS
    seen = {room(config)}
    # Fewest blocks in flight first: they leave most.
    for columns, slots in ((narrow, 1), (narrow, 2), (0, 1), (narrow, 4), (0, 2)):
        found = configs.staged(dataclasses.replace(config, columns=columns, side_slots=slots), footprint)
        if found is not None and room(found) not in seen:
            seen.add(room(found))
            yield found
    for stages in range(config.stages - 1, max(2, config.stages - 3), -1):
        fewer = dataclasses.replace(config, stages=stages)
        if configs.fits(fewer, footprint):
            yield fewer
