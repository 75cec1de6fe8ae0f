"""Where the time of a step goes: the kernels of a JAX profile by what they do, told from the compiled program."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from xla_fp8 import hlo
from xla_fp8.backends.depthwise.primitive import PRIMITIVE
from xla_fp8.hlo import HloInstruction, HloModule

KINDS = (
    "convolution",
    "depthwise",
    "matmul",
    "attention",
    "quantization",
    "norms and sums",
    "pointwise",
    "copies",
    "unknown",
)
"""`depthwise`: convolutions in groups, cuDNN's and this project's, these with what belongs to them. `quantization`:
fusions that write FP8, or find an amax. `norms and sums`: others with a reduction. What a fusion does besides (an
activation in front of a cast, say) counts with it."""

_TARGETS = (
    (re.compile(r"__cudnn\$conv|mosaic_gpu|xla_fp8\.?conv|xla_fp8_cudnn"), "convolution"),
    (re.compile(r"__cublas|gemm", re.IGNORECASE), "matmul"),
    (re.compile(r"fmha|flash|sdpa|attention", re.IGNORECASE), "attention"),
    (re.compile(r"quantize|triton_kernel_call|xla\.gpu\.triton"), "quantization"),
)
_KERNELS = (
    (re.compile(r"fmha|flash|sdpa"), "attention"),
    (re.compile(r"depthwise|grouped_direct"), "depthwise"),
    (re.compile(r"fused_cast|quantize"), "quantization"),
    (re.compile(r"fprop|dgrad|wgrad|conv2d|implicit|mosaic"), "convolution"),
    (re.compile(r"gemm|nvjet|cutlass"), "matmul"),
    (re.compile(r"memcpy|memset", re.IGNORECASE), "copies"),
    (re.compile(r"transpose|copy"), "copies"),
    (re.compile(r"reduce"), "norms and sums"),
    (re.compile(r"fusion|wrapped|loop_"), "pointwise"),
)


_KERNEL_OPCODES = frozenset(
    ("convolution", "dot", "custom-call", "copy", "transpose", "concatenate", "copy-start", "reduce", "fusion")
)


def kinds_of(module: HloModule) -> dict[str, str]:
    """What each instruction that is a kernel does, by its name."""
    return {
        instruction.name: kind
        for computation in module.computations
        for instruction in computation
        if (kind := kind_of(instruction)) is not None
    }


def kind_of(instruction: HloInstruction) -> str | None:
    """One of KINDS; None for what runs no kernel."""
    opcode = instruction.opcode
    if opcode in _KERNEL_OPCODES and _is_depthwise(instruction):
        return "depthwise"
    if opcode in ("convolution", "dot"):
        return "convolution" if opcode == "convolution" else "matmul"
    if opcode == "custom-call":
        return _first(_TARGETS, instruction.custom_call_target) or "unknown"
    if opcode in ("copy", "transpose", "concatenate", "copy-start"):
        return "copies"
    if opcode == "reduce":
        return "norms and sums"
    if opcode != "fusion":
        return None
    inside = [i for computation in instruction.called_computations for i in computation]
    opcodes = {i.opcode for i in inside}
    if opcodes & {"convolution", "dot"}:
        return "convolution" if "convolution" in opcodes else "matmul"
    if any(shape.is_fp8 for shape in _leaves(instruction)) or ("abs" in opcodes and "reduce" in opcodes):
        return "quantization"
    if opcodes & {"reduce", "reduce-window", "select-and-scatter"}:
        return "norms and sums"
    moves = {"parameter", "transpose", "copy", "bitcast", "tuple", "concatenate", "reshape", "constant"}
    return "copies" if opcodes <= moves else "pointwise"


def _is_depthwise(instruction: HloInstruction) -> bool:
    if PRIMITIVE in instruction.op_name:
        return True
    is_convolution = instruction.opcode == "convolution" or "__cudnn$conv" in instruction.custom_call_target
    groups = [instruction.attr(name) for name in ("feature_group_count", "batch_group_count")]
    return is_convolution and any(int(count) > 1 for count in groups if count)


def _leaves(instruction: HloInstruction) -> Iterator[Any]:
    shape = instruction.shape
    yield from shape.tuple_shapes if shape.is_tuple else (shape,)


def _first(rules: tuple[tuple[re.Pattern[str], str], ...], text: str) -> str | None:
    return next((kind for pattern, kind in rules if pattern.search(text)), None)


def launches(module: HloModule) -> dict[str, int]:
    """How many kernels of each kind a step has, as compiled: instructions of the computations that run one by one."""
    inside = {called for c in module.computations for i in c if i.opcode != "while" for called in i.called_computations}
    counted = collections.Counter(
        kind
        for computation in module.computations
        if computation not in inside
        for instruction in computation
        if (kind := kind_of(instruction)) is not None
    )
    return dict(counted)


def parsed(compiled: Any) -> HloModule | None:
    """The compiled program; None where it has text that this project does not read."""
    try:
        return hlo.parse(compiled.as_text())
    except hlo.HloError:
        return None


def profile(run: Callable[[], None], steps: int, kinds: Mapping[str, str]) -> dict[str, Any]:
    """Milliseconds of each kind in a step, and the kernels that take longest; the time from the first kernel to the end
    of the last; and what takes longest on the host (what it calls counts with it).

    Args:
        run: runs `steps` steps, to their end.
        kinds: of `kinds_of`.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    ms: collections.Counter[str] = collections.Counter()
    kernels: collections.Counter[tuple[str, str]] = collections.Counter()
    count, begin, end = 0, float("inf"), 0.0
    for op, kernel, at, nanoseconds in _kernels(data):
        begin, end = min(begin, at), max(end, at + nanoseconds)
        # Of what runs in a CUDA graph `op` is the graph; XLA's own kernels are named for their instructions.
        name = op if op in kinds else re.sub(r"_(\d+)$", r".\1", kernel)
        kind = kinds.get(name) or _first(_KERNELS, kernel) or "unknown"
        ms[kind] += nanoseconds / 1e6 / steps  # type: ignore[assignment]
        kernels[(kind, name)] += nanoseconds / 1e6 / steps  # type: ignore[assignment]
        count += 1
    longest = [[kind, name[:80], round(value, 4)] for (kind, name), value in kernels.most_common(25)]
    return {
        "ms": {kind: ms[kind] for kind in KINDS if ms[kind]},
        "kernels": count / steps,
        "span_ms": round(max(0.0, end - begin) / 1e6 / steps, 4),
        "longest": longest,
        "host": _host(data, steps),
    }


def _host(data: Any, steps: int) -> dict[str, float]:
    found: collections.Counter[str] = collections.Counter()
    for plane in data.planes:
        if plane.name.startswith("/host:CPU"):
            for line in plane.lines:
                for event in line.events:
                    if event.name.startswith("$"):  # Python's functions
                        continue
                    found[event.name.partition("#")[0][:60]] += event.duration_ns / 1e6 / steps
    return {name: round(ms, 4) for name, ms in found.most_common(25)}


def _kernels(data: Any) -> Iterator[tuple[str, str, float, float]]:
    """(HLO instruction, kernel, begin, nanoseconds) of what ran on a GPU's streams; on a CPU of its operations."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in devices or planes:
        for line in plane.lines:
            if devices and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                op = str(stats.get("hlo_op", ""))
                if devices or op:
                    yield op, event.name, event.start_ns, event.duration_ns
