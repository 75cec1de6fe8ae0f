"""A few small convolutions of the Mosaic kernel under NVIDIA's compute-sanitizer: out-of-bounds accesses, and races.

    python -m tests.hopper.sanitize --out sanitize.json [--tools memcheck,racecheck,synccheck] [--seconds 120]

One process for each tool, side by side. Every array is an allocation of its own there (XLA's platform allocator), so
that memcheck sees where it ends. The outcome of a tool is its own summary line, and whether the results were right.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CASES = (
    *("odd-full", "gradient-2-odd-full", "stride-2-odd-full", "splits-3", "tail-highest", "pingpong-large"),
    "columns-64-1",
)
"""Cut tiles, phases, strides, a split reduction, promotion, consumers that take turns, blocks that follow in place."""

_SUMMARY = re.compile(
    r"ERROR SUMMARY: (?P<errors>\d+) error|RACECHECK SUMMARY: (?P<hazards>\d+) hazards? displayed "
    r"\((?P<race_errors>\d+) errors?, (?P<warnings>\d+) warnings?\)"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--tools", default="memcheck,racecheck,synccheck")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seconds", type=float, default=120, help="for each tool")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        return run_cases(arguments.cases.split(","))
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(sanitizer).exists():
        print("there is no compute-sanitizer on PATH or in /usr/local/cuda/bin", file=sys.stderr)
        return 2
    tools = arguments.tools.split(",")
    with concurrent.futures.ThreadPoolExecutor(len(tools)) as pool:
        outcomes = pool.map(lambda tool: run_tool(sanitizer, tool, arguments), tools)
        results = dict(zip(tools, outcomes, strict=True))
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if all(result["clean"] for result in results.values()) else 1


def run_cases(names: list[str]) -> int:
    """What runs under the tool."""
    from tests.hopper.mosaic_cases import NAMED
    from tests.hopper.mosaic_check import prepare, verify

    failed = 0
    for name in names:
        outcome = verify(prepare(NAMED[name]), repeats=2)
        print(f"CASE {name} {outcome['outcome']} {outcome['message']}", flush=True)
        failed += outcome["outcome"] != "passed"
    return min(failed, 1)


def run_tool(sanitizer: str, tool: str, arguments: argparse.Namespace) -> dict[str, Any]:
    inside = [sys.executable, "-m", "tests.hopper.sanitize", "--inside", "--cases", arguments.cases]
    environment = dict(
        os.environ,
        XLA_PYTHON_CLIENT_PREALLOCATE="false",
        XLA_PYTHON_CLIENT_ALLOCATOR="platform",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
    )
    start = time.monotonic()
    process = subprocess.Popen(
        [sanitizer, "--tool", tool, "--print-limit", "20", *inside],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=arguments.seconds)
        ended = True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the tool, and the program under it
        text, _ = process.communicate()
        ended = False
    summaries = list(_SUMMARY.finditer(text))
    counts = {key: int(value) for match in summaries for key, value in match.groupdict().items() if value is not None}
    cases = re.findall(r"^CASE (\S+) (\S+)", text, re.MULTILINE)
    complaints = [line for line in text.splitlines() if line.startswith("=========")]
    result = {
        "clean": ended and bool(summaries) and not any(counts.values()),
        "ended": ended,
        "counts": counts,
        "cases": dict(cases),
        "seconds": round(time.monotonic() - start, 1),
        "complaints": complaints[:80],
    }
    print(f"{tool}: {'clean' if result['clean'] else 'NOT CLEAN'} {counts} {result['cases']} {result['seconds']} s")
    if not result["clean"]:
        print("\n".join(complaints[:40] or text.splitlines()[-20:]), flush=True)
    return result


if __name__ == "__main__":
    sys.exit(main())
