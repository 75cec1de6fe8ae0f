"""Makes docs/validation-h200.md of the results of tests/hopper: every test, with its errors; failures are not hidden.

python benchmarks/validation_report.py OUT/*.jsonl --about "NVIDIA H200, ..." > docs/validation-h200.md
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def load(paths: list[Path]) -> dict[str, Result]:
    """The newest result of each test."""
    results: dict[str, Result] = {}
    lines = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    for result in sorted(lines, key=lambda result: str(result["date"])):
        if result["outcome"] != "skipped":
            results[str(result["test"])] = result
    return results


def rows(results: dict[str, Result]) -> list[str]:
    """One row for each test function and type of result: how many cases, and the worst numbers of them."""
    groups: dict[tuple[str, str], list[tuple[Result, int]]] = defaultdict(list)
    for name, result in results.items():
        function = re.sub(r"\[.*", "", name.rpartition("::")[2])
        for index, type_ in enumerate(result.get("types", ["-"])):
            groups[function, type_].append((result, index))
    lines = []
    for (function, type_), cases in groups.items():
        failed = sum(result["outcome"] == "failed" for result, _ in cases)
        measured = [(result, index) for result, index in cases if "max_abs" in result]
        if measured:
            relative = (
                max(r["max_abs"][i] / r["largest"][i] for r, i in measured if r["largest"][i])
                if any(r["largest"][i] for r, i in measured)
                else 0.0
            )
            numbers = [
                f"{relative:.2g}",
                f"{max(r['max_steps'][i] for r, i in measured):g}",
                f"{min(r['share_equal'][i] for r, i in measured):.2%}",
            ]
        else:
            numbers = ["-", "-", "-"]
        lines.append(f"| {function} | {type_} | {len(cases)} | {failed} | {' | '.join(numbers)} |")
    return lines


def render(results: dict[str, Result], about: str, command: str) -> str:
    dates = sorted(str(result["date"]) for result in results.values())
    failed = [result for result in results.values() if result["outcome"] == "failed"]
    text = [
        "# Validation on an H200",
        "",
        f"{about}. {len(results)} tests, {len(failed)} failed; {dates[0]} to {dates[-1]}." if dates else "No results.",
        "",
        f"Command: `{command}`. The reference is `xla_fp8.backends.reference` in f32 on the CPU.",
        "",
        "| test | type of result | cases | failed | largest error / largest value | most steps | least share equal |",
        "|---|---|---|---|---|---|---|",
        *rows(results),
        "",
        "## Failures",
        "",
    ]
    text += [f"- `{r['test']}`: {_last_line(str(r['message']))}" for r in failed] or ["None."]
    return "\n".join(text) + "\n"


def _last_line(message: str) -> str:
    return next((line.strip() for line in reversed(message.splitlines()) if line.strip()), "no message")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--about", default="NVIDIA H200")
    parser.add_argument("--command", default="make validate")
    arguments = parser.parse_args()
    print(render(load(arguments.results), arguments.about, arguments.command), end="")


if __name__ == "__main__":
    main()
