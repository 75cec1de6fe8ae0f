"""depthwise_conv: on a CPU lax's numbers to the last bit, derivatives of every order; kernels where CUDA is meant."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax

import xla_fp8
from tests.xla_options import environment
from xla_fp8 import depthwise_conv

pytestmark = pytest.mark.unoptimized

Conv = Callable[..., jax.Array]


def by_lax(x: jax.Array, w: jax.Array, *, window_strides: Any = (1, 1), padding: Any = "SAME") -> jax.Array:
    w = w[:, :, None] if w.ndim == 3 else w
    return lax.conv_general_dilated(
        x,
        w,
        window_strides,
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


def normal(shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def operands(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    return normal((2, 9, 7, 16), dtype), normal((3, 3, 16), dtype, 1)


def loss(conv: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sin(conv(x, w).astype(jnp.float32)))


def same(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def near(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        wide = np.asarray(b, np.float32)
        assert np.linalg.norm(np.asarray(a, np.float32) - wide) <= tolerance * np.linalg.norm(wide)


TYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
WINDOWS: tuple[dict[str, Any], ...] = (
    {},
    {"window_strides": (2, 2)},
    {"window_strides": (1, 2), "padding": "VALID"},
    {"padding": "SAME_LOWER"},
    {"padding": ((0, 2), (1, 0))},
    {"padding": ((3, 3), (0, 0))},  # as wide as the window
    {"window_strides": (3, 1)},
)


# No rule looks at the type and the window together: every type with the first window, the other windows in turns.
@pytest.mark.parametrize(
    ("dtype", "options"),
    [*((dtype, {}) for dtype in TYPES), *zip(itertools.cycle(TYPES), WINDOWS[1:])],
)
def test_values_and_gradients_are_those_of_lax_to_the_last_bit(dtype: Any, options: dict[str, Any]) -> None:
    x, w = operands(dtype)
    found, expected = (functools.partial(conv, **options) for conv in (depthwise_conv, by_lax))
    same(found(x, w), expected(x, w))
    same(jax.jit(found)(x, w[:, :, None]), jax.jit(expected)(x, w))
    gradients = [jax.jit(jax.grad(functools.partial(loss, conv), (0, 1))) for conv in (found, expected)]
    same(gradients[0](x, w), gradients[1](x, w))


def test_other_channel_counts_and_types_are_laxs() -> None:
    x, w = normal((2, 6, 6, 5)), normal((3, 3, 5))
    same(depthwise_conv(x, w), by_lax(x, w))
    with jax.enable_x64(True):
        x64, w64 = (normal(a.shape, jnp.float64) for a in operands())
        same(depthwise_conv(x64, w64), by_lax(x64, w64))


def test_a_filter_in_float32_is_computed_with_as_it_is() -> None:
    x, w = operands(jnp.bfloat16)[0], operands()[1]
    wide = x.astype(jnp.float32)
    same(depthwise_conv(x, w), by_lax(wide, w).astype(jnp.bfloat16))
    assert not np.array_equal(depthwise_conv(x, w), depthwise_conv(x, w.astype(jnp.bfloat16)))
    of_x, of_w = jax.grad(functools.partial(loss, depthwise_conv), (0, 1))(x, w)
    assert (of_x.dtype, of_w.dtype) == (jnp.bfloat16, jnp.float32)
    expected = jax.grad(lambda w: loss(lambda x, w: by_lax(x, w).astype(jnp.bfloat16), wide, w))(w)
    near(of_w, expected, 1e-6)


@pytest.mark.parametrize("stride", [1, 2])
def test_derivatives_of_every_order(stride: int) -> None:
    x, w = operands()
    dx, dw = normal(x.shape, seed=2), normal(w.shape, seed=3)
    found, expected = (
        functools.partial(loss, functools.partial(conv, window_strides=(stride, stride)))
        for conv in (depthwise_conv, by_lax)
    )

    def transformed(loss: Callable[..., jax.Array]) -> dict[str, Any]:
        gradient = jax.grad(loss, (0, 1))

        def of_gradient(x: jax.Array, w: jax.Array) -> jax.Array:
            return sum((jnp.sum(jnp.cos(part)) for part in gradient(x, w)), jnp.float32(0))

        return {
            "forward": jax.jvp(loss, (x, w), (dx, dw))[1],
            "forward over reverse": jax.jvp(gradient, (x, w), (dx, dw))[1],
            "reverse over reverse": jax.grad(of_gradient, (0, 1))(x, w),
            "reverse over forward": jax.grad(lambda x: jax.jvp(loss, (x, w), (dx, dw))[1])(x),
            "third": jax.jvp(jax.grad(of_gradient, (0, 1)), (x, w), (dx, dw))[1],
            "linearized": jax.linearize(loss, x, w)[1](dx, dw),
        }

    for name, value in jax.jit(lambda: transformed(found))().items():
        near(value, jax.jit(lambda: transformed(expected))()[name])


@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (3, None), (0, 2)])
def test_vmap(axes: tuple[int | None, int | None]) -> None:
    batched = [a if axis is None else jnp.stack([a, 2 * a, -a], axis) for a, axis in zip(operands(), axes, strict=True)]
    for of in (lambda conv: conv, lambda conv: jax.grad(functools.partial(loss, conv), (0, 1))):
        near(jax.vmap(of(depthwise_conv), axes)(*batched), jax.vmap(of(by_lax), axes)(*batched))


def test_a_vmap_in_a_vmap() -> None:
    x, w = normal((3, 4, 2, 9, 7, 16)), normal((4, 3, 3, 16))
    found, expected = (jax.vmap(jax.vmap(conv), (0, None))(x, w) for conv in (depthwise_conv, by_lax))
    near(found, expected)
    found, expected = (jax.vmap(jax.vmap(conv, (0, None)), (0, None))(x, w[0]) for conv in (depthwise_conv, by_lax))
    near(found, expected)


def test_a_vmap_over_images_is_one_convolution() -> None:
    x, w = normal((3, 2, 9, 7, 16)), operands()[1]
    jaxpr = jax.make_jaxpr(jax.grad(lambda w: jnp.sum(jax.vmap(depthwise_conv, (0, None))(x, w))))(w)
    assert str(jaxpr).count("xla_fp8_depthwise") == 2
    assert "conv_general_dilated" not in str(jaxpr)


def test_loops_checkpoints_and_no_jit() -> None:
    x, w = operands()

    def looped(conv: Conv, x: jax.Array, w: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda x: jnp.tanh(conv(x, w)))
        return lax.scan(lambda x, _: (body(x), None), x, length=3)[0]

    found, expected = (functools.partial(loss, functools.partial(looped, conv)) for conv in (depthwise_conv, by_lax))
    same(jax.jit(jax.grad(found, (0, 1)))(x, w), jax.jit(jax.grad(expected, (0, 1)))(x, w))
    with jax.disable_jit():
        same(depthwise_conv(x, w), by_lax(x, w))


@pytest.mark.parametrize("saves", [True, False])
def test_a_policy_of_checkpoint_takes_it_for_a_convolution(saves: bool) -> None:
    def policy(primitive: Any, *_: Any, **__: Any) -> bool:
        return saves and primitive.name == "conv_general_dilated"

    x, w = operands()
    f = jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(depthwise_conv(x, w))), policy=policy)
    jaxpr = str(jax.make_jaxpr(jax.grad(f))(x, w))
    assert jaxpr.count("part=output") == (1 if saves else 2)


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (jnp.ones((2, 4, 4, 8), jnp.int32), jnp.ones((3, 3, 8)), "x is int32"),
        (jnp.ones((2, 4, 4, 8)), jnp.ones((3, 3, 8), jnp.float8_e4m3fn), "w is float8_e4m3fn"),
        (jnp.ones((4, 4, 8)), jnp.ones((3, 3, 8)), r"x has shape \[4, 4, 8\]"),
        (jnp.ones((2, 4, 4, 8)), jnp.ones((3, 3, 8, 8)), r"w \[3, 3, 8, 8\]"),
        (jnp.ones((2, 4, 4, 8)), jnp.ones((3, 3, 16)), "of the same channels"),
    ],
)
def test_wrong_operands_are_named(x: Any, w: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        depthwise_conv(x, w)


@pytest.mark.parametrize(
    "options",
    [
        {"window_strides": (1,)},
        {"window_strides": 2},
        {"window_strides": (0, 1)},
        {"window_strides": (1.5, 1)},
        {"padding": (1, 1)},
        {"padding": ((1, 1), (1, 1, 1))},
    ],
    ids=str,
)
def test_wrong_strides_and_padding_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="expected two strides"):
        depthwise_conv(*operands(), **options)


def test_where_types_are_not_promoted() -> None:
    x, w = operands(jnp.bfloat16)[0], operands()[1]
    expected = depthwise_conv(x, w)
    with jax.numpy_dtype_promotion("strict"):
        same(depthwise_conv(x, w), expected)


@pytest.mark.parametrize("sizes", ["b, 9, 7, 16", "b, h, w, 16"])
def test_exported_for_sizes_that_are_not_known(sizes: str) -> None:
    x, w = operands()
    unknown = jax.ShapeDtypeStruct(export.symbolic_shape(sizes), jnp.float32)
    exported = export.export(jax.jit(depthwise_conv))(unknown, w)
    same(exported.call(x, w), by_lax(x, w))


# Lowered for CUDA


def lowered(function: Any, *arguments: Any) -> str:
    return str(jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text())


def kernels_of(text: str) -> list[str]:
    return re.findall(r'name = "(depthwise_\w+)"', text)


def structs(dtype: Any = jnp.bfloat16) -> tuple[Any, Any]:
    return jax.ShapeDtypeStruct((4, 12, 12, 32), dtype), jax.ShapeDtypeStruct((7, 7, 32), dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_program_traced_here_has_kernels_on_cuda(dtype: Any) -> None:
    text = lowered(jax.grad(functools.partial(loss, depthwise_conv), (0, 1)), *structs(dtype))
    assert sorted(kernels_of(text)) == ["depthwise_filter_gradient", "depthwise_forward", "depthwise_forward"]
    assert "stablehlo.convolution" not in text
    assert "depthwise_forward" not in jax.jit(depthwise_conv).lower(*structs(dtype)).as_text()


def test_kernels_in_x64_mode() -> None:
    arguments = structs()
    with jax.enable_x64(True):
        assert len(kernels_of(lowered(jax.grad(functools.partial(loss, depthwise_conv), (0, 1)), *arguments))) == 3


def test_an_input_gradient_of_stride_2_is_laxs() -> None:
    conv = functools.partial(depthwise_conv, window_strides=(2, 2))
    text = lowered(jax.grad(functools.partial(loss, conv), (0, 1)), *structs())
    assert sorted(kernels_of(text)) == ["depthwise_filter_gradient", "depthwise_forward"]
    assert text.count("stablehlo.convolution") == 1


def test_kernels_stand_in_loops_and_vmaps_and_mesh_shards() -> None:
    x, w = structs()
    assert kernels_of(lowered(lambda x, w: lax.scan(lambda x, _: (depthwise_conv(x, w), 0), x, length=2)[0], x, w))
    several = jax.ShapeDtypeStruct((3, *x.shape), x.dtype)
    assert kernels_of(lowered(jax.vmap(depthwise_conv, (0, None)), several, w))
    per_example = jax.vmap(jax.grad(functools.partial(loss, depthwise_conv), 1), (0, None))
    assert kernels_of(lowered(per_example, several, w)) == ["depthwise_forward"]


def test_other_gpus_and_exports_have_laxs(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = export.export(jax.jit(depthwise_conv), platforms=("cuda",))(*structs())
    assert "stablehlo.convolution" in exported.mlir_module()
    monkeypatch.setattr("xla_fp8.backends.quantize.request._capability", lambda: (8, 0))
    assert not kernels_of(lowered(depthwise_conv, *structs()))


def test_xla_fp8_jit_leaves_it_to_jax() -> None:
    x, w = structs()
    text = str(xla_fp8.jit(depthwise_conv).trace(x, w).lower(lowering_platforms=("cuda",)).as_text())
    assert kernels_of(text) == ["depthwise_forward"]


MESHES = """
import functools, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from xla_fp8 import depthwise_conv

