"""Norms, activations and gates in front of a cast to FP8: this project's kernels against XLA, on a Hopper GPU.

    python -m benchmarks.fused_cast --out build/fused_cast.json

A row is a program that ends in FP8 and begins at tensors in bf16; those of training also have the amax, the tensor in
bf16 and sums over its rows. Several calls on tensors of their own are in one jit, one behind the other, and the times
taken as `benchmarks.conv.timing` does. "floor" is what a device copy of the same run would take for the bytes: each
tensor read once, but twice where a group norm's or batch norm's is larger than the L2 cache, and the results written. A
group norm of large images is two kernels, of which the rows named "sums" time the first, beside XLA's sums.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import xla_fp8
from benchmarks.conv.timing import Contestant, Timing, beside, copier, short, time_in_turn
from examples.networks.layers import Array, batch_norm_of_batch, group_norm, layer_norm
from xla_fp8.backends.fused_cast import statistics
from xla_fp8.backends.fused_cast.problem import Joined, Matrix, Node, Statistics

_SCALE = 0.013
_L2_BYTES = 50e6


@dataclasses.dataclass(frozen=True)
class Row:
    """A program that is timed.

    Attributes:
        function: of tensors in bf16, of these shapes; its first result is FP8.
        reads: how often memory must be read.
        kernel: what is timed in place of the function under xla_fp8.jit.
    """

    name: str
    function: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    reads: int = 1
    kernel: Callable[..., Array] | None = None

    @property
    def result_bytes(self) -> int:
        results = jax.tree.leaves(jax.eval_shape(self.function, *self.structs))
        return sum(math.prod(result.shape) * result.dtype.itemsize for result in results)

    @property
    def structs(self) -> list[Any]:
        return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in self.shapes]  # type: ignore[no-untyped-call]

    @property
    def floor_bytes(self) -> float:
        wide = 2 * sum(map(math.prod, self.shapes))
        result = self.result_bytes if self.kernel is None else 0
        return wide * (self.reads if wide > _L2_BYTES else 1) + result

    @property
    def calls(self) -> int:
        """Calls in one program: 8, or what some gigabytes hold."""
        return int(max(2, min(8, 2**31 // (2 * sum(map(math.prod, self.shapes))))))


def _cast(x: Array) -> Array:
    data: Array = xla_fp8.quantize(x, scale=_SCALE).data
    return data


def _affine(channels: int) -> dict[str, Any]:
    """Numbers that differ: of others XLA would make constants."""
    numbers = np.linspace(0.5, 1.5, channels, dtype=np.float32)
    return {"gamma": numbers, "beta": numbers - 1}


def _group_norm_silu(*xs: Array) -> Array:
    x = jnp.concatenate(xs, -1)
    return _cast(jax.nn.silu(group_norm(x, _affine(x.shape[-1]))))


def _sums(*xs: Array) -> Array:
    """Of x and of its square, for each image and group: [2,N,32]."""
    x = jnp.concatenate(xs, -1).astype(jnp.float32)
    grouped = x.reshape(x.shape[0], -1, 32, x.shape[-1] // 32)
    return jnp.stack([grouped.sum((1, 3)), (grouped * grouped).sum((1, 3))])


def _sums_in_parts(*xs: Array) -> Array:
    """The same as a fused cast's first kernel makes them."""
    rows, period = math.prod(xs[0].shape[:-1]), math.prod(xs[0].shape[1:-1])
    parts = tuple(Matrix(np.dtype(x.dtype), x.shape[-1]) for x in xs)
    columns = sum(part.width for part in parts)
    operand = parts[0] if len(parts) == 1 else Joined(parts)
    problem = Statistics(rows, columns, period, columns // 32, (operand,), (Node("mul", (0, 0)),), (0, 1))
    return statistics.run(problem, [x.reshape(rows, -1) for x in xs])


def _layer_norm(x: Array) -> Array:
    return _cast(layer_norm(x, _affine(x.shape[-1])))


def _rms_norm(x: Array) -> Array:
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return _cast((normed * _affine(x.shape[-1])["gamma"]).astype(x.dtype))


def _geglu(x: Array) -> Array:
    value, gate = jnp.split(x, 2, -1)
    return _cast(value * jax.nn.gelu(gate))


def _swiglu(x: Array) -> Array:
    gate, value = jnp.split(x, 2, -1)
    return _cast(jax.nn.silu(gate) * value)


def _trained(x: Array, dtype: Any = jnp.float8_e4m3fn) -> tuple[Array, Array, Array]:
    """What a step with delayed scales makes of a tensor: FP8, the amax, and the tensor for a filter's gradient."""
    q, amax = xla_fp8.quantize(x, dtype, scale=_SCALE, return_amax=True)
    return q.data, amax, x


def _gelu_gradient(x: Array, dy: Array) -> Any:
    (dx,) = jax.vjp(jax.nn.gelu, x)[1](dy)
    data, amax, _ = _trained(dx, jnp.float8_e5m2)
    return data, amax, dx.sum(tuple(range(dx.ndim - 1)))


def _geglu_gradient(x: Array, dy: Array) -> Any:
    def gated(x: Array) -> Array:
        value, gate = jnp.split(x, 2, -1)
        return value * jax.nn.gelu(gate)

    (dx,) = jax.vjp(gated, x)[1](dy)
    data, amax, _ = _trained(dx, jnp.float8_e5m2)
    return data, amax, dx.sum(tuple(range(dx.ndim - 1)))


def _layer_norm_gradient(x: Array, dy: Array) -> Any:
    affine = {name: jnp.asarray(value) for name, value in _affine(x.shape[-1]).items()}
    dx, sums = jax.vjp(layer_norm, x, affine)[1](dy)
    return (*_trained(dx, jnp.float8_e5m2), sums)


def _group_norm_silu_trained(x: Array) -> Any:
    return _trained(jax.nn.silu(group_norm(x, _affine(x.shape[-1]))))


def _group_norm_silu_gradient(x: Array, dy: Array) -> Any:
    affine = {name: jnp.asarray(value) for name, value in _affine(x.shape[-1]).items()}
    dx, sums = jax.vjp(lambda x, affine: jax.nn.silu(group_norm(x, affine)), x, affine)[1](dy)
    return (*_trained(dx, jnp.float8_e5m2), sums)


def _batch_norm_relu(x: Array) -> Any:
    affine = _affine(x.shape[-1])
    y, _ = batch_norm_of_batch(x, {**affine, "mean": affine["beta"], "var": affine["gamma"]})
    return _trained(jax.nn.relu(y))


def rows() -> list[Row]:
    """Of Stable Diffusion's UNet at two batch sizes, ConvNeXt, and a language model."""
    found = []
    for batch in (16, 2):
        for side, c in ((64, 320), (32, 640), (16, 1280)):
            image, tokens = (batch, side, side, c), (batch, side * side, c)
            found += [
                Row(f"group norm, silu {image}", _group_norm_silu, (image,), 2),
                Row(f"sums {image}", _sums, (image,), kernel=_sums_in_parts),
                Row(f"layer norm {tokens}", _layer_norm, (tokens,)),
                Row(f"geglu {(*tokens[:2], 4 * c)}", _geglu, ((*tokens[:2], 8 * c),)),
            ]
        parts = ((batch, 64, 64, 640), (batch, 64, 64, 320))
        joined = (batch, 64, 64, 960)
        found.append(Row(f"concatenation, group norm, silu {joined}", _group_norm_silu, parts, 2))
        found.append(Row(f"concatenation, sums {joined}", _sums, parts, kernel=_sums_in_parts))
        found.append(Row(f"group norm, silu {(batch, 8, 8, 1280)}", _group_norm_silu, ((batch, 8, 8, 1280),), 2))
    tokens, pixels, image = (16, 4096, 320), (16, 64, 64, 320), (256, 28, 28, 128)
    return [
        *found,
        Row("training: layer norm's gradient (16, 4096, 320)", _layer_norm_gradient, (tokens, tokens)),
        Row("training: group norm, silu (16, 64, 64, 320)", _group_norm_silu_trained, (pixels,), 2),
        Row("training: group norm, silu, gradient (16, 64, 64, 320)", _group_norm_silu_gradient, (pixels, pixels), 2),
        Row("training: geglu's gradient (16, 4096, 1280)", _geglu_gradient, ((16, 4096, 2560), (16, 4096, 1280))),
        Row("training: gelu's gradient (256, 14, 14, 1536)", _gelu_gradient, ((256, 14, 14, 1536),) * 2),
        Row("training: layer norm's gradient (256, 14, 14, 384)", _layer_norm_gradient, ((256, 14, 14, 384),) * 2),
        Row("training: batch norm, relu (256, 28, 28, 128)", _batch_norm_relu, (image,), 2),
        Row("training: batch norm, relu (256, 56, 56, 256)", _batch_norm_relu, ((256, 56, 56, 256),), 2),
        Row("layer norm (256, 56, 56, 96)", _layer_norm, ((256, 56, 56, 96),)),
        Row("layer norm (256, 14, 14, 384)", _layer_norm, ((256, 14, 14, 384),)),
        Row("rms norm (8192, 2048)", _rms_norm, ((8192, 2048),)),
        Row("swiglu (8192, 14336)", _swiglu, ((8192, 28672),)),
    ]


def program(row: Row, function: Callable[..., Any]) -> Callable[..., list[Any]]:
    """Calls of a function, one behind the other."""

    def run(*operands: Array) -> list[Any]:
        count = len(row.shapes)
        results: list[Any] = []
        for i in range(0, len(operands), count):
            own = operands[i : i + count]
            if results:  # else XLA would fuse what stands beside each other here and nowhere else
                *own, results[-1] = lax.optimization_barrier((*own, results[-1]))
            results.append(function(*own))
        return results

    return run


def _arguments(structs: Sequence[Any]) -> tuple[Array, ...]:
    @jax.jit
    def made() -> list[Array]:
        keys = jax.random.split(jax.random.key(0), len(structs))
        return [jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys, structs, strict=True)]

    return tuple(jax.block_until_ready(made()))


