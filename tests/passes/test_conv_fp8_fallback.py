"""conv-fp8-fallback: what the backend cannot run in FP8 keeps its numbers, its epilogue and its amax in bf16."""

from __future__ import annotations

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.graph import graph_of
from xla_fp8.passes import PipelineOptions
from xla_fp8.passes.conv_fp8_fallback import Fp8FallbackWarning
from xla_fp8.target import GraphCall, Target


@dataclasses.dataclass(frozen=True)
class No:
    """A backend's no."""

    reason: str = "the convolution has 1 input channel in each of 16 groups"
    rule: str = "grouped-channels"
    ok: bool = False


def target(verdict: No) -> Target:
    def supports(call: GraphCall) -> No:
        return verdict

    return Target("picky", (9, 0), supports=supports)


def quantize(y: jax.Array, largest: float = 448.0) -> jax.Array:
    return jnp.clip(y, -largest, largest).astype(jnp.float8_e4m3fn)


def chain(wide: jnp.dtype, groups: int, vector: bool) -> tuple[object, list[np.ndarray]]:
    """An FP8 convolution with scales before it (one divided), bias, relu, amax and a cast; and its arguments."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 8, 8, 16)).astype(jnp.float8_e4m3fn)
    w = rng.normal(size=(3, 3, 16 // groups, 32)).astype(jnp.float8_e5m2)
    scale = rng.uniform(0.5, 2, 32).astype(np.float32) if vector else np.float32(0.75)

    def program(x: jax.Array, w: jax.Array, a: jax.Array, b: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = lax.conv_general_dilated(
            x.astype(wide) / a.astype(wide),
            w.astype(wide) * b.astype(wide),
            (2, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )
        y = jax.nn.relu(y + bias.astype(wide))
        return quantize(y), jnp.max(jnp.abs(y))

    return program, [x, w, np.float32(1.25), scale, rng.normal(size=32).astype(np.float32)]


def text_of(program: object, arguments: list[np.ndarray]) -> str:
    return _jax_compat.lowered_hlo_text(jax.jit(program).lower(*arguments))  # type: ignore[arg-type]


def fall_back(text: str, verdict: No = No()) -> tuple[hlo.HloModule, passes.Report]:
    module = hlo.parse(text)
    report = passes.run(module, target=target(verdict), dialect="extended", options=PipelineOptions(verify_each=True))
    return module, report


@pytest.mark.parametrize("vector", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("groups", [1, 16])
@pytest.mark.parametrize("wide", [jnp.float32, jnp.bfloat16, jnp.float16], ids=["f32", "bf16", "f16"])
def test_the_numbers_stay(wide: jnp.dtype, groups: int, vector: bool) -> None:
    program, arguments = chain(wide, groups, vector)
    text = text_of(program, arguments)
    with pytest.warns(Fp8FallbackWarning, match="1 input channel in each of 16 groups; it runs in bf16"):
        module, report = fall_back(text)
    hlo.verify(module)
    assert report.changed
    assert not any(graph_of(i) for c in module.computations for i in c)
    (convolution,) = [i for i in module.entry if i.opcode == "convolution"]
    assert [operand.shape.element_type for operand in convolution.operands] == ["bf16", "bf16"]
    assert convolution.shape.element_type == "f32"
    assert {operand.operand(0).opcode for operand in convolution.operands} == {"opt-barrier"}

    exact, _ = chain(jnp.float32, groups, vector)
    y, amax = (np.asarray(result, np.float32) for result in exact(*arguments))  # type: ignore[operator]
    result, top = _jax_compat.execute(_jax_compat.compile_hlo_text(hlo.to_text(module), "cpu"), arguments)
    step = {jnp.float32: 1e-5, jnp.bfloat16: 2**-6, jnp.float16: 2**-9}[wide]
    assert np.mean(np.asarray(result, np.float32) != y) < (0.005 if wide is jnp.float32 else 0.1)
    np.testing.assert_allclose(np.asarray(top, np.float32), amax, rtol=step)


def test_the_report_names_the_rule_and_what_runs_instead() -> None:
    text = text_of(*chain(jnp.float32, 16, False))
    with pytest.warns(Fp8FallbackWarning):
        _, report = fall_back(text)
    (entry,) = report.refused_fp8
    assert entry.reason.endswith("1 input channel in each of 16 groups; it runs in bf16")
    assert entry.graph is None


def test_a_backend_that_names_no_rule_leaves_the_module_as_it_was() -> None:
    text = text_of(*chain(jnp.float32, 1, False))
    before = hlo.to_text(hlo.parse(text))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module, report = fall_back(text, No("left to XLA", rule=""))
    assert not report.changed
    assert hlo.to_text(module) == before


def test_other_convolutions_of_the_module_become_graphs() -> None:
    program, arguments = chain(jnp.float32, 16, False)

    def two(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        x, w, a, b, bias, kernel = arguments
        y, amax = program(x, w, a, b, bias)  # type: ignore[operator]
        z = lax.conv_general_dilated(
            y.astype(jnp.float32),
            kernel.astype(jnp.float32),
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return amax, quantize(z * 0.1)

    def supports(call: GraphCall) -> No:
        return No() if call.feature_group_count > 1 else No(ok=True)

    module = hlo.parse(text_of(two, [*arguments, np.ones((1, 1, 32, 32), jnp.float8_e4m3fn)]))
    with pytest.warns(Fp8FallbackWarning):
        report = passes.run(
            module,
            target=Target("picky", (9, 0), supports=supports),
            dialect="extended",
            options=PipelineOptions(verify_each=True),
        )
    assert len(report.rewritten) == 1
    assert sum(graph_of(i) is not None for i in module.entry) == 1
    assert sum(i.opcode == "convolution" for i in module.entry) == 1


def test_running_twice_changes_nothing_more() -> None:
    with pytest.warns(Fp8FallbackWarning):
        module, _ = fall_back(text_of(*chain(jnp.float32, 16, False)))
    once = hlo.to_text(module)
    module, report = fall_back(once)
    assert not report.changed
    assert hlo.to_text(module) == once
