"""One row in one process: many configs of this project's kernels beside XLA's programs, timed in turn.

For what the two phases do not tell: how good the order of `configs.generate` is, and what a schedule or an epilogue
costs. Programs are compiled, loaded and run for the first time while others use the GPU; times have it alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks.conv import delay, executables, state
from benchmarks.conv.measure import bare_row, first_outputs
from benchmarks.conv.programs import EPILOGUES, KERNELS, TARGET, Case, backend_of, calls, operands_of, program
from benchmarks.conv.shapes import Shape
from benchmarks.conv.timing import Contestant, Inputs, Timing, agreement, short, time_in_turn
from xla_fp8.backends.mosaic import configs
from xla_fp8.backends.mosaic.configs import Config, Footprint
from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of
from xla_fp8.backends.mosaic.problem import Problem, problem_of


def measure(case: Case, out: Path, gpu: str, limit: int, process: str) -> dict[str, Any]:
    """A row of results.json: of a kernel the fastest of some configs, with the times of all as those of its tuning.

    XLA's contestants are those that other processes left in `out`.
    """
    others = [_Entrant(case, name) for name in case.contestants if name not in KERNELS]
    facts = _compete([*others, *_kernels(case, limit)], out, gpu)
    return bare_row(case, process) | {"contestants": {name: found for (_, name), found in facts.items()}}


def measure_epilogues(shape: Shape, out: Path, gpu: str, limit: int) -> dict[str, Any]:
    """What each epilogue of one shape costs: the same facts of mosaic for each, all timed in turn."""
    cases = [Case(shape, epilogue, (), ("mosaic",)) for epilogue in EPILOGUES]
    facts = _compete([entrant for case in cases for entrant in _kernels(case, limit)], out, gpu)
    bytes_of = {case.epilogue: case.bytes for case in cases}
    return {epilogue: found | {"bytes": bytes_of[epilogue]} for (epilogue, _), found in facts.items()}


@dataclasses.dataclass(frozen=True)
class _Entrant:
    """A contestant, with one of its configs where it is a kernel; the first one is its first guess."""

    case: Case
    contestant: str
    config: Config | None = None

    @property
    def group(self) -> tuple[str, str]:
        """Those of whom only the fastest counts: an epilogue, and a contestant."""
        return self.case.epilogue, self.contestant

    def __str__(self) -> str:
        return f"{self.case.name} / {self.contestant} / {self.config}"

    def load(self, out: Path) -> Any:
        """The executable: that of a kernel is compiled, others were stored."""
        if self.contestant not in KERNELS:
            return executables.stored(out, self.case, self.contestant)
        return program(self.case, self.contestant, backend_of(self.contestant), self.config).compile()


def _kernels(case: Case, limit: int) -> list[_Entrant]:
    """`limit` configs of mosaic, and half as many of those that sum in f32, where both are asked for."""
    found = [_Entrant(case, "mosaic", config) for config in _chosen(case, limit)]
    if "highest" in case.contestants:
        configs = backend_of("highest").configs(case.call, TARGET)[: max(1, limit // 2)]
        found += [_Entrant(case, "highest", config) for config in configs]  # type: ignore[arg-type]
    return found


def _compete(entrants: Sequence[_Entrant], out: Path, gpu: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Compiles all side by side, times them in turn, and says of each group how fast its fastest was."""
    problems: dict[str, str] = {}
    compiled: dict[_Entrant, Any] = {}
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for entrant, future in [(entrant, pool.submit(entrant.load, out)) for entrant in entrants]:
            try:
                compiled[entrant] = future.result()
            except FileNotFoundError:
                pass  # not tuned: not in the row
            except Exception as error:
                problems[str(entrant)] = short(error)
    inputs = Inputs(entrants[0].case.shape.product[2])
    operands = {entrant: operands_of(entrant.case, entrant.contestant) for entrant in compiled}
    for needed in operands.values():
        inputs.prepare(needed)
    delay.compiled()
    running: dict[str, Contestant] = {}
    with state.alone(out, gpu):
        for entrant, executable in compiled.items():
            arguments = inputs.of(operands[entrant])
            running[str(entrant)] = Contestant(executable, arguments, calls(operands[entrant]))
        jax.block_until_ready([contestant.arguments for contestant in running.values()])
    # cuDNN builds its plans when a program runs for the first time: up to 7 s, in which others may use the GPU. What is
    # run is short, and a round of theirs that it falls into is an outlier.
    for name, contestant in list(running.items()):
        try:
            jax.block_until_ready(contestant.executable(*contestant.arguments))
        except Exception as error:
            problems[name] = short(error)
            del running[name]
    with state.alone(out, gpu):
        timings = time_in_turn(running)
        problems |= {name: found for name, found in timings.items() if isinstance(found, str)}
        times = {name: found for name, found in timings.items() if isinstance(found, Timing)}
        groups: dict[tuple[str, str], list[_Entrant]] = {}
        for entrant in entrants:
            groups.setdefault(entrant.group, []).append(entrant)
        facts = {group: found for group, members in groups.items() if (found := _facts(members, times, problems))}
        timed = [entrant for entrant in entrants if str(entrant) in times]
        fastest = {entrant.group: entrant for entrant in sorted(timed, key=lambda one: -times[str(one)].us)}
        _compare(facts, fastest, running)
    for group, entrant in fastest.items():
        if entrant.contestant in KERNELS:
            facts[group]["launches"] = _launches(compiled[entrant])
    return facts


def _facts(members: Sequence[_Entrant], times: Mapping[str, Timing], problems: Mapping[str, str]) -> dict[str, Any]:
    """Of the fastest of a group; empty where it was not there."""
    timed = {entrant: found for entrant in members if (found := times.get(str(entrant)))}
    failed = {str(entrant.config): problems[str(entrant)] for entrant in members if str(entrant) in problems}
    if not timed:
        return {"problem": next(iter(failed.values()))} if failed else {}
    best = min(timed, key=lambda entrant: timed[entrant].us)
    timing = timed[best]
    facts = {"problem": ""} | timing.facts
    if best.contestant not in KERNELS:
        return facts
    first = timed.get(members[0])
    return facts | {
        "config": str(best.config),
        "first": first.us if first else None,
        "tuned_us": {str(entrant.config): found.us for entrant, found in timed.items()},
        "spreads": {str(entrant.config): found.spread for entrant, found in timed.items()},
        "problems": failed,
    }


def _launches(executable: Any) -> dict[str, int]:
    """How many kernels a program launches, by the kind of instruction of XLA."""
    with contextlib.suppress(Exception):  # not every executable has its text
        _, _, entry = executable.as_text().rpartition("ENTRY")
        return {
            kind: count for kind in ("custom-call", "fusion", "reduce", "copy") if (count := entry.count(f" {kind}("))
        }
    return {}


def _compare(
    facts: Mapping[tuple[str, str], dict[str, Any]],
    fastest: Mapping[tuple[str, str], _Entrant],
    running: Mapping[str, Contestant],
) -> None:
    """How near the results of each kernel are to XLA's in FP8, where that ran."""
    for (epilogue, contestant), entrant in fastest.items():
        peer = fastest.get((epilogue, "xla_fp8"))
        if contestant in KERNELS and peer is not None:
            expected, got = (first_outputs(running[str(one)]) for one in (peer, entrant))
            facts[epilogue, contestant] |= agreement(expected, got)


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
