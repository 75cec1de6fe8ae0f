"""The correctness programme of the Mosaic kernel: named and random convolutions, many processes, a time limit.

    python -m tests.hopper.mosaic_run --out results.jsonl [--seeds 0:1000] [--seconds 270] [--processes 12]

Needs no pytest. Every case appends one line to the results as soon as it is done; cases that passed in an earlier run
are not run again, so a programme may take several sessions. Compiling costs a second or two of a core, running next to
nothing: each process compiles some cases ahead in threads and runs them one by one. A kernel that hangs takes its
process with it: it is recorded, and the process starts over behind it. The exit status is 1 if anything failed.

`--dry-run` lowers for CUDA where there is no GPU, and computes every reference.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import fnmatch
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HANG_SECONDS = 60
AHEAD = 3
MEMORY_SHARE = 0.25
"""Of the GPU's memory, for all processes together."""


def main() -> int:
    arguments = _parse()
    if arguments.worker:
        work(arguments, arguments.worker)
        return 0
    begin = time.monotonic()
    environment = dict(os.environ)
    os.environ["JAX_PLATFORMS"] = "cpu"  # this process only needs the names, and the workers all of the GPU
    names = remaining(arguments)
    print(f"{len(names)} cases to run, {len(finished(arguments.out))} done before", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        watch(arguments, environment, Path(scratch), begin + arguments.seconds)
    failed = summarize(arguments.out)
    print(f"{time.monotonic() - begin:.0f} s, {len(remaining(arguments))} cases left", flush=True)
    return 1 if failed else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="results, one JSON object a line; appended to")
    parser.add_argument("--seeds", default="0:1000", help="FIRST:END of the random cases")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--names", default="", help="cases of these names alone: patterns with *, and commas between")
    parser.add_argument("--seconds", type=float, default=270, help="no case starts later")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=100, help="runs of each case, whose bits must be the same")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: lower and compute references")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def all_names(arguments: argparse.Namespace) -> list[str]:
    from tests.hopper.mosaic_cases import NAMED

    first, end = map(int, arguments.seeds.split(":"))
    names = [*NAMED, *(f"random-{seed}" for seed in range(first, end))]
    if arguments.names:
        patterns = arguments.names.split(",")
        return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    return [name for name in names if arguments.only in name]


def finished(out: Path) -> dict[str, dict[str, Any]]:
    """The last result of each case."""
    lines = out.read_text().splitlines() if out.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def remaining(arguments: argparse.Namespace) -> list[str]:
    done = finished(arguments.out)
    return [name for name in all_names(arguments) if name not in done or done[name]["outcome"] != "passed"]


# The parent


def watch(arguments: argparse.Namespace, environment: Mapping[str, str], scratch: Path, end: float) -> None:
    """Runs the workers until all are done or the time is over; a worker that hangs or dies starts over behind it.

    A worker has a folder: its cases are in `queue`, and the one that is on the GPU is in `running`.
    """
    names = remaining(arguments)
    queues = [names[i :: arguments.processes] for i in range(arguments.processes)]
    folders = [scratch / str(i) for i in range(arguments.processes)]
    environment = {
        **environment,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": str(MEMORY_SHARE / arguments.processes),
        # References are many and small, and every core has a process of its own.
        "XLA_FLAGS": f"{environment.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false",
    }
    workers: dict[int, subprocess.Popen[bytes]] = {}
    for i, folder in enumerate(folders):
        folder.mkdir()
        workers[i] = start(environment, folder, queues[i], end)
    while workers:
        time.sleep(0.5)
        for i, worker in list(workers.items()):
            status, note = worker.poll(), folders[i] / "running"
            late = note.exists() and time.time() - note.stat().st_mtime > HANG_SECONDS
            if status is None and not late and time.monotonic() < end + HANG_SECONDS:
                continue
            if status is None:
                worker.kill()
                worker.wait()
            del workers[i]
            if note.exists():
                name = note.read_text()
                note.unlink()
                what = "hung" if late else f"ended the process with status {worker.returncode}"
                record(arguments.out, {"name": name, "outcome": "error", "message": what})
                print(f"{name} {what}", flush=True)
            done = finished(arguments.out)
            queue = [name for name in queues[i] if name not in done]
            if queue and status != 0 and time.monotonic() < end:
                workers[i] = start(environment, folders[i], queue, end)


