"""Quantization kernels against XLA on a Hopper GPU, and the bytes that must move.

    python -m benchmarks.quantize --seconds 60 --out build/quantize
    python -m benchmarks.quantize --plot build/quantize/results.json docs/plots/quantize.svg

A row is a shape, a layout, and where the scale comes from. Each algorithm quantizes several tensors of its own in one
jit, one behind the other; launching is hidden and the times taken as `benchmarks.conv.timing` does. Before that, the
results are compared with those of plain JAX, bit by bit and a hundred times.

"floor" is what a device copy, measured in the same run, would take for the bytes: of a dynamic scale x twice and the
result (x once where all of it stays in the L2 cache), of a given scale x once. Two-byte x and one-byte results.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import functools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.conv.timing import Contestant, Timing, copy_bandwidth, short, time_in_turn
from xla_fp8.backends.quantize.atomic import Atomic
from xla_fp8.backends.quantize.reduction import Reduction
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
        shape: of the bfloat16 tensor.
        layout: "row", or "both" with a transposed copy.
        delayed: the scale is given, and the amax found on the way.
    """

    shape: tuple[int, ...]
    layout: Layout = "row"
    delayed: bool = False

    @property
    def name(self) -> str:
        parts = "x".join(map(str, self.shape)), self.layout, "delayed" if self.delayed else "dynamic"
        return " ".join(parts)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def floor_bytes(self) -> int:
        """Bytes that must move between the device's memory and its L2 cache, for one tensor."""
        reads = 1 if self.delayed or 2 * self.size <= _L2_BYTES else 2
        return self.size * (2 * reads + (1 if self.layout == "row" else 2))

    @property
    def calls(self) -> int:
        """Tensors in one program: 8, or what some gigabytes hold."""
        return max(2, min(8, 2**30 // self.size))

    @property
    def request(self) -> Request:
        return Request(
            self.shape,
            jnp.dtype(jnp.bfloat16),
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
    *(Row(shape) for shape in (*SQUARES, *ACTIVATIONS)),
    *(Row(shape, "both") for shape in (*SQUARES, *ACTIVATIONS)),
    *(Row(shape, delayed=True) for shape in SQUARES),
    Row((8192, 8192), "both", delayed=True),
    *(Row((10**exponent,)) for exponent in (3, 4, 5, 6, 7, 8, 9)),
    Row((1024, 1024)),
    Row((1024, 1024), "both"),
)
"""The most wanted first, for a run that ends early."""

TINY = (Row((1000,)), Row((33, 65), "both"), Row((64, 64), delayed=True))

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType(
    {"xla": Lax(), "atomic": Atomic(), "reduction": Reduction(), "single_pass": SinglePass()}
)

VARIANTS: Mapping[str, Algorithm] = MappingProxyType(
    {
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
)
"""Other tiles, for rows with a transposed copy."""

VARIED = (Row((4096, 4096)), Row((8192, 8192)), Row((16384, 16384)), Row((10**6,)), Row((10**4,)))
TILED = (Row((8192, 8192), "both"), Row((4096, 4096), "both"))

PUBLISHED = {
    "torchao float8nocompile, atomic": {4096**2: 101.3, 8192**2: 163.7, 16384**2: 360.8},
    "torch.compile": {4096**2: 56.4, 8192**2: 245.8, 16384**2: 935.0},
}
"""Microseconds of PyTorch's kernels on an H200, row-major, dynamic: from a run of their own, not of this script."""


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
    pool = jnp.asarray(np.random.default_rng(0).normal(size=_POOL), jnp.bfloat16)

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
        if isinstance(timing, Timing):
            found[name] |= {"us": timing.us, "spread": timing.spread, "host_bound": timing.host_bound}
        else:
            found[name]["error"] = timing
    return entry


def compile_all(jobs: Sequence[tuple[Row, str, Algorithm]], threads: int) -> dict[tuple[Row, str], Any]:
    """Executables, or errors as text, of every job; started in order."""

    def compiled(job: tuple[Row, str, Algorithm]) -> Any:
        row, _, algorithm = job
        x = jax.ShapeDtypeStruct(row.shape, jnp.bfloat16)  # type: ignore[no-untyped-call]
        scale = jax.ShapeDtypeStruct((), jnp.float32)  # type: ignore[no-untyped-call]
        try:
            return jax.jit(program(algorithm, row)).lower([x] * row.calls, scale).compile()
        except Exception as error:
            return short(error)

    pool = concurrent.futures.ThreadPoolExecutor(threads)
    return {(job[0], job[1]): pool.submit(compiled, job) for job in jobs}


def _interpreted(algorithm: Algorithm) -> Algorithm:
    return algorithm if isinstance(algorithm, Lax) else dataclasses.replace(algorithm, interpret=True)  # type: ignore


def print_row(entry: Mapping[str, Any]) -> None:
    reference = entry["algorithms"].get("xla", {}).get("us")
    print(f"\n{entry['row']}: floor {entry['floor_us']:.1f} us")
    for name, found in entry["algorithms"].items():
        if "us" not in found:
            print(f"  {name:36} {found.get('bits', '')} {found.get('error', '')}")
            continue
        ratio = f"{reference / found['us']:.2f}x" if reference else ""
        mark = "~" if found["host_bound"] else ""
        print(
            f"  {name:36} {mark}{found['us']:8.2f} us (±{found['spread']:.2f})  {ratio:>6} of XLA  "
            f"{entry['floor_us'] / found['us']:6.1%} of the floor  "
            f"{5e-3 * entry['size'] / found['us']:7.1f} GB/s at 5 bytes  {found['bits']}",
            flush=True,
        )


def run(rows: Sequence[Row], seconds: float, threads: int, variants: bool, out: Path) -> None:
    start = time.monotonic()
    jobs: list[tuple[Row, dict[str, Algorithm]]] = [(row, dict(ALGORITHMS)) for row in rows]
    if variants:
        jobs += [(row, {"xla": Lax(), **VARIANTS}) for row in VARIED]
        jobs += [(row, {"xla": Lax(), **TILES}) for row in TILED]
    if jax.default_backend() == "cpu":
        jobs = [(row, {name: _interpreted(algorithm) for name, algorithm in some.items()}) for row, some in jobs]
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
    """GB/s at five bytes an element, against the size, of rows with a dynamic scale and one copy."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "quantize"
    figure, axes = pyplot.subplots(figsize=(8, 4.8))
    curves: dict[str, dict[int, float]] = {}
    for entry in results["rows"]:
        if entry["row"].endswith("row dynamic"):
            for name in ALGORITHMS:
                if "us" in entry["algorithms"].get(name, {}):
                    curves.setdefault(name, {})[entry["size"]] = entry["algorithms"][name]["us"]
    for name, times in {**curves, **PUBLISHED}.items():
        sizes = sorted(times)
        speeds = [5e-3 * size / times[size] for size in sizes]
        published = name in PUBLISHED
        label = f"{name} (published, another run)" if published else name
        axes.plot(sizes, speeds, "x--" if published else "o-", markersize=4, label=label)
    axes.axhline(results["copy_bandwidth"] / 1e9, color="gray", linewidth=0.8, linestyle=":", label="device copy")
    axes.set(xscale="log", yscale="log", xlabel="elements", ylabel="GB/s at 5 bytes an element")
    axes.set_title(f"bfloat16 → float8_e4m3fn, dynamic scale, {results['device']}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/quantize"), help="folder of results.json")
    parser.add_argument("--seconds", type=float, default=300, help="no row is started later")
    parser.add_argument("--threads", type=int, default=8, help="that compile")
    parser.add_argument("--variants", action="store_true", help="also other settings of the kernels")
    parser.add_argument("--tiny", action="store_true", help="small tensors, interpreted: to try it on any machine")
    parser.add_argument("--plot", nargs=2, type=Path, metavar=("RESULTS", "SVG"), help="only draw")
    arguments = parser.parse_args()
    if arguments.plot:
        source, target = arguments.plot
        plot(json.loads(source.read_text()), target)
        return
    run(TINY if arguments.tiny else ROWS, arguments.seconds, arguments.threads, arguments.variants, arguments.out)


if __name__ == "__main__":
    main()
