"""Quantization kernels against XLA on a Hopper GPU, and the bytes that must move.

    python -m benchmarks.quantize --seconds 60 --out build/quantize
    python -m benchmarks.quantize --plot build/quantize/results.json docs/plots/quantize.svg

A row is a shape, a layout, and where the scale comes from. Each algorithm quantizes several tensors of its own in one
jit, one behind the other; launching is hidden and the times taken as `benchmarks.conv.timing` does. Before that, the
results are compared with those of plain JAX, bit by bit and a hundred times.

"floor" is what a device copy, measured in the same run, would take for the bytes: of a dynamic scale x twice and the
result (x once where all of it stays in the L2 cache), of a given scale x once. Results have one byte.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.conv.timing import Contestant, Timing, beside, copier, short, time_in_turn
from xla_fp8.backends.quantize import resident
from xla_fp8.backends.quantize.atomic import Atomic
from xla_fp8.backends.quantize.reduction import Reduction
from xla_fp8.backends.quantize.resident import Resident
from xla_fp8.backends.quantize.single_pass import SinglePass
from xla_fp8.backends.quantize.two_kernels import Settings
from xla_fp8.quantization.algorithms import Algorithm, Lax, Layout, Request
from xla_fp8.quantization.numerics import ScaleRule

REPEATS = 100
ROUNDS = 5
_L2_BYTES = 50e6
_POOL = 1 << 22


@dataclasses.dataclass(frozen=True)
class Row:
    """
    Attributes:
        shape: of the tensor.
        layout: "row", "transposed", or "both".
        delayed: the scale is given, and the amax found on the way.
        dtype: of the tensor.
    """

    shape: tuple[int, ...]
    layout: Layout = "row"
    delayed: bool = False
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        parts = "x".join(map(str, self.shape)), self.layout, "delayed" if self.delayed else "dynamic"
        return " ".join(parts if self.dtype == "bfloat16" else (*parts, self.dtype))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def floor_bytes(self) -> int:
        """Bytes that must move between the device's memory and its L2 cache, for one tensor."""
        wide = np.dtype(jnp.dtype(self.dtype)).itemsize
        reads = 1 if self.delayed or wide * self.size <= _L2_BYTES else 2
        return self.size * (wide * reads + (2 if self.layout == "both" else 1))

    @property
    def calls(self) -> int:
        """Tensors in one program: 8, or what some gigabytes hold."""
        return max(2, min(8, 2**30 // self.size))

    @property
    def request(self) -> Request:
        return Request(
            self.shape,
            jnp.dtype(self.dtype),
            ScaleRule(jnp.dtype(jnp.float8_e4m3fn)),
            (),
            self.layout,
            "scale" if self.delayed else "",
            self.delayed,
            "cuda",
        )


SQUARES = [(n, n) for n in (4096, 8192, 16384)]
ACTIVATIONS = [(64, 56, 56, 256), (2, 64, 64, 320)]
ROWS = (
    *(Row(shape) for shape in SQUARES),
    *(Row(shape, delayed=True) for shape in SQUARES),
    *(Row(shape, "both") for shape in SQUARES),
    *(Row((10**exponent,)) for exponent in (3, 4, 5, 6, 7, 8, 9)),
    *(Row(shape, layout) for shape in ACTIVATIONS for layout in ("row", "both")),
    Row((8192, 8192), "both", delayed=True),
    Row((1024, 1024)),
    Row((1024, 1024), "both"),
    Row((8192, 8192), "transposed"),
    Row((4096, 4096), "both", delayed=True),
    Row((16384, 16384), "both", delayed=True),
    Row((8192, 8192), dtype="float32"),
    Row((8192, 8192), dtype="float16"),
)
"""The most wanted first, for a run that ends early."""

TINY = (Row((1000,)), Row((33, 65), "both"), Row((64, 64), delayed=True))

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {
        "xla": Lax(),
        "atomic": Atomic(),
        "reduction": Reduction(),
        "single_pass": SinglePass(),
        "resident": Resident(),
    }
)


def _residents(side: Literal["flat", "tiled"], *settings: tuple[int, int, int, int]) -> Mapping[str, Algorithm]:
    """`resident` with each of some settings, of warpgroups, slots, bytes of a slot, and lag."""
    return {
        f"resident, {warpgroups} x {slots} x {slot_bytes} lag {lag}": Resident(
            **{side: resident.Settings(warpgroups, slots, slot_bytes, lag)}
        )
        for warpgroups, slots, slot_bytes, lag in settings
    }


STREAMS: Mapping[str, Algorithm] = MappingProxyType(
    _residents(
        "flat",
        (4, 7, 8192, 1),
        (4, 7, 8192, 3),
        (2, 7, 16384, 2),
        (2, 14, 8192, 3),
        (4, 4, 8192, 1),
        (8, 3, 8192, 1),
        (4, 7, 8192, 4),
    )
)
"""Other settings, for rows with a given scale."""

VARIANTS: Mapping[str, Algorithm] = MappingProxyType(
    {
        **STREAMS,
        "atomic, separate scale": Atomic(settings=Settings("separate")),
        "reduction, separate scale": Reduction(settings=Settings("separate")),
        "atomic, cast 4 programs": Atomic(settings=Settings(cast_programs=4)),
        "reduction, cast 4 programs": Reduction(settings=Settings(cast_programs=4)),
        "atomic, cast 2 loads": Atomic(settings=Settings(cast_loads=2)),
        "atomic, amax 2 loads 8 programs": Atomic(settings=Settings(amax_loads=2, amax_programs=8)),
        "atomic, evict first": Atomic(settings=Settings(eviction="evict_first")),
        "single_pass, 2 loads": SinglePass(loads=2),
        "single_pass, 32 warps 2 loads": SinglePass(block=16384, loads=2, warps=32),
        # Of bfloat16 in rows these have at most 63 registers, so four fit.
        "single_pass, 2 programs 8 warps": SinglePass(block=4096, warps=8, each=2),
        "single_pass, 4 programs 8 warps": SinglePass(block=4096, warps=8, each=4),
        "single_pass, 4 programs 2 loads": SinglePass(block=4096, warps=8, each=4, loads=2),
        "single_pass, evict first": SinglePass(eviction="evict_first"),
    }
)
"""Other settings, for rows without a transposed copy."""

TILES: Mapping[str, Algorithm] = MappingProxyType(
    {
        f"atomic, tile {rows}x{columns} {warps} warps": Atomic(
            settings=Settings(tile=(rows, columns), tile_warps=warps)
        )
        for rows, columns, warps in ((64, 64, 4), (128, 64, 4), (64, 128, 4), (128, 128, 4), (128, 256, 8))
    }
    | {
        f"single_pass, tile {rows}x{columns} {warps} warps, {each} programs": SinglePass(
            tile=(rows, columns), warps=warps, each=each
        )
        # These have at most 62 registers (of the first two) on shapes that the tile divides.
        for rows, columns, warps, each in ((64, 64, 4, 4), (128, 64, 8, 2), (128, 128, 8, 1), (128, 256, 16, 1))
    }
    | _residents("tiled", (4, 3, 16384, 1), (4, 7, 8192, 2), (2, 3, 32768, 1), (3, 4, 16384, 1))
)
"""Other tiles, for rows with a transposed copy."""

VARIED = (
    (Row((4096, 4096)), VARIANTS),
    (Row((4096, 4096), delayed=True), STREAMS),
    (Row((8192, 8192), "both"), TILES),
    (Row((16384, 16384)), VARIANTS),
    (Row((16384, 16384), delayed=True), STREAMS),
    (Row((4096, 4096), "both"), TILES),
    (Row((8192, 8192)), VARIANTS),
    (Row((10**6,)), VARIANTS),
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Rows that are one panel of the plot.

    Attributes:
        ending: of their names.
        bytes: of an element that speeds count, as if nothing stayed in a cache.
        peers: microseconds by size of PyTorch's kernels, by name.
    """

    title: str
    ending: str
    bytes: int
    peers: Mapping[str, Mapping[int, float]]


def _squares(*us: float) -> Mapping[int, float]:
    return dict(zip((n * n for n, _ in SQUARES), us, strict=True))


KINDS = (
    Kind(
        "dynamic scale",
        "row dynamic",
        5,
        {
            "torchao float8nocompile, atomic": _squares(101.3, 163.7, 360.8),
            "torchao float8nocompile, reduction": _squares(177.9, 794.8, 3320),
            "torch.compile": _squares(56.4, 245.8, 935.0),
        },
    ),
    Kind(
        "dynamic scale, both layouts",
        "both dynamic",
        6,
        {
            "torchao float8nocompile, row and transposed": _squares(512.1, 1982.8, 7774.7),
            "torchao float8nocompile, row and column": _squares(217.8, 120.3, 449.0),
        },
    ),
    Kind("given scale, with amax", "row delayed", 3, {"transformer_nuggets": _squares(42.6, 60.5, 226.2)}),
)
"""The peers' times are of one H200, 2026-11-30, bfloat16 to e4m3: of a run of their own, not of this script."""


def program(algorithm: Algorithm, row: Row) -> Callable[..., Any]:
    """Quantizes a list of tensors, one behind the other."""

    once = jax.jit(functools.partial(algorithm.run, row.request))  # traced and lowered once for all calls

    def run(xs: Sequence[jax.Array], scale: jax.Array) -> list[Any]:
        outcomes: list[Any] = []
        for x in xs:
            if outcomes:  # else XLA would fuse what stands beside each other here and nowhere else
                x, outcomes[-1] = lax.optimization_barrier((x, outcomes[-1]))
            outcomes.append(once(x, scale if row.delayed else None))
        return outcomes

    return run


def inputs(row: Row) -> tuple[list[jax.Array], jax.Array]:
    """Normal numbers, for each call others; and a scale with which some saturate."""
    pool = jnp.asarray(np.random.default_rng(0).normal(size=_POOL), jnp.dtype(row.dtype))

    @jax.jit
    def make(pool: jax.Array, number: jax.Array) -> jax.Array:
        x = pool[(jnp.arange(row.size) + 7919 * number) & (_POOL - 1)]
        # The largest is another in each tensor.
        return x.at[row.size // 3].set(8 + number.astype(x.dtype) / 4).reshape(row.shape)

    return [make(pool, jnp.int32(number)) for number in range(row.calls)], jnp.float32(0.01)


@jax.jit
def _differences(a: Any, b: Any) -> jax.Array:
    """How many bit patterns differ."""
    counts = []
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        unsigned = jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32
        x, y = (lax.bitcast_convert_type(z, unsigned) for z in (x, y))
        counts.append(jnp.sum(x != y, dtype=jnp.int32))
    return sum(counts, jnp.int32(0))


def check(contestant: Contestant, expected: Any, repeats: int) -> str:
    """ "equal", or what was different."""
    counts = [_differences(contestant.executable(*contestant.arguments), expected) for _ in range(repeats)]
    wrong = [int(count) for count in counts if int(count)]
    return f"{len(wrong)} of {repeats} runs differ, up to {max(wrong)} numbers" if wrong else "equal"


def measure(row: Row, algorithms: Mapping[str, Algorithm], executables: Mapping[str, Any], bandwidth: float) -> Any:
    """Checks and times all algorithms of a row."""
    arguments = inputs(row)
    entry: dict[str, Any] = {"row": row.name, "size": row.size, "calls": row.calls, "algorithms": {}}
    entry["floor_us"] = row.floor_bytes / bandwidth * 1e6
    found: dict[str, Any] = entry["algorithms"]
    contestants: dict[str, Contestant] = {}
    for name in algorithms:
        executable = executables[name]
        if isinstance(executable, str):
            found[name] = {"error": executable}
        else:
            contestants[name] = Contestant(executable, arguments, row.calls)
    expected = contestants["xla"].executable(*arguments)
    for name, contestant in list(contestants.items()):
        try:
            found[name] = {"bits": check(contestant, expected, REPEATS if name in ALGORITHMS else 10)}
        except Exception as error:
            found[name] = {"error": short(error)}
            del contestants[name]
    del expected
    for name, timing in time_in_turn(contestants, ROUNDS).items():
        found[name] |= timing.facts if isinstance(timing, Timing) else {"error": timing}
    return entry


def compile_all(jobs: Sequence[tuple[Row, str, Algorithm]], threads: int) -> dict[tuple[Row, str], Any]:
    """Executables, or errors as text, of every job; started in order."""

    def compiled(job: tuple[Row, str, Algorithm]) -> Any:
        row, _, algorithm = job
        verdict = algorithm.supports(row.request)
        if not verdict.ok:
            return verdict.reason
        x = jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype))  # type: ignore[no-untyped-call]
        scale = jax.ShapeDtypeStruct((), jnp.float32)  # type: ignore[no-untyped-call]
        try:
            return jax.jit(program(algorithm, row)).lower([x] * row.calls, scale).compile()
        except Exception as error:
            return short(error)

    pool = concurrent.futures.ThreadPoolExecutor(threads)
    return {(job[0], job[1]): pool.submit(compiled, job) for job in jobs}


def _interpreted(algorithms: Mapping[str, Algorithm]) -> dict[str, Algorithm]:
    """Without `resident`, whose interpreter runs one program at a time and waits for ever where several are queued."""
    return {
        name: algorithm if isinstance(algorithm, Lax) else dataclasses.replace(algorithm, interpret=True)  # type: ignore
        for name, algorithm in algorithms.items()
        if not isinstance(algorithm, Resident)
    }


def print_row(entry: Mapping[str, Any]) -> None:
    reference = entry["algorithms"].get("xla", {})
    print(f"\n{entry['row']}: floor {entry['floor_us']:.1f} us")
    for name, found in entry["algorithms"].items():
        if "us" not in found:
            print(f"  {name:36} {found.get('bits', '')} {found.get('error', '')}")
            continue
        print(
            f"  {name:36} {beside(found, reference)} of XLA  "
            f"{entry['floor_us'] / found['us']:6.1%} of the floor  "
            f"{5e-3 * entry['size'] / found['us']:7.1f} GB/s at 5 bytes  {found['bits']}",
            flush=True,
        )


def copy_bandwidth() -> float:
    """Bytes a second that the device reads and writes when it copies."""
    contestant, copied = copier()
    timing = time_in_turn({"copy": contestant}, ROUNDS)["copy"]
    if isinstance(timing, str):
        raise RuntimeError(f"a copy has no time: {timing}")
    return copied / timing.us * 1e6


def run(rows: Sequence[Row], seconds: float, threads: int, variants: bool, without: Sequence[str], out: Path) -> None:
    start = time.monotonic()
    jobs: list[tuple[Row, dict[str, Algorithm]]] = [(row, dict(ALGORITHMS)) for row in rows]
    if variants:
        jobs += [(row, {name: ALGORITHMS[name] for name in ("xla", "resident")} | some) for row, some in VARIED]
    jobs = [(row, {name: a for name, a in some.items() if a.name not in without}) for row, some in jobs]
    if jax.default_backend() == "cpu":
        jobs = [(row, _interpreted(some)) for row, some in jobs]
    flat = [(row, name, algorithm) for row, algorithms in jobs for name, algorithm in algorithms.items()]
    futures = compile_all(list({(row, name): (row, name, a) for row, name, a in flat}.values()), threads)
    concurrent.futures.wait(futures.values())  # XLA times kernels while it compiles: nothing is measured beside it
    print(f"{len(futures)} programs compiled in {time.monotonic() - start:.0f} s", flush=True)
    bandwidth = copy_bandwidth()
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "copy_bandwidth": bandwidth,
        "repeats": REPEATS,
        "rows": [],
    }
    print(f"{results['date']} {results['device']} jax {results['jax']}, copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for row, algorithms in jobs:
        if time.monotonic() - start > seconds:
            print(f"not measured, the {seconds:g} seconds are over: {row.name}")
            continue
        executables = {name: futures[row, name].result() for name in algorithms}
        try:
            entry = measure(row, algorithms, executables, bandwidth)
        except Exception as error:
            print(f"{row.name}: {short(error)}")
            continue
        print_row(entry)
        results["rows"].append(entry)
        (out / "results.json").write_text(json.dumps(results, indent=1))
    print(f"\n{time.monotonic() - start:.0f} s")


def plot(results: Mapping[str, Any], path: Path) -> None:
    """GB/s against the size, by where the scale comes from."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "quantize"
    figure, panels = pyplot.subplots(len(KINDS), figsize=(8, 4 * len(KINDS)))
    for kind, axes in zip(KINDS, panels, strict=True):
        times: dict[str, dict[int, float]] = {}
        for entry in results["rows"]:
            if entry["row"].endswith(kind.ending):
                for name in ALGORITHMS:
                    found = entry["algorithms"].get(name, {})
                    if "us" in found and found["bits"] == "equal":
                        times.setdefault(name, {}).setdefault(entry["size"], found["us"])
        for name, of_size in {**times, **kind.peers}.items():
            sizes = sorted(of_size)
            speeds = [1e-3 * kind.bytes * size / of_size[size] for size in sizes]
            label, style = (f"{name} (another run)", "x--") if name in kind.peers else (name, "o-")
            axes.plot(sizes, speeds, style, markersize=4, label=label)
        copy = results["copy_bandwidth"] / 1e9
        axes.axhline(copy, color="gray", linewidth=0.8, linestyle=":", label="device copy")
        axes.set(xscale="log", yscale="log", ylabel=f"GB/s at {kind.bytes} bytes an element", title=kind.title)
        axes.legend(fontsize=7)
    panels[-1].set_xlabel("elements")
    figure.suptitle(f"bfloat16 → float8_e4m3fn, {results['device']}, {results['date'][:10]}, jax {results['jax']}")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/quantize"), help="folder of results.json")
    parser.add_argument("--seconds", type=float, default=300, help="no row is started later")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--only", help="rows whose names match this regular expression")
    parser.add_argument("--variants", action="store_true", help="also other settings of the kernels")
    parser.add_argument("--without", nargs="+", default=(), metavar="ALGORITHM", help="leave these out")
    parser.add_argument("--tiny", action="store_true", help="small tensors, interpreted: to try it on any machine")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULTS", "SVG"), help="only draw")
    arguments = parser.parse_args()
    if arguments.plot:
        source, target = arguments.plot
        plot(json.loads(source.read_text()), target)
        return
    rows = [row for row in (TINY if arguments.tiny else ROWS) if re.search(arguments.only or "", row.name)]
    run(rows, arguments.seconds, arguments.threads, arguments.variants, arguments.without, arguments.out)


if __name__ == "__main__":
    main()
