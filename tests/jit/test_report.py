"""Reports of traced functions, strict mode, and the environment variables."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

import xla_fp8
from tests.jit.programs import LAYOUT, assert_close, conv, inputs, quantize, tensors, wide_layer
from xla_fp8 import hlo
from xla_fp8.backends.protocol import Config, Implementation, No
from xla_fp8.backends.registry import BackendError, ReferenceBackend
from xla_fp8.passes import DEFAULT_PIPELINE
from xla_fp8.report import Report
from xla_fp8.target import GraphCall, Target, Verdict
from xla_fp8.tracing.errors import DumpWarning


def here(fn: Any, text: str) -> str:
    """`file:line` of the line of `fn` that holds `text`."""
    lines, first = inspect.getsourcelines(fn)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def net(x8: jax.Array, w8: jax.Array, wide: jax.Array) -> Any:
    x = x8.astype(jnp.float32) * 0.1
    a = lax.conv_general_dilated(x, w8.astype(jnp.float32), (1, 1), "SAME", dimension_numbers=LAYOUT)  # rewritten
    b = lax.conv_general_dilated(x, wide, (1, 1), "SAME", dimension_numbers=LAYOUT)  # refused

    def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        return c @ c, None  # not FP8

    return a, b, lax.scan(body, jnp.eye(3), None, length=2)[0]


ARGS = (*tensors(), jnp.ones((3, 3, 4, 8)))


def test_entries_name_the_users_own_lines() -> None:
    for report in (
        xla_fp8.explain(net)(*ARGS),
        xla_fp8.jit(net).report(*ARGS),
        xla_fp8.rewrite(net).report(*ARGS),
        xla_fp8.explain(xla_fp8.jit(net))(*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in ARGS)),
    ):
        assert [entry.source for entry in report.rewritten] == [here(net, "# rewritten")]
        assert [entry.source for entry in report.refused_fp8] == [here(net, "# refused")]
        assert "no FP8 tensor" in report.refused_fp8[0].reason
        assert [(entry.op, entry.source) for entry in report.refused_without_fp8] == [("dot", here(net, "# not FP8"))]
        assert report.rewritten[0].graph == "1:[f32]conv();2:[f32]scale(1);"
        assert json.loads(report.to_json())["rewritten"][0]["source"] == here(net, "# rewritten")
        assert "1 rewritten, 1 refused, 1 without FP8 operands" in str(report)


def test_explaining_runs_nothing() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: pytest.fail("it ran"))
        return wide_layer(x8, w8)

    assert len(xla_fp8.explain(fn)(*tensors()).rewritten) == 1


def test_report_callback_is_called_once_for_each_compilation() -> None:
    reports: list[Report] = []
    fast = xla_fp8.jit(net, report=reports.append)
    fast(*ARGS)
    fast(*ARGS)
    assert len(reports) == 1
    fast(*tensors(batch=4), ARGS[2])
    assert [len(report.rewritten) for report in reports] == [1, 1]
    eager: list[Report] = []
    slow = xla_fp8.rewrite(net, report=eager.append)
    slow(*ARGS)
    slow(*ARGS)
    assert len(eager) == 1


def test_environment_variable_prints_the_report_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = xla_fp8.jit(net)
    monkeypatch.setenv("XLA_FP8_REPORT", "1")
    fast(*ARGS)
    fast(*ARGS)
    printed = capsys.readouterr().err
    assert printed.startswith("xla_fp8: net\nrewritten  conv_general_dilated")
    assert printed.count("1 rewritten, 1 refused") == 1
    monkeypatch.setenv("XLA_FP8_REPORT", "0")
    xla_fp8.jit(lambda *a: net(*a))(*ARGS)
    assert capsys.readouterr().err == ""


def test_dump_directory_gets_hlo_before_and_after(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    monkeypatch.setenv("XLA_FP8_DUMP_DIR", str(folder))
    x8, w8 = tensors(batch=5)
    jax.jit(xla_fp8.rewrite(wide_layer)).lower(x8, w8)
    after, before = sorted(folder.iterdir())
    assert before.name.replace("before", "after") == after.name
    assert "convolution(" in before.read_text()
    assert "__cudnn$convForwardGraph" in after.read_text()
    for file in (before, after):
        hlo.verify(hlo.parse(file.read_text()))
        file.unlink()
    jax.jit(xla_fp8.rewrite(lambda *a: wide_layer(*a))).lower(x8, w8)
    assert sorted(folder.iterdir()) == [after, before]


def test_strict_raises_and_names_the_line() -> None:
    with pytest.raises(xla_fp8.NotRewrittenError) as caught:
        xla_fp8.jit(net, strict=True)(*ARGS)
    assert here(net, "# refused") in str(caught.value)
    assert here(net, "# rewritten") not in str(caught.value)
    with pytest.raises(xla_fp8.NotRewrittenError):
        xla_fp8.rewrite(net, strict=True)(*ARGS)
    assert_close(xla_fp8.jit(wide_layer, strict=True)(*tensors()), wide_layer(*tensors()))


def test_strict_allows_what_has_no_fp8() -> None:
    assert_close(xla_fp8.jit(lambda a: a @ a, strict=True)(jnp.eye(3)), jnp.eye(3))


def test_target_that_has_no_fp8_refuses_everything() -> None:
    fast = xla_fp8.jit(wide_layer, target="a100")
    assert "compute capability" in fast.report(*tensors()).refused_fp8[0].reason
    assert_close(fast(*tensors()), wide_layer(*tensors()))
    assert "xla_fp8_region" not in fast.lower(*tensors()).as_text()


def test_targets_own_hook_is_asked_too() -> None:
    target = Target("picky", (9, 0), supports=lambda call: No("not on a Monday"))
    assert xla_fp8.jit(wide_layer, target=target).report(*tensors()).refused_fp8[0].reason == "not on a Monday"


def test_xla_backend_rewrites_nothing() -> None:
    fast = xla_fp8.jit(wide_layer, backend="xla")
    assert "left to XLA's own matcher" in fast.report(*tensors()).refused_fp8[0].reason
    assert_close(fast(*tensors()), wide_layer(*tensors()))


def test_own_passes() -> None:
    fast = xla_fp8.jit(wide_layer, passes=["simplify", "dce"])
    assert fast.report(*tensors()).rewritten == []
    assert_close(fast(*tensors()), wide_layer(*tensors()))


def test_calls_without_a_graph_fall_back_with_one_warning() -> None:
    """A pipeline that stops behind conv-rewriter leaves calls that only XLA's GPU compiler may make."""
    fast = xla_fp8.jit(wide_layer, passes=["conv-rewriter"])
    with pytest.warns(xla_fp8.FallbackWarning, match="should end with conv-restorer") as caught:
        assert_close(fast(*tensors(batch=3)), wide_layer(*tensors(batch=3)))
    assert len(caught) == 1
    strict = xla_fp8.jit(wide_layer, passes=["conv-rewriter"], strict=True)
    with pytest.raises(xla_fp8.XlaFp8Error):
        strict(*tensors(batch=3))


