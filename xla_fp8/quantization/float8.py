"""Float8: an FP8 array together with its scale."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.typing import DTypeLike

from xla_fp8.functions import FP8_DTYPES
from xla_fp8.quantization import algorithms, scale_shapes
from xla_fp8.quantization.derivatives import refuse
from xla_fp8.quantization.errors import QuantizationError
from xla_fp8.quantization.numerics import ScaleRule
from xla_fp8.quantization.operators import Operators


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Float8(Operators):
    """An array of FP8 numbers that stands for data * scale. A pytree; `xla_fp8.quantize` makes it.

    It indexes, reshapes and transposes like an array where its scale allows that. In Python's operators it counts as
    `q.dequantize(dtype)`, where dtype is the other operand's if that is float32, bfloat16 or float16, and else
    float32; the result is a jax.Array. Functions of jax.numpy and NumPy refuse it: say q.dequantize(), so that
    it is seen where FP8 ends. It has no derivative; taking one raises DifferentiationError.

    Attributes:
        data: the FP8 numbers, float8_e4m3fn or float8_e5m2; None where only the transposed copy was asked for.
        scale: float32; [] or one for each index of some dimensions, see `xla_fp8.quantization.scale_shapes`.
        transposed: the same numbers with the last two dimensions exchanged, [..., N, M] for [..., M, N], as an array of
            its own, so that index M is contiguous; or None. Indexing and reshaping drop it.
    """

    data: jax.Array | None
    scale: jax.Array
    transposed: jax.Array | None = None

    # What it looks like

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in the order of `data`, whichever copies there are."""
        if self.data is not None:
            return tuple(self.data.shape)
        *batch, n, m = self._copy().shape
        return (*batch, m, n)

    @property
    def dtype(self) -> Any:
        """The FP8 type."""
        return self._copy().dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies and the scale."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __len__(self) -> int:
        if not self.shape:
            raise QuantizationError("len() of a Float8 without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        copy = self.data if self.data is not None else self.transposed
        if not all(hasattr(leaf, "dtype") and hasattr(leaf, "shape") for leaf in (copy, self.scale)):
            return f"Float8(data={self.data!r}, scale={self.scale!r}, transposed={self.transposed!r})"
        copies = {(True, True): ", both layouts", (False, True): ", transposed"}
        layout = copies.get((self.data is not None, self.transposed is not None), "")
        return f"Float8({self.dtype}{list(self.shape)}, scale={_short(self.scale)}{layout})"

    def __str__(self) -> str:
        """The line that repr gives, and below it the numbers that it stands for."""
        if not isinstance(self._copy(), (jax.Array, np.ndarray)) or _is_traced(self._copy()):
            return repr(self)
        return f"{self!r}\n{np.asarray(self.dequantize())}"

    # What it stands for

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """data * scale, multiplied in f32 and rounded to `dtype`.

        Raises:
            QuantizationError: the scale does not fit the data.
            DifferentiationError: when it is differentiated with respect to the data or the scale.
        """
        scale = refuse(self.full_scale(), "a Float8")
        return (refuse(self.row_major(), "a Float8").astype(jnp.float32) * scale).astype(dtype)

    def unscaled(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The data without the scale, converted to `dtype`; bfloat16, float16 and float32 hold every FP8 value."""
        return refuse(self.row_major(), "a Float8").astype(dtype)

    def row_major(self) -> jax.Array:
        """`data`, or where there is only the transposed copy, that one transposed back."""
        return self.data if self.data is not None else jnp.swapaxes(self._copy(), -1, -2)

    def full_scale(self) -> jax.Array:
        """`scale` with as many dimensions as the data; [] where it is one number.

        Raises:
            QuantizationError: it does not fit the data.
        """
        scale_shapes.check(self.scale.shape, self.shape)
        full: jax.Array = scale_shapes.full(self.scale, self.ndim)
        return full

    def _aligned_scale(self) -> jax.Array:
        """`scale` as what moves the elements moves it. Of a stack of one it keeps the dimension of the stack, so that
        scan and vmap find it there, as in a stack of several. Raises as `full_scale`."""
        scale_shapes.check(self.scale.shape, self.shape)
        aligned: jax.Array = scale_shapes.aligned(self.scale, self.ndim)
        return aligned

    def astype(self, dtype: DTypeLike) -> Any:
        """A jax.Array: `dequantize(dtype)`. To the other FP8 type a Float8, quantized anew, with as many scales."""
        wanted = jnp.dtype(dtype)
        if wanted == self.dtype:
            return self
        if wanted not in FP8_DTYPES:
            return self.dequantize(wanted)
        wide = self.dequantize()
        old = self._aligned_scale()
        request = algorithms.Request(
            wide.shape,
            wide.dtype,
            ScaleRule(wanted),
            tuple(d for d, size in enumerate(old.shape) if size > 1),
            {(True, False): "row", (False, True): "transposed"}.get(  # type: ignore[arg-type]
                (self.data is not None, self.transposed is not None), "both"
            ),
            "",
            False,
            algorithms.current_platform(),
        )
        row, transposed, scale, _ = algorithms.run("auto", request, wide, None)
        return Float8(row, scale.reshape(old.shape), transposed)

    # What moves its elements

    def __getitem__(self, index: Any) -> Float8:
        row = self.row_major()
        return Float8(row[index], scale_shapes.indexed(self._aligned_scale(), row.shape, index))

    def __iter__(self) -> Iterator[Float8]:
        return (self[i] for i in range(len(self)))

    def reshape(self, *shape: Any) -> Float8:
        """As jax.Array.reshape. A dimension with a scale for each index must stay one."""
        row = self.row_major()
        data = row.reshape(*shape)
        return Float8(data, scale_shapes.reshaped(self._aligned_scale(), row.shape, data.shape))

    def transpose(self, *axes: Any) -> Float8:
        """As jax.Array.transpose. Exchanging the last two dimensions exchanges the copies, where there are both."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], Sequence) else () if axes == (None,) else axes
        order = tuple(map(self._dimension, order)) or tuple(reversed(range(self.ndim)))
        scale = scale_shapes.transposed(self._aligned_scale(), order)
        if self.transposed is not None and order == (*range(self.ndim - 2), self.ndim - 1, self.ndim - 2):
            return Float8(self.transposed, scale, self.data)
        return Float8(self.row_major().transpose(order), scale)

    def swapaxes(self, axis1: int, axis2: int) -> Float8:
        order = list(range(self.ndim))
        first, second = self._dimension(axis1), self._dimension(axis2)
        order[first], order[second] = second, first
        return self.transpose(order)

    @property
    def T(self) -> Float8:  # as arrays have it
        return self.transpose()

    @property
    def mT(self) -> Float8:
        """The last two dimensions exchanged."""
        return self.swapaxes(-1, -2)

    def _dimension(self, axis: Any) -> int:
        """`axis`, counted from the front."""
        index = operator.index(axis)
        if not -self.ndim <= index < self.ndim:
            raise QuantizationError(f"there is no dimension {index} in {self!r}")
        return index % self.ndim

    # What it is not

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise QuantizationError(
            f"{self!r} is no array: NumPy and jax.numpy would take its data without its scale. Say q.dequantize(), or "
            "q.data and q.scale"
        )

    def __bool__(self) -> bool:
        return bool(self.dequantize())

    def _copy(self) -> jax.Array:
        """Whichever copy there is."""
        copy = self.data if self.data is not None else self.transposed
        if copy is None:
            raise QuantizationError("a Float8 without data: give data, transposed, or both")
        return copy


export.register_pytree_node_serialization(
    Float8,
    serialized_name="xla_fp8.Float8",
    serialize_auxdata=lambda _: b"",  # all of its fields are children
    deserialize_auxdata=lambda _: (),
    from_children=lambda _, children: Float8(*children),
)


def _short(scale: Any) -> str:
    if _is_traced(scale) or not isinstance(scale, (jax.Array, np.ndarray)) or scale.size != 1:
        return f"float32{list(scale.shape)}"
    return f"{float(np.asarray(scale).reshape(())):.6g}"


def _is_traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)
