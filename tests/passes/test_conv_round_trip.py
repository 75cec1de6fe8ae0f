"""conv-rewriter and conv-restorer undo each other: the same numbers for every kind of convolution and gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from xla_fp8 import _jax_compat, hlo, passes

BACKWARD = ("__cudnn$convBackwardInput", "__cudnn$convBackwardFilter")


def conv(strides: tuple[int, ...], padding: Any, dilation: tuple[int, ...], labels: tuple[str, str, str]) -> Callable:
    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, strides, padding, rhs_dilation=dilation, dimension_numbers=labels)

    return apply


NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
CASES = {
    "same": (conv((1, 1), "SAME", (1, 1), NHWC), (2, 9, 8, 3), (3, 3, 3, 4)),
    "valid": (conv((1, 1), "VALID", (1, 1), NHWC), (2, 9, 8, 3), (3, 2, 3, 4)),
    "strided": (conv((2, 2), "SAME", (1, 1), NHWC), (2, 9, 8, 3), (3, 3, 3, 4)),
    "strided 1x1": (conv((2, 2), "SAME", (1, 1), NHWC), (2, 9, 8, 3), (1, 1, 3, 4)),
    "stride 3, uneven padding": (conv((3, 2), [(2, 1), (0, 2)], (1, 1), NCHW), (2, 3, 11, 9), (4, 3, 3, 3)),
    "dilated": (conv((1, 1), [(2, 2), (1, 3)], (2, 2), NCHW), (2, 3, 9, 8), (4, 3, 3, 3)),
    "1-D": (conv((2,), "SAME", (1,), ("NWC", "WIO", "NWC")), (2, 9, 3), (3, 3, 4)),
    "3-D": (conv((1, 2, 1), "SAME", (1, 1, 1), ("NDHWC", "DHWIO", "NDHWC")), (1, 4, 5, 6, 2), (2, 3, 3, 2, 3)),
}


def evaluate(text: str, arguments: list[np.ndarray]) -> list[np.ndarray]:
    return _jax_compat.execute(_jax_compat.compile_hlo_text(text, "cpu"), arguments)


@pytest.mark.parametrize("name", CASES)
def test_rewritten_and_restored_is_the_same(name: str) -> None:
    apply, x_shape, w_shape = CASES[name]
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in (x_shape, w_shape))
    cotangent = rng.normal(size=jax.eval_shape(apply, x, w).shape).astype(np.float32)

    def program(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        y, vjp = jax.vjp(apply, x, w)
        return (y, *vjp(cotangent))

    text = _jax_compat.lowered_hlo_text(jax.jit(program).lower(x, w, cotangent))
    module = hlo.parse(text)
    convolutions = sorted(i.name for i in module.entry if i.opcode == "convolution")
    assert len(convolutions) == 3
    passes.run(module, ["conv-rewriter"], "h200", options=passes.PipelineOptions(verify_each=True))
    targets = {i.custom_call_target for i in module.entry if i.opcode == "custom-call"}
    assert "__cudnn$convForward" in targets
    # Of a dilated convolution XLA takes the input gradient for a forward convolution, and the filter gradient too where
    # its window is small.
    assert bool(targets & set(BACKWARD)) == (name != "dilated")
    assert not any(i.opcode == "convolution" for i in module.entry)
    _jax_compat.verify_stablehlo(_jax_compat.hlo_to_stablehlo(hlo.to_text(module)))

    passes.run(module, ["conv-restorer", "dce"], "h200", options=passes.PipelineOptions(verify_each=True))
    assert sorted(i.name for i in module.entry if i.opcode == "convolution") == convolutions
    before, after = evaluate(text, [x, w, cotangent]), evaluate(hlo.to_text(module), [x, w, cotangent])
    for expected, found in zip(before, after, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_classified_as_xla_does() -> None:
    apply, x_shape, w_shape = CASES["strided"]
    x, w = jnp.zeros(x_shape), jnp.zeros(w_shape)

    def program(x: jax.Array, w: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        return jax.vjp(apply, x, w)[1](cotangent)

    cotangent = jnp.zeros(jax.eval_shape(apply, x, w).shape)
    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(program).lower(x, w, cotangent)))
    passes.run(module, ["conv-rewriter"], "h200")
    calls = {i.custom_call_target: i for i in module.entry if i.opcode == "custom-call"}
    assert set(calls) == set(BACKWARD)
    # In a gradient's custom call the window is that of the forward convolution.
    for call in calls.values():
        assert [(d.size, d.stride) for d in call.window] == [(3, 2), (3, 2)]
        assert str(call.dim_labels) == "b01f_01io->b01f"
