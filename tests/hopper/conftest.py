"""What the tests on a Hopper GPU share: results that survive between runs, a deadline, and the comparison itself.

    XLA_FP8_RESULTS=results.jsonl   every outcome is appended to this file
    XLA_FP8_EARLIER=a.jsonl:b.jsonl what passed in these is not run again
    XLA_FP8_SHARD=0/4               one of four processes that share the tests
    XLA_FP8_SECONDS=500             no test starts later than this many seconds after the first
    XLA_FP8_SEEDS=0:500             which random graphs

`python benchmarks/validation_report.py results.jsonl > docs/validation-h200.md` makes the report.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
import os
import platform
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8.backends.compare import compare
from xla_fp8.backends.cudnn import CudnnMissingError, library
from xla_fp8.backends.cudnn.backend import CudnnBackend, Plan
from xla_fp8.backends.error_bound import TENSOR_CORE, Interval, intervals
from xla_fp8.backends.inputs import random_operands
from xla_fp8.target import GraphCall, format_version

RESULTS = os.environ.get("XLA_FP8_RESULTS")
EARLIER = [path for path in os.environ.get("XLA_FP8_EARLIER", "").split(":") if path]
SHARD, SHARDS = map(int, os.environ.get("XLA_FP8_SHARD", "0/1").split("/"))
SECONDS = float(os.environ.get("XLA_FP8_SECONDS", "inf"))
_start = time.monotonic()
# One plan or config for each call, the backend's own choice: tuning is a test of its own.
os.environ.setdefault("XLA_FP8_AUTOTUNE", "0")

Arrays = list[np.ndarray[Any, Any]]


def pytest_sessionstart(session: pytest.Session) -> None:
    if RESULTS is not None:
        _append({"environment": environment(), "date": _now()})


def environment() -> dict[str, str]:
    """The device and the versions of what runs here, for the report."""
    devices = jax.devices()
    found = {
        "device": f"{len(devices)} x {devices[0].device_kind}",
        "compute capability": str(getattr(devices[0], "compute_capability", "none")),
        "platform": " ".join(str(getattr(devices[0].client, "platform_version", "")).split()),
        "Python": platform.python_version(),
    }
    for distribution in ("jax", "jaxlib", "nvidia-cudnn-frontend", "jax-tvm-ffi"):
        found[distribution] = str(library.version_of(distribution))
    try:
        found["cuDNN"] = format_version(library.version())
    except CudnnMissingError as error:
        found["cuDNN"] = str(error)
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    results = [json.loads(line) for path in EARLIER for line in Path(path).read_text().splitlines()]
    passed = {result["test"] for result in results if result.get("outcome") == "passed"}
    here = [item for item in items if item.get_closest_marker("hopper")]
    mine = [item for item in here if _name(item) not in passed][SHARD::SHARDS]
    items[:] = [item for item in items if item not in here or item in mine]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.monotonic() - _start > SECONDS:
        pytest.skip(f"the {SECONDS:g} seconds of this run are over")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    outcome = yield
    report = outcome.get_result()
    if RESULTS is None or (report.when != "call" and not report.failed):
        return
    result = {
        "test": _name(item),
        "outcome": report.outcome,
        "seconds": round(report.duration, 3),
        "date": _now(),
        "reason": "" if report.passed else _reason(report),
        "message": "" if report.passed else str(report.longrepr)[-1500:],
        **dict(report.user_properties),
    }
    _append(result)


def _reason(report: pytest.TestReport) -> str:
    """The first line of what went wrong, or why it was skipped."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    return next((line.strip()[:400] for line in text.splitlines() if line.strip()), "no message")


def _append(result: dict[str, Any]) -> None:
    """Adds a line in one write: several processes may append to the file."""
    assert RESULTS is not None
    handle = os.open(RESULTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(result) + "\n").encode())
    finally:
        os.close(handle)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _name(item: pytest.Item) -> str:
    return item.nodeid.rpartition("hopper/")[2]


def operands_of(call: GraphCall, seed: int = 1) -> Arrays:
    """Random operands with outputs of the order of ten, so that an FP8 output is neither all zeros nor all saturated.

    Input and filter are scaled by a power of two, the same for every element: exponents stay as mixed as they were.
    """
    operands = random_operands(call, seed=seed)
    filter_shape = call.operand_shapes[1].dimensions
    products = math.prod(filter_shape) // filter_shape[call.dim_labels.kernel_output_feature_dimension]
    smaller = 2.0 ** -round(math.log2(products) / 4)
    scaled = [(array.astype(np.float32) * smaller).astype(array.dtype) for array in operands[:2]]
    return [*scaled, *operands[2:]]


