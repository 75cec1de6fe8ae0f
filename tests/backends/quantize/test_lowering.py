"""The quantization kernels lower to Triton for an H200 that is not there, and "auto" takes them where it should."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests import quantize_requests as requests
from tests.sampling import pairwise
from xla_fp8.backends.quantize import choice
from xla_fp8.backends.quantize.atomic import Atomic
from xla_fp8.backends.quantize.reduction import Reduction
from xla_fp8.backends.quantize.single_pass import SinglePass
from xla_fp8.backends.quantize.two_kernels import Settings
from xla_fp8.backends.triton.device import hopper_gpu
from xla_fp8.quantization import algorithms
from xla_fp8.quantization.algorithms import Algorithm, Request

SHAPES = [(), (7,), (1001,), (4096, 4096), (33, 65), (8, 56, 56, 256)]


def request_for(shape: tuple[int, ...], **changes: Any) -> Request:
    return requests.request_for(jax.ShapeDtypeStruct(shape, jnp.bfloat16), **changes)


def lowered(function: Any, *arguments: Any) -> str:
    """The StableHLO for CUDA."""
    with hopper_gpu():
        return str(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())


def kernels_of(text: str) -> list[str]:
    return re.findall(r'name = "(quantize_\w+)"', text)


@pytest.mark.parametrize(
    ("algorithm", "layout", "given"),
    pairwise([Atomic(), Reduction(), SinglePass()], ["row", "transposed", "both"], ["", "amax", "scale"]),
    ids=lambda part: getattr(part, "name", part),
)
def test_kernels_of_each_algorithm(algorithm: Algorithm, layout: str, given: str) -> None:
    for shape in SHAPES:
        if layout != "row" and len(shape) < 2:
            continue
        request = request_for(shape, layout=layout, given=given)
        number = [jax.ShapeDtypeStruct((), jnp.float32)] if given else []
        text = lowered(
            lambda x, *number, request=request: algorithm.run(request, x, *(number or [None])),
            jax.ShapeDtypeStruct(shape, jnp.bfloat16),
            *number,
        )
        if given:
            assert kernels_of(text) == ["quantize_cast"]
        elif algorithm.name == "single_pass":
            assert kernels_of(text) == ["quantize_single_pass"]
        else:
            assert kernels_of(text) == ["quantize_amax", "quantize_cast"]


def test_a_separate_scale_step_is_xlas() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    for step, division in (("block", False), ("separate", True)):
        algorithm = Atomic(settings=Settings(scale_step=step))  # type: ignore[arg-type]
        request = requests.request_for(x)
        text = lowered(lambda x, a=algorithm, r=request: a.run(r, x, None), x)
        assert ("stablehlo.divide" in text) == division


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "current_platform", lambda: "cuda")
    monkeypatch.setattr("xla_fp8.backends.quantize.request._capability", lambda: (9, 0))
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.mark.usefixtures("on_hopper")
def test_auto_takes_kernels_on_hopper() -> None:
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    text = lowered(lambda x: xla_fp8.quantize(x, layout="both"), x)
    assert kernels_of(text)
    for options in ({"axis": 0}, {"algorithm": "lax"}, {"scale": 0.5, "return_amax": True}):
        assert not kernels_of(lowered(lambda x, o=options: xla_fp8.quantize(x, **o), x))
    # A batch of kernels could not wait at one barrier.
    assert not kernels_of(lowered(jax.vmap(xla_fp8.quantize), x))


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("shape", "changes", "expected"),
    [
        ((), {}, "reduction"),
        ((2**25 - 1,), {}, "reduction"),
        ((2**25,), {}, "atomic"),
        ((16384, 16384), {}, "atomic"),
        ((16384, 16384), {"layout": "both"}, "reduction"),
        ((16384, 16384), {"layout": "transposed"}, "reduction"),
        ((512, 512), {"given": "scale"}, None),
        ((16384, 16384), {"given": "scale"}, None),
        ((8192, 8192), {"given": "scale", "layout": "both"}, "resident"),
        ((8192, 8192), {"given": "scale", "layout": "transposed"}, "resident"),
        ((4096, 4096), {"given": "scale", "layout": "both"}, "resident"),
        ((4096, 2048), {"given": "scale", "layout": "both"}, None),
        ((8192, 8200), {"given": "scale", "layout": "both"}, None),
        ((16384, 16384), {"given": "amax"}, "atomic"),
    ],
)
def test_auto_by_scale_layout_and_size(shape: tuple[int, ...], changes: dict[str, Any], expected: str | None) -> None:
    assert choice.fastest(request_for(shape, **changes)) == expected


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("options", [{}, {"layout": "both"}, {"scale": 0.5, "layout": "both", "return_amax": True}])
def test_auto_takes_no_kernel_whose_programs_wait_for_each_other(options: Any) -> None:
    # Such kernels begin with words that are zero; `atomic` has one too, in which an amax is joined.
    for shape in ((512, 512), (8192, 8192)):
        text = lowered(lambda x: xla_fp8.quantize(x, **options), jax.ShapeDtypeStruct(shape, jnp.bfloat16))
        assert "quantize_single_pass" not in text
        assert "tensor<132xi32>" not in text


@pytest.mark.usefixtures("on_hopper")
def test_auto_leaves_what_may_be_sharded_to_the_partitioner(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.fastest(request_for((512, 512))) is not None
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert choice.fastest(request_for((512, 512))) is None


def test_auto_is_lax_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choice.fastest(request_for((512, 512), platform="cpu")) is None
    monkeypatch.setattr("xla_fp8.backends.quantize.request._capability", lambda: (8, 9))
    assert choice.fastest(request_for((512, 512))) is None
    assert np.isfinite(xla_fp8.quantize(jnp.ones(4)).scale)
