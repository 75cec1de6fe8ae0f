"""Asks for every private JAX API of xla_fp8._jax_compat, so that a new JAX that moves one fails here, by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8 import _jax_compat

TEXT = """\
HloModule m

ENTRY e {
  a = f32[2,3]{1,0} parameter(0), metadata={op_name="the_name" source_file="a.py" source_line=3}
  c = f32[3]{0} constant({1, 2, 3})
  d = f32[12]{0} constant({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12})
  b = f32[2,3]{1,0} broadcast(c), dimensions={1}, control-predecessors={d}
  ROOT r = f32[2,3]{1,0} custom-call(a, b), custom_call_target="t", backend_config={"key":"value"}
}
"""
STABLEHLO_TEXT = """\
HloModule m

ENTRY e {
  a = f32[2,3]{1,0} parameter(0)
  ROOT r = f32[2,3]{1,0} add(a, a)
}
"""


FUNCTIONS_TEXT = """\
HloModule m

%two.helper (x: f32[2]) -> f32[2] {
  %x = f32[2]{0} parameter(0)
  ROOT %y = f32[2]{0} negate(%x)
}

%two (a: f32[2], b: f32[3]) -> (f32[2], f32[3]) {
  %a = f32[2]{0} parameter(0)
  %b = f32[3]{0} parameter(1)
  %c = f32[2]{0} call(%a), to_apply=%two.helper
  ROOT %t = (f32[2]{0}, f32[3]{0}) tuple(%c, %b)
}

%one (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  ROOT %s = f32[2]{0} sine(%a)
}

ENTRY %main () -> pred[] {
  ROOT %none = pred[] constant(false)
}
"""


@pytest.fixture(scope="module")
def lowered() -> jax.stages.Lowered:
    table = np.arange(100, dtype=np.float32) ** 2

    def function(x: jax.Array) -> jax.Array:
        return jnp.sin(x) * table

    return jax.jit(function).lower(jnp.zeros(100, jnp.float32))


def test_full_text_keeps_what_xla_prints_by_default_and_large_constants() -> None:
    full = _jax_compat.full_text(TEXT)
    for part in ('op_name="the_name"', "control-predecessors={%d}", '{"key":"value"}', "11, 12}", "%r = f32[2,3]{1,0}"):
        assert part in full
    assert _jax_compat.full_text(full) == full


def test_computations_that_nothing_calls_become_stablehlo_of_their_own() -> None:
    modules = _jax_compat.hlo_functions_to_stablehlo(FUNCTIONS_TEXT, ["one", "two"])
    one, two = (_jax_compat.verify_stablehlo(modules[name]) for name in ("one", "two"))
    assert one.count("func.func") == 1
    assert "@main(%arg0: tensor<2xf32>) -> tensor<2xf32>" in one
    assert two.count("func.func") == 2
    assert "@main(%arg0: tensor<2xf32>, %arg1: tensor<3xf32>) -> (tensor<2xf32>, tensor<3xf32>)" in two
    with pytest.raises(KeyError):
        _jax_compat.hlo_functions_to_stablehlo(FUNCTIONS_TEXT, ["three"])


def test_short_text_has_no_metadata_and_no_percent() -> None:
    short = _jax_compat.module_short_text(_jax_compat.hlo_text_to_module(TEXT))
    assert "the_name" not in short
    assert "%" not in short


def test_bad_text_is_a_runtime_error_with_line_and_column() -> None:
    with pytest.raises(RuntimeError, match=r"was parsing 3:3: error"):
        _jax_compat.hlo_text_to_module("HloModule m\nENTRY e {\n  ?\n}\n")


def test_proto_of_a_module_and_of_an_hlo_proto_print_the_same() -> None:
    proto = _jax_compat.hlo_text_to_proto(TEXT)
    size = len(proto)
    varint = bytes([size & 0x7F | 0x80, size >> 7]) if size > 0x7F else bytes([size])
    wrapped = b"\x0a" + varint + proto + b"\x1a\x02\x08\x01"  # field 3: a buffer assignment
    assert _jax_compat.hlo_proto_unwrap(proto) == proto
    assert _jax_compat.hlo_proto_unwrap(wrapped) == proto
    assert _jax_compat.module_proto_to_text(wrapped) == _jax_compat.module_proto_to_text(proto)
    assert "%r = f32[2,3]{1,0} custom-call(%a, %b)" in _jax_compat.module_proto_to_text(proto)


@pytest.mark.parametrize("bad", [b"", b"\xff\xff", b"\x0a\x7fabc", b"HloModule m\n", b"\x00\x01", b"\x08\x01"])
def test_bytes_without_a_module_are_refused(bad: bytes) -> None:
    with pytest.raises(_jax_compat.HloProtoError):
        _jax_compat.hlo_proto_unwrap(bad)


def test_stablehlo_of_hlo_verifies() -> None:
    text = _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(STABLEHLO_TEXT))
    assert "stablehlo.add" in text
    assert _jax_compat.verify_stablehlo(text) == text


def test_stablehlo_verifier_refuses_shapes_that_disagree() -> None:
    text = """
        func.func @f(%a: tensor<2xf32>, %b: tensor<3xf32>) -> tensor<2xf32> {
          %r = "stablehlo.add"(%a, %b) : (tensor<2xf32>, tensor<3xf32>) -> tensor<2xf32>
          return %r : tensor<2xf32>
        }"""
    with pytest.raises(Exception, match=r"stablehlo\.add"):
        _jax_compat.verify_stablehlo(text)


def test_lowered_text_has_metadata_and_large_constants(lowered: jax.stages.Lowered) -> None:
    text = _jax_compat.lowered_hlo_text(lowered)
    assert "9801" in text
    assert "metadata={" in text
    assert "sine(" in text


def test_compiled_text_is_that_of_the_optimized_module(lowered: jax.stages.Lowered) -> None:
    text = _jax_compat.compiled_hlo_text(lowered.compile())
    assert "is_scheduled=true" in text
    assert _jax_compat.full_text(text) == text


def test_jaxlib_version_is_that_of_the_package() -> None:
    import jaxlib

    assert _jax_compat.jaxlib_version() == jaxlib.__version__


def test_a_name_that_moved_is_reported_by_name() -> None:
    with pytest.raises(_jax_compat.JaxApiError, match=r"no jaxlib\._hlo\.Gone"):
        _jax_compat._private("jaxlib._hlo", "Gone")
    with pytest.raises(_jax_compat.JaxApiError, match=r"no jaxlib\._gone\.Name"):
        _jax_compat._private("jaxlib._gone", "Name")


def test_asking_the_parser_does_not_import_jax() -> None:
    program = f"""if 1:
        import sys
        from xla_fp8 import _jax_compat
        assert not [name for name in sys.modules if name.startswith("jax")], "imported before it is needed"
        _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo({STABLEHLO_TEXT!r}))
        assert "jax" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_gpu_compute_capability_is_none_without_a_gpu_and_a_version_with_one() -> None:
    capability = _jax_compat.gpu_compute_capability()
    if any(device.platform == "gpu" for device in jax.devices()):
        assert capability is not None
        assert capability >= (5, 0)
    else:
        assert capability is None


