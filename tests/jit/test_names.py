"""The names of calls in the compiled program, which profilers show."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
from jax import lax

import xla_fp8
from tests.jit.programs import F8, inputs, layer


def names(compiled: jax.stages.Compiled) -> set[str]:
    """The op_names of a program, each cut behind the call that it belongs to."""
    found = re.findall(r'op_name="([^"]*)"', compiled.as_text() or "")
    return {match[0] for name in found if (match := re.search(r"xla_fp8/\w+\[[^\]]*\]", name))}


def test_a_graph_call_is_named_after_its_nodes() -> None:
    compiled = xla_fp8.jit(layer, backend="reference").lower(*inputs()).compile()
    assert names(compiled) == {"xla_fp8/conv_graph[scale,scale,relu,scale,amax]"}
    of_convolution = [line for line in (compiled.as_text() or "").splitlines() if "/conv_general_dilated" in line]
    assert of_convolution
    assert all("xla_fp8/conv_graph[" in line for line in of_convolution)


def test_names_stay_inside_the_callers_scopes() -> None:
    def step(*arguments: jax.Array) -> jax.Array:
        with jax.named_scope("block3"):
            return layer(*arguments)[1]

    text = xla_fp8.jit(step, backend="reference").lower(*inputs()).compile().as_text() or ""
    assert re.search(r'op_name="[^"]*block3[^"]*xla_fp8/conv_graph\[', text)


def test_a_matmul_call_is_named_after_what_it_adds() -> None:
    def dense(x: jax.Array, w: jax.Array, bias: jax.Array, scale: jax.Array) -> jax.Array:
        y = lax.dot(x.astype(jnp.bfloat16) * scale, w.astype(jnp.bfloat16) * scale)
        return jax.nn.relu(y + bias)

    x, w = jnp.ones((16, 32), F8), jnp.ones((32, 16), F8)
    bias, scale = jnp.ones(16, jnp.bfloat16), jnp.bfloat16(0.5)
    passes = ("call-inliner", "simplify", "gemm-rewriter", "dce")
    rewritten = xla_fp8.jit(dense, passes=passes, backend="reference")
    assert rewritten.report(x, w, bias, scale).rewritten
    compiled = rewritten.lower(x, w, bias, scale).compile()
    assert names(compiled) == {"xla_fp8/matmul[bias,relu]"}
