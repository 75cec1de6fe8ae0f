"""Fused casts written by hand, with what training needs beside the FP8 tensor, and what NumPy makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8.backends.fused_cast.problem import Constant, FusedCast, Matrix, Node, Operand, Result, Table

E4M3, E5M2 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e5m2)
BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
NUMBER = Table(F32, 1)


def tensor(columns: int) -> Matrix:
    return Matrix(BF16, columns)


def by_column(columns: int) -> Table:
    return Table(F32, columns, pitch=columns, columns=((1, columns, 1),))


def by_row(rows: int) -> Table:
    return Table(F32, rows, period=1)


class Builder:
    """A fused cast, node by node. Positions are integers; numbers of the program floats."""

    def __init__(self, rows: int, columns: int, *operands: Operand) -> None:
        self.rows, self.columns, self.operands, self.nodes = rows, columns, operands, list[Node]()

    def __call__(self, op: str, *operands: int | float) -> int:
        read = tuple(o if isinstance(o, int) else Constant(o) for o in operands)
        self.nodes.append(Node(op, read))
        return len(self.operands) + len(self.nodes) - 1

    def writing(self, *results: Result) -> FusedCast:
        return FusedCast(self.rows, self.columns, self.operands, tuple(self.nodes), results)


def of_dtype(value: int, dtype: np.dtype[Any]) -> Result:
    return Result("tensor", (value,), dtype)


def of_rows(value: int) -> Result:
    return Result("row", (value,), F32)


def amax(value: int) -> Result:
    return Result("amax", (value,), F32)


def column_sum(value: int) -> Result:
    return Result("column_sum", (value,), F32)


def copy(rows: int, columns: int) -> FusedCast:
    """A tensor, its amax and its sums by column."""
    return Builder(rows, columns, tensor(columns)).writing(of_dtype(0, E4M3), amax(0), column_sum(0))


def gradient_of_gelu(rows: int, columns: int) -> FusedCast:
    """dx of tanh's gelu, of x and dy, scaled in e5m2 and in bf16; its amax, and the gradient of a bias."""
    do = Builder(rows, columns, tensor(columns), tensor(columns), NUMBER)
    x, dy, scale = range(3)
    square = do("mul", x, x)
    inner = do("mul", do("add", x, do("mul", do("mul", square, x), 0.044715)), 0.7978845608)
    tanh = do("tanh", inner)
    slope = do("mul", do("add", do("mul", square, 0.134145), 1.0), 0.7978845608)
    half = do("mul", do("mul", do("mul", do("sub", 1.0, do("mul", tanh, tanh)), slope), x), 0.5)
    dx = do("mul", dy, do("add", do("mul", do("add", tanh, 1.0), 0.5), half))
    return do.writing(of_dtype(do("mul", dx, scale), E5M2), of_dtype(dx, BF16), amax(dx), column_sum(dx))


def layer_norm(rows: int, columns: int) -> FusedCast:
    """In FP8 and bf16, with what its backward pass reads of each row, and its amax."""
    do = Builder(rows, columns, tensor(columns), by_column(columns), by_column(columns), NUMBER)
    x, gamma, beta, scale = range(4)
    mean = do("mul", do("reduce_sum", x), 1 / columns)
    centered = do("sub", x, mean)
    variance = do("mul", do("reduce_sum", do("mul", centered, centered)), 1 / columns)
    rsqrt = do("rsqrt", do("add", variance, 1e-6))
    y = do("add", do("mul", do("mul", centered, rsqrt), gamma), beta)
    scaled = do("mul", y, scale)
    return do.writing(of_dtype(scaled, E4M3), of_dtype(y, BF16), of_rows(mean), of_rows(rsqrt), amax(y))


def gradient_of_layer_norm(rows: int, columns: int) -> FusedCast:
    """dx, and the gradients of beta and gamma."""
    tables = by_row(rows), by_row(rows), by_column(columns)
    do = Builder(rows, columns, tensor(columns), tensor(columns), *tables)
    dy, x, mean, rsqrt, gamma = range(5)
    normed = do("mul", do("sub", x, mean), rsqrt)
    g = do("mul", dy, gamma)
    mean_g = do("mul", do("reduce_sum", g), 1 / columns)
    mean_product = do("mul", do("reduce_sum", do("mul", g, normed)), 1 / columns)
    dx = do("mul", do("sub", do("sub", g, mean_g), do("mul", normed, mean_product)), rsqrt)
    return do.writing(of_dtype(dx, BF16), column_sum(dy), column_sum(do("mul", dy, normed)))


def batch_norm_and_relu(rows: int, columns: int) -> FusedCast:
    do = Builder(rows, columns, tensor(columns), by_column(columns), by_column(columns), NUMBER)
    y = do("max", do("add", do("mul", 0, 1), 2), 0.0)
    return do.writing(of_dtype(do("mul", y, 3), E4M3), of_dtype(y, BF16), amax(y))


def gradient_of_relu(rows: int, columns: int) -> FusedCast:
    do = Builder(rows, columns, tensor(columns), tensor(columns), NUMBER)
    dx = do("select_n", do("gt", 0, 0.0), 0.0, 1)
    return do.writing(of_dtype(do("mul", dx, 2), E5M2), of_dtype(dx, F16), amax(dx), column_sum(dx))


Program = Callable[[int, int], FusedCast]
PROGRAMS: Sequence[Program] = (
    copy,
    gradient_of_gelu,
    layer_norm,
    gradient_of_layer_norm,
    batch_norm_and_relu,
    gradient_of_relu,
)


def arrays_of(problem: FusedCast) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(problem.rows, o.width) if isinstance(o, Matrix) else (o.size,) for o in _stored(problem)]
    numbers = [rng.normal(size=shape) + (len(shape) == 1) for shape in shapes]
    return [jnp.asarray(n, operand.dtype) for n, operand in zip(numbers, _stored(problem), strict=True)]


def _stored(problem: FusedCast) -> list[Matrix | Table]:
    return [operand for operand in problem.operands if isinstance(operand, Matrix | Table)]


_COMPUTED: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "gt": np.greater,
    "max": np.maximum,
    "mul": np.multiply,
    "reduce_sum": lambda x: x.sum(1, keepdims=True),
    "rsqrt": lambda x: x**-0.5,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
    "sub": np.subtract,
    "tanh": np.tanh,
}


def computed(problem: FusedCast, arrays: Sequence[jax.Array]) -> list[Any]:
    """The results, in f64."""
    values: list[Any] = []
    for operand, array in zip(_stored(problem), arrays, strict=True):
        wide = np.asarray(array, np.float64)
        is_by_row = isinstance(operand, Table) and operand.period == 1
        values.append(wide[:, None] if is_by_row else wide)
    for node in problem.nodes:
        operands = [o.value if isinstance(o, Constant) else values[o] for o in node.operands]
        values.append(_COMPUTED[node.op](*operands))
    shape = problem.rows, problem.columns
    results: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda x: np.broadcast_to(x, shape),
        "row": lambda x: np.broadcast_to(x, (problem.rows, 1))[:, 0],
        "amax": lambda x: np.max(np.abs(x)),
        "column_sum": lambda x: np.broadcast_to(x, shape).sum(0),
    }
    return [results[result.kind](values[result.values[0]]) for result in problem.results]