def start(environment: Mapping[str, str], folder: Path, queue: list[str], end: float) -> subprocess.Popen[bytes]:
    (folder / "queue").write_text("\n".join(queue))
    command = [sys.executable, "-m", "tests.hopper.mosaic_run", *sys.argv[1:]]
    seconds = max(0.0, end - time.monotonic())
    return subprocess.Popen([*command, "--seconds", f"{seconds:.0f}", "--worker", str(folder)], env=environment)


def record(out: Path, entry: dict[str, Any]) -> None:
    with out.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def summarize(out: Path) -> int:
    """Prints what all results say; returns how many cases failed."""
    results = list(finished(out).values())
    print(dict(collections.Counter(entry["outcome"] for entry in results)))
    failed = [entry for entry in results if entry["outcome"] != "passed"]
    for entry in failed:
        print(f"  {entry['name']}: {entry.get('message', '')[:400]}\n      {entry.get('what', '')}")
    measured = [entry for entry in results if "results" in entry]
    for key in ("results", "poisoned", "guarded"):
        print(f"{key}: {sum(entry[key] for entry in measured)}")
    shares: dict[tuple[str, str, str], list[float]] = collections.defaultdict(list)
    for entry in measured:
        for type, share in zip(entry["types"], entry["share_equal"], strict=True):
            shares[entry["operands"], entry["precision"], type].append(share)
    for kind, values in sorted(shares.items()):
        print(f"equal to the reference, {' '.join(kind)}: {sum(values) / len(values):.4f} of {len(values)} results")
    bounds = [ratio for entry in measured for ratio in entry["of_bound"] if ratio is not None]
    if bounds:
        print(f"largest error as a part of its bound, of {len(bounds)} f32 results: {max(bounds):.3f}")
    seconds: collections.Counter[str] = collections.Counter()
    for entry in measured:
        seconds.update(entry["seconds"])
    print("seconds of all processes:", {name: round(value) for name, value in seconds.items()})
    return len(failed)


# A worker


def work(arguments: argparse.Namespace, folder: Path) -> None:
    """Runs the cases of its queue, in order."""
    from tests.hopper.mosaic_cases import NAMED, random_case
    from tests.hopper.mosaic_check import Prepared, prepare, verify

    end = time.monotonic() + arguments.seconds
    note = folder / "running"
    names = iter((folder / "queue").read_text().splitlines())
    platform = "cuda" if arguments.dry_run else None

    def prepared(name: str) -> tuple[dict[str, Any], Prepared]:
        case = NAMED[name] if name in NAMED else random_case(int(name.rpartition("-")[2]))
        call = case.call
        shapes = ", ".join(map(str, call.operand_shapes[:2]))
        entry = {
            "name": name,
            "operands": case.operands,
            "precision": case.precision,
            "types": [shape.element_type for shape in call.output_shapes],
            "what": f"{call.graph} {call.window} {call.dim_labels} {shapes} {case.chosen_config}",
        }
        return entry, prepare(case, platform)

    def ahead(pool: concurrent.futures.Executor) -> Iterator[tuple[str, concurrent.futures.Future[Any]]]:
        waiting = collections.deque((name, pool.submit(prepared, name)) for name in itertools.islice(names, AHEAD))
        while waiting:
            name, future = waiting.popleft()
            yield name, future
            waiting.extend((name, pool.submit(prepared, name)) for name in itertools.islice(names, 1))

    pool = concurrent.futures.ThreadPoolExecutor(AHEAD - 1)
    for name, future in ahead(pool):
        if time.monotonic() > end:
            break
        entry: dict[str, Any] = {"name": name}
        try:
            known, ready = future.result()
            entry |= known
            note.write_text(name)
            entry |= {"outcome": "passed"} if arguments.dry_run else verify(ready, arguments.repeats)
        except Exception as error:
            entry |= {"outcome": "error", "message": f"{type(error).__name__}: {error}"[:1000]}
            entry["traceback"] = traceback.format_exc()[-1500:]
        record(arguments.out, entry)
        note.unlink(missing_ok=True)
        if entry["outcome"] == "error" and not arguments.dry_run and not _alive():
            os._exit(3)  # a fault on the GPU ends every later call of the process too
    pool.shutdown(wait=False, cancel_futures=True)


def _alive() -> bool:
    """Whether this process can still use the GPU."""
    import jax
    import numpy as np

    try:
        return int(jax.device_put(np.int32(1)).block_until_ready()) == 1
    except jax.errors.JaxRuntimeError:
        return False


if __name__ == "__main__":
    sys.exit(main())
