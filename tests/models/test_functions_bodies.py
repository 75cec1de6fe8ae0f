"""Bodies of scan, cond, checkpoint and loops in converted functions keep shardings, mesh axes and references."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import xla_fp8
from tests.xla_options import environment

RECIPE = xla_fp8.Recipe("dynamic", min_flops=0, keep_first=0, keep_last=0)

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, xla_fp8
from jax.sharding import AxisType, PartitionSpec as P

recipe = xla_fp8.Recipe("dynamic", min_flops=0, keep_first=0, keep_last=0)
rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
w = jnp.asarray(rng.normal(size=(16, 16)) / 4, jnp.float32)
ws = jnp.stack([w] * 3)

def layer(x, w):
    return jnp.tanh(x @ w)

def scanned(x, ws):
    return jax.lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0]

def checkpointed(x, ws):
    return jax.checkpoint(layer)(x, ws[0])

def branched(x, ws):
    return jax.lax.cond(x.shape[0] > 0, layer, lambda x, w: x, x, ws[0])

def near(found, expected, share=0.1):
    assert np.linalg.norm(found - expected) <= share * np.linalg.norm(expected)

explicit = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Explicit,))
auto = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
for f in (scanned, checkpointed, branched):
    g = xla_fp8.convert(f, recipe)
    assert "f8_e4m3fn" in str(jax.make_jaxpr(g)(x, ws)), f
    alone = jax.grad(lambda x: g(x, ws).sum())(x)
    near(alone, jax.grad(lambda x: f(x, ws).sum())(x), 0.3)
    with jax.set_mesh(explicit):
        sharded = jax.device_put(x, P("d"))
        assert jax.typeof(jax.jit(g)(sharded, ws)) == jax.typeof(jax.jit(f)(sharded, ws)), f
        near(jax.device_get(jax.jit(jax.grad(lambda x: g(x, ws).sum()))(sharded)), alone)
    mapped = jax.shard_map(g, mesh=auto, in_specs=(P("d"), P()), out_specs=P("d"))
    near(mapped(x, ws), f(x, ws))
    near(jax.grad(lambda x: mapped(x, ws).sum())(x), alone, 0.3)  # each shard has scales of its own
"""


def test_shardings_and_mesh_axes_stay() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment(4), timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_references_stay() -> None:
    def accumulated(x: jax.Array, w: jax.Array) -> jax.Array:
        total = jax.new_ref(jnp.zeros((8, 16)))

        def body(i: jax.Array, carry: int) -> int:
            total[...] += x @ w
            return carry

        jax.lax.fori_loop(0, 3, body, 0)
        return total[...]

    x = jax.random.normal(jax.random.key(0), (8, 16))
    w = jax.random.normal(jax.random.key(1), (16, 16)) / 4
    found = jax.jit(xla_fp8.convert(accumulated, RECIPE))(x, w)
    np.testing.assert_allclose(found, 3 * (x @ w), atol=0.5)
