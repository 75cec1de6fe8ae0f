"""Property test: random FP8 convolution programs built in JAX mean the same before and after the pipeline.

Each example is lowered to HLO, rewritten in both dialects with the verifier after every pass, read back by XLA's
parser and StableHLO's verifier, run on the CPU and compared; a second run of the pipeline must change nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings

from tests.random_programs import Builder, Operands, Program, fits, programs
from tests.xla_options import QUICKLY
from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.backends.compare import TOLERANCES, compare
from xla_fp8.backends.executable import Executable

# Clipping leaves little of a large sum but its rounding error; a wrong scale or operand is wrong by more than this.
TOLERANCE = {type: dataclasses.replace(t, relative=max(t.relative, 1e-3)) for type, t in TOLERANCES.items()}


def lower(program: Program, wide: str) -> tuple[str, Operands]:
    """The program's HLO text, computing in `wide`, and its operands."""
    first = Builder(program, wide, None)
    jax.eval_shape(first.build)
    lowered = jax.jit(lambda *operands: Builder(program, wide, operands).build(), keep_unused=True).lower(*first.made)
    return _jax_compat.lowered_hlo_text(lowered), first.made


@pytest.mark.parametrize("dialect", ["xla", "extended"])
@settings(max_examples=2000 if settings.default.max_examples > 1000 else 30)
@given(program=programs().filter(fits))
def test_pipeline_keeps_the_meaning(dialect: str, program: Program) -> None:
    text, operands = lower(program, program.wide)
    module = hlo.parse(text)
    report = passes.run(module, target="h200", dialect=dialect, options=passes.PipelineOptions(verify_each=True))
    rewritten = hlo.to_text(module)
    _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(rewritten))
    again = hlo.parse(rewritten)
    passes.run(again, target="h200", dialect=dialect)
    assert hlo.to_text(again) == rewritten, "the second run changed something"

    before, after = (Executable(m, "cpu", QUICKLY)(*operands) for m in (hlo.parse(text), module))
    for index, (original, result) in enumerate(zip(before, after, strict=True)):
        difference = compare(original, result)
        if not TOLERANCE[program.wide].accepts(difference, original.dtype):
            assert is_nearer_to_f32(program, index, original, result), (
                f"output {index}: {difference}\n{report}\n{rewritten}"
            )


def is_nearer_to_f32(program: Program, index: int, original: Any, result: Any) -> bool:
    """Whether a bf16 or f16 program's result is at least as near to what it means, the program in f32, on average.

    The answer where rounding errors are most of an output, as behind a tanh of large numbers that cancel.
    """
    if program.wide == "f32":
        return False
    text, operands = lower(program, "f32")
    exact = Executable(hlo.parse(text), "cpu", QUICKLY)(*operands)[index].astype(np.float64)
    errors = [np.abs(output.astype(np.float64) - exact) for output in (original, result)]
    return bool(np.mean(errors[1]) <= np.mean(errors[0]))
