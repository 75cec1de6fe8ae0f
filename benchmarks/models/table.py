"""results.json as tables: times, ratios to bf16 and to XLA's FP8, memory, where the time goes. Imports no JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.models.rows import BASELINE, Row, rows

RESULTS, TABLE = "results.json", "table.md"


def write(out: Path, content: dict[str, Any]) -> None:
    """Both files, each whole or not at all."""
    for name, text in ((RESULTS, json.dumps(content, indent=1)), (TABLE, render(content))):
        temporary = out / (name + ".part")
        temporary.write_text(text)
        temporary.replace(out / name)


def describe(facts: dict[str, Any]) -> str:
    """A row as one line."""
    if "ms" not in facts:
        return f"- ({facts.get('problem', 'compiled, not measured')})"
    parts = [f"{facts['ms']:.2f} ms{' (host-bound)' if facts['host_bound'] else ''}"]
    parts += [f"{kind} {ms:.2f}" for kind, ms in facts["profile"]["ms"].items()]
    return ", ".join(parts)


def known(found: dict[str, Any]) -> list[Row]:
    """The rows that results are of."""
    return list({row.name: row for tiny in (False, True) for row in rows(tiny) if row.name in found}.values())


def render(content: dict[str, Any]) -> str:
    """Both tables, of the rows that are there."""
    found: dict[str, Any] = content["rows"]
    every = known(found)
    about = ", ".join(f"{name} {value}" for name, value in content["about"].items())
    return "\n".join([f"<!-- {about} -->", "", *_times(every, found), "", *_profile(every, found), ""])


def _times(every: list[Row], found: dict[str, Any]) -> list[str]:
    lines = [
        "| network | variant | ms | to bf16 | to XLA's FP8 | memory, GB | kernels | compile, s | XLA's autotuning | |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in every:
        facts = found[row.name]
        bf16 = found.get(f"{row.case} {BASELINE}", {}).get("ms")
        xla = found.get(f"{row.case} {row.recipe}/xla", {}).get("ms") if row.recipe != BASELINE else None
        ms = facts.get("ms")
        cells = [
            row.case,
            row.variant,
            f"{ms:.2f}" if ms else "-",
            f"{bf16 / ms:.2f}x" if ms and bf16 else "-",
            f"{xla / ms:.2f}x" if ms and xla else "-",
            _memory(facts),
            f"{facts['profile']['kernels']:.0f}" if ms else "-",
            str(facts.get("compile_s", "-")),
            f"level {facts['xla_autotune']}" if "xla_autotune" in facts else "-",
            facts.get("problem", "host-bound" if facts.get("host_bound") else "").replace("|", "/"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _memory(facts: dict[str, Any]) -> str:
    """What the compiled program needs: arguments, results and temporary tensors. (The device's peak is in the file; it
    counts what XLA needed for its autotuning too.)"""
    size = sum(facts.get("memory", {}).values())
    return f"{size / 1e9:.2f}" if size else "-"


def _profile(every: list[Row], found: dict[str, Any]) -> list[str]:
    measured = [row for row in every if "profile" in found[row.name]]
    used = {kind for row in measured for kind in found[row.name]["profile"]["ms"]}
    order = [kind for row in measured for kind in found[row.name]["profile"]["ms"]]
    kinds = sorted(used, key=order.index)
    lines = [
        f"| where the time goes, ms | {' | '.join(kinds)} | sum |",
        f"|---|{'---:|' * (len(kinds) + 1)}",
    ]
    for row in measured:
        ms = found[row.name]["profile"]["ms"]
        cells = [f"{ms[kind]:.2f}" if kind in ms else "" for kind in kinds]
        lines.append(f"| {row.name} | {' | '.join(cells)} | {sum(ms.values()):.2f} |")
    return lines if measured else []
