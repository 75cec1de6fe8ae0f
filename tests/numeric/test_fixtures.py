"""Every golden fixture, through the default pipeline: XLA takes the result, and it computes the same numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tests.xla_options import QUICKLY
from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.backends.compare import TOLERANCES, compare, working_type
from xla_fp8.backends.executable import Executable, ExecutionError
from xla_fp8.backends.inputs import random_inputs

FIXTURES = Path(__file__).resolve().parents[2] / "hlo_fixtures"
FILES = sorted(
    path.relative_to(FIXTURES).as_posix()
    for path in FIXTURES.glob("**/*.hlo")
    if path.relative_to(FIXTURES).parts[0] != "dumps"
)


def _module(name: str) -> hlo.HloModule:
    try:
        module = hlo.parse((FIXTURES / name).read_text(), name)
        hlo.verify(module)
        return module
    except (hlo.HloParseError, hlo.HloVerifyError) as error:
        pytest.skip(f"is there to be rejected: {error.message}")


def _is_floating(array: np.ndarray[Any, Any]) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


@pytest.mark.parametrize("name", FILES)
def test_pipeline_keeps_the_meaning(name: str) -> None:
    original = _module(name)
    rewritten: dict[str, hlo.HloModule] = {}  # dialects often agree: one run of each text is enough
    for dialect in ("xla", "extended"):
        module = _module(name)
        options = passes.PipelineOptions(verify_each=True)
        if passes.run(module, target="h200", dialect=dialect, options=options).changed:
            text = hlo.to_text(module)
            _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(text))
            rewritten[text] = module
    if not rewritten:
        return
    if any(computation.has_side_effect for computation in original.computations):
        pytest.skip("has side effects: it would wait for another process")
    try:
        executable = Executable(original, "cpu", QUICKLY)
    except ExecutionError as error:
        pytest.skip(f"the original does not run on a CPU: {str(error).splitlines()[0]}")
    arrays = random_inputs(executable.parameters)
    before = executable(*arrays)
    if any(_is_floating(output) and np.isnan(output.astype(np.float64)).any() for output in before):
        # The root of a variance below 0, say. Whether a maximum with NaN is NaN depends on the version of XLA's CPU.
        arrays = [np.abs(array) if _is_floating(array) else array for array in arrays]
        before = executable(*arrays)
    # One fixture takes the sine of large numbers. A wrong scale or operand is wrong by more than this.
    tolerance = TOLERANCES[working_type(original)]
    tolerance = dataclasses.replace(tolerance, relative=max(tolerance.relative, 1e-3))
    for module in rewritten.values():
        for index, (one, other) in enumerate(zip(before, Executable(module, "cpu", QUICKLY)(*arrays), strict=True)):
            difference = compare(one, other)
            assert tolerance.accepts(difference, one.dtype), f"output {index}: {difference}"
