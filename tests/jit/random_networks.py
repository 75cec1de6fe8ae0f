"""Random networks of FP8 convolutions: layers that read one another's results, quantized again between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from hypothesis import strategies as st

from tests.random_programs import E4M3, E5M2, Array, Builder, Program, arranged, fits, programs

FEATURES = 16


@dataclasses.dataclass(frozen=True)
class Layer:
    """One convolution with its epilogue.

    Attributes:
        program: its types, scales, window and epilogue; its input's shape and layout are those of what it reads.
        reads: which earlier result, counted back from the last; two layers may read one (a fork).
        adds: whether the latest earlier result of the output's shape is added to the convolution (a residual).
    """

    program: Program
    reads: int
    adds: bool


class NetworkBuilder(Builder):
    """Builds a network as it is traced: the same layers with the same operands in every wide type.

    Args:
        quantized: what to compute on with in place of each quantized tensor. A rounding error that turns an FP8 value
            into its neighbour is a large one in all that is computed from it; where another program's quantized tensors
            go into the next layers, each layer is compared by itself.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        wide: str,
        operands: Sequence[Array] | None,
        quantized: Sequence[Array] | None = None,
    ) -> None:
        super().__init__(layers[0].program, wide, operands)
        self.layers, self.given_quantized = layers, quantized
        self.quantized: list[Array] = []

    def network(self) -> tuple[list[Array], list[Array]]:
        """Every quantized tensor, and everything else that the network returns, both in order."""
        first = self.layers[0].program
        values = [(self.tensor(arranged(first.lhs, first.batch, FEATURES, first.sizes), first.x), first.lhs)]
        others: list[Array] = []
        for layer in self.layers:
            y, layout, extra = self.layer(layer, values)
            others += extra
            if y.dtype in (E4M3, E5M2):
                y = self.noted(y)
            else:
                others.append(y)
            values.append((y, layout))
        return self.quantized, others

    def noted(self, x: Array) -> Array:
        """What stands for a quantized tensor in the rest of the network."""
        self.quantized.append(x)
        return x if self.given_quantized is None else self.given_quantized[len(self.quantized) - 1]

    def layer(self, layer: Layer, values: Sequence[tuple[Array, str]]) -> tuple[Array, str, list[Array]]:
        """The layer's result, its layout, and what else it returns."""
        x, layout = values[-1 - layer.reads % len(values)]
        p = self.program = dataclasses.replace(layer.program, lhs=layout)
        if x.dtype == self.dtype:
            x = self.noted(jnp.clip(x * self.scalar().astype(self.dtype), -448, 448).astype(p.x))
        lhs = self.moved(x) if p.boundaries else self.moved(self.dequantize(x, p.x_scale))
        sizes = tuple(lhs.shape[layout.index(letter)] for letter in "DHW"[-len(p.sizes) :])
        if not fits(dataclasses.replace(p, sizes=sizes)):
            ones = (1,) * len(sizes)
            p = self.program = dataclasses.replace(p, padding=((1, 1),) * len(sizes), dilation=ones)
        w = self.tensor(arranged(p.rhs, FEATURES, lhs.shape[layout.index("C")] // p.groups, p.kernel, "OI"), p.w)
        if not p.boundaries:
            y = self.convolve(lhs, self.dequantize(w, p.w_scale))
        elif p.x_scale == "direct" and lhs.dtype == w.dtype:
            y = self.convolve(lhs, w)
        else:
            y = self.convolve(self.dequantize(lhs, p.x_scale), self.dequantize(w, p.w_scale))
        residual = next(
            (v for v, order in reversed(values) if layer.adds and (v.shape, order) == (y.shape, p.out)), None
        )
        if residual is not None:
            y = y + residual.astype(self.dtype) * self.scalar().astype(self.dtype)
        y, extra = self.epilogue(y, p.out.index("C"))
        layout = p.out
        for _ in range(p.steps.count("transpose") % 2):  # it swaps the first dimension and the last
            layout = layout[-1] + layout[1:-1] + layout[0]
        return self.quantize(y), layout, extra


@st.composite
def networks(draw: st.DrawFn) -> tuple[Layer, ...]:
    """Two or three layers of one rank, in all of at most four steps: what XLA compiles in a tenth of a second."""
    rank = draw(st.sampled_from((2, 2, 2, 1, 3)))
    layer = st.builds(Layer, programs((rank,)), st.sampled_from((0, 0, 1, 2)), st.booleans())
    return _shortened(draw(st.lists(layer, min_size=2, max_size=3)))


def _shortened(layers: Sequence[Layer], most: int = 4) -> tuple[Layer, ...]:
    left = most
    shorter = []
    for layer in layers:
        steps = layer.program.steps[:left]
        left -= len(steps)
        shorter.append(dataclasses.replace(layer, program=dataclasses.replace(layer.program, steps=steps)))
    return tuple(shorter)
