"""FP8 matmuls on a Hopper GPU: XLA in bf16, XLA given FP8 as users write it, and what this project makes of that.

    python -m benchmarks.matmul --seconds 80 --workers 12 --out build/matmul
    python -m benchmarks.matmul --table build/matmul/results.json

A row is y[M, N] = x[M, K] w[N, K]ᵀ in one of several spellings. Contestants:

    bf16     the same matmul and activation in bf16, without scales, amax and cast
    xla      the spelling, compiled by XLA alone
    ours     the spelling through `xla_fp8.jit` with gemm-rewriter, then XLA
    mosaic   the same arithmetic in this project's kernel, as a 1x1 convolution

Each multiplies several x by one w in one jit; times are taken as `benchmarks.conv.timing` does. "error" is the norm of
the difference to f32 arithmetic over the norm, of the first result.

XLA takes seconds to tune a matmul, so each of its programs is compiled by a process of its own, several at a time. As
soon as those of a row exist, mosaic's is compiled here (a program with a Mosaic kernel cannot be loaded by another
process than the one that compiled it), and the row is measured; whatever still compiles stands still meanwhile. What
XLA tunes while others tune it may choose less well than alone.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import serialize_executable

import xla_fp8
from benchmarks.conv.programs import quantized
from benchmarks.conv.timing import Contestant, Timing, beside, short, time_in_turn
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.mosaic.backend import MosaicBackend
from xla_fp8.target import GraphCall, Target

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 5
PASSES = "call-inliner,simplify,gemm-rewriter,dce"
TARGET = Target.parse("h200")
E4M3, BF16, F32 = jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
_POOL = 1 << 22
_MOST_BYTES = 2**31  # of all x of a program
_LONGER = 1.15  # times the seconds: until then rows are measured whose programs are not all there


def _dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())))


def _product(x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array, wide: Any = F32) -> jax.Array:
    return _dot(x.astype(wide) * x_scale.astype(wide), w.astype(wide) * w_scale.astype(wide))


def _fp8(x: jax.Array, w: jax.Array, bias: jax.Array, x_scale: Any, w_scale: Any, y_scale: Any) -> Any:
    y = _product(x, w, x_scale, w_scale)
    return quantized(y * y_scale), jnp.max(jnp.abs(y))


def _amax_of_scaled(x: jax.Array, w: jax.Array, bias: jax.Array, x_scale: Any, w_scale: Any, y_scale: Any) -> Any:
    y = _product(x, w, x_scale, w_scale) * y_scale
    return quantized(y), jnp.max(jnp.abs(y))


def _rounded(x: jax.Array, w: jax.Array, bias: jax.Array, x_scale: Any, w_scale: Any, y_scale: Any) -> Any:
    return _dot((x.astype(F32) * x_scale).astype(BF16), (w.astype(F32) * w_scale).astype(BF16))


@dataclasses.dataclass(frozen=True)
class Spelling:
    """What is computed, and how it is written.

    Attributes:
        fp8: of x, w, bias bf16[N], and the scales of x, w and y.
        bf16: of x, w and bias in bf16.
        graph: the same as a graph string with the sides named in `sides`; "" where the kernel has no such epilogue.
    """

    fp8: Callable[..., Any]
    bf16: Callable[..., Any]
    graph: str
    sides: tuple[str, ...]


SPELLINGS: Mapping[str, Spelling] = MappingProxyType(
    {
        "bf16 out": Spelling(
            lambda x, w, bias, a, b, c: _product(x, w, a, b).astype(BF16),
            lambda x, w, bias: _dot(x, w),
            "1:[f32]conv();2:[f32]scale(1);3:[bf16]scale(2);",
            ("x_scale", "w_scale"),
        ),
        "fp8 out, amax": Spelling(
            _fp8,
            lambda x, w, bias: _dot(x, w),
            "1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2);4:[f8e4m3fn]scale(3);5:[f32]amax(3);",
            ("x_scale", "w_scale", "y_scale"),
        ),
        "bias, relu, bf16 out": Spelling(
            lambda x, w, bias, a, b, c: jax.nn.relu(_product(x, w, a, b, BF16) + bias),
            lambda x, w, bias: jax.nn.relu(_dot(x, w) + bias),
            "1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2);4:[f32]bias(3);5:[bf16]relu(4);",
            ("x_scale", "w_scale", "bias"),
        ),
        "rounded to bf16": Spelling(
            _rounded,
            lambda x, w, bias: _dot(x, w),
            "1:[f32]conv();2:[f32]scale(1);3:[bf16]scale(2);",
            ("x_scale", "w_scale"),
        ),
        "amax of the scaled": Spelling(
            _amax_of_scaled,
            lambda x, w, bias: _dot(x, w),
            "1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2);4:[f8e4m3fn]scale(3);5:[f32]amax(4);",
            ("x_scale", "w_scale", "y_scale"),
        ),
    }
)
"""The last two XLA's own pass does not match as one FP8 matmul (docs/matmul.md)."""


