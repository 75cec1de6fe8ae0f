"""Tables, ratios and plots of results.json."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.conv import state

MAIN = "amax"
_MULTIPROCESSORS = 132
_TILE = 128 * 256
"""Outputs of a tile: a convolution with fewer than 132 of them leaves multiprocessors without work."""

_HEADS = (
    *("convolution", "TF/s", "mosaic", "highest", "cudnn", "XLA FP8", "XLA bf16", "vs FP8", "vs bf16"),
    *("highest vs FP8", "of cuBLASLt", "first guess", "equal"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of results.json."""

    data: dict[str, Any]

    @property
    def shape(self) -> str:
        return str(self.data["shape"])

    @property
    def epilogue(self) -> str:
        return str(self.data["epilogue"])

    @property
    def fills(self) -> bool:
        """Whether there is a tile for every multiprocessor."""
        m, n, _ = self.data["product"]
        return bool(m * n >= _MULTIPROCESSORS * _TILE)

    def us(self, contestant: str) -> float | None:
        found = self.data["contestants"].get(contestant, {}).get("us")
        return None if found is None else float(found)

    def ratio(self, slow: str, fast: str) -> float | None:
        """How many times as fast `fast` is."""
        a, b = self.us(slow), self.us(fast)
        return a / b if a and b else None

    def tflops(self, contestant: str) -> float | None:
        us = self.us(contestant)
        return float(self.data["flops"]) / us / 1e6 if us else None

    def against_xla(self, *ours: str) -> float | None:
        """How many times as fast the fastest of `ours` is as the faster of XLA's two."""
        theirs, mine = self._fastest("xla_fp8", "xla_bf16"), self._fastest(*ours)
        return theirs / mine if theirs and mine else None

    def _fastest(self, *contestants: str) -> float | None:
        return min((us for name in contestants if (us := self.us(name))), default=None)

    @property
    def guess(self) -> float | None:
        """How much slower than the fastest config the first one was, when they were tuned."""
        facts = self.data["contestants"].get("mosaic", {})
        times = facts.get("tuned_us", {})
        return facts["first"] / min(times.values()) - 1 if len(times) > 1 and facts.get("first") else None

    def cells(self) -> list[str]:
        def time(contestant: str) -> str:
            facts = self.data["contestants"].get(contestant)
            if facts is None:
                return ""
            mark = "~" if facts.get("host_bound") else ""
            unfused = " (not fused)" if facts.get("fused") is False else ""
            return f"{facts['us']:.1f}{mark}{unfused}" if "us" in facts else "-"

        tflops, equal = self.tflops("mosaic"), self.data["contestants"].get("mosaic", {}).get("equal")
        return [
            f"`{self.shape}`",
            f"{tflops:.0f}" if tflops else "",
            *(time(contestant) for contestant in ("mosaic", "highest", "cudnn", "xla_fp8", "xla_bf16")),
            _times(self.ratio("xla_fp8", "mosaic")),
            _times(self.ratio("xla_bf16", "mosaic")),
            _times(self.ratio("xla_fp8", "highest")),
            _percent(self.ratio("gemm", "mosaic")),
            "" if self.guess is None else f"+{self.guess:.0%}",
            "" if equal is None else f"{equal:.1%}",
        ]


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else ""


def _percent(ratio: float | None) -> str:
    return f"{ratio:.0%}" if ratio else ""