def test_report_of_a_gradient_has_its_backward_convolutions() -> None:
    def loss(scale: jax.Array) -> jax.Array:
        return wide_layer(*tensors(), scale).mean()

    report = xla_fp8.explain(jax.grad(loss))(jnp.float32(0.1))
    assert report.rewritten or report.refused
    assert all(entry.source for entry in (*report.rewritten, *report.refused))


def test_dots_are_reported() -> None:
    def fn(a: jax.Array, b: jax.Array) -> jax.Array:
        return quantize(a, 1.0).astype(jnp.float32) @ quantize(b, 1.0).astype(jnp.float32)

    report = xla_fp8.explain(fn)(jnp.ones((4, 4)), jnp.ones((4, 4)))
    assert [(entry.op, entry.source) for entry in report.refused_fp8] == [("dot", here(fn, "@"))]
    assert_close(xla_fp8.jit(fn)(jnp.eye(4), jnp.eye(4)), jnp.eye(4))


def test_layer_has_its_whole_graph() -> None:
    from tests.jit.programs import layer

    (entry,) = xla_fp8.explain(layer)(*inputs()).rewritten
    assert entry.graph is not None
    for op in ("relu", "[f8e4m3fn]scale", "amax"):
        assert op in entry.graph


def test_options_of_explain_win_over_those_of_the_function() -> None:
    fast = xla_fp8.jit(wide_layer, target="a100")
    assert xla_fp8.explain(fast)(*tensors()).rewritten == []
    assert len(xla_fp8.explain(fast, target="h100")(*tensors()).rewritten) == 1