# Jaxprs and lowering.


@pytest.fixture
def closed() -> jax.extend.core.ClosedJaxpr:
    return jax.make_jaxpr(lambda x, y: (jnp.sin(x) * y, y))(jnp.ones(3), jnp.ones(3))


def test_equations_of_a_jaxpr_are_taken_out_and_put_back(closed: jax.extend.core.ClosedJaxpr) -> None:
    inner = _jax_compat.open_jaxpr(closed)
    assert [equation.primitive.name for equation in inner.eqns] == ["sin", "mul"]
    assert _jax_compat.open_jaxpr(inner) is inner
    again = _jax_compat.with_equations(closed, inner.eqns[:1], [inner.eqns[0].outvars[0], inner.invars[1]])
    sine, _ = jax.extend.core.jaxpr_as_fun(again)(jnp.ones(3), jnp.ones(3))
    np.testing.assert_allclose(sine, np.sin(np.ones(3)), rtol=1e-6)
    alone = _jax_compat.close_equations(inner.invars[:1], inner.eqns[0].outvars, inner.eqns[:1], "name")
    np.testing.assert_allclose(_jax_compat.evaluate_equations(alone, [jnp.ones(3)])[0], sine)


def test_a_traced_function_computes_what_it_did() -> None:
    table = np.arange(3, dtype=np.float32)

    def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.sin(x) * table, jax.jit(jnp.cos)(y)

    avals = [jax.core.ShapedArray((3,), np.dtype(np.float32))] * 2
    closed = _jax_compat.trace(function, avals, "name")
    assert closed.in_avals == avals
    x = jnp.linspace(0, 1, 3)
    for got, wanted in zip(jax.extend.core.jaxpr_as_fun(closed)(x, x), function(x, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def test_a_traced_function_without_constants_has_the_jaxpr_of_make_jaxpr() -> None:
    def twice(x: jax.Array) -> tuple[jax.Array]:
        return (x * 2,)

    aval = jax.core.ShapedArray((3,), np.dtype(np.float32))
    assert str(_jax_compat.trace(twice, [aval], "name")) == str(jax.make_jaxpr(twice)(aval))


def test_equations_without_contexts_are_those_that_a_trace_would_find(closed: jax.extend.core.ClosedJaxpr) -> None:
    plain = _jax_compat.without_contexts(closed)
    assert plain is not None
    traced = jax.make_jaxpr(lambda *values: _jax_compat.evaluate_equations(closed, values))(*closed.in_avals)
    assert str(plain) == str(traced)


def test_equations_without_contexts_name_no_mesh() -> None:
    mesh = jax.sharding.AbstractMesh((2,), ("x",))
    spread = jax.make_jaxpr(lambda x: jax.lax.broadcast_in_dim(x, (4,), ()))(1.0)
    inner = _jax_compat.open_jaxpr(spread)
    (equation,) = inner.eqns
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None))
    sharded = equation.replace(params={**equation.params, "sharding": everywhere})
    without = _jax_compat.without_contexts(_jax_compat.with_equations(spread, [sharded], inner.outvars))
    assert without is not None
    assert _jax_compat.open_jaxpr(without).eqns[0].params["sharding"] is None
    with jax.sharding.use_abstract_mesh(mesh):
        assert _jax_compat.without_contexts(jax.make_jaxpr(jnp.sin)(jax.ShapeDtypeStruct((3,), jnp.float32))) is None


