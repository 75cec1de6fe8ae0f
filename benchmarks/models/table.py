"""results.json as tables: times, ratios to bf16 and to XLA's FP8, memory, where the time goes. Imports no JAX.

`render` has all that was measured; `for_docs` a line for each network, and puts it into a page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.models.rows import BASELINE, XLA, Row, rows

RESULTS, TABLE = "results.json", "table.md"
BEGIN, END = "<!-- networks -->\n", "<!-- end of networks -->"


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


def for_docs(content: dict[str, Any]) -> str:
    """A line for each network and recipe that was measured in bf16 and by this project; then where their time goes."""
    found: dict[str, Any] = content["rows"]
    ours = [
        row
        for row in known(found)
        if row.compiler == "auto" and "ms" in found[row.name] and "ms" in found.get(f"{row.case} {BASELINE}", {})
    ]
    lines = [
        "| | scales | bf16, ms | XLA's FP8 | xla_fp8 | vs bf16 | vs XLA's FP8 | memory, GB | kernels |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in ours:
        bf16, xla, fp8 = (found.get(f"{row.case} {v}", {}) for v in (BASELINE, f"{row.recipe}/{XLA}", row.variant))
        cells = [
            row.case,
            row.recipe,
            _ms(bf16),
            _ms(xla),
            _ms(fp8),
            f"{bf16['ms'] / fp8['ms']:.2f}x",
            f"{xla['ms'] / fp8['ms']:.2f}x" if "ms" in xla else "-",
            f"{_memory(bf16)} → {_memory(fp8)}",
            " → ".join(f"{facts['profile']['kernels']:.0f}" for facts in (bf16, fp8)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    shown = {f"{row.case} {BASELINE}" for row in ours} | {row.name for row in ours}
    every = [row for row in known(found) if row.name in shown]
    return "\n".join([*lines, "", *_profile(sorted(every, key=lambda row: row.case), found), ""])


def put_into(page: Path, text: str) -> None:
    """Replaces what stands between the two comments of a page."""
    content = page.read_text()
    before, _, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page}: expected {BEGIN.strip()} and {END} around the tables of networks")
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def _ms(facts: dict[str, Any]) -> str:
    """With by how much the rounds differ, largest minus least."""
    return (
        f"{facts['ms']:.2f} ({facts['spread']:.2f}){' (host)' if facts['host_bound'] else ''}" if "ms" in facts else "-"
    )


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
    # Of runs from before clocks were read there is nothing to show.
    states = any(found[row.name].get("gpu_state") for row in measured)
    columns = [*kinds, "sum", "a step", "host", *(("MHz, least", "W") if states else ())]
    lines = [f"| where the time goes, ms | {' | '.join(columns)} |", f"|---|{'---:|' * len(columns)}"]
    for row in measured:
        facts = found[row.name]
        ms = facts["profile"]["ms"]
        cells = [f"{ms[kind]:.2f}" if kind in ms else "" for kind in kinds]
        cells += [f"{sum(ms.values()):.2f}", *(f"{facts[name]:.2f}" for name in ("ms", "host_ms"))]
        if states:
            gpu = facts.get("gpu_state") or {}
            cells += [f"{gpu['MHz']:.0f}, {gpu['MHz_least']:.0f}", f"{gpu['W']:.0f}"] if gpu else ["", ""]
        lines.append(f"| {row.name} | {' | '.join(cells)} |")
    return lines if measured else []
