"""Makes docs/validation-h200.md of the results of tests/hopper: every test, with its errors; failures are not hidden.

    python benchmarks/validation_report.py OUT/results.jsonl [MORE.jsonl ...] --command "..." > docs/validation-h200.md

Of a test that ran several times the newest result counts, and the report says how often it failed before.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Results:
    """What was read.

    Attributes:
        tests: the newest result of each test that ran, by name, in the order of names.
        skipped: tests that only were skipped, each with the reason.
        failed_before: tests that passed at last and failed in an earlier run.
        environments: each device with its versions, once.
    """

    tests: dict[str, Result]
    skipped: dict[str, str]
    failed_before: list[str]
    environments: list[dict[str, str]]


def load(lines: Iterable[str]) -> Results:
    """Reads lines of results, of several runs in any order. Raises ValueError for what is no JSON."""
    tests: dict[str, Result] = {}
    skipped, failed, environments = {}, set(), []
    for entry in sorted((json.loads(line) for line in lines if line.strip()), key=lambda entry: str(entry["date"])):
        if "environment" in entry:
            if entry["environment"] not in environments:
                environments.append(entry["environment"])
        elif entry["outcome"] == "skipped":
            skipped[entry["test"]] = entry["reason"]
        else:
            tests[entry["test"]] = entry
            if entry["outcome"] != "passed":
                failed.add(entry["test"])
    before = sorted(name for name in failed if tests[name]["outcome"] == "passed")
    return Results(
        dict(sorted(tests.items())),
        {name: reason for name, reason in sorted(skipped.items()) if name not in tests},
        before,
        environments,
    )


def render(results: Results, command: str) -> str:
    """The page."""
    tests = results.tests
    if not tests:
        return "# Validation on an H200\n\nNo results.\n"
    dates = sorted(str(result["date"]) for result in tests.values())
    failed = [result for result in tests.values() if result["outcome"] != "passed"]
    text = [
        "# Validation on an H200",
        "",
        f"{len(tests)} tests ran, {len(failed)} failed, {len(results.skipped)} were skipped; "
        f"{dates[0]} to {dates[-1]}.",
        "",
        f"    {command}",
        "",
        *(f"- {', '.join(f'{name} {value}' for name, value in sorted(e.items()))}" for e in results.environments),
        "",
        "The reference is `xla_fp8.backends.reference` in f32 on the CPU; [Numbers](numbers.md#on-a-tensor-core) has",
        "the bound that every element must keep. A row for each test and type of result, with the worst of its cases.",
        "",
        "| test | result | cases | failed | largest error / largest value | of the bound | most steps | least equal |",
        "|---|---|---|---|---|---|---|---|",
        *rows(tests.values()),
        "",
        "## Failures",
        "",
        *([f"- `{r['test']}`: {r['reason']}" for r in failed] or ["None."]),
    ]
    if results.failed_before:
        text += ["", "## Failed in an earlier run and passed at last", ""]
        text += [f"- `{name}`" for name in results.failed_before]
    if results.skipped:
        text += ["", "## Skipped", "", *(f"- `{name}`: {reason}" for name, reason in results.skipped.items())]
    return "\n".join(text) + "\n"


def rows(tests: Iterable[Result]) -> list[str]:
    """The rows of the table, in the order of the tests."""
    groups: dict[tuple[str, str], list[tuple[Result, int]]] = defaultdict(list)
    for result in tests:
        function = re.sub(r"\[.*", "", str(result["test"]).rpartition("::")[2])
        for index, type_ in enumerate(result.get("types", ["-"])):
            groups[function, type_].append((result, index))
    return [f"| {function} | {type_} | {' | '.join(_cells(cases))} |" for (function, type_), cases in groups.items()]


def _cells(cases: Sequence[tuple[Result, int]]) -> list[str]:
    failed = sum(result["outcome"] != "passed" for result, _ in cases)

    def values(key: str) -> list[float]:
        return [result[key][i] for result, i in cases if i < len(result.get(key, ())) and result[key][i] is not None]

    relative = [error / largest for error, largest in zip(values("max_abs"), values("largest"), strict=True) if largest]
    return [
        str(len(cases)),
        str(failed),
        _worst(relative, max, ".2g"),
        _worst(values("of_bound"), max, ".2g"),
        _worst(values("max_steps"), max, "g"),
        _worst(values("share_equal"), min, ".2%"),
    ]


def _worst(numbers: Sequence[float], choose: Any, format_: str) -> str:
    return f"{choose(numbers):{format_}}" if numbers else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--command", default="make validate")
    arguments = parser.parse_args()
    lines = [line for path in arguments.results for line in path.read_text().splitlines()]
    print(render(load(lines), arguments.command), end="")


if __name__ == "__main__":
    main()
