"""Makes docs/validation-h200.md of the results of tests/hopper: every test, with its errors; failures are not hidden.

    python benchmarks/validation_report.py OUT/results.jsonl [MORE.jsonl ...] --command "..." \
        [--programs OUT/hopper_jit.json ...] > docs/validation-h200.md

Of a test that ran several times the newest result counts, and the page names those that failed before. `--programs`
adds the table of benchmarks/hopper_jit.py; of a program in several files the last counts. What is known of a test or
program that failed is in benchmarks/validation_notes.json, by a part of its name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
NOTES = Path(__file__).with_name("validation_notes.json")


@dataclasses.dataclass(frozen=True)
class Results:
    """What was read.

    Attributes:
        tests: the newest result of each test that ran, by name, in the order of names.
        skipped: tests that only were skipped, each with the reason.
        failed_before: tests that passed at last and failed in an earlier run, each with the reason.
        environments: each device with its versions, once.
    """

    tests: dict[str, Result]
    skipped: dict[str, str]
    failed_before: dict[str, str]
    environments: list[dict[str, str]]


def load(lines: Iterable[str]) -> Results:
    """Reads lines of results, of several runs in any order. Raises ValueError for what is no JSON."""
    tests: dict[str, Result] = {}
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    environments: list[dict[str, str]] = []
    for entry in sorted((json.loads(line) for line in lines if line.strip()), key=lambda entry: str(entry["date"])):
        if "environment" in entry:
            if entry["environment"] not in environments:
                environments.append(entry["environment"])
        elif entry["outcome"] == "skipped":
            skipped[entry["test"]] = entry["reason"]
        else:
            tests[entry["test"]] = entry
            if entry["outcome"] != "passed":
                failed[entry["test"]] = entry["reason"]
    before = {name: reason for name, reason in sorted(failed.items()) if tests[name]["outcome"] == "passed"}
    return Results(
        dict(sorted(tests.items())),
        {name: reason for name, reason in sorted(skipped.items()) if name not in tests},
        before,
        environments,
    )


_HOW_TO_READ = """\
Most tests run one graph call through cuDNN on the GPU and compare it with `xla_fp8.backends.reference`, in f32 on the
CPU: every element of every result must lie within the bound that [Numbers](numbers.md#on-a-tensor-core) derives. Tests
of `jit` and of a sharded step compare whole programs by the norm of the error, which may be 2%. Those without a type of
result compare bits, memory or messages; random graphs among them are such as cuDNN has no plan for, as it said without
a device. A row is a test and a type of result, and has the worst of all its cases:

- **error**: the largest difference, relative to the largest value of that result.
- **of the bound**: the largest error as a part of what is allowed; f32 results only, as others are rounded.
- **equal**: the least share of elements with the very value of the reference; not for f32.
- **steps**: how many values of the type lie between the two at most. Near zero they are small, and a sum of large
  products is many of them off.\
"""

_PROGRAMS = """\
`benchmarks/hopper_jit.py`: functions under `xla_fp8.jit`, on the Mosaic kernel unless the name says otherwise, against
plain `jax.jit` on the CPU; deep ones against their layers, run one by one, bit for bit. **equal** is the least share of
equal elements of an FP8 result, **norm** the largest norm of an error, relative to that of the result.\
"""


def render(
    results: Results, command: str, programs: Sequence[Mapping[str, Any]] = (), notes: Mapping[str, str] | None = None
) -> str:
    """The page.

    Args:
        command: what made the results; a line for each run.
        programs: rows of benchmarks/hopper_jit.py by name, of each run; the last counts.
        notes: what is known of a failure, by a part of the name of what failed.
    """
    tests, notes = results.tests, notes or {}
    if not tests:
        return "# Validation on an H200\n\nNo results.\n"
    dates = sorted(str(result["date"]) for result in tests.values())
    failed = {name: str(result["reason"]) for name, result in tests.items() if result["outcome"] != "passed"}
    text = [
        "# Validation on an H200",
        "",
        f"{len(tests)} tests ran, {len(failed)} failed, {len(results.skipped)} were skipped; "
        f"{dates[0]} to {dates[-1]}.",
        "",
        *(f"    {line}" for line in command.splitlines()),
        "",
        *environments(results),
        "",
        "## Tests",
        "",
        _HOW_TO_READ,
        "",
        "| test | result | cases | failed | error | of the bound | equal | steps |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
        *rows(tests.values()),
        "",
        "## Failures",
        "",
        *(_listed(failed, notes) or ["None."]),
    ]
    if results.failed_before:
        text += ["", "## Failed in an earlier run and passed at last", "", *_listed(results.failed_before, notes)]
    if results.skipped:
        text += ["", "## Skipped", "", *_listed(results.skipped, notes)]
    if programs:
        last = {name: row for run in programs for name, row in run.items()}
        text += ["", "## Whole programs", "", _PROGRAMS, "", *program_rows(last)]
        told = {
            name: "passed, and failed in an earlier run" if last[name]["ok"] else "failed"
            for run in programs
            for name, row in run.items()
            if not row["ok"]
        }
        text += ["", *_listed(told, notes)] if told else []
    return "\n".join(text) + "\n"


def environments(results: Results) -> list[str]:
    """A line for each set of versions, with the devices that processes saw."""
    found: dict[str, list[str]] = defaultdict(list)
    for environment in results.environments:
        versions = ", ".join(f"{name} {value}" for name, value in sorted(environment.items()) if name != "device")
        found[versions].append(environment.get("device", "unknown device"))
    return [f"- {' or '.join(sorted(devices, reverse=True))}: {versions}" for versions, devices in found.items()]


def _listed(reasons: Mapping[str, str], notes: Mapping[str, str]) -> list[str]:
    """Lines of a list: what, why, and what is known of it."""
    lines = []
    for name, reason in reasons.items():
        known = [f"  {note}" for part, note in notes.items() if part in name]
        reason = reason.removeprefix("Skipped: ")
        shown = reason if len(reason) <= 240 else f"{reason[:240]} ..."
        lines.append(f"- `{name}`: {shown}" if shown else f"- `{name}`")
        lines += ["", *known, ""] if known else []
    return lines


def rows(tests: Iterable[Result]) -> list[str]:
    """The rows of the table, in the order of the tests."""
    groups: dict[tuple[str, str], list[tuple[Result, int]]] = defaultdict(list)
    for result in tests:
        function = re.sub(r"\[.*", "", str(result["test"]).rpartition("::")[2])
        for index, type_ in enumerate(result.get("types", ["-"])):
            groups[function.removeprefix("test_").replace("_", " "), type_].append((result, index))
    order = sorted(groups, key=lambda key: key[0])  # stable: types stay in the order of the results
    return [f"| {name} | {type_} | {' | '.join(_cells(groups[name, type_], type_))} |" for name, type_ in order]


def program_rows(programs: Mapping[str, Any]) -> list[str]:
    """The table of whole programs."""
    table = ["| program | | kernels | equal | norm | time of a call |", "|---|---|--:|--:|--:|--:|"]
    for name, row in programs.items():
        results = row.get("results", [])
        cells = [
            name,
            "ok" if row["ok"] else "**failed**",
            str(row.get("kernels", "-")),
            _worst([result["equal"] for result in results if result["type"].startswith("float8")], min, ".2%"),
            _worst([result["norm"] for result in results], max, ".1e"),
            f"{row['us']:.1f} us" if "us" in row else "-",
        ]
        table.append(f"| {' | '.join(cells)} |")
        if "error" in row:
            table[-1] = f"| {name} | {'ok' if row['ok'] else '**failed**'}: {row['error'][:200]} | - | - | - | - |"
    return table


def _cells(cases: Sequence[tuple[Result, int]], type_: str) -> list[str]:
    failed = sum(result["outcome"] != "passed" for result, _ in cases)

    def values(key: str) -> list[float]:
        return [result[key][i] for result, i in cases if i < len(result.get(key, ())) and result[key][i] is not None]

    relative = [error / largest for error, largest in zip(values("max_abs"), values("largest"), strict=True) if largest]
    return [
        str(len(cases)),
        str(failed),
        _worst(relative, max, ".2g"),
        _worst(values("of_bound"), max, ".2g"),
        *(["-", "-"] if type_ == "float32" else _exact(values("share_equal"), values("max_steps"))),
    ]


def _exact(shares: Sequence[float], steps: Sequence[float]) -> list[str]:
    return [_worst(shares, min, ".2%"), _worst(steps, max, "g")]


def _worst(numbers: Sequence[float], choose: Any, format_: str) -> str:
    return f"{choose(numbers):{format_}}" if numbers else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--command", action="append", help="what made the results, once for each run")
    parser.add_argument("--programs", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    programs = [json.loads(path.read_text()) for path in arguments.programs]
    command = "\n".join(arguments.command or ["make validate"])
    lines = [line for path in arguments.results for line in path.read_text().splitlines()]
    print(render(load(lines), command, programs, json.loads(NOTES.read_text())), end="")


if __name__ == "__main__":
    main()
