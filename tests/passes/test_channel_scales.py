"""Scales of a filter, one for each output channel, behind what moves its elements: each stays with its own channel."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.same_numbers import assert_same_numbers
from xla_fp8 import _jax_compat, hlo, passes

E4M3 = jnp.float8_e4m3fn
Array = jax.Array
ARGUMENTS = (
    jax.ShapeDtypeStruct((1, 8, 8, 16), E4M3),
    jax.ShapeDtypeStruct((32, 3, 3, 16), E4M3),
    jax.ShapeDtypeStruct((32,), jnp.float32),
)
NO_EDGES = ((0, 0, 0),) * 3

MOVES: dict[str, tuple[Callable[[Array], Array], bool]] = {
    # What moves the scaled filter, OHWI, and whether its channels are in order still.
    "transpose": (lambda w: w.transpose(0, 2, 1, 3), True),
    "reverse": (lambda w: jnp.flip(w, (1, 2)), True),
    "pad": (lambda w: lax.pad(w, 0.0, ((0, 0, 0), (1, 1, 0), *NO_EDGES[:2])), True),
    "slice": (lambda w: w[:, :2], True),
    "reverse_channels": (lambda w: jnp.flip(w, 0), False),
    "reverse_all": (lambda w: jnp.flip(w), False),
    "shift_channels": (lambda w: lax.pad(w, 0.0, ((1, -1, 0), *NO_EDGES)), False),
    "shift_channels_back": (lambda w: lax.pad(w, 0.0, ((-1, 1, 0), *NO_EDGES)), False),
    "some_channels": (lambda w: w[::2], False),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_scale_stays_with_its_channel(name: str) -> None:
    move, in_order = MOVES[name]

    def program(x: Array, w: Array, scales: Array) -> Array:
        wide = move(w.astype(jnp.float32) * scales[:, None, None, None])
        labels = ("NHWC", "OHWI", "NHWC")
        return lax.conv_general_dilated(x.astype(jnp.float32), wide, (1, 1), "SAME", dimension_numbers=labels)

    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(program).lower(*ARGUMENTS)))
    report = passes.run(module, target="h200", dialect="extended")
    if in_order:
        assert report.rewritten[0].graph == "1:[f32]conv();2:[f32]channel_scale(1);"
    else:
        (found,) = report.refused
        assert found.rule == "scale-not-scalar"
        assert "may change which channel is which" in found.reason
    assert_same_numbers(module, program, ARGUMENTS)