def test_a_functions_own_report_attribute_is_left_alone() -> None:
    class Model:
        report = "mine"

        def __call__(self, x8: jax.Array, w8: jax.Array) -> jax.Array:
            return wide_layer(x8, w8)

    assert len(xla_fp8.explain(Model())(*tensors()).rewritten) == 1


def test_convolution_that_must_stay_is_warned_of_and_refused() -> None:
    from jax.experimental.xla_metadata import set_xla_metadata

    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        with set_xla_metadata(key="value"):
            return wide_layer(x8, w8)

    with pytest.warns(xla_fp8.FallbackWarning, match=r"programs\.py:\d+ runs as plain JAX: it stands under") as caught:
        report = xla_fp8.explain(fn)(*tensors())
    assert len(caught) == 1
    assert [entry.rule for entry in report.refused_fp8] == ["not-plain"]
    with pytest.warns(xla_fp8.FallbackWarning), pytest.raises(xla_fp8.NotRewrittenError, match="set_xla_metadata"):
        xla_fp8.jit(fn, strict=True)(*tensors())


@dataclasses.dataclass(frozen=True)
class Broken(ReferenceBackend):
    """Says yes and then cannot, as a library does of which no plan builds on the GPU at hand."""

    name: str = "broken"

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        raise BackendError("no plan builds")


@dataclasses.dataclass(frozen=True)
class BrokenKernel(Broken):
    name: str = "broken kernel"
    opaque: bool = True


@dataclasses.dataclass(frozen=True)
class NotInstalled(ReferenceBackend):
    name: str = "not installed"

    def missing(self) -> str | None:
        return "cudnn-test is not installed: pip install cudnn-test"

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        return No(self.missing() or "")


def test_a_backend_that_fails_costs_the_rewrite_and_not_the_program() -> None:
    with pytest.warns(xla_fp8.FallbackWarning, match="no plan builds") as warned:
        found = xla_fp8.jit(wide_layer, backend=Broken())(*tensors())
    assert len(warned) == 1
    assert_close(found, jax.jit(wide_layer)(*tensors()))
    with pytest.raises(xla_fp8.NotRewrittenError, match="no plan builds"):
        xla_fp8.jit(wide_layer, backend=Broken(), strict=True)(*tensors())


def test_a_report_claims_no_rewrite_that_lowering_does_not_bring_about() -> None:
    (entry,) = xla_fp8.explain(wide_layer, backend=Broken())(*tensors()).refused
    assert (entry.graph, entry.rule) == (None, "failed")
    assert entry.reason == "lowering it failed: BackendError: no plan builds"
    fast = xla_fp8.jit(wide_layer, backend=BrokenKernel())
    assert fast.report(*tensors()).summary.startswith("1 rewritten"), "kernels are not made for a report"
    with pytest.warns(xla_fp8.FallbackWarning, match="no plan builds"):
        fast(*tensors())
    assert fast.report(*tensors()).summary.startswith("0 rewritten, 1 refused")
    with pytest.raises(xla_fp8.NotRewrittenError, match="no plan builds"):
        xla_fp8.jit(wide_layer, backend=BrokenKernel(name="another"), strict=True)(*tensors())


@dataclasses.dataclass(frozen=True)
class OtherResult(ReferenceBackend):
    name: str = "other result"

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        run = super().lower(call, config)
        return lambda *operands: tuple(result.astype(jnp.float16) for result in run(*operands))


def test_a_backend_whose_function_returns_something_else_fails_with_both_types() -> None:
    message = r"the backend's function returns \(float16\[2, 6, 6, 8\]\), and the call has the results \(f32\[2,6,6,8\]"
    with pytest.warns(xla_fp8.FallbackWarning, match=message):
        found = xla_fp8.jit(wide_layer, backend=OtherResult())(*tensors())
    assert_close(found, jax.jit(wide_layer)(*tensors()))
    (entry,) = xla_fp8.explain(wide_layer, backend=OtherResult())(*tensors()).refused
    assert "returns (float16" in entry.reason


