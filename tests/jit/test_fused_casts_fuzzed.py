"""Programs on which kernels of several results are easily wrong; each computes what the program means."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core

import xla_fp8
from tests.fused_casts import BF16, E4M3, E5M2, F32, Array, normal
from tests.training_steps import assert_kernels_compute_what_is_meant, kernels
from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import kernel, statistics
from xla_fp8.backends.protocol import No
from xla_fp8.backends.quantize import choice
from xla_fp8.tracing.equations import is_literal
from xla_fp8.tracing.fused_cast_problem import problem_of
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.region import cut_closed

X, Y, W = normal((512, 256)), normal((512, 256), seed=1), normal((512, 512), seed=2)
COLUMNS = jnp.linspace(0.5, 2, 512)


def clipped(x: Array, largest: float = 448.0) -> Array:
    return jnp.clip(x, -largest, largest)


def rms(x: Array) -> Array:
    wide = x.astype(F32)
    return wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)


def gates(x: Array, y: Array) -> Array:
    x, y = x.astype(F32), y.astype(F32)
    return jnp.concatenate([x * jax.nn.gelu(y), y * jax.nn.gelu(x)], -1)


def clamped(x: Array) -> tuple[Array, ...]:
    """The cast saturates itself; others read what is clamped."""
    y = clipped(rms(x) * 300)
    return y.astype(E4M3), jnp.max(jnp.abs(y)), jnp.sum(y, 0)


def clamped_in_both_types(x: Array) -> tuple[Array, ...]:
    y = clipped(rms(x) * 300)
    return y.astype(E5M2), y.astype(E4M3)


def clamped_in_bf16(x: Array) -> tuple[Array, ...]:
    y = clipped((rms(x) * 300).astype(BF16))
    return y.astype(E4M3), y


def of_heads(x: Array, y: Array) -> tuple[Array, ...]:
    """A number for each column of [tokens, heads * channels], beside a tensor of [tokens, heads, channels]."""
    x, y = (a.reshape(4, 128, 8, 32).astype(F32) for a in (x, y))
    z = (x * y).astype(BF16)
    product = z.transpose(0, 2, 1, 3) @ jnp.ones((32, 4), BF16)
    return product, jnp.sum(z.astype(F32) * x, (0, 1)), clipped(W).astype(E4M3)


def nested_parts(x: Array, y: Array) -> Array:
    return clipped(jnp.concatenate([gates(x, y), gates(y, x * 2)], -1)).astype(E4M3)


def amax_of_parts(x: Array, y: Array) -> tuple[Array, ...]:
    z = gates(x, y)
    return clipped(z * 3).astype(E4M3), jnp.max(jnp.abs(z)), jnp.sum(z, 0)


def moments(x: Array) -> tuple[Array, ...]:
    """As jnp.var, the variance reads a mean of its own, which is a sum over the same tensor."""
    wide = x.astype(F32)
    deviation = wide - wide.mean(0)
    return wide.mean(0), jnp.mean(deviation * deviation, 0), wide.var(0), clipped(jnp.ones((8, 8))).astype(E4M3)


def dynamically_scaled(x: Array) -> list[Array]:
    """As for queries, keys and values: each cast reads the scale of an amax of its own."""
    y = (rms(x) * 3 + 1).astype(BF16)
    scaled = [xla_fp8.quantize(y) for _ in range(3)]
    return [*(q.data for q in scaled), *(q.scale for q in scaled)]


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    "clamped values have other readers": (clamped, (X,)),
    "two types of clamped values": (clamped_in_both_types, (X,)),
    "clamped values are a result": (clamped_in_bf16, (X,)),
    "parts, and numbers of columns": (lambda x, y, c: clipped(gates(x, y) * c).astype(E4M3), (X, Y, COLUMNS)),
    "parts, and computed numbers": (lambda x, y, c: clipped(gates(x, y) * (2 * c + 1)).astype(E4M3), (X, Y, COLUMNS)),
    "parts, and another tensor": (lambda x, y, w: clipped(gates(x, y) * w).astype(E4M3), (X, Y, W)),
    "parts of parts": (nested_parts, (X, Y)),
    "amax and sums of parts": (amax_of_parts, (X, Y)),
    "mean and variance of columns": (moments, (X + 1,)),
    "casts of a tensor with scales of their own": (dynamically_scaled, (X,)),
    "sums over rows of heads": (of_heads, (X, Y)),
}


@pytest.fixture(autouse=True)
def kernels_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Hopper GPU, by Pallas' interpreter."""
    monkeypatch.setattr(choice, "takes_fused", lambda platform: True)
    monkeypatch.setattr(kernel, "run", functools.partial(kernel.run, interpret=True))
    monkeypatch.setattr(statistics, "totals", functools.partial(statistics.totals, interpret=True))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    function, arguments = PROGRAMS[name]
    assert_kernels_compute_what_is_meant(rewritten(function, arguments), arguments)