@functools.lru_cache(maxsize=4)
def expected(call: GraphCall, seed: int = 1) -> tuple[Arrays, list[Interval]]:
    """Operands, and what the reference makes of them with its bounds, from the CPU: no tensor core has a part in it."""
    operands = operands_of(call, seed)
    return operands, bounded(call, operands)


def bounded(call: GraphCall, operands: Arrays) -> list[Interval]:
    with jax.default_device(jax.devices("cpu")[0]):
        return intervals(call, operands, TENSOR_CORE)


def cudnn_function(call: GraphCall, plan: str = "") -> Callable[..., tuple[jax.Array, ...]]:
    """The call through the backend, with one of cuDNN's plans ("" is the first that builds)."""
    return CudnnBackend().lower(call, Plan(plan))


class Check:
    """Compares results with the reference, and notes how far apart they are for the report."""

    def __init__(self, note: Callable[[str, object], None]) -> None:
        self.note = note

    def __call__(self, call: GraphCall, plan: str = "", operands: Arrays | None = None) -> None:
        """Every result of a call through cuDNN is within its bound (`xla_fp8.backends.error_bound`)."""
        if operands is None:
            operands, wanted = expected(call)
        else:
            wanted = bounded(call, operands)
        outputs = jax.jit(cudnn_function(call, plan))(*map(jnp.asarray, operands))
        self.within(wanted, [np.asarray(output) for output in outputs], str(call.graph))

    def within(self, wanted: list[Interval], outputs: Arrays, what: str) -> None:
        self._note([interval.stored for interval in wanted], outputs, what)
        self.note("of_bound", [_of_bound(i, output) for i, output in zip(wanted, outputs, strict=True)])
        outside = [interval.outside(output) for interval, output in zip(wanted, outputs, strict=True)]
        self.note("outside", [int(np.count_nonzero(wrong)) for wrong in outside])
        for index, (interval, output, wrong) in enumerate(zip(wanted, outputs, outside, strict=True)):
            if wrong.any():
                where = tuple(int(i) for i in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
                pytest.fail(
                    f"result {index} of {what}: {np.count_nonzero(wrong)} of {wrong.size} elements beyond the bound, "
                    f"e.g. {output[where]} at {where} for {interval.value[where]} +- {interval.error[where]}",
                    pytrace=False,
                )

    def same(self, wanted: Arrays, outputs: Arrays, what: str) -> None:
        """Whole programs of one convolution: NaN and infinity at the same places, and the rest near in the L2 norm.

        A convolution's relative error e flips the FP8 rounding of e/0.09 of the values nearest to a boundary, by a step
        of 0.09: sqrt(e * 0.09) in the norm, for the e of 2^-11 to 2^-8 of tensor cores 0.7% to 1.9%.
        """
        self._note(wanted, outputs, what)
        for index, (a, b) in enumerate(zip(wanted, outputs, strict=True)):
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            finite = np.isfinite(wide_a)
            np.testing.assert_array_equal(wide_a[~finite], wide_b[~finite])
            norm = np.linalg.norm(wide_a[finite])
            error = np.linalg.norm(wide_a[finite] - wide_b[finite])
            assert error <= 0.02 * norm, (
                f"result {index} of {what}: the norm of the error is {error / norm:.2%} of its own"
            )

    def _note(self, wanted: Arrays, outputs: Arrays, what: str) -> None:
        differences = [compare(a, b) for a, b in zip(wanted, outputs, strict=True)]
        self.note("graph", what)
        self.note("types", [array.dtype.name for array in wanted])
        self.note("max_abs", [difference.max_abs for difference in differences])
        self.note("largest", [difference.largest for difference in differences])
        self.note("share_equal", [1 - difference.share for difference in differences])
        self.note("max_steps", [difference.max_steps for difference in differences])


def _of_bound(interval: Interval, output: np.ndarray[Any, Any]) -> float | None:
    """The largest error as a part of the bound, where the output is f32 and so is not rounded."""
    usable = np.isfinite(interval.value) & (interval.error > 0)
    if interval.type != "f32" or not usable.any():
        return None
    return float(np.max(np.abs(output - interval.value)[usable] / interval.error[usable]))


@pytest.fixture
def check(record_property: Callable[[str, object], None]) -> Check:
    return Check(record_property)
