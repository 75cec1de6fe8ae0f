"""Random FP8 convolution programs in JAX: what the tests of the passes and those of xla_fp8.jit draw from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
WIDE = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}
Array = jax.Array
Operands = list[np.ndarray[Any, Any]]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "leaky_relu": functools.partial(jax.nn.leaky_relu, negative_slope=0.125),
    "leaky_relu_where": lambda y: jnp.where(y > 0, y, y * jnp.asarray(0.25, y.dtype)),
    "elu": jax.nn.elu,
    "silu": jax.nn.silu,
    "gelu_tanh": jax.nn.gelu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}
POINTWISE: dict[str, Callable[[Array], Array]] = {
    "constant_scale": lambda y: y * 0.5,
    "large_scale": lambda y: y * 64,
    "fork_join": lambda y: jax.nn.relu(y) + y * 0.25,
    "minimum": lambda y: jnp.minimum(y, 3),
    "maximum": lambda y: jnp.maximum(y, -2),
    "square": lambda y: y * y,
    "double": lambda y: y + y,
    # Activations by hand.
    "relu_by_hand": lambda y: jnp.where(y < 0, 0, y),
    "relu6_by_hand": lambda y: jnp.where(y < 0, 0, jnp.where(y > 6, 6, y)),
    "elu_by_hand": lambda y: jnp.where(y < 0, jnp.exp(jnp.minimum(y, 0)) - 1, y),
    "silu_by_hand": lambda y: y / (1 + jnp.exp(-y)),
    "gelu_by_hand": lambda y: y * (0.5 + 0.5 * jnp.tanh(0.7978845608 * y * (1 + 0.044715 * y * y))),
    # What looks like something else.
    "steep_leaky_relu": lambda y: jnp.where(y > 0, y, y * 2),
    "negative_leaky_relu": lambda y: jnp.where(y > 0, y, y * -0.5),
    "flipped_leaky_relu": lambda y: jnp.where(y < 0, y, y * 0.25),
    "relu_where": lambda y: jnp.where(y > 0, y, 0),
    "elu_of_two": lambda y: jax.nn.elu(y, 2.0),
    "quick_gelu": lambda y: y * jax.nn.sigmoid(1.5 * y),
    "silu_of_half": lambda y: y * jax.nn.sigmoid(0.5 * y),
    "reciprocal": lambda y: 3 / (y * y + 1),
    "negate": lambda y: 1 - y,
    "reverse_residual": lambda y: y + jnp.flip(y, 0),
    "clip_relu1": lambda y: jnp.clip(y, 0, 1),
    "clip_unit": lambda y: jnp.clip(y, -1, 1),
    "round_trip": lambda y: y.astype(jnp.float32).astype(y.dtype),
    "softmax": lambda y: jax.nn.softmax(y, axis=-1),
    "mean_residual": lambda y: y - jnp.mean(jnp.abs(y)),
}
MOVES: dict[str, Callable[[Array, int], Array]] = {  # along a spatial axis
    "flip": jnp.flip,
    "pad": lambda x, axis: jnp.pad(x, [(2, 1) if d == axis else (0, 0) for d in range(x.ndim)]),
    "slice": lambda x, axis: lax.slice_in_dim(x, 0, None, 2, axis),
    "reshape": lambda x, axis: x.reshape(-1).reshape(x.shape),
}
STEPS = (
    *ACTIVATIONS,
    *ACTIVATIONS,
    *POINTWISE,
    *("bias", "bias", "residual", "residual", "residual_first", "fp8_residual", "fp8_residual", "scale", "scale"),
    *("inverse_scale", "channel_scale", "transpose", "wide_copy", "amax", "amax", "flat_amax", "amax_rescale"),
    *("subtract_bias", "subtract_residual", "spatial_bias", "max_without_abs", "sum", "row_amax", "scale_tensor"),
)


@dataclasses.dataclass(frozen=True)
class Program:
    """One random program; every field is a choice that real programs make.

    Attributes:
        wide: the type it computes in.
        x, w, y: types of input, filter and output; `y` None leaves the output wide.
        lhs, rhs, out: dimension numbers as JAX spells them.
        sizes, kernel, strides, padding, dilation: one entry for each spatial dimension.
        x_scale, w_scale, y_scale: how each scale is applied.
        moves: what happens to the input before the convolution.
        steps: the epilogue, in order.
        clamp: how the saturating cast is written.
        form: what stands around it: one convolution, its input gradient, two in a row, the sum of two.
        boundaries: whether activations are jit functions of their own.
    """

    wide: str
    x: Any
    w: Any
    y: Any
    lhs: str
    rhs: str
    out: str
    batch: int
    groups: int
    features_in: int
    features_out: int
    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    x_scale: str
    w_scale: str
    y_scale: str
    moves: tuple[str, ...]
    steps: tuple[str, ...]
    clamp: str
    form: str
    boundaries: bool


class Builder:
    """Builds a program's operands as it is traced: the same seed, so the same operands, in every wide type."""

    def __init__(self, program: Program, wide: str, operands: Sequence[Array] | None, seed: int = 0) -> None:
        self.program, self.dtype, self.given = program, WIDE[wide], operands
        self.rng, self.made = np.random.default_rng(seed), Operands()

    def operand(self, make: Callable[[], Any], dtype: Any) -> Array:
        """The next operand: made on the first walk, given on later ones."""
        if self.given is not None:
            self.made.append(np.zeros(()))
            return self.given[len(self.made) - 1]
        self.made.append(np.asarray(make(), np.float32).astype(dtype))
        return jnp.asarray(self.made[-1])

    def tensor(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.operand(lambda: self.rng.normal(size=shape), dtype)

    def scalar(self, dtype: Any = jnp.float32) -> Array:
        # Of many bits: after a scale like 0.75, too many results lie right between two FP8 values.
        return self.operand(lambda: self.rng.uniform(0.25, 2), dtype)

    def dequantize(self, x: Array, how: str) -> Array:
        wide = x.astype(self.dtype)
        if how in ("none", "direct"):
            return wide
        if how in ("vector", "sliced"):  # one scale for each output channel of the filter; an element of an array
            if how == "sliced":
                return wide * self.tensor((3,), jnp.bfloat16).astype(self.dtype)[1]
            axis = self.program.rhs.index("O") % wide.ndim
            return wide * jnp.expand_dims(
                self.tensor((wide.shape[axis],), jnp.bfloat16).astype(self.dtype),
                [i for i in range(wide.ndim) if i != axis],
            )
        if how == "multiply_outside":  # scalar of the wide type from the caller
            return wide * self.scalar(jnp.bfloat16).astype(self.dtype)
        scale = self.scalar().astype(self.dtype)
        if how == "broadcast_first":
            return wide * jnp.broadcast_to(scale, wide.shape)
        if how == "keepdims":
            return wide * scale.reshape((1,) * wide.ndim)
        return wide / scale if how == "divide" else scale * wide

    def convolve(self, lhs: Array, rhs: Array, same: bool = False) -> Array:
        p = self.program
        ones = (1,) * len(p.sizes)
        return lax.conv_general_dilated(
            lhs,
            rhs,
            ones if same else p.strides,
            "SAME" if same else p.padding,
            rhs_dilation=ones if same else p.dilation,
            dimension_numbers=(p.lhs, p.rhs, p.out),
            feature_group_count=1 if same else p.groups,
            preferred_element_type=self.dtype,
        )

    def moved(self, x: Array) -> Array:
        for move in self.program.moves:
            x = MOVES[move](x, self.program.lhs.index("W"))
        return x

    def convolution(self) -> Array:
        """A convolution of an input and a filter of its own."""
        p = self.program
        x = self.tensor(arranged(p.lhs, p.batch, p.features_in, p.sizes), p.x)
        w = self.tensor(arranged(p.rhs, p.features_out, p.features_in // p.groups, p.kernel, "OI"), p.w)
        if p.x_scale == "direct" and p.x == p.w:
            return self.convolve(self.moved(x), w)
        # Either the FP8 tensor is moved, or what it dequantizes to.
        lhs = self.dequantize(self.moved(x), p.x_scale) if p.boundaries else self.moved(self.dequantize(x, p.x_scale))
        rhs = self.dequantize(w, p.w_scale)
        if p.form == "input_gradient":
            y, vjp = jax.vjp(lambda lhs: self.convolve(lhs, rhs), lhs)
            return vjp(self.dequantize(self.tensor(y.shape, p.x), p.x_scale))[0]
        return self.convolve(lhs, rhs)

    def epilogue(self, y: Array, channel: int) -> tuple[Array, list[Array]]:
        """The steps applied to `y`, and what else the program returns."""
        extra: list[Array] = []
        for step in self.program.steps:
            if step in ACTIVATIONS:
                function = jax.jit(ACTIVATIONS[step]) if self.program.boundaries else ACTIVATIONS[step]
                y = function(y)
            elif step in POINTWISE:
                y = POINTWISE[step](y)
            elif step in ("bias", "channel_scale", "subtract_bias", "spatial_bias"):
                dimension = 1 if step == "spatial_bias" else channel
                vector = self.tensor((y.shape[dimension],), jnp.bfloat16).astype(self.dtype)
                vector = lax.broadcast_in_dim(vector, y.shape, (dimension,))
                y = y * vector if step == "channel_scale" else y - vector if step == "subtract_bias" else y + vector
            elif step in ("subtract_residual", "scale_tensor"):
                other = self.tensor(y.shape, jnp.bfloat16).astype(self.dtype)
                y = y * other if step == "scale_tensor" else other - y
            elif step.startswith("residual"):
                other = self.tensor(y.shape, jnp.bfloat16).astype(self.dtype)
                y = other + y if step == "residual_first" else y + other
            elif step == "fp8_residual":
                y = y + self.tensor(y.shape, E5M2).astype(self.dtype) * self.scalar().astype(self.dtype)
            elif step == "scale":
                y = y * self.scalar().astype(self.dtype)
            elif step == "inverse_scale":
                y = y / self.scalar().astype(self.dtype)
            elif step == "transpose":
                y = jnp.swapaxes(y, 0, -1)
                channel = {0: y.ndim - 1, y.ndim - 1: 0}.get(channel, channel)
            elif step == "wide_copy":
                extra.append(y)
            elif step in ("amax", "flat_amax"):
                extra.append(jnp.max(jnp.abs(y if step == "amax" else y.reshape(-1))))
            elif step in ("max_without_abs", "sum", "row_amax"):
                reduce = {
                    "max_without_abs": jnp.max,
                    "sum": lambda y: jnp.sum(jnp.abs(y)),
                    "row_amax": lambda y: jnp.max(jnp.abs(y), 1),
                }[step]
                extra.append(reduce(y))
            elif step == "amax_rescale":
                amax = jnp.max(jnp.abs(y))
                y = y * (jnp.asarray(8, self.dtype) / (amax + 1))
                extra.append(amax)
        return y, extra

    def quantize(self, y: Array) -> Array:
        p = self.program
        if p.y_scale != "none":
            scale = self.scalar().astype(self.dtype)
            y = y * scale if p.y_scale == "multiply" else y / scale
        if p.y is None:
            return y
        largest = float(jnp.finfo(p.y).max)
        if p.clamp == "clip":
            y = jnp.clip(y, -largest, largest)
        elif p.clamp == "max_of_min":
            y = jnp.maximum(jnp.minimum(y, largest), -largest)
        elif p.clamp == "lax":
            y = lax.clamp(jnp.asarray(-largest, y.dtype), y, jnp.asarray(largest, y.dtype))
        elif p.clamp == "f32":
            y = jnp.clip(y.astype(jnp.float32), -largest, largest)
        elif p.clamp == "wrong":
            y = jnp.clip(y, -16, 16)
        return y.astype(p.y)

    def build(self) -> list[Array]:
        """All that the program returns."""
        p = self.program
        y = self.convolution()
        if p.form == "sum_of_two":
            y = y + self.convolution()
        y, extra = self.epilogue(y, p.lhs.index("C") if p.form == "input_gradient" else p.out.index("C"))
        y = self.quantize(y)
        if p.form == "two_in_a_row" and y.ndim == len(p.out):
            channel = y.shape[p.lhs.index("C")]
            w = self.tensor(arranged(p.rhs, 16, channel, (1,) * len(p.sizes), "OI"), p.w)
            z = self.convolve(self.dequantize(y, p.x_scale if p.y else "none"), self.dequantize(w, p.w_scale), True)
            extra.append(self.quantize(z))
        return [y, *extra]


def arranged(spec: str, first: int, second: int, spatial: Sequence[int], letters: str = "NC") -> tuple[int, ...]:
    sizes = dict(zip(letters, (first, second), strict=True)) | dict(zip("DHW"[-len(spatial) :], spatial, strict=True))
    return tuple(sizes[letter] for letter in spec)


@st.composite
def programs(draw: st.DrawFn, ranks: Sequence[int] = (2, 2, 2, 1, 3)) -> Program:
    rank = draw(st.sampled_from(ranks))
    spatial = "DHW"[-rank:]

    def per_dimension(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in range(rank))

    def order(usual: str) -> str:
        return draw(st.one_of(st.just(usual), st.permutations(usual).map("".join)))

    wide = draw(st.sampled_from(("f32", "f32", "bf16", "f16")))
    groups = draw(st.sampled_from((1, 1, 1, 2)))
    form = draw(st.sampled_from(("one", "one", "one", "input_gradient", "two_in_a_row", "sum_of_two")))
    scale = st.sampled_from(
        ("multiply", "none", "divide", "broadcast_first", "keepdims", "multiply_outside", "vector", "sliced")
    )
    return Program(
        wide=wide,
        x=draw(st.sampled_from((E4M3, E5M2))),
        w=draw(st.sampled_from((E4M3, E5M2))),
        y=draw(st.sampled_from((E4M3, E4M3, E5M2, None))),
        lhs=order(f"N{spatial}C"),
        rhs=order(f"{spatial}IO"),
        out=order(f"N{spatial}C"),
        batch=draw(st.integers(1, 3)),
        groups=groups,
        features_in=16 * groups,
        features_out=16 * groups,
        sizes=per_dimension((3, 4, 5, 6)),
        kernel=per_dimension((1, 2, 3)),
        strides=(1,) * rank if form == "input_gradient" and draw(st.booleans()) else per_dimension((1, 1, 2)),
        padding=per_dimension(((0, 0), (1, 1), (0, 1), (2, 1))),
        dilation=per_dimension((1, 1, 1, 2)) if draw(st.booleans()) else (1,) * rank,
        x_scale=draw(st.one_of(scale, st.just("direct"))),
        w_scale=draw(scale),
        y_scale=draw(st.sampled_from(("multiply", "none", "divide"))),
        moves=tuple(draw(st.lists(st.sampled_from(tuple(MOVES)), max_size=1))) if draw(st.booleans()) else (),
        steps=tuple(draw(st.sampled_from(STEPS)) for _ in range(draw(st.integers(0, 4)))),
        clamp=draw(st.sampled_from(("clip", "clip", "clip", "max_of_min", "lax", "f32", "wrong", "none"))),
        form=form,
        boundaries=draw(st.booleans()),
    )


def fits(program: Program) -> bool:
    """Whether every convolution has an output."""
    letters = "DHW"[-len(program.sizes) :]
    sizes, kernel = (dict(zip(letters, s, strict=True)) for s in (program.sizes, program.kernel))
    # JAX takes padding and dilation in the order in which the filter has its dimensions.
    windows = zip((c for c in program.rhs if c in letters), program.padding, program.dilation, strict=True)
    return all(sizes[c] + low + high >= (kernel[c] - 1) * dilation + 1 for c, (low, high), dilation in windows)
