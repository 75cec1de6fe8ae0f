"""Why a cast to FP8 gets no kernel with what is in front of it: each has a reason, and what is to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.experimental.xla_metadata import set_xla_metadata

from tests.fused_casts import BF16, CASES, E4M3, F32, ROWS, Array, affine, cast, layer_norm, normal, of, rms
from tests.jit.test_fused_casts import convolved
from xla_fp8 import _jax_compat
from xla_fp8.backends.quantize import choice
from xla_fp8.tracing import cut
from xla_fp8.tracing.cast_reporting import left_casts
from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.fused_casts import fused_casts
from xla_fp8.tracing.fused_casts.found import Found, Group
from xla_fp8.tracing.inline import inline_calls
from xla_fp8.tracing.nested import nested
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.region import cut_jaxpr, fused_cast_p, is_region


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU; the kernels are not there, and are not asked for."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)


def left(function: Callable[..., Any], *arguments: Any) -> list[tuple[str, str | None]]:
    """Of each cast that is left to XLA the reason, and the name of the operation that is to blame."""
    return list(_left(cut_jaxpr(jax.make_jaxpr(function)(*arguments), Options())))


def _left(jaxpr: Any) -> Iterator[tuple[str, str | None]]:
    for result, (reason, blame) in left_casts(jaxpr, Options()).items():
        assert result.aval.dtype in (E4M3, jnp.float8_e5m2)
        yield reason, None if blame is None else blame.primitive.name
    for equation in _jax_compat.open_jaxpr(jaxpr).eqns:
        is_ours = is_region(equation) or equation.primitive is fused_cast_p
        for body in () if is_ours else nested(equation):
            yield from _left(body.jaxpr)


def of_seven(*tensors: Array) -> Array:
    return cast(sum(tensors))


def of_product(x: Array, w: Array) -> Array:
    return cast(layer_norm(jnp.dot(x, w, preferred_element_type=F32), affine(320)))


def with_sine(x: Array) -> Array:
    return cast(jax.nn.silu(x.astype(F32) + jnp.sin(x)))


REASONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str, str | None]] = {
    "a bare cast": (
        lambda x: cast(x * 2),
        (normal(ROWS),),
        "3 operations on each element; with fewer than 5 XLA's own kernel is as fast",
        None,
    ),
    "a relu": (
        lambda x: cast(jax.nn.relu(x)),
        (normal(ROWS),),
        "2 operations on each element, relu and the like not counted; with fewer than 5 XLA's own kernel is as fast",
        None,
    ),
    "few elements": (
        rms,
        (normal((192, 320)),),
        "61,440 elements; below 65,536 a launch is most of a kernel's time",
        None,
    ),
    "a vector": (
        lambda x: cast(jax.nn.gelu(x)),
        (normal((2**17,)),),
        "its shape is [131072], and kernels are of rows",
        None,
    ),
    "a tensor in f32": (
        rms,
        (normal(ROWS, F32),),
        "it reads f32[2,256,320], and kernels read tensors of 16 bits",
        None,
    ),
    "a product in f32": (
        of_product,
        (normal((2048, 320)), normal((320, 320))),
        "it reads f32[2048,320], and kernels read tensors of 16 bits",
        "dot_general",
    ),
    "a transpose": (
        lambda x: rms(x.transpose(0, 2, 1)),
        (normal((2, 320, 256)),),
        "it reads the result of a transpose, which XLA fuses",
        "transpose",
    ),
    "another operation": (
        with_sine,
        (normal(ROWS),),
        "it reads the result of a sin, which kernels do not compute",
        "sin",
    ),
    "dequantized values": (
        lambda x: rms(x.astype(BF16)),
        (normal(ROWS).astype(E4M3),),
        "it reads the result of a convert_element_type, which reads what kernels do not: f8_e4m3fn[2,256,320]",
        "convert_element_type",
    ),
    "many tensors": (of_seven, tuple(normal(ROWS, seed=i) for i in range(7)), "it reads more than 6 tensors", None),
    "no clamp": (
        lambda x: (layer_norm(x, affine(320)).astype(F32) * 2).astype(E4M3),
        (normal(ROWS),),
        "it casts to float8_e4m3fn without a clamp to 448, where the kernel saturates",
        None,
    ),
    "odd rows": (rms, (normal((1024, 100)),), "rows of 100 elements are no few tiles of a power of two", None),
}


@pytest.mark.parametrize("name", REASONS)
def test_reasons(name: str) -> None:
    function, arguments, reason, blame = REASONS[name]
    assert left(function, *arguments) == [(reason, blame)]


@pytest.mark.parametrize("name", CASES)
def test_there_is_none_where_there_is_a_kernel(name: str) -> None:
    function, arguments = of(name)
    assert not left(function, *arguments)


def test_a_graph_is_no_kernel_and_needs_no_reason() -> None:
    x, w = normal((2, 32, 32, 64)).astype(E4M3), normal((64, 3, 3, 64)).astype(E4M3)
    assert not left(lambda x, w: cast(jax.nn.relu(convolved(x, w))), x, w)


def test_a_cast_beside_another_one_is_in_its_kernel() -> None:
    """By itself it would be too little."""

    def both(x: Array) -> tuple[Array, Array]:
        y = jax.nn.gelu(x.astype(F32) * 2).astype(BF16)
        return cast(y), cast(y, scale=0.5)

    assert not left(both, normal(ROWS))


def test_bodies_have_reasons_too() -> None:
    def loop(x: Array) -> Any:
        return jax.lax.scan(lambda carry, each: (carry, cast(each * 2)), 0, x)

    [(reason, _)] = left(loop, normal((4, *ROWS)))
    assert reason.startswith("3 operations")


def test_operations_that_must_stay_with_jax() -> None:
    def elsewhere(x: Array) -> Array:
        with set_xla_metadata(place="elsewhere"):
            return jnp.clip(x, -448, 448).astype(E4M3)

    reasons = left(elsewhere, normal(ROWS))
    assert reasons == [("it stands under compute_on or set_xla_metadata, which HLO text would lose", None)]


def test_shapes_that_are_not_known_yet() -> None:
    (rows,) = export.symbolic_shape("rows")
    x = jax.ShapeDtypeStruct((rows, 320), BF16)
    reason = "beside it are shapes that are not known yet, as an export leaves them"
    assert left(rms, x) == [(reason, None)]


def test_a_kernel_that_would_read_what_is_made_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search makes no such group: this one casts at its beginning and at its end."""

    def chained(x: Array) -> tuple[Array, Array]:
        first = rms(x)
        return first, rms(first.astype(BF16))

    def both(flow: Any, outvars: Any, taken: Any) -> Found:
        [group] = fused_casts(flow, outvars, taken).groups
        last = len(flow.equations) - 1
        results = (*group.results, *flow.equations[last].outvars)
        return Found((Group((*group.equations, last - 1, last), results),), ())

    monkeypatch.setattr(cut, "fused_casts", both)
    reason = "by way of other kernels its own would read what is made of its results"
    assert left(chained, normal(ROWS)) == [(reason, None)] * 2


def test_equations_of_reasons() -> None:
    """By index, in program order."""

    def three(x: Array) -> tuple[Array, ...]:
        return cast(x), rms(x), cast(jnp.sin(x))

    equations = list(inline_calls(jax.make_jaxpr(three)(normal(ROWS)).eqns))
    flow = DataFlow(equations)
    casts = [i for i, equation in enumerate(equations) if is_cast(equation)]
    results = [equations[i].outvars[0] for i in casts]
    found = fused_casts(flow, results, set())
    [group] = found.groups
    assert group.results == (results[1],)
    assert [left.equation for left in found.unfused] == [casts[0], casts[2]]
    [blame] = [left.blame for left in found.unfused if left.blame is not None]
    assert equations[blame].primitive.name == "sin"