def test_fresh_variables_differ(closed: jax.extend.core.ClosedJaxpr) -> None:
    aval = closed.in_avals[0]
    one, other = _jax_compat.fresh_variable(aval), _jax_compat.fresh_variable(aval)
    assert one is not other
    assert one.aval == aval


def test_equations_know_their_line_scope_and_context() -> None:
    def function(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    def outer(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            return jax.jit(function)(x)

    (call,) = jax.make_jaxpr(outer)(1.0).eqns
    assert call.primitive.name == "jit"
    assert _jax_compat.is_plain_jit(call)
    (sine,) = call.params["jaxpr"].eqns
    assert str(_jax_compat.equation_source(sine)).startswith(f"{__file__}:")
    assert str(_jax_compat.equation_source_info(sine, within=call).name_stack) == "outer/inner"
    (call,) = jax.make_jaxpr(lambda x: jax.nn.silu(x))(1.0).eqns
    inner = call.params["jaxpr"].eqns[0]
    assert _jax_compat.equation_source(inner) is None
    inlined = inner.replace(source_info=_jax_compat.equation_source_info(inner, within=call))
    assert str(_jax_compat.equation_source(inlined)).startswith(f"{__file__}:")
    assert not _jax_compat.has_own_context(sine)


def test_a_jit_with_a_sharding_or_donation_is_not_plain() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for kwargs in ({"in_shardings": device}, {"out_shardings": device}, {"donate_argnums": 0}):
        (call,) = jax.make_jaxpr(jax.jit(jnp.sin, **kwargs))(jnp.ones(3)).eqns
        assert not _jax_compat.is_plain_jit(call)


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_the_mesh_of_the_program_leaves_a_jit_plain(axis_type: jax.sharding.AxisType) -> None:
    with jax.set_mesh(jax.make_mesh((1,), ("data",), (axis_type,))):
        (call,) = jax.make_jaxpr(jax.jit(jnp.sin))(jnp.ones(3)).eqns
    assert not call.params["ctx_mesh"].empty
    assert _jax_compat.is_plain_jit(call)


def test_a_value_is_sharded_as_its_type_says() -> None:
    primitive = jax.extend.core.Primitive("sharded_test")
    primitive.def_abstract_eval(lambda x: x)
    jax.interpreters.mlir.register_lowering(
        primitive, lambda context, x: [_jax_compat.sharded_as_typed(context, x, context.avals_out[0])]
    )
    for axis_type, constraints in ((jax.sharding.AxisType.Auto, 0), (jax.sharding.AxisType.Explicit, 1)):
        with jax.set_mesh(jax.make_mesh((1,), ("data",), (axis_type,))):
            text = jax.jit(primitive.bind).lower(jnp.ones(3)).as_text()
        assert text.count("sharding_constraint") == constraints


def test_xla_metadata_is_a_context() -> None:
    from jax.experimental.xla_metadata import set_xla_metadata

    def marked(x: jax.Array) -> jax.Array:
        with set_xla_metadata(key="value"):
            return jnp.sin(x)

    (equation,) = jax.make_jaxpr(marked)(1.0).eqns
    assert _jax_compat.has_own_context(equation)


def test_jaxprs_are_differentiated_and_split(closed: jax.extend.core.ClosedJaxpr) -> None:
    both, nonzero_out = _jax_compat.jvp_of_jaxpr(closed, [True, False])
    assert nonzero_out == [True, False]
    known, linear, unknown = _jax_compat.split_jaxpr(both, [False, False, True], [False, False, True])
    assert unknown == [False, False, True]
    _, _, *residuals = jax.extend.core.jaxpr_as_fun(known)(jnp.ones(3), jnp.full(3, 2.0))
    (tangent,) = jax.extend.core.jaxpr_as_fun(linear)(*residuals, jnp.ones(3))
    np.testing.assert_allclose(tangent, 2 * np.cos(np.ones(3)), rtol=1e-6)


@pytest.mark.parametrize(("saved", "calls"), [(True, 1), (False, 2)])
def test_checkpoint_asks_the_policy_about_what_a_primitive_stands_for(saved: bool, calls: int) -> None:
    primitive = jax.extend.core.Primitive("save_test")
    primitive.def_abstract_eval(lambda x: x)
    _jax_compat.save_as(primitive, lambda equation: [equation])
    function = jax.checkpoint(lambda x, y: jnp.sin(primitive.bind(x) * y), policy=lambda *_, **__: saved)
    text = str(jax.make_jaxpr(jax.grad(function, argnums=1))(1.0, 2.0))
    assert text.count("save_test") == calls


def test_cache_holds_its_first_argument_weakly() -> None:
    class Key:
        pass

    calls = []
    cached = _jax_compat.weakref_lru_cache(lambda key, number: calls.append(number) or number)
    key = Key()
    assert (cached(key, 1), cached(key, 1), cached(key, 2), cached(Key(), 1)) == (1, 1, 2, 1)
    assert calls == [1, 2, 1]


def test_custom_vjp_equations_hold_wrapped_functions() -> None:
    function = jax.custom_vjp(jnp.sin)
    function.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (g,))
    (equation,) = jax.make_jaxpr(function)(1.0).eqns
    for name in ("fwd_jaxpr_thunk", "bwd"):
        original = equation.params[name]
        again = _jax_compat.wrapped_like(original.call_wrapped, original)
        assert type(again) is type(original)


def test_a_jaxpr_is_evaluated_as_one_equation_of_what_is_traced() -> None:
    closed = jax.make_jaxpr(lambda x: (jnp.sin(x) * 2, x))(1.0)

    def fn(x: jax.Array) -> list[jax.Array]:
        return _jax_compat.evaluate_staged(closed, [x], "some_name")

    (equation,) = jax.make_jaxpr(fn)(1.0).eqns
    assert (equation.primitive.name, equation.params["name"]) == ("jit", "some_name")
    assert _jax_compat.is_plain_jit(equation)
    wanted = [np.sin(np.float32(1)) * 2, 1]
    np.testing.assert_allclose(fn(jnp.float32(1)), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(fn)(1.0), wanted, rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: fn(x)[0]))(1.0), 2 * np.cos(1), rtol=1e-6)


