"""Schedules of the Mosaic kernel side by side on a Hopper GPU: who works on a tile, and what a step copies.

    PYTHONPATH=. python3 benchmarks/mosaic_variants.py --out variants.json [--budget-seconds 120] [--only 64x64,7x7]
    PYTHONPATH=. python3 benchmarks/mosaic_variants.py --dry-run     # no GPU: lowers for cuda, measures nothing

For each shape and epilogue the first config, in which both consumers share a tile and each step copies one tap, is the
yardstick: the results of all others must equal its results bit for bit, as the operands are small whole numbers, whose
sums are exact in any order (`same` in the table is the share that is equal); on the small shapes its own results are
compared with the reference. `*` marks what runs where
nothing is tuned. Times are device-bound, as in `mosaic_session.py`. A config that
hangs is recorded, and the process starts over without it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from benchmarks import mosaic_session as base
from xla_fp8.backends.mosaic import configs
from xla_fp8.backends.mosaic.configs import Config, Footprint
from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of
from xla_fp8.backends.mosaic.problem import Problem, problem_of

CASES: dict[str, tuple[tuple[int, ...], int, tuple[int, int], int, int]] = {
    # Name: input size, channels, window, features, stride.
    "odd": ((5, 13, 19), 160, (3, 3), 176, 1),
    "56x56-64": ((64, 56, 56), 64, (3, 3), 64, 1),
    "28x28-128": ((64, 28, 28), 128, (3, 3), 128, 1),
    "7x7-512": ((64, 7, 7), 512, (3, 3), 512, 1),
    "28x28-512-128-1x1": ((64, 28, 28), 512, (1, 1), 128, 1),
    "112x112-64-128": ((64, 112, 112), 64, (3, 3), 128, 1),
    "sd2/64": ((2, 64, 64), 320, (3, 3), 320, 1),
    "64x64-256": ((32, 64, 64), 256, (3, 3), 256, 1),
    "56x56-128": ((64, 56, 56), 128, (3, 3), 128, 1),
    "odd-wide": ((3, 30, 31), 256, (3, 3), 384, 1),
    "odd-many": ((16, 61, 59), 64, (3, 3), 208, 1),
    "odd-stride": ((16, 61, 123), 64, (3, 3), 208, 2),
    "56x56-128-s2": ((64, 56, 56), 128, (3, 3), 128, 2),
    "56x56-64-256-1x1": ((64, 56, 56), 64, (1, 1), 256, 1),
    "14x14-512": ((64, 14, 14), 512, (3, 3), 512, 1),
    "32x32-1024": ((16, 32, 32), 1024, (3, 3), 1024, 1),
    "sdxl": ((1, 64, 64), 1280, (3, 3), 1280, 1),
    "56x56-256-1x1": ((64, 56, 56), 256, (1, 1), 256, 1),
}
EPILOGUES = {
    "odd": ("amax", "bias-silu-residual"),
    "odd-wide": ("amax",),
    "odd-many": ("bias-silu-residual",),
    "odd-stride": ("amax",),
    "64x64-256": ("scale", "amax", "bias-relu-residual-fp8", "bias-silu-residual"),
}
SMALL = ("odd", "odd-wide", "odd-many", "odd-stride")
"""Only checked, not timed."""


def case_of(name: str, epilogue: str) -> base.Case:
    size, channels, window, features, stride = CASES[name]
    return base.Case(name, size, channels, window, features, stride=stride, **base.EPILOGUES[epilogue])


def variants(problem: Problem, epilogue: Epilogue) -> Iterator[Config]:
    """What the autotuner would time, and the best guess of each kind beside; first the yardstick. Without splits."""
    footprint = epilogue.footprint
    generated = [c for c in configs.generate(problem, footprint, limit=512) if c.splits == 1]
    kinds: dict[tuple[bool, bool, bool], list[Config]] = {}
    for config in generated:
        kinds.setdefault((config.taps > 1, config.resident > 0, config.pingpong), []).append(config)
    yield kinds[False, False, False][0]
    yield from generated[:5]
    for kind, found in kinds.items():
        yield found[0]
        if kind[2] and not kind[1]:
            yield from narrower(found[0], footprint)
        yield from [config for config in found if config.tile_pixels != found[0].tile_pixels][: 1 if kind[0] else 0]


def narrower(config: Config, footprint: Footprint) -> Iterator[Config]:
    """The same with an epilogue that takes less room, and more stages for it: for graphs with side tensors."""
    for columns, slots in ((0, 1), (32, 2), (32, 1)) if footprint.side_sizes else ():
        bare = dataclasses.replace(config, columns=columns, side_slots=slots, stages=0)
        room = configs.SHARED_MEMORY - configs.shared_memory(bare, footprint)
        yield dataclasses.replace(bare, stages=min(8, 768 // bare.tile_channels, room // bare.stage_bytes))


def run(session: base.Session, name: str, epilogue: str) -> None:
    case = case_of(name, epilogue)
    problem, chain = problem_of(case.call), epilogue_of(case.call)
    assert isinstance(problem, Problem)
    assert isinstance(chain, Epilogue)
    chosen = list(dict.fromkeys(variants(problem, chain)))
    print(f"{name} {epilogue}", flush=True)
    if session.dry:
        for config in chosen:
            try:
                base.lower(case.backend.lower(case.call, config), base.shapes_of(case), True)
                print(f"    {configs.shared_memory(config, chain.footprint):7} bytes  {config}", flush=True)
            except Exception as error:
                print(f"    ERROR {config}: {base.short(error)}", flush=True)
        return
    keys = {config: f"{name}/{epilogue}/{config}" for config in chosen}
    chosen = [chosen[0], *(c for c in chosen[1:] if keys[c] not in session.entries)]
    data = base.Inputs.of(case, integers=True)
    arguments = (data.inputs, *data.rest)
    futures = {}
    for config in chosen:
        try:
            function = base.inner_times(case.backend.lower(case.call, config))
            lowered = base.lower(function, base.data_shapes(data), False)
            futures[config] = session.pool.submit(lowered.compile)
        except Exception as error:
            session.record(keys[config], {"ok": False, "error": base.short(error)})
            print(f"    ERROR in lowering {config}: {base.short(error)}", flush=True)
    if name in SMALL:
        whole = base.lower(case.backend.lower(case.call, chosen[0]), base.shapes_of(case), False)
        base.check(session, case, session.pool.submit(whole.compile))
    concurrent.futures.wait(futures.values())
    expected: list[np.ndarray[Any, Any]] | None = None
    for config, future in futures.items():
        session.start(keys[config])
        try:
            executable = future.result()
            got = [np.asarray(array).reshape(-1).view(np.uint8) for array in jax.tree.leaves(executable(*arguments)[0])]
            if expected is None:
                expected = got
            same = min(float(np.mean(a == b)) for a, b in zip(got, expected, strict=True))
            us = math.nan if name in SMALL else 1e6 * base.seconds_a_call(executable, arguments)
        except Exception as error:
            session.record(keys[config], {"ok": False, "error": base.short(error)})
            print(f"    ERROR {config}: {base.short(error)}", flush=True)
            continue
        session.record(keys[config], {"ok": same == 1.0, "us": us, "same": same})
        mark = "*" if config == configs.generate(problem, chain.footprint)[0] else " "
        print(f"  {mark} {us:8.1f} us {case.flops / us / 1e6:6.0f} TF/s  same {same:.6f}  {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("mosaic_variants.json"))
    parser.add_argument("--done", type=pathlib.Path, help="results of an earlier run, not to be measured again")
    parser.add_argument("--budget-seconds", type=float, default=120)
    parser.add_argument("--only", default="", help="comma-separated parts of shape/epilogue names")
    parser.add_argument("--dry-run", action="store_true", help="lower for cuda on this machine and measure nothing")
    options = parser.parse_args()
    base.HANG_SECONDS = 20
    entries = json.loads(options.done.read_text()) if options.done and options.done.exists() else {}
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        deadline = time.monotonic() + options.budget_seconds
        session = base.Session(options.out, deadline, options.dry_run, entries, pool)
        if not options.dry_run:
            threading.Thread(target=session.watch, daemon=True).start()
        for name in CASES:
            for epilogue in EPILOGUES.get(name, ("scale",)):
                wanted = [part for part in options.only.split(",") if part]
                if wanted and not any(part in f"{name}/{epilogue}" for part in wanted):
                    continue
                if session.time_left < 5:
                    print(f"no time left for {name} {epilogue}")
                    continue
                run(session, name, epilogue)


if __name__ == "__main__":
    main()
