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
import json
import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8.backends import reference
from xla_fp8.backends.compare import Difference, compare
from xla_fp8.backends.cudnn.backend import CudnnBackend, Plan
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.target import GraphCall

RESULTS = os.environ.get("XLA_FP8_RESULTS")
EARLIER = [path for path in os.environ.get("XLA_FP8_EARLIER", "").split(":") if path]
SHARD, SHARDS = map(int, os.environ.get("XLA_FP8_SHARD", "0/1").split("/"))
SECONDS = float(os.environ.get("XLA_FP8_SECONDS", "inf"))
_start = time.monotonic()

Arrays = list[np.ndarray[Any, Any]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    results = [json.loads(line) for path in EARLIER for line in Path(path).read_text().splitlines()]
    passed = {result["test"] for result in results if result["outcome"] == "passed"}
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
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "message": "" if report.passed else str(report.longrepr)[-1500:],
        **dict(report.user_properties),
    }
    with Path(RESULTS).open("a") as file:
        file.write(json.dumps(result) + "\n")


def _name(item: pytest.Item) -> str:
    return item.nodeid.rpartition("hopper/")[2]


def f32_reference(call: GraphCall, operands: Arrays) -> Arrays:
    """What the call computes in f32, on the CPU: no tensor core has a part in it."""
    types = [shape.element_type for shape in call.output_shapes]
    with jax.default_device(jax.devices("cpu")[0]):

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            return reference.run(call.graph, call.window, call.dim_labels, call.feature_group_count, operands, types)

        return [np.asarray(output) for output in jax.jit(run)(*operands)]


def cudnn_function(call: GraphCall, plan: str = "") -> Callable[..., tuple[jax.Array, ...]]:
    """The call through the backend, with one of cuDNN's plans ("" is the first that builds)."""
    return CudnnBackend().lower(call, Plan(plan))


def near(difference: Difference, dtype: np.dtype[Any]) -> bool:
    """Whether a result is what the f32 reference says, up to the bits that a tensor core's sum loses.

    FP8: at most one step apart, and that in 2% of the elements at most (two elements always may). 16-bit: two units in
    the last place of the largest value. f32: 2^-10 of the largest value, as the tensor core keeps about 14 bits.
    """
    if dtype.itemsize == 1:
        return difference.beyond_one_step == 0 and difference.different <= max(2, 0.02 * difference.size)
    relative = {"bfloat16": 2.0**-7, "float16": 2.0**-9}.get(dtype.name, 2.0**-10)
    return difference.max_abs <= relative * difference.largest


@pytest.fixture
def check(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Compares every result of a call through cuDNN with the reference, and notes how far apart they are."""

    def run(call: GraphCall, plan: str = "", operands: Arrays | None = None) -> None:
        operands = random_inputs(call.operand_shapes, seed=1) if operands is None else operands
        expected = f32_reference(call, operands)
        outputs = jax.jit(cudnn_function(call, plan))(*map(jnp.asarray, operands))
        compare_all(expected, [np.asarray(output) for output in outputs], str(call.graph))

    def compare_all(expected: Arrays, outputs: Arrays, what: str) -> None:
        differences = [compare(wanted, output) for wanted, output in zip(expected, outputs, strict=True)]
        record_property("graph", what)
        record_property("types", [wanted.dtype.name for wanted in expected])
        record_property("max_abs", [difference.max_abs for difference in differences])
        record_property("largest", [difference.largest for difference in differences])
        record_property("share_equal", [1 - difference.share for difference in differences])
        record_property("max_steps", [difference.max_steps for difference in differences])
        for index, (difference, wanted) in enumerate(zip(differences, expected, strict=True)):
            assert near(difference, wanted.dtype), f"result {index} of {what}: {difference}"

    run.compare = compare_all  # type: ignore[attr-defined]
    return run
