"""Transposes of FP8 tensors: this project's kernel against XLA's, on a Hopper GPU.

    python -m benchmarks.transpose --out build/transpose.json

Rows are operands of dots whose filter gradients contract rows, and filters whose output and input features are
exchanged for input gradients. Several calls on tensors of their own are in one jit, one behind the other, and the times
taken as `benchmarks.conv.timing` does. "floor" is what a device copy of the same run would take for the bytes, each
read and written once; tensors that fit into the L2 cache can be faster. `--small` runs each with few elements.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.conv.timing import Contestant, Timing, beside, copier, short, time_in_turn
from xla_fp8.backends.transpose.primitive import transpose

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Row:
    """A transpose that is timed: the first dimension and the last are exchanged."""

    shape: tuple[int, ...]

    @property
    def permutation(self) -> tuple[int, ...]:
        last = len(self.shape) - 1
        return (last, *range(1, last), 0)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def calls(self) -> int:
        """Calls in one program: 8, or what some gigabytes hold."""
        return int(max(2, min(8, 2**31 // self.size)))

    def small(self) -> Row:
        return Row((64, *self.shape[1:-1], 48))


ROWS = (
    *(Row(shape) for shape in ((65536, 2560), (65536, 1280), (65536, 320), (16384, 5120), (4096, 1280))),
    *(Row(shape) for shape in ((50176, 1536), (50176, 384))),
    *(Row(shape) for shape in ((1280, 3, 3, 1280), (1280, 3, 3, 2560), (10240, 1280), (1280, 1280))),
)
"""Of the training of Stable Diffusion's UNet and ConvNeXt."""


def program(row: Row, function: Callable[..., Array]) -> Callable[..., list[Array]]:
    """Calls of a function, one behind the other."""

    def run(*tensors: Array) -> list[Array]:
        results: list[Array] = []
        for tensor in tensors:
            if results:  # else XLA would make one kernel of several
                tensor, results[-1] = lax.optimization_barrier((tensor, results[-1]))
            results.append(function(tensor, row.permutation))
        return results

    return run


@functools.partial(jax.jit, static_argnums=(0, 1))
def _arguments(shape: tuple[int, ...], count: int) -> list[Array]:
    keys = jax.random.split(jax.random.key(0), count)
    return [lax.bitcast_convert_type(jax.random.bits(key, shape, jnp.uint8), jnp.float8_e4m3fn) for key in keys]


def measure(row: Row, bandwidth: float) -> dict[str, Any]:
    """Times both, and compares their bytes."""
    arguments = tuple(jax.block_until_ready(_arguments(row.shape, row.calls)))
    contestants = {
        name: Contestant(jax.jit(program(row, function)).lower(*arguments).compile(), arguments, row.calls)
        for name, function in (("xla", lax.transpose), ("xla_fp8", transpose))
    }
    results = [
        [np.asarray(lax.bitcast_convert_type(y, jnp.uint8)) for y in contestant.executable(*arguments)]
        for contestant in contestants.values()
    ]
    entry: dict[str, Any] = {
        "row": str(row.shape),
        "floor_us": 2 * row.size / bandwidth * 1e6,
        "equal": all(map(np.array_equal, *results)),
    }
    for name, timing in time_in_turn(contestants).items():
        entry[name] = timing.facts if isinstance(timing, Timing) else {"error": timing}
        if isinstance(timing, Timing):
            entry[name]["tb_per_s"] = 2 * row.size / timing.us / 1e6
    return entry


def _told(entry: dict[str, Any]) -> str:
    equal = "same bytes" if entry["equal"] else "OTHER BYTES"
    lines = [f"{entry['row']}: floor {entry['floor_us']:.1f} us, {equal}"]
    for name in ("xla", "xla_fp8"):
        facts = entry[name]
        told = f"{beside(facts, entry['xla'])}  {facts['tb_per_s']:.2f} TB/s" if "us" in facts else facts["error"]
        lines.append(f"  {name:8} {told}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/transpose.json"), help="results, written row by row")
    parser.add_argument("--only", default="", help="rows whose shape has this")
    parser.add_argument("--small", action="store_true", help="few elements, to try the script")
    options = parser.parse_args(arguments)
    contestant, copied = copier()
    copy = time_in_turn({"copy": contestant})["copy"]
    if not isinstance(copy, Timing):
        raise SystemExit(f"a copy has no time: {copy}")
    bandwidth = copied / copy.us * 1e6
    results: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "copy_bandwidth": bandwidth,
        "rows": [],
    }
    print(f"{results['date']} {results['device']} jax {results['jax']}, copy {bandwidth / 1e12:.3f} TB/s", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        if options.only not in str(row.shape):
            continue
        try:
            entry = measure(row.small() if options.small else row, bandwidth)
        except Exception as error:
            print(f"{row.shape}: {short(error)}", flush=True)
            continue
        results["rows"].append(entry)
        print(_told(entry), flush=True)
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