@pytest.mark.parametrize("constant", [None, np.arange(3, dtype=np.float32)], ids=["plain", "with constants"])
def test_a_jaxpr_is_lowered_where_a_primitive_is(constant: np.ndarray | None) -> None:
    from jax.interpreters import mlir

    def fn(x: jax.Array) -> jax.Array:
        return jnp.sin(x) + (x if constant is None else jnp.asarray(constant))

    closed = jax.make_jaxpr(fn)(jnp.ones(3))
    primitive = jax.extend.core.Primitive("lower_test")
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, lambda context, x: _jax_compat.lower_jaxpr(context, closed, [x]))
    x = jnp.linspace(0, 1, 3)
    np.testing.assert_allclose(jax.jit(primitive.bind)(x), fn(x), rtol=1e-6)


def test_stablehlo_is_merged_where_a_primitive_is_lowered() -> None:
    from jax.interpreters import mlir

    stablehlo = _jax_compat.hlo_to_stablehlo(
        STABLEHLO_TEXT.replace("add(a, a)", 'custom-call(a), custom_call_target="t"')
    )
    primitive = jax.extend.core.Primitive("merge_test")
    primitive.def_abstract_eval(lambda x: x)
    seen = []

    def lower(context: object, x: object) -> list[object]:
        name, calls = _jax_compat.merge_stablehlo(context, stablehlo, "merged")
        seen.append((name, [call.name for call in calls], _jax_compat.is_partitioned(context)))
        assert _jax_compat.local_devices_of(context) == (jax.devices()[0],)
        return [x]

    mlir.register_lowering(primitive, lower)
    _jax_compat.require_devices_during_lowering(primitive)
    text = jax.jit(primitive.bind).lower(jnp.ones((2, 3))).as_text()
    assert seen == [("merged", ["stablehlo.custom_call"], False)]
    assert "func.func private @merged" in text


