"""Small programs, one for each corner of HLO that JAX reaches: control flow, sorting, algebra, types, sharding."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .catalog import array, dump

# Control flow.


@dump("full", "compiled")
def scan() -> Any:
    def rnn(w: jax.Array, h: jax.Array, xs: jax.Array) -> Any:
        def cell(h: jax.Array, x: jax.Array) -> Any:
            h = jnp.tanh(x + h @ w)
            return h, h.sum(-1)

        return lax.scan(cell, h, xs, unroll=2)

    return jax.value_and_grad(lambda *a: rnn(*a)[1].sum()), (array((8, 8)), array((4, 8)), array((10, 4, 8)))


@dump("full", "short")
def while_loop() -> Any:
    def collatz(n: jax.Array) -> jax.Array:
        def step(state: Any) -> Any:
            n, count = state
            return jnp.where(n % 2 == 0, n // 2, 3 * n + 1), count + 1

        return lax.while_loop(lambda state: state[0] != 1, step, (n, 0))[1]

    return jax.vmap(collatz), (array((16,), "int32"),)


@dump()
def cond_and_switch() -> Any:
    def f(i: jax.Array, flag: jax.Array, x: jax.Array, tree: dict[str, jax.Array]) -> Any:
        y = lax.switch(i, [jnp.sin, jnp.cos, lambda v: v * 2, lambda v: v @ v], x)
        return lax.cond(flag, lambda t, v: ({**t, "a": v}, v.sum()), lambda t, v: (t, t["b"].max()), tree, y)

    return f, (array((), "int32"), array((), "bool"), array((4, 4)), {"a": array((4, 4)), "b": array((3,))})


@dump()
def many_operands() -> Any:
    """Tuples of more than five, whose places XLA marks with /*index=5*/ comments."""

    def f(xs: list[jax.Array]) -> list[jax.Array]:
        return lax.fori_loop(0, 5, lambda i, xs: [x + i * y for x, y in zip(xs, xs[1:] + xs[:1], strict=True)], xs)

    return f, ([array((2, 2))] * 17,)


# Sorting, searching, moving data.


@dump("full", "compiled")
def sort() -> Any:
    def f(x: jax.Array, y: jax.Array) -> Any:
        return (
            jnp.sort(x),
            jnp.argsort(-x),
            lax.sort((x, y), num_keys=2),
            lax.top_k(x, 3),
            jnp.argmax(x),
            jnp.unique(y, size=4),
        )

    return f, (array((32,)), array((32,), "int32"))


@dump("full", "typed")
def gather_scatter() -> Any:
    def f(x: jax.Array, i: jax.Array, u: jax.Array, start: jax.Array) -> Any:
        taken = x[i], x[:, i[:, 0]], jnp.take(x, i, axis=1, mode="clip")
        put = x.at[i[:, 0]].set(u), x.at[i[:, 0], 1].add(u[:, 0]), x.at[1:3, ::2].mul(3), x.at[i[:, 0]].max(u)
        return taken, put, lax.dynamic_slice(x, (start, start), (2, 2)), lax.dynamic_update_slice(x, u, (start, 0))

    return f, (array((8, 6)), array((3, 1), "int32"), array((3, 6)), array((), "int32"))


@dump()
def reduce_window() -> Any:
    def f(x: jax.Array) -> Any:
        most = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME", window_dilation=(1, 2, 1, 1))
        mean = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), ((0, 0), (1, 0), (0, 1), (0, 0))) / 4
        sums = jnp.cumsum(x, 1), lax.cumlogsumexp(x, 2), lax.cumprod(x, 3, reverse=True)
        return most, mean, sums, lax.reduce_precision(x, 5, 2)

    return f, (array((2, 9, 9, 3)),)


@dump("full", "compiled")
def select_and_scatter() -> Any:
    def f(x: jax.Array) -> jax.Array:
        return (lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID") ** 2).sum()

    return jax.grad(f), (array((2, 9, 9, 3)),)


@dump()
def reductions() -> Any:
    """Variadic reductions, boolean ones, padding, reversal, concatenation, iota, clamp, select."""

    def f(x: jax.Array, m: jax.Array) -> Any:
        pair = lax.reduce((x, x), (0.0, jnp.inf), lambda a, b: (a[0] + b[0], jnp.minimum(a[1], b[1])), (1,))
        moved = lax.pad(x, 0.0, ((1, -1, 2), (0, 3, 0))), lax.rev(x, (0,)), jnp.concatenate([x, x[::2]])
        return (
            pair,
            moved,
            m.any(0),
            m.all(),
            jnp.where(m, x, lax.broadcasted_iota(x.dtype, x.shape, 1)),
            jnp.clip(x, 0, 6),
        )

    return f, (array((4, 5)), array((4, 5), "bool"))


@dump()
def convolutions() -> Any:
    """Groups, dilation, strides, one and three dimensions, dim labels of every kind, and the gradients of all these."""

    def f(x1: jax.Array, w1: jax.Array, x2: jax.Array, w2: jax.Array, x3: jax.Array, w3: jax.Array) -> jax.Array:
        y1 = lax.conv_general_dilated(
            x1, w1, (2,), ((1, 2),), rhs_dilation=(2,), dimension_numbers=("NWC", "WIO", "NWC")
        )
        y2 = lax.conv_general_dilated(x2, w2, (1, 2), "SAME", feature_group_count=4)
        y3 = lax.conv_transpose(x3, w3, (2, 2, 2), "SAME")
        return (y1**2).sum() + (y2**2).sum() + (y3**2).sum()

    shapes = [(2, 17, 3), (3, 3, 8), (2, 8, 9, 10), (12, 2, 3, 3), (1, 4, 4, 4, 2), (3, 3, 3, 2, 5)]
    return jax.grad(f, argnums=tuple(range(6))), tuple(map(array, shapes))


# Random numbers, FFT, linear algebra.


@dump("full", "compiled")
def rng_threefry() -> Any:
    def f(key: jax.Array) -> Any:
        a, b, c = jax.random.split(jax.random.wrap_key_data(key, impl="threefry2x32"), 3)
        return jax.random.normal(a, (3, 5)), jax.random.randint(b, (7,), 0, 10), jax.random.permutation(c, 9)

    return f, (array((2,), "uint32"),)


@dump()
def rng_bit_generator() -> Any:
    def f(key: jax.Array) -> Any:
        bits = [lax.rng_bit_generator(key, (4, 3), algorithm=a) for a in lax.RandomAlgorithm]
        return bits, lax.rng_uniform(0.0, 1.0, (5,)), jax.random.bits(jax.random.wrap_key_data(key, impl="rbg"), (4,))

    return f, (array((4,), "uint32"),)


@dump()
def fft() -> Any:
    def f(x: jax.Array, z: jax.Array) -> Any:
        return jnp.fft.fft2(z), jnp.fft.rfft(x), jnp.fft.irfft(z, 14), jnp.fft.ifftn(z)

    return f, (array((4, 16)), array((4, 8), "complex64"))


@dump("full", "short", platform="tpu")
def cholesky() -> Any:
    """Lowered for the TPU, where cholesky and triangular-solve stay HLO instructions."""

    def f(a: jax.Array, b: jax.Array) -> Any:
        c = lax.linalg.cholesky(a)
        return lax.linalg.triangular_solve(c, b, left_side=True, lower=True, transpose_a=True), jnp.linalg.slogdet(a)

    return f, (array((2, 4, 4)), array((2, 4, 3)))


@dump()
def lapack_custom_calls() -> Any:
    """The same for the CPU: LAPACK through XLA's FFI, with operand layouts and a backend_config in MLIR's syntax."""

    def f(a: jax.Array) -> Any:
        return (
            jnp.linalg.cholesky(a),
            jnp.linalg.svd(a),
            jnp.linalg.eigh(a),
            jnp.linalg.qr(a),
            jnp.linalg.solve(a, a[0]),
        )

    return f, (array((4, 4)),)


# Types.


@dump("full", "typed")
def f64_and_complex() -> Any:
    table = np.linspace(0, 1, 14, dtype=np.float64)
    spectrum = np.exp(1j * table).astype(np.complex128)

    def f(x: jax.Array, z: jax.Array, i: jax.Array) -> Any:
        c = lax.complex(x, -x) * z
        special = jnp.array([np.inf, -np.inf, np.nan, -0.0, 5e-324, 0.1])
        return (
            c.real,
            c.imag,
            jnp.abs(z),
            jnp.conj(z) @ spectrum,
            x * table,
            special,
            i >> 3,
            lax.erf_inv(x),
            jnp.exp(z),
        )

    return f, (array((14,), "float64"), array((14,), "complex128"), array((3,), "int64"))


@dump()
def small_integers() -> Any:
    def f(x: jax.Array, y: jax.Array, b: jax.Array) -> Any:
        table = jnp.array([-8, -1, 0, 7], "int4")
        more = x.astype("int2"), y.astype("uint2"), jnp.array([0, 3, 15], "uint4"), b ^ True, ~b
        return x + table, lax.dot(x.astype("int8"), x.astype("int8"), preferred_element_type=jnp.int32), y * 2, more

    return f, (array((4,), "int4"), array((5,), "uint4"), array((3,), "bool"))


@dump("full", "as_hlo_text")
def large_constants() -> Any:
    table = np.arange(64, dtype=np.float32).reshape(8, 8) / 7
    ids, flags, text = (
        np.arange(12, dtype=np.int16),
        np.arange(12) % 3 == 0,
        np.array([b"\n"[0], b'"'[0]] * 6, np.uint8),
    )

    def f(x: jax.Array) -> Any:
        return x @ table, jnp.bfloat16(1.5) * table[0].astype(jnp.bfloat16), jnp.asarray(ids), jnp.asarray(flags), text

    return f, (array((2, 8)),)


# Several devices, donation, calls.


def mesh(*axes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(axes))]).reshape(axes), tuple("xy")[: len(axes)])


@dump("full", "compiled")
def collectives_under_shard_map() -> Any:
    @functools.partial(jax.shard_map, mesh=mesh(4, 2), in_specs=P("x", "y"), out_specs=P("x", "y"), check_vma=False)
    def f(a: jax.Array) -> jax.Array:
        ring = [(i, (i + 1) % 4) for i in range(4)]
        a = lax.psum(a, "x") + lax.pmax(a, ("x", "y")) + lax.ppermute(a, "x", ring)
        a = a + lax.all_to_all(a.reshape(4, -1), "x", 0, 0, tiled=True).reshape(a.shape)
        a = lax.psum_scatter(lax.all_gather(a, "y", axis=1, tiled=True), "y", scatter_dimension=1, tiled=True)
        return a * lax.axis_index("x") + lax.pmean(a, "y", axis_index_groups=None)

    return f, (array((16, 8)),)


@dump("full", "compiled")
def sharded_matmul() -> Any:
    m = mesh(4, 2)

    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        h = lax.with_sharding_constraint(jax.nn.relu(x @ w), NamedSharding(m, P("x", "y")))
        return (h @ w.T).sum(0)

    shardings = NamedSharding(m, P("x", None)), NamedSharding(m, P(None, "y"))
    return jax.jit(f, in_shardings=shardings), (array((16, 8)), array((8, 16)))


@dump("full", "compiled")
def donated_arguments() -> Any:
    def f(state: dict[str, jax.Array], x: jax.Array) -> Any:
        return {name: value + x for name, value in state.items()}, (x * 2).sum()

    state = {"a": array((4, 4)), "b": array((4, 4))}
    return jax.jit(f, donate_argnums=0), (state, array((4, 4)))


@dump("full", "proto")
def nested_jit_and_remat() -> Any:
    @jax.jit
    def inner(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.clip(x * y, -1, 1)

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        with jax.named_scope('outer scope/with "quotes"'):
            y = jax.checkpoint(lambda v: jnp.sin(inner(v, y)))(x)
        return inner(y, lax.optimization_barrier(y)).sum()

    return jax.grad(f), (array((8,)), array((8,)))


@dump()
def ffi_and_custom_calls() -> Any:
    """Custom calls as users make them: typed FFI with attributes, aliased output, layouts, side effect."""

    def f(x: jax.Array) -> Any:
        out = array((4, 8))
        a = jax.ffi.ffi_call("user.scale", out)(x, factor=np.float32(2.5), name='gelu\n"tanh"', axes=np.array([0, 1]))
        b = jax.ffi.ffi_call("user.in_place", out, input_output_aliases={0: 0}, has_side_effect=True)(a)
        layouts = {"input_layouts": [(0, 1)], "output_layouts": (0, 1)}
        return jax.ffi.ffi_call("user.column_major", out, custom_call_api_version=4, **layouts)(b)

    return f, (array((4, 8)),)