def test_passes_that_do_not_go_together_are_no_bug_of_this_package() -> None:
    (entry,) = xla_fp8.explain(wide_layer, passes="conv-rewriter")(*tensors()).refused
    assert entry.rule == "failed"
    assert "the pipeline should end with conv-restorer" in entry.reason
    assert entry.advice.startswith("run the default pipeline")


def donating(y: jax.Array) -> jax.Array:
    return jax.jit(jax.nn.relu, donate_argnums=0)(y)  # here


def with_a_callback(y: jax.Array) -> jax.Array:
    @jax.jit
    def shown(y: jax.Array) -> jax.Array:
        jax.debug.callback(lambda _: None, y)
        return jax.nn.relu(y)

    return shown(y)  # here


def behind_a_barrier(y: jax.Array) -> jax.Array:
    return jax.nn.relu(lax.optimization_barrier(y))  # here


def with_metadata(y: jax.Array) -> jax.Array:
    with set_xla_metadata(key="value"):
        return y + 1  # here


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (donating, r"jit of relu \({}\) follows, and it is a jit with .* donated arguments"),
        (with_a_callback, r"jit of shown \({}\) follows, and it is a call with operations inside that must stay"),
        (behind_a_barrier, r"optimization_barrier \({}\) follows, which must stay with JAX"),
        (with_metadata, r"add \({}\) follows, and it stands under compute_on or set_xla_metadata"),
    ],
)
def test_a_chain_that_ends_early_has_a_reason(middle: Any, reason: str) -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> Any:
        whole, cut = quantize(wide_layer(x8, w8), 3.0), wide_layer(x8, w8)
        return whole, quantize(middle(cut), 2.0), wide_layer(x8, w8)

    report = xla_fp8.explain(fn)(*tensors())
    first, second, third = sorted(report.rewritten, key=lambda entry: entry.instruction)
    assert re.match(reason.format(re.escape(here(middle, "# here"))), second.reason)
    assert f"stops because: {second.reason[:12]}" in str(report)
    assert first.reason == third.reason == ""


def test_a_backend_that_is_not_installed_is_one_warning() -> None:
    def two(x8: jax.Array, w8: jax.Array) -> Any:
        return wide_layer(x8, w8), lax.map(lambda x: wide_layer(x[None], w8), x8)

    with pytest.warns(xla_fp8.FallbackWarning, match=r"cudnn-test is not installed: pip install") as warned:
        xla_fp8.jit(two, backend=NotInstalled())(*tensors())
    assert len(warned) == 1


def test_a_kernel_for_gpus_is_not_lowered_for_a_cpu() -> None:
    x8, w8 = jnp.ones((2, 8, 8, 32), jnp.float8_e4m3fn), jnp.ones((3, 3, 32, 32), jnp.float8_e4m3fn)
    with pytest.warns(xla_fp8.FallbackWarning, match=r"the mosaic backend runs on cuda, and .* lowered for cpu"):
        found = xla_fp8.jit(wide_layer, backend="mosaic", target="h200")(x8, w8)
    assert_close(found, jax.jit(wide_layer)(x8, w8))
    (entry,) = xla_fp8.explain(wide_layer, backend="mosaic", target="h200")(x8, w8).refused
    assert entry.rule == "backend"
    assert "the mosaic backend runs on cuda, and this program is lowered for cpu" in entry.reason
    strict = xla_fp8.jit(wide_layer, backend="mosaic", target="h200", strict=True)
    with pytest.raises(xla_fp8.NotRewrittenError, match="lowered for cpu"):
        strict(x8, w8)
    strict.trace(x8, w8)  # it may yet be lowered for a GPU


def test_passes_may_be_one_string() -> None:
    names = ",".join(DEFAULT_PIPELINE)
    assert len(xla_fp8.explain(wide_layer, passes=names)(*tensors()).rewritten) == 1


def test_an_error_of_the_callback_is_the_users_own() -> None:
    def callback(report: Report) -> None:
        raise ZeroDivisionError("mine")

    for make in (xla_fp8.jit, xla_fp8.rewrite):
        fast = make(wide_layer, report=callback)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError, match="mine"):
                fast(*tensors())
    x8, w8 = tensors()
    calls: list[Report] = []

    def only_the_first(report: Report) -> None:
        calls.append(report)
        if len(calls) > 1:
            raise ZeroDivisionError("mine")

    batched = jax.vmap(xla_fp8.jit(wide_layer, report=only_the_first), (0, None))
    with pytest.raises(ZeroDivisionError, match="mine"):
        batched(jnp.stack([x8] * 2), w8)