def measure(row: Row, bandwidth: float) -> dict[str, Any]:
    """Times both, and compares each with the program in f32."""
    structs = [struct for _ in range(row.calls) for struct in row.structs]
    arguments = _arguments(structs)
    ours = xla_fp8.jit(program(row, row.function)) if row.kernel is None else jax.jit(program(row, row.kernel))
    contestants = {
        "xla": Contestant(jax.jit(program(row, row.function)).lower(*structs).compile(), arguments, row.calls),
        "xla_fp8": Contestant(ours.lower(*structs).compile(), arguments, row.calls),
    }
    in_f32 = jax.jit(lambda *xs: row.function(*(x.astype(jnp.float32) for x in xs)))
    wanted = jax.tree.leaves(in_f32(*arguments[: len(row.shapes)]))[0]
    entry: dict[str, Any] = {"row": row.name, "floor_us": row.floor_bytes / bandwidth * 1e6}
    for name, contestant in contestants.items():
        found = jax.tree.leaves(contestant.executable(*arguments)[0])[0]
        if found.shape != wanted.shape:  # sums in parts
            entry[name] = {}
            continue
        entry[name] = {"equal to f32": float(jnp.mean((found == wanted) | (jnp.isnan(found) & jnp.isnan(wanted))))}
    for name, timing in time_in_turn(contestants).items():
        entry[name] |= timing.facts if isinstance(timing, Timing) else {"error": timing}
    return entry


def _told(entry: dict[str, Any]) -> str:
    lines = [f"{entry['row']}: floor {entry['floor_us']:.1f} us"]
    for name in ("xla", "xla_fp8"):
        facts = entry[name]
        timed = beside(facts, entry["xla"]) if "us" in facts else facts["error"]
        equal = f"  equal to f32: {facts['equal to f32']:.2%}" if "equal to f32" in facts else ""
        lines.append(f"  {name:8} {timed}{equal}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/fused_cast.json"), help="results, written row by row")
    parser.add_argument("--only", default="", help="rows whose name has this")
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
    for row in rows():
        if options.only not in row.name:
            continue
        try:
            entry = measure(row, bandwidth)
        except Exception as error:
            print(f"{row.name}: {short(error)}", flush=True)
            continue
        results["rows"].append(entry)
        print(_told(entry), flush=True)
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