RUN_TEXT = """\
HloModule m, input_output_alias={ {0}: (0, {}, may-alias) }

ENTRY e {
  a = f64[2,3]{0,1} parameter(0), sharding={replicated}
  b = s4[2]{0} parameter(1)
  d = f64[2,3]{0,1} add(a, a)
  c = f8e4m3fn[2,3]{1,0} convert(a)
  inner = (f8e4m3fn[2,3]{1,0}, s4[2]{0}) tuple(c, b)
  ROOT r = (f64[2,3]{0,1}, (f8e4m3fn[2,3]{1,0}, s4[2]{0})) tuple(d, inner)
}
"""


def test_hlo_text_runs_twice_on_the_same_arrays_whatever_its_layouts_and_aliases() -> None:
    executable = _jax_compat.compile_hlo_text(RUN_TEXT, "cpu", {"xla_allow_excess_precision": False})
    a, b = np.arange(6, dtype=np.float64).reshape(2, 3), np.array([-3, 4], jnp.int4)
    for _ in range(2):
        doubled, fp8, same = _jax_compat.execute(executable, [a, b])
        assert (doubled.dtype, fp8.dtype, same.dtype) == (np.float64, jnp.float8_e4m3fn, jnp.int4)
        np.testing.assert_array_equal(doubled, 2 * a)
        np.testing.assert_array_equal(fp8.astype(np.float64), a)
        np.testing.assert_array_equal(same, b)


def test_an_unknown_platform_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="abacus"):
        _jax_compat.compile_hlo_text(STABLEHLO_TEXT, "abacus")


def test_short_text_of_a_lowered_function_has_its_constants(lowered: jax.stages.Lowered) -> None:
    text = _jax_compat.lowered_short_text(lowered)
    assert "9801" in text
    assert "metadata" not in text