def test_a_dump_folder_that_cannot_be_costs_one_warning_and_not_the_rewrite(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XLA_FP8_DUMP_DIR", str(tmp_path / "file" / "in"))

    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        return wide_layer(jax.nn.relu(quantize(wide_layer(x8, w8)[..., :4], 1.0)), w8)

    with pytest.warns(match=r"no HLO is written: XLA_FP8_DUMP_DIR is .*Not a directory") as warned:
        lowered = xla_fp8.jit(fn, strict=False).lower(*tensors(batch=7))
    assert [warning.category for warning in warned] == [DumpWarning]
    assert "call @xla_fp8_region" in lowered.as_text()


def test_names_tell_the_convolutions_of_a_function_apart() -> None:
    def fn(x8: jax.Array, w8: jax.Array, a: jax.Array) -> Any:
        y = wide_layer(x8, w8)
        z = lax.scan(lambda c, _: (c + wide_layer(x8, w8), None), y, None, length=2)[0]
        return z, jax.nn.silu(wide_layer(quantize(z[..., :4], 1.0), w8)), (a @ a) @ a, lax.map(lambda a: a @ a, a[None])

    report = xla_fp8.explain(fn)(*tensors(), jnp.eye(3))
    assert [entry.instruction for entry in report.rewritten] == [f"conv_general_dilated.{n}" for n in (1, 2, 3)]
    assert [entry.instruction for entry in report.refused] == [f"dot_general.{n}" for n in (1, 2, 3)]


def test_a_reason_names_an_instruction_as_its_entry_does() -> None:
    def fn(x8: jax.Array, w8: jax.Array, v8: jax.Array) -> Any:
        first = wide_layer(x8, w8)
        y = conv(x8.astype(jnp.float32), w8.astype(jnp.float32))
        return first, conv(y, v8.astype(jnp.float32))

    x8, w8 = tensors()
    (entry,) = xla_fp8.explain(fn)(x8, w8, jnp.zeros((3, 3, 8, 4), w8.dtype)).refused_fp8
    assert entry.instruction == "conv_general_dilated.3"
    assert "the input comes from conv_general_dilated.2 (convolution, " in entry.reason


@pytest.mark.parametrize(
    ("transform", "batch"),
    [(lambda f: f, ()), (lambda f: jax.vmap(f, (0, None)), (2,)), (lambda f: jax.jit(jax.checkpoint(f)), ())],
)
def test_reasons_have_the_users_lines_and_advice_that_fits_jit(transform: Any, batch: tuple[int, ...]) -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> Any:
        y = wide_layer(x8, w8)
        z = jnp.tanh(y) * y  # two uses
        return quantize(jax.nn.softplus(z), 1.0)

    x8, w8 = tensors()
    x8 = jnp.broadcast_to(x8, (*batch, *x8.shape))
    reports: list[Report] = []
    for make in (xla_fp8.jit, xla_fp8.rewrite):
        transform(make(fn, report=reports.append))(x8, w8)
    for report in reports:
        for entry in (*report.rewritten, *report.refused):
            assert "xla_fp8/" not in entry.reason + (entry.source or "")
            assert "--" not in entry.advice
        assert report.rewritten[0].reason
        assert __file__ in report.rewritten[0].reason


def test_what_jax_nn_does_has_the_line_of_its_call() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        y = wide_layer(x8, w8)
        y = jax.nn.silu(y)  # the fork
        return quantize(jax.nn.softplus(y), 1.0)  # where it goes

    (entry,) = xla_fp8.explain(fn)(*tensors()).rewritten
    assert f"(multiply, {here(fn, 'the fork')})" in entry.reason
    assert f"(compare, {here(fn, 'where it goes')})" in entry.reason


def test_convolutions_of_our_own_functions_have_the_users_line() -> None:
    def fn(x8: jax.Array, w8: jax.Array) -> jax.Array:
        return xla_fp8.conv_general_dilated(x8, w8, (1, 1), "SAME", dimension_numbers=LAYOUT, activation="relu")

    (entry,) = xla_fp8.explain(fn)(*tensors()).rewritten
    assert entry.source == here(fn, "return")
