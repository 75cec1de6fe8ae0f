"""Delayed scaling on a mesh of 8 devices: a state that all shards share sees the largest amax of all of them."""

from __future__ import annotations

import subprocess
import sys

from tests.xla_options import environment

PROGRAM = """
import functools
import jax, jax.numpy as jnp, numpy as np, xla_fp8
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(64, 32)), jnp.float32).at[37, 3].set(20.0)
w = jnp.asarray(rng.normal(size=(32, 16)), jnp.float32)
scaling = xla_fp8.DelayedScaling.create(amax=4.0, length=4)
line = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
square = jax.make_mesh((4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)

def loss(w, scaling, x):
    return jnp.sum(xla_fp8.fp8_dot(x, w, scaling=scaling) ** 2)

def amaxes(observed):
    states = observed.lhs, observed.rhs, observed.gradient
    return np.stack([np.asarray(state.amax_history)[..., 0] for state in states])

def product(w, scaling, x):
    return xla_fp8.fp8_dot(x, w, scaling=scaling)

def same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(amaxes(found[1]), amaxes(expected[1]), rtol=1e-6)
    for a, b in zip(jax.tree.leaves(scaling.update(found[1])), jax.tree.leaves(scaling.update(expected[1]))):
        np.testing.assert_allclose(a, b, rtol=1e-6)

gradients = jax.grad(loss, (0, 1))
expected = jax.jit(gradients)(w, scaling, x)
assert amaxes(expected[1])[0] == 20

# Rewritten, the sums of the forward dot come in another order: a cotangent beside the middle between two FP8 numbers
# may be rounded to the other one, a step of e5m2 (2^-2 of its binade) that its row of x carries into the gradient.
rewritten = xla_fp8.jit(gradients)(w, scaling, x)
np.testing.assert_allclose(amaxes(rewritten[1]), amaxes(expected[1]), rtol=1e-6)
cotangent = 2 * np.asarray(jax.jit(product)(w, scaling, x))
slack = 2 * np.abs(cotangent / 2 - np.asarray(xla_fp8.jit(product)(w, scaling, x))) + 1e-6 * np.abs(cotangent)
scaled, slack = np.abs(cotangent) / scaling.gradient.scale, slack / scaling.gradient.scale
step = np.exp2(np.floor(np.log2(scaled)) - 2)
beside_a_middle = np.abs(scaled / step % 1 - 0.5) * step <= slack
assert beside_a_middle.sum() <= 4  # of 1,024
change = beside_a_middle * step * scaling.gradient.scale
bound = np.abs(xla_fp8.quantize(x, scale=scaling.lhs.scale).dequantize()).T @ change
assert (np.abs(rewritten[0] - expected[0]) <= bound + 1e-2 + 1e-4 * np.abs(expected[0])).all()

for mesh, rows in ((line, P("i")), (square, P(("i", "j")))):
    shards = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), rows))
    same(jax.jit(shards(gradients, out_specs=(P(), P())))(w, scaling, x), expected)
    whole = shards(lambda *args: jax.lax.psum(loss(*args), tuple(mesh.axis_names)), out_specs=P())
    same(jax.jit(jax.grad(whole, (0, 1)))(w, scaling, x), expected)
    same(jax.jit(gradients)(w, scaling, jax.device_put(x, NamedSharding(mesh, rows))), expected)
    same(xla_fp8.jit(gradients)(w, scaling, jax.device_put(x, NamedSharding(mesh, rows))), rewritten)

# A state for each row of the mesh, which its two shards share.
states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), scaling)
def rows_of_the_mesh(w, states, x):
    gradient, observed = gradients(w, jax.tree.map(lambda leaf: leaf[0], states), x)
    return gradient, jax.tree.map(lambda leaf: leaf[None], observed)
by_row = jax.shard_map(
    rows_of_the_mesh, mesh=square, in_specs=(P(), P("i"), P(("i", "j"))), out_specs=(P(), P("i"))
)
found = amaxes(jax.jit(by_row)(w, states, x)[1])
np.testing.assert_array_equal(found[0], np.abs(x).reshape(4, -1).max(axis=1))
np.testing.assert_array_equal(found[1], [np.abs(w).max()] * 4)

# A convolution, and a loop over layers with a state each.
images = jnp.asarray(rng.normal(size=(8, 6, 6, 8)), jnp.float32).at[5, 0, 0, 0].set(9.0)
filters = jnp.asarray(rng.normal(size=(3, 3, 3, 8, 8)) / 8, jnp.float32)
stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), scaling)
def deep(filters, states, images):
    def layer(x, inputs):
        w, state = inputs
        y = xla_fp8.fp8_conv(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), scaling=state)
        return jax.nn.relu(y), None
    return jnp.sum(jax.lax.scan(layer, images, (filters, states))[0] ** 2)
deep_gradients = jax.grad(deep, (0, 1))
on_one = jax.jit(deep_gradients)(filters, stacked, images)
on_eight = jax.jit(
    jax.shard_map(deep_gradients, mesh=line, in_specs=(P(), P(), P("i")), out_specs=(P(), P()))
)(filters, stacked, images)
np.testing.assert_allclose(amaxes(on_eight[1]), amaxes(on_one[1]), rtol=1e-5)
assert amaxes(on_one[1])[0, 0] == 9
np.testing.assert_allclose(on_eight[0], on_one[0], rtol=1e-2, atol=1e-2 * float(jnp.max(jnp.abs(on_one[0]))))

# States on several devices, updated together: each stays where it is.
at = jax.devices()[:2]
model = [jax.device_put(scaling, device) for device in at]
seen = [jax.device_put(expected[1], device) for device in at]
for device, state in zip(at, xla_fp8.update_scaling(model, seen)):
    assert {leaf.device for leaf in jax.tree.leaves(state)} == {device}
    jax.tree.map(np.testing.assert_array_equal, state, scaling.update(expected[1]))
# And under shard_map, where one varies over the mesh and another does not.
def both(states, x):
    varying = jax.tree.map(lambda leaf: leaf + 0 * x[0, 0], states[0])
    return [jax.tree.map(lambda leaf: leaf[None], s) for s in xla_fp8.update_scaling([varying, states[1]], states)]
mixed = jax.shard_map(both, mesh=line, in_specs=(P(), P("i")), out_specs=[P("i"), P()])
for state in mixed([scaling, scaling], x):
    np.testing.assert_array_equal(state.lhs.scale, [scaling.update(scaling).lhs.scale] * len(state.lhs.scale))
print("fine")
"""


def test_a_shared_state_sees_the_largest_amax_of_all_shards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment(8), timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fine" in done.stdout
