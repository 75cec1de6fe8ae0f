"""Graph custom calls as plain HLO, and modules that run: what is replaced, and what is refused by name."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from xla_fp8 import _jax_compat, hlo
from xla_fp8.backends import reference
from xla_fp8.backends.compare import TOLERANCES, compare, working_type
from xla_fp8.backends.executable import Executable, ExecutionError
from xla_fp8.backends.expand import expand_graph_calls
from xla_fp8.graph import graph_of

CALL = """\
HloModule m

%amax.1 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %max = f32[] maximum(%a, %b)
}

ENTRY %main (x: f8e4m3fn[1,4,4,8], w: f8e4m3fn[8,3,3,8], s: f32[]) -> (f8e4m3fn[1,4,4,8], f32[], f32[]) {
  %x = f8e4m3fn[1,4,4,8]{3,2,1,0} parameter(0)
  %w = f8e4m3fn[8,3,3,8]{3,2,1,0} parameter(1)
  %s = f32[] parameter(2)
  %conv = (f8e4m3fn[1,4,4,8]{3,2,1,0}, f32[], u8[16]{0}) custom-call(%x, %w, %s), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForwardGraph", backend_config={"cudnn_conv_backend_config":{"serialized_graph":"1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);"}}
  %y = f8e4m3fn[1,4,4,8]{3,2,1,0} get-tuple-element(%conv), index=0
  %amax = f32[] get-tuple-element(%conv), index=1
  %wide = f32[1,4,4,8]{3,2,1,0} convert(%y)
  %zero = f32[] constant(0)
  %largest = f32[] reduce(%wide, %zero), dimensions={0,1,2,3}, to_apply=%amax.1
  %after = f32[] add(%largest, %zero), control-predecessors={%conv}
  ROOT %out = (f8e4m3fn[1,4,4,8]{3,2,1,0}, f32[], f32[]) tuple(%y, %amax, %after)
}
"""  # noqa: E501


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn) for shape in ((1, 4, 4, 8), (8, 3, 3, 8)))
    return [x, w, np.float32(0.5)]


def test_a_graph_call_becomes_a_call_to_plain_hlo() -> None:
    module = hlo.parse(CALL)
    assert expand_graph_calls(module) == 1
    hlo.verify(module)
    call = module.entry.instruction("after").control_predecessors[0]
    assert call.opcode == "call"
    assert call.shape == hlo.parse(CALL).entry.instruction("conv").shape
    _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(hlo.to_text(module)))
    assert expand_graph_calls(module) == 0


def test_two_calls_do_not_share_names() -> None:
    text = CALL.replace("  %y =", "  %conv.1 = " + CALL.split("%conv = ")[1].split("\n")[0] + "\n  %y =")
    module = hlo.parse(text.replace("get-tuple-element(%conv), index=1", "get-tuple-element(%conv.1), index=1"))
    assert expand_graph_calls(module) == 2
    hlo.verify(module)
    assert len(Executable(module, "cpu")(*arrays())) == 3


def test_it_computes_what_the_reference_computes() -> None:
    module = hlo.parse(CALL)
    call = module.entry.instruction("conv")
    graph = graph_of(call)
    assert graph is not None
    expected = reference.run(graph, call.window, call.dim_labels, 1, arrays())
    executable = Executable(module, "cpu")
    y, amax, largest = executable(*arrays())
    assert graph_of(module.entry.instruction("conv")) == graph, "the module itself is left as it is"
    assert [index for index, _ in executable.results] == ["{0}", "{1}", "{2}"]
    np.testing.assert_array_equal(y.astype(np.float32), np.asarray(expected[0]).astype(np.float32))
    np.testing.assert_allclose(amax, expected[1], rtol=1e-6)
    assert largest == np.max(y.astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("__cudnn$convForwardGraph", "__cudnn$convForward"), "custom call %conv in computation main has target"),
        (("%zero = f32[] constant(0)", "%zero = f32[] constant({...})"), "the value of constant %zero in computation"),
    ],
)
def test_what_cannot_run_is_refused_by_name(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ExecutionError) as error:
        Executable(hlo.parse(CALL.replace(*change)), "cpu")
    assert message in str(error.value)


@pytest.mark.parametrize("wrong", [slice(0, 2), [1, 0, 2], [0, 1, 1]])
def test_wrong_arguments_are_refused(wrong: slice | list[int]) -> None:
    given = arrays()[wrong] if isinstance(wrong, slice) else [arrays()[i] for i in wrong]
    with pytest.raises(ExecutionError, match="but got"):
        Executable(hlo.parse(CALL), "cpu")(*given)


def test_compare_counts_steps_and_tells_nan_from_numbers() -> None:
    fp8 = ml_dtypes.float8_e4m3fn
    a, b = np.array([1, -(2**-9), np.nan, 448, 0], fp8), np.array([1.125, 2**-9, np.nan, 448, -0.0], fp8)
    difference = compare(a, b)
    assert (difference.max_steps, difference.different, difference.beyond_one_step) == (2, 2, 1)
    assert difference.worst == (0,)
    assert difference.max_abs == 0.125
    lost = compare(a, np.array([1, -(2**-9), 2, 448, 0], fp8))
    assert (lost.max_abs, lost.max_steps, lost.different) == (np.inf, np.inf, 1)
    assert not any(tolerance.accepts(lost, a.dtype) for tolerance in TOLERANCES.values())
    with pytest.raises(ValueError, match="cannot compare"):
        compare(a, b[:2])


@pytest.mark.parametrize("dtype", [np.float64, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, np.int32])
def test_one_step_is_one_step_in_every_type(dtype: type) -> None:
    a = np.array([1, -2, 0.25, 3], dtype)
    step = np.array([1] * 4, dtype) if dtype is np.int32 else None
    b = (
        a + step
        if step is not None
        else (a.view(f"uint{8 * a.itemsize}") + 1).astype(f"uint{8 * a.itemsize}").view(dtype)
    )
    assert (compare(a, b).max_steps, compare(a, b).beyond_one_step) == (1, 0)


def test_the_working_type_is_what_a_module_computes_in() -> None:
    body = "a = bf16[4] parameter(0)\n  b = f32[4] convert(a)\n  ROOT c = f32[4] add(b, b)"
    text = f"HloModule m\n\nENTRY e {{\n  {body}\n}}\n"
    assert working_type(hlo.parse(text)) == "f32"
    assert (
        working_type(
            hlo.parse(text.replace("convert(a)", "convert(d)").replace("  b =", "  d = bf16[4] add(a, a)\n  b ="))
        )
        == "bf16"
    )
    rounded = text.replace("ROOT c = f32[4] add(b, b)", "ROOT c = bf16[4] convert(b)")
    assert working_type(hlo.parse(rounded)) == "bf16"