def table(rows: Iterable[Row]) -> str:
    """Markdown; times in microseconds, TF/s of mosaic. Columns in which nothing stands are left out."""
    lines = [_HEADS, *(row.cells() for row in rows)]
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    return _markdown(list(zip(*columns, strict=True)))


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table, of which all but the first column are numbers."""
    heads, *rest = lines
    rule = "|---" + "|--:" * (len(heads) - 1) + "|"
    return "\n".join([f"| {' | '.join(heads)} |", rule, *(f"| {' | '.join(cells)} |" for cells in rest)])


def by_network(rows: Sequence[Row]) -> str:
    """Markdown: for each network the geometric means over its shapes, and the least."""
    lines = [("network/batch", "shapes", "vs XLA FP8", "least", "vs XLA bf16", "least", "vs the faster", "least")]
    networks = sorted({name for row in rows for name in row.data["networks"]})
    groups = {"all": list(rows)} | {name: [row for row in rows if name in row.data["networks"]] for name in networks}
    for name, group in groups.items():
        cells: list[str] = []
        for of in (_vs_fp8, _vs_bf16, _vs_faster):
            found = [ratio for row in group if (ratio := of(row))]
            cells += [_times(statistics.geometric_mean(found)), _times(min(found))] if found else ["", ""]
        lines.append((name, str(len(group)), *cells))
    return _markdown(lines)


def _vs_fp8(row: Row) -> float | None:
    return row.ratio("xla_fp8", "mosaic")


def _vs_bf16(row: Row) -> float | None:
    return row.ratio("xla_bf16", "mosaic")


def _vs_faster(row: Row) -> float | None:
    return row.against_xla("mosaic")


def in_turn(content: dict[str, Any]) -> str:
    """Markdown: the time with a scale alone; with each other epilogue how much more, and the time to copy its bytes."""
    found = content.get("epilogues", {})
    epilogues_of = {shape: epilogues for shape, epilogues in found.items() if "us" in epilogues.get("scale", {})}
    names = [name for name in next(iter(epilogues_of.values()), {}) if name != "scale"]
    lines = [("convolution", "scale", *names)]
    for shape, epilogues in epilogues_of.items():
        bare = epilogues["scale"]
        cells = []
        for facts in (epilogues[name] for name in names):
            bytes_us = (facts["bytes"] - bare["bytes"]) / content["ceilings"]["copy_bytes_per_s"] * 1e6
            more = f"{facts['us'] / bare['us']:.2f}x {facts['us'] - bare['us']:+.1f}" if "us" in facts else "-"
            cells.append(more + (f" ({bytes_us:.1f})" if bytes_us > 0.05 else ""))
        lines.append((f"`{shape}`", f"{bare['us']:.1f}", *cells))
    return _markdown(lines) if names else ""


def ratios(name: str, rows: Sequence[Row], of: Callable[[Row], float | None]) -> str:
    """One line: geometric mean, least, and how many are below 1."""
    found = {row.shape: ratio for row in rows if (ratio := of(row))}
    if not found:
        return f"{name}: no rows"
    least = min(found, key=found.__getitem__)
    below = [shape for shape, ratio in found.items() if ratio < 1]
    return (
        f"{name}: geometric mean {statistics.geometric_mean(found.values()):.2f} over {len(found)}, least "
        f"{found[least]:.2f} ({least}), {len(below)} below 1 {below or ''}"
    )


def summary(content: dict[str, Any]) -> str:
    """What the aims ask for, in lines."""
    rows = [Row(row) for row in content["rows"].values()]
    main = [row for row in rows if row.epilogue == MAIN]
    lines = [f"{content['about']}; ceilings {content['ceilings']}"]
    lines.append(f"{len(rows)} rows from {len({row.data['process'] for row in rows})} process(es)")
    lines.append(ratios("mosaic vs XLA FP8", main, _vs_fp8))
    lines.append(ratios("mosaic vs XLA bf16", main, _vs_bf16))
    lines.append(ratios("mosaic vs the faster of the two", main, _vs_faster))
    auto = ("mosaic", "cudnn", "xla_fp8")
    lines.append(ratios("auto, which picks, vs the faster of the two", main, lambda row: row.against_xla(*auto)))
    lines.append(ratios("highest vs XLA FP8", main, lambda row: row.ratio("xla_fp8", "highest")))
    lines.append(ratios("cudnn vs XLA FP8", rows, lambda row: row.ratio("xla_fp8", "cudnn")))
    filling = [row for row in main if row.fills]
    lines.append(ratios("of cuBLASLt, where the grid fills the GPU", filling, lambda row: row.ratio("gemm", "mosaic")))
    plain = {row.shape: row for row in rows if row.epilogue == "scale"}
    for epilogue in sorted({row.epilogue for row in rows} - {"scale"}):
        group = [row for row in rows if row.epilogue == epilogue and row.shape in plain]

        def cost(row: Row) -> float | None:
            ours, bare = row.us("mosaic"), plain[row.shape].us("mosaic")
            return ours / bare if ours and bare else None

        lines.append(ratios(f"mosaic, {epilogue} / scale (time)", group, cost))
        if epilogue != MAIN:
            lines.append(ratios(f"mosaic, {epilogue} vs XLA FP8", group, _vs_fp8))
            lines.append(ratios(f"cudnn, {epilogue} vs XLA FP8", group, lambda row: row.ratio("xla_fp8", "cudnn")))
    guesses = sorted(guess for row in main if (guess := row.guess) is not None)
    if guesses:
        within = sum(guess <= 0.1 for guess in guesses)
        lines.append(f"first guess: median +{statistics.median(guesses):.0%}, {within}/{len(guesses)} within 10%")
    bound = [f"{row.shape} {n}" for row in rows for n, f in row.data["contestants"].items() if f.get("host_bound")]
    lines.append(f"host-bound (marked ~): {bound or 'none'}")
    return "\n".join(lines)


def roofline(content: dict[str, Any], path: Path) -> bool:
    """TF/s against FLOPs a byte, under the ceilings of the same run; False where matplotlib is not installed."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    rows = [row for row in (Row(row) for row in content["rows"].values()) if row.epilogue == MAIN]
    bandwidth = content["ceilings"]["copy_bytes_per_s"] / 1e12
    products = [tflops for row in rows if (tflops := row.tflops("gemm"))]
    peak = max([*products, content["ceilings"]["gemm_tflops"] or 0])
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    styles = {"mosaic": ("o", "C0"), "xla_fp8": ("s", "C1"), "xla_bf16": ("^", "C2")}
    for name, (marker, color) in styles.items():
        # bf16 tensors are twice as large.
        points = [
            (row.data["flops"] / row.data["bytes"] / (2 if name == "xla_bf16" else 1), tflops)
            for row in rows
            if (tflops := row.tflops(name))
        ]
        label = {"mosaic": "mosaic", "xla_fp8": "XLA FP8", "xla_bf16": "XLA bf16"}[name]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, s=18, color=color, label=label, alpha=0.8)
    intensities = [row.data["flops"] / row.data["bytes"] for row in rows]
    low, high = min(intensities) / 2.5, max(intensities) * 1.2
    knee = peak / bandwidth
    axes.plot([low, knee, high], [low * bandwidth, peak, peak], color="black", linewidth=1)
    axes.annotate(f"cuBLASLt FP8, the best product: {peak:.0f} TF/s", (high, peak), ha="right", va="bottom", fontsize=8)
    axes.annotate(f"copy: {bandwidth:.2f} TB/s", (low, low * bandwidth), ha="left", va="bottom", fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity (FLOP per byte read or written at least)")
    axes.set_ylabel("TF/s")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path)
    return True


def write(out: Path) -> None:
    """Prints all of it, and writes table.md and roofline.svg beside results.json."""
    content = json.loads((out / state.RESULTS).read_text())
    rows = [Row(row) for row in content["rows"].values()]
    main = [row for row in rows if row.epilogue == MAIN]
    parts = [f"## networks\n\n{by_network(main)}\n"] if main else []
    for epilogue in dict.fromkeys(row.epilogue for row in rows):
        parts.append(f"## {epilogue}\n\n{table(row for row in rows if row.epilogue == epilogue)}\n")
    if epilogues := in_turn(content):
        parts.append(f"## epilogues in turn\n\n{epilogues}\n")
    text = "\n".join([*parts, summary(content)])
    (out / "table.md").write_text(text + "\n")
    print(text)
    if rows and content["ceilings"] and not roofline(content, out / "roofline.svg"):
        print("no plot: matplotlib is not installed")