def rewritten(function: Callable[..., Any], arguments: tuple[Array, ...]) -> Any:
    """The rewritten jaxpr, which computes the same to the last bit where each operation runs by itself."""
    original = jax.make_jaxpr(function)(*arguments)
    changed = cut_closed(original, Options())
    with jax.disable_jit():
        ours = core.jaxpr_as_fun(changed)(*jax.tree.leaves(arguments))
        theirs = core.jaxpr_as_fun(original)(*jax.tree.leaves(arguments))
    for found, wanted in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))
    return changed


ACTIVATIONS: list[Callable[[Array], Array]] = [jax.nn.relu, jax.nn.gelu, jax.nn.silu, jnp.tanh, jax.nn.leaky_relu]


def composed(seed: int) -> Callable[..., Any]:
    """The gradient of norms, activations, gates and sums in any order, with casts, amaxes and sums on the way."""

    def loss(x: Array, y: Array, columns: Array) -> tuple[Array, list[Array]]:
        pick = random.Random(seed)
        made, others = [x, y], []
        for _ in range(7):
            z = pick.choice(made[-2:]).astype(F32)
            step = pick.choice(["norm", "batch norm", "activation", "gate", "add", "columns", "cast", "sum", "amax"])
            if step == "norm":
                z = rms(z)
            elif step == "batch norm":
                # Of numbers whose sum is not zero: else that would be one of rounding errors.
                z = (z - 0.5 * z.mean(0)) * jax.lax.rsqrt((z * z).mean(0) + 1e-5)
            elif step == "activation":
                z = pick.choice(ACTIVATIONS)(z)
            elif step == "gate":
                left, right = jnp.split(z, 2, -1)
                z = jnp.concatenate([left * jax.nn.silu(right), right * pick.choice(ACTIVATIONS)(left)], -1)
            elif step == "add":
                z = z + pick.choice(made)
            elif step == "columns":
                z = z * columns
            elif step == "cast":
                others.append(clipped(z * 30).astype(E4M3))
            elif step == "sum":
                others.append(jnp.sum(z, 0))
            else:
                others.append(jnp.max(jnp.abs(z)))
            made.append(z.astype(BF16))
        return jnp.sum(made[-1].astype(F32) * y), [*others, clipped(rms(made[-1]) * 30 + 1).astype(E4M3)]

    return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)


def in_f32(jaxpr: Any) -> Callable[..., Any]:
    """What a group is without roundings to bf16 on the way, as kernels compute it: in sums these add up."""
    inner = _jax_compat.open_jaxpr(flat(jaxpr))

    def wide(x: Array) -> Array:
        return x.astype(F32) if x.dtype == BF16 else x

    def run(*inputs: Array) -> list[Array]:
        values = dict(zip(inner.invars, map(wide, inputs), strict=True))
        for equation in inner.eqns:
            operands = [wide(jnp.asarray(a.val, a.aval.dtype)) if is_literal(a) else values[a] for a in equation.invars]
            params = dict(equation.params)
            if params.get("new_dtype") == BF16:
                params["new_dtype"] = np.dtype(F32)
            results = equation.primitive.bind(*operands, **params)
            made = results if equation.primitive.multiple_results else [results]
            values.update(zip(equation.outvars, made, strict=True))
        return [values[variable].astype(variable.aval.dtype) for variable in inner.outvars]

    return run


