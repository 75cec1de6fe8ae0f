"""What vmap and NCHW do to a chain: the reshape or transpose of the result moves behind the epilogue."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.graph import graph_of

E4M3 = jnp.float8_e4m3fn


def layer(x: jax.Array, w: jax.Array, scale: jax.Array, bias: jax.Array, residual: jax.Array) -> tuple[jax.Array, ...]:
    y = lax.conv_general_dilated(
        x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    y = jax.nn.relu(y + bias + residual)
    return jnp.clip(y * scale, -448, 448).astype(E4M3), jnp.max(jnp.abs(y))


def test_vmap_loses_no_part_of_the_epilogue() -> None:
    batched = jax.vmap(layer, in_axes=(0, None, None, None, 0))
    arguments = (
        jnp.zeros((3, 2, 8, 8, 16), E4M3),
        jnp.zeros((3, 3, 16, 32), E4M3),
        jnp.float32(2),
        jnp.zeros((32,)),
        jnp.zeros((3, 2, 8, 8, 32)),
    )
    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(lambda *a: batched(*a)[0]).lower(*arguments)))
    passes.run(module, target="h200", dialect="extended", options=passes.PipelineOptions(verify_each=True))
    (call,) = (i for i in module.entry if graph_of(i) is not None)
    assert str(graph_of(call)) == "1:[f32]conv();2:[f32]bias(1);3:[f32]add(2);4:[f32]relu(3);5:[f8e4m3fn]scale(4);"
    # The FP8 result is reshaped once, to the batch that vmap made; the bias stays a vector.
    (element,) = call.users
    (reshape,) = element.users
    assert reshape.is_root
    assert reshape.shape.dimensions == (3, 2, 8, 8, 32)
    assert call.operand(2).shape.dimensions == (32,)


def test_nchw_keeps_amax_and_moves_only_the_fp8_result() -> None:
    def nchw(x: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, ...]:
        y = lax.conv_general_dilated(x.astype(jnp.float32), w.astype(jnp.float32), (1, 1), "SAME")
        return jnp.clip(y * scale, -448, 448).astype(E4M3), jnp.max(jnp.abs(y))

    arguments = jnp.zeros((2, 16, 8, 8), E4M3), jnp.zeros((32, 16, 3, 3), E4M3), jnp.float32(2)
    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(nchw).lower(*arguments)))
    passes.run(module, target="h200", options=passes.PipelineOptions(verify_each=True))
    (call,) = (i for i in module.entry if graph_of(i) is not None)
    assert str(graph_of(call)) == "1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);"
    assert {i.shape.element_type for i in module.entry if i.opcode == "transpose"} == {"f8e4m3fn"}