x, w = (jnp.asarray(np.random.default_rng(0).normal(size=s), jnp.float32) for s in ((8, 6, 6, 16), (3, 3, 16)))

def loss(w, x):
    return jnp.sum(jnp.sin(depthwise_conv(x, w)))

expected = jax.value_and_grad(loss, (0, 1))(w, x)

def same(found):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)

def kernels(function, *arguments):
    text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    return len(re.findall(r'name = "depthwise_', text))

gradient = jax.value_and_grad(loss, (0, 1))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        # Over explicit axes lax's convolution takes no sharded channels.
        for spec in (P(("i", "j")), P("i", None, None, "j"))[: 1 if kind is AxisType.Explicit else 2]:
            sharded = jax.device_put(x, NamedSharding(mesh, spec))
            of_w = jax.device_put(w, NamedSharding(mesh, P(None, None, spec[3] if len(spec) == 4 else None)))
            same(jax.jit(gradient)(of_w, sharded))
            assert kernels(gradient, of_w, sharded) == 0

mesh = jax.make_mesh((4, 2), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
for axes in (("i",), ("i", "j")):
    for checks in (True, False):
        shards = functools.partial(
            jax.shard_map, mesh=mesh, in_specs=(P(), P(axes)), axis_names=set(axes), check_vma=checks
        )
        whole = jax.value_and_grad(shards(lambda *a: jax.lax.psum(loss(*a), axes), out_specs=P()), (0, 1))
        same(jax.jit(whole)(w, x))
        # Where one axis is left to the partitioner, XLA splits what stands inside, and cannot split a kernel.
        assert kernels(whole, w, x) == (3 if len(axes) == 2 else 0)
by_example = jax.shard_map(jax.vmap(jax.grad(loss)), mesh=mesh, in_specs=P("i"), out_specs=P("i"))
found = jax.jit(by_example)(jnp.stack([w] * 8), x[:, None]).sum(0)
np.testing.assert_allclose(found, expected[1][0], rtol=1e-4, atol=1e-4)
print("done")
"""


def test_over_several_devices_it_is_laxs_but_in_shards() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MESHES], env=environment(8), capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout == "done\n", done.stderr[-3000:]