@pytest.mark.parametrize("seed", range(3))
def test_programs_at_random(seed: int) -> None:
    arguments = X, Y, COLUMNS[:256]
    changed = rewritten(composed(seed), arguments)
    assert kernels(changed)
    assert_kernels_compute_what_is_meant(changed, arguments, in_f32)


def test_no_group_reads_what_is_made_of_its_amax() -> None:
    """Such a kernel would be left out when the program is put in order, with all that it could compute."""
    changed = rewritten(dynamically_scaled, (X,))
    assert [[v.aval.dtype for v in fused.outvars] for fused in kernels(changed)] == [[E4M3]] * 3


@pytest.mark.parametrize("step", [lambda z: z * 0.5 + z, lambda z: z + 0.5], ids=["two readers", "one reader"])
def test_many_steps_beside_a_cast(step: Callable[[Array], Array]) -> None:
    """Neither as many ways as there are through all of them are gone, nor as many calls deep."""

    def beside(x: Array) -> tuple[Array, ...]:
        y = z = rms(x)
        for _ in range(600):
            z = step(z)
        return clipped(y * 3).astype(E4M3), jnp.sum(z, 0)

    assert len(kernels(cut_closed(jax.make_jaxpr(beside)(X), Options()))) == 1


def test_a_sum_over_rows_is_no_node() -> None:
    """A kernel would take it for that over a row."""

    def centered(x: Array) -> Array:
        return clipped(x.astype(F32) - jnp.sum(x.astype(F32), 0)).astype(E4M3)

    assert problem_of(jax.make_jaxpr(centered)(X)) == No("it computes a reduce_sum that is not of rows")


def test_layers_of_a_differentiated_scan() -> None:
    """What does not depend on the layer is computed outside, where the bounds of a clamp would be no constants."""

    def loss(weights: Array, x: Array) -> Array:
        def layer(x: Array, w: Array) -> tuple[Array, None]:
            y: Array = xla_fp8.fp8_dot((rms(x) * 3 + 1).astype(BF16), w, scaling=xla_fp8.DelayedScaling.create(amax=8))
            return x + y, None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0].astype(F32))

    changed = cut_closed(jax.make_jaxpr(jax.grad(loss))(normal((2, 256, 256)), X), Options())
    forward, _ = (e.params["jaxpr"] for e in changed.eqns if e.primitive.name == "scan")
    assert [fused.outvars[0].aval.dtype for fused in kernels(forward)] == [E4M3]


def test_what_has_a_context_keeps_it() -> None:
    def partly_marked(x: Array) -> tuple[Array, ...]:
        y = rms(x) * 3
        with set_xla_metadata(mark="here"):
            marked = jnp.max(jnp.abs(y)), jnp.sum(y * y, 0)
        return clipped(y).astype(E4M3), *marked

    [fused] = kernels(rewritten(partly_marked, (X,)))
    assert fused.outvars[0].aval.dtype == E4M3
    assert not any(map(_jax_compat.has_own_context, fused.params["jaxpr"].eqns))


def test_open_dimensions() -> None:
    """Of an export: nothing is known of the sizes, and the program is rewritten all the same."""
    shape = export.symbolic_shape("tokens, 256")
    jaxpr = jax.make_jaxpr(lambda x: (clipped(rms(x)).astype(E4M3), jnp.sum(rms(x), 0)))(
        jax.ShapeDtypeStruct(shape, BF16)
    )
    assert not kernels(cut_closed(jaxpr, Options()))


def test_a_rule_of_two_operands_is_no_relu() -> None:
    """Whose body is one maximum, of either."""

    @jax.custom_jvp
    def second(x: Array, y: Any) -> Array:
        return jnp.maximum(y, 0)

    second.defjvp(lambda primals, tangents: (second(*primals), tangents[0]))

    def masked(x: Array, y: Array) -> tuple[Array, ...]:
        z = x * 2 + y
        return second(z, 0.5), second(z, y), z > 0, clipped(rms(x)).astype(E4M3)

    rewritten(masked, (X, Y))