def test_files_that_are_hidden_are_not_the_users(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours" / "module.py", tmp_path / "ours_not" / "module.py"
    assert _jax_compat.is_user_file(str(ours))
    assert not _jax_compat.is_user_file(str(Path(jax.__file__).parent / "_src" / "core.py"))
    _jax_compat.hide_from_sources(str(ours.parent))
    assert not _jax_compat.is_user_file(str(ours))
    assert _jax_compat.is_user_file(str(theirs))


def lowered_for_hopper(kernel: Any, scratch: Any) -> str:
    """A kernel of Pallas Mosaic GPU from i32[128] to i32[128], lowered by the JAX that can without a GPU."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.sharding import AbstractDevice, AbstractMesh

    if not hasattr(jax.sharding, "use_abstract_mesh"):
        pytest.skip("this JAX cannot lower for a device that is not there")
    call = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.int32),
        scratch_types=[scratch],
        grid=(1,),
        grid_names=("program",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    try:  # JAX 0.10 asks for no platform
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    except TypeError:
        device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(call).trace(jax.ShapeDtypeStruct((128,), jnp.int32))
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_inline_ptx_reaches_the_kernel() -> None:
    import jax.experimental.pallas.mosaic_gpu as plgpu

    def kernel(x: Any, y: Any, shared: Any) -> None:
        @plgpu.inline_mgpu(  # type: ignore[no-untyped-call,untyped-decorator]
            arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(()))
        )
        def run(_: Any, shared: Any, y: Any, value: Any) -> None:
            text = "st.shared.b32 [$0], 7; red.global.add.f32 [$1], $2;"
            _jax_compat.inline_ptx(text, shared=[shared], pointers=[y], values=[value])

        run(shared, y, jnp.float32(1))

    text = lowered_for_hopper(kernel, plgpu.SMEM((4,), jnp.int32))
    assert "st.shared.b32" in text
    assert "r,l,f,~{memory}" in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("optimized", [True, False])
def test_a_ref_is_loaded_in_a_layout(optimized: bool) -> None:
    import jax.experimental.pallas.mosaic_gpu as plgpu

    loaded = []

    def kernel(x: Any, y: Any, shared: Any) -> None:
        loaded.append(_jax_compat.load_ref(shared, plgpu.Layout.WG_STRIDED((128,), vec_size=1), optimized=optimized))
        shared[...] = loaded[0] + 1

    lowered_for_hopper(kernel, plgpu.SMEM((128,), jnp.int32))
    assert loaded[0].shape == (128,)


def test_an_equation_is_bound_in_its_own_context_behind_the_current_scopes() -> None:
    def scoped(x: jax.Array) -> jax.Array:
        with jax.named_scope("inner"):
            return jnp.sin(x)

    (equation,) = _jax_compat.open_jaxpr(jax.make_jaxpr(scoped)(1.0)).eqns

    def bound(x: jax.Array) -> jax.Array:
        with jax.named_scope("outer"):
            (y,) = _jax_compat.bind_equation(equation, [x])
        return y

    (again,) = _jax_compat.open_jaxpr(jax.make_jaxpr(bound)(1.0)).eqns
    assert again.primitive is equation.primitive
    assert str(again.source_info.name_stack) == "outer/inner"
    assert _jax_compat.equation_source(again) == _jax_compat.equation_source(equation)


def test_a_jaxpr_is_open_or_closed_like_another(closed: jax.extend.core.ClosedJaxpr) -> None:
    plain = jax.make_jaxpr(jnp.sin)(1.0)
    for original in (closed, _jax_compat.open_jaxpr(closed)):
        assert isinstance(_jax_compat.like_jaxpr(plain, original), type(original))


def test_values_inside_vmap_know_how_many_examples_they_stand_for() -> None:
    seen = []

    def spy(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.append((_jax_compat.vmapped_examples(x), _jax_compat.vmapped_examples(y)))
        return x + y

    jax.vmap(jax.vmap(spy, (0, None)), (0, None))(jnp.ones((3, 5)), 1.0)
    jax.vmap(jax.grad(spy), (0, None))(jnp.ones(4), 1.0)
    jax.vmap(lambda x: jax.jvp(lambda x: spy(x, 1.0), (x,), (x,)))(jnp.ones(6))
    jax.grad(lambda x: jnp.sum(jax.vmap(spy)(x, x)))(jnp.ones(7))
    spy(jnp.ones(2), jnp.ones(2))
    assert seen == [(15, 1), (4, 1), (6, 1), (7, 7), (1, 1)]


def test_operands_are_made_to_vary_over_the_same_axes() -> None:
    from jax.sharding import PartitionSpec

    seen = []

    def spy(x: jax.Array, y: jax.Array) -> jax.Array:
        seen.extend(_jax_compat.alike_over_mesh(x, y))
        return x * y

    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    of_shards = jax.shard_map(
        spy, mesh=mesh, in_specs=(PartitionSpec("i"), PartitionSpec()), out_specs=PartitionSpec("i")
    )
    jax.eval_shape(of_shards, jnp.ones(3), jnp.ones(3))
    assert jax.typeof(seen[0]) == jax.typeof(seen[1])
    assert jax.typeof(seen[0]) != jax.typeof(jnp.ones(3))


def test_what_is_lowered_knows_whether_it_spans_devices() -> None:
    seen = []
    primitive = jax.extend.core.Primitive("spy")
    primitive.def_abstract_eval(lambda x: x)

    def lower(context: Any, x: Any) -> Any:
        seen.append(_jax_compat.spans_devices(context))
        return [x]

    jax.interpreters.mlir.register_lowering(primitive, lower)
    jax.jit(primitive.bind).lower(jnp.ones(2))
    mesh = jax.sharding.AbstractMesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.ShapeDtypeStruct((2,), jnp.float32, sharding=jax.NamedSharding(mesh, jax.P("i")))
    for function in (
        primitive.bind,
        jax.shard_map(primitive.bind, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")),
    ):
        jax.jit(function).trace(sharded).lower(lowering_platforms=("cpu",))
    assert seen == [False, True, False]


def test_inputs_in_use() -> None:
    def function(x: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        jnp.sin(z)
        return jax.lax.scan(lambda carry, _: (carry * y, None), x, None, 2)[0]

    assert _jax_compat.inputs_in_use(jax.make_jaxpr(function)(1.0, 2.0, 3.0)) == [True, True, False]