@dataclasses.dataclass(frozen=True)
class Row:
    m: int
    n: int
    k: int
    spelling: str
    what: str

    @property
    def name(self) -> str:
        return f"{self.m},{self.n},{self.k} {self.spelling}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def calls(self) -> int:
        return max(2, min(8, _MOST_BYTES // (2 * self.m * self.k)))

    @property
    def call(self) -> GraphCall:
        """The 1x1 convolution that this product is."""
        graph = SPELLINGS[self.spelling].graph
        return graph_call(
            graph, batch=1, image=(1, self.m), channels=self.k, features=self.n, filter=(1, 1), window="{size=1x1}"
        )


SHAPES: Mapping[tuple[int, int, int], str] = MappingProxyType(
    {
        (8192, 8192, 8192): "square",
        (4096, 14336, 4096): "MLP of 8 billion parameters",
        (4096, 4096, 14336): "MLP of 8 billion parameters",
        (4096, 6144, 4096): "attention",
        (4096, 4096, 4096): "attention",
        (131072, 256, 2304): "3x3 convolution",
        (131072, 256, 256): "1x1 convolution",
        (200704, 256, 64): "1x1 convolution",
        (50176, 512, 128): "1x1 convolution",
        (16, 4096, 4096): "small",
        (128, 4096, 4096): "small",
        (1024, 1024, 1024): "small",
        (512, 768, 768): "small",
        (8192, 28672, 8192): "MLP of 70 billion parameters",
    }
)
"""M, N, K of layers; tokens or pixels are M."""

_MLP = (4096, 14336, 4096)
_FEW = ((8192, 8192, 8192), _MLP, (131072, 256, 2304), (1024, 1024, 1024), (4096, 4096, 14336), (131072, 256, 256))


def _rows() -> tuple[Row, ...]:
    first = [(shape, "bf16 out") for shape in _FEW]
    of_one_shape = [(_MLP, spelling) for spelling in reversed(SPELLINGS)]
    amax = [(shape, "fp8 out, amax") for shape in _FEW]
    rest = [(shape, spelling) for spelling in SPELLINGS for shape in SHAPES]
    wanted = dict.fromkeys([*first, *of_one_shape, *amax, *rest])
    return tuple(Row(*shape, spelling, SHAPES[shape]) for shape, spelling in wanted)


ROWS = _rows()
"""The most wanted first, for a run that ends early."""

_USUAL = 15
"""Of these rows the first are measured unless others are named: six shapes, and all spellings of one of them."""

TINY = tuple(Row(64, 32, 48, spelling, "tiny") for spelling in SPELLINGS)
CONTESTANTS = ("bf16", "xla", "ours", "mosaic")
HERE = ("mosaic",)
"""Those whose programs have Mosaic kernels. The process that measures compiles them itself: jaxlib 0.11.2 serializes
them, but who loads them finds no `mosaic_gpu_init_tma_desc`."""


def function(row: Row, contestant: str) -> Callable[..., Any]:
    """Of x, w, bias and three scales. Raises where the contestant has none."""
    spelling = SPELLINGS[row.spelling]
    if contestant == "bf16":
        return lambda x, w, bias, *scales: spelling.bf16(x, w, bias)
    if contestant == "xla":
        return spelling.fp8
    if contestant == "ours":
        rewritten: Callable[..., Any] = xla_fp8.jit(spelling.fp8, passes=PASSES, target=TARGET)
        return rewritten
    backend = MosaicBackend()
    if not (verdict := backend.supports(row.call, TARGET)).ok:
        raise ValueError(verdict.reason)
    kernel = backend.lower(row.call, backend.configs(row.call, TARGET)[0])

    def product(x: jax.Array, w: jax.Array, bias: jax.Array, x_scale: Any, w_scale: Any, y_scale: Any) -> Any:
        named = {"x_scale": x_scale, "w_scale": w_scale, "y_scale": y_scale, "bias": bias.astype(F32)}
        sides = [named[side] for side in spelling.sides]
        y, *rest = kernel(x.reshape(1, 1, row.m, row.k), w.reshape(row.n, 1, 1, row.k), *sides)
        return y.reshape(row.m, row.n), *rest

    return product


def lowered(row: Row, contestant: str, platform: str | None = None) -> Any:
    """Several products with one w, each of an x of its own."""
    one = jax.jit(function(row, contestant))

    def several(xs: Sequence[jax.Array], *rest: jax.Array) -> list[Any]:
        return [one(x, *rest) for x in xs]

    dtype = BF16 if contestant == "bf16" else E4M3
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((row.m, row.k), (row.n, row.k)))
    bias, scale = jax.ShapeDtypeStruct((row.n,), BF16), jax.ShapeDtypeStruct((), F32)
    traced = jax.jit(several).trace([x] * row.calls, w, bias, scale, scale, scale)
    return traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()


def inputs(row: Row, contestant: str) -> tuple[Any, ...]:
    """Normal numbers with scales of which results are of the order of ten."""
    pool = jnp.asarray(np.random.default_rng(0).normal(size=_POOL), E4M3)

    @functools.partial(jax.jit, static_argnums=1)
    def make(start: Any, shape: tuple[int, int]) -> jax.Array:
        values = pool[(jnp.arange(math.prod(shape)) + start) & (_POOL - 1)].reshape(shape)
        return values.astype(BF16) if contestant == "bf16" else values

    xs = [make(7919 * number, (row.m, row.k)) for number in range(row.calls)]
    bias = jnp.linspace(-1, 1, row.n).astype(BF16)
    scales = [jnp.float32(scale) for scale in (8 / row.k**0.5, 1.25, 4.0)]
    return xs, make(104729, (row.n, row.k)), bias, *scales


@functools.partial(jax.jit, static_argnums=0)
def _expected(row: Row, x: jax.Array, *rest: jax.Array) -> jax.Array:
    """The first rows of the result in f32 arithmetic."""
    with jax.default_matmul_precision("highest"):
        found = jax.tree.leaves(SPELLINGS[row.spelling].fp8(x[:128], *rest))[0]
    return found.astype(F32)


@jax.jit
def _error(found: jax.Array, expected: jax.Array) -> jax.Array:
    difference = found[: expected.shape[0]].astype(F32) - expected
    return jnp.linalg.norm(difference) / jnp.linalg.norm(expected)


Program = tuple[Row, str]
"""A row and a contestant."""


def compile_into(path: Path, row: Row, contestant: str) -> None:
    """Writes the executable as another process can load it, or why there is none."""
    try:
        found: Any = serialize_executable.serialize(lowered(row, contestant).compile())
    except Exception as error:
        found = short(error)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_bytes(pickle.dumps(found))
    unfinished.rename(path)


class Compilation:
    """Processes that compile one program each, in the order of the rows, several at a time.

    Args:
        arguments: of this module, so that the processes know the same rows.
    """

    def __init__(self, rows: Sequence[Row], out: Path, workers: int, arguments: Sequence[str]) -> None:
        self._out, self._arguments = out, arguments
        self._running: dict[Program, subprocess.Popen[bytes]] = {}
        self._starting = threading.Lock()
        self._ended = False
        self._pool = concurrent.futures.ThreadPoolExecutor(workers)
        # Of one shape and activation all spellings have the same program in bf16.
        self._same: dict[Program, Program] = {}
        made: dict[Any, Program] = {}
        for row in rows:
            relu = "relu" in row.spelling
            for name in (name for name in CONTESTANTS if name not in HERE):
                key = (row.m, row.n, row.k, relu) if name == "bf16" else (row, name)
                self._same[row, name] = made.setdefault(key, (row, name))
        self._futures = {
            program: self._pool.submit(self._compile, number, program) for number, program in enumerate(made.values())
        }

    def _compile(self, number: int, program: Program) -> Any:
        """A serialized executable, or an error as text."""
        row, contestant = program
        path = self._out / f"{number}.program"
        path.unlink(missing_ok=True)
        command = [sys.executable, "-P", "-m", "benchmarks.matmul", *self._arguments]
        command += ["--compile", row.name, contestant, str(path)]
        with self._starting:
            if self._ended:
                return "not compiled in time"
            log = (self._out / "compile.log").open("ab")
            # A process takes only the device memory it needs: there are several.
            variables = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT))))
            self._running[program] = process = subprocess.Popen(command, stdout=log, stderr=log, env=variables)
        start = time.monotonic()
        code = process.wait()
        with self._starting:
            del self._running[program]
        if not path.exists():
            return "not compiled in time" if self._ended else f"the process that compiled it ended with {code}"
        print(f"  compiled in {time.monotonic() - start:.0f} s: {row.name}, {contestant}", flush=True)
        return pickle.loads(path.read_bytes())

    def of(self, row: Row) -> dict[str, concurrent.futures.Future[Any]]:
        """The programs of a row that other processes compile, by contestant."""
        return {name: self._futures[self._same[row, name]] for name in CONTESTANTS if name not in HERE}

    @contextlib.contextmanager
    def paused(self) -> Generator[None]:
        """Nothing is compiled and tuned meanwhile."""
        with self._starting:
            for process in self._running.values():
                process.send_signal(signal.SIGSTOP)
            time.sleep(0.1)  # until the device has done what they launched
            try:
                yield
            finally:
                for process in self._running.values():
                    process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Ends what still compiles."""
        with self._starting:
            self._ended = True
            for process in self._running.values():
                process.kill()
        self._pool.shutdown()


def measure(row: Row, executables: Mapping[str, Any], compilation: Compilation) -> dict[str, Any]:
    """Checks and times all contestants of a row."""
    arguments = {kind: inputs(row, kind) for kind in ("bf16", "fp8")}
    entry: dict[str, Any] = {"row": row.name, "what": row.what, "flops": row.flops, "contestants": {}}
    found: dict[str, Any] = entry["contestants"]
    xs, *rest = arguments["fp8"]
    expected = _expected(row, xs[0], *rest)
    contestants: dict[str, Contestant] = {}
    for name, executable in executables.items():
        if isinstance(executable, str):
            found[name] = {"error": executable}
            continue
        given = arguments["bf16" if name == "bf16" else "fp8"]
        try:
            first = jax.tree.leaves(executable(*given)[0])[0]
            found[name] = {} if name == "bf16" else {"norm": float(_error(first, expected))}
            contestants[name] = Contestant(executable, given, row.calls)
        except Exception as error:
            found[name] = {"error": short(error)}
    with compilation.paused():
        timings = time_in_turn(contestants, ROUNDS)
    for name, timing in timings.items():
        found[name] |= timing.facts if isinstance(timing, Timing) else {"error": timing}
    return entry


def print_row(entry: Mapping[str, Any]) -> None:
    reference = entry["contestants"].get("xla", {})
    print(f"\n{entry['row']} ({entry['what']})")
    for name, found in entry["contestants"].items():
        if "us" not in found:
            print(f"  {name:8} {found.get('error', '')}")
            continue
        norm = f"error {found['norm']:.1e}" if "norm" in found else ""
        speed = f"{1e-6 * entry['flops'] / found['us']:7.1f} TF/s"
        print(f"  {name:8} {beside(found, reference)} of XLA's FP8  {speed}  {norm}", flush=True)


def table(results: Mapping[str, Any]) -> str:
    """The results in Markdown."""
    lines = ["| M, N, K | " + " | ".join(CONTESTANTS) + " |", "|---" * (len(CONTESTANTS) + 1) + "|"]
    for entry in results["rows"]:
        reference = entry["contestants"].get("xla", {}).get("us")
        cells = []
        for name in CONTESTANTS:
            us = entry["contestants"].get(name, {}).get("us")
            ratio = f" ({reference / us:.2f}x)" if us and reference and name != "xla" else ""
            cells.append(f"{us:.1f} us, {1e-6 * entry['flops'] / us:.0f} TF/s{ratio}" if us else "-")
        lines.append(f"| {entry['row']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(rows: Sequence[Row], seconds: float, workers: int, out: Path, arguments: Sequence[str] = ()) -> None:
    """Measures what is compiled within the seconds, most wanted first; then rows of which some programs are missing."""
    start = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    compilation = Compilation(rows, out, workers, arguments)
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "rows": [],
    }

    def take(row: Row) -> None:
        try:
            loaded = {name: _loaded(future) for name, future in compilation.of(row).items()}
            entry = measure(row, loaded | {name: compiled_here(row, name) for name in HERE}, compilation)
        except Exception as error:
            print(f"{row.name}: {short(error)}", flush=True)
            return
        print_row(entry)
        results["rows"].append(entry)
        (out / "results.json").write_text(json.dumps(results, indent=1))

    left = list(rows)
    while left and time.monotonic() - start < seconds:
        ready = next((row for row in left if all(future.done() for future in compilation.of(row).values())), None)
        if ready is None:
            time.sleep(0.05)
            continue
        take(ready)
        left.remove(ready)
    compilation.end()
    for row in left:
        if time.monotonic() - start > seconds * _LONGER:
            print(f"not measured: {row.name}")
        elif sum(not isinstance(future.result(), str) for future in compilation.of(row).values()) >= 2:
            take(row)
    print(f"\n{time.monotonic() - start:.0f} s")


def _loaded(future: concurrent.futures.Future[Any]) -> Any:
    """An executable that can be called, or an error as text: the row's others are measured without it."""
    found = future.result()
    try:
        return found if isinstance(found, str) else serialize_executable.deserialize_and_load(*found)
    except Exception as error:
        return short(error)


def compiled_here(row: Row, contestant: str) -> Any:
    """An executable of this process, or an error as text."""
    try:
        return lowered(row, contestant).compile()
    except Exception as error:
        return short(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/matmul"), help="folder of results.json")
    parser.add_argument("--seconds", type=float, default=120, help="no program is waited for longer")
    parser.add_argument("--workers", type=int, default=8, help="processes that compile")
    parser.add_argument("--only", help="rows whose names match this regular expression, in place of the usual ones")
    parser.add_argument("--tiny", action="store_true", help="small matrices: to try it on any machine")
    parser.add_argument("--table", type=Path, metavar="RESULTS", help="only print results in Markdown")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.table.read_text())))
        return
    rows = TINY if arguments.tiny else ROWS
    if arguments.compile:
        name, contestant, path = arguments.compile
        compile_into(Path(path), next(row for row in rows if row.name == name), contestant)
        return
    chosen = [row for row in rows if re.search(arguments.only, row.name)] if arguments.only else rows[:_USUAL]
    run(chosen, arguments.seconds, arguments.workers, arguments.out, ["--tiny"] if arguments.tiny else [])


if __name__ == "__main__":
    main()
