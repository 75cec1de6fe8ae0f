"""What is compiled and timed: one shape, one epilogue and one contestant make a program of several calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.conv import shapes
from benchmarks.conv.shapes import Shape
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.protocol import Backend, Config
from xla_fp8.backends.registry import BACKENDS
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall, Target

TARGET = Target.parse("h200")
E4M3 = jnp.float8_e4m3fn
NHWC = ("NHWC", "OHWI", "NHWC")


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What stands behind the convolution.

    Attributes:
        graph: as a graph string, which this project's backends run.
        chain: the same in JAX, on the f32 value of the convolution and the side operands: what XLA is given.
        bf16: the same in a network without FP8, which has no scales, no amax and no cast.
        residual: element type of the tensor that is added, "" where there is none.
    """

    graph: str
    chain: Callable[..., tuple[jax.Array, ...]]
    bf16: Callable[..., jax.Array]
    residual: str = ""


def quantized(y: jax.Array) -> jax.Array:
    """A saturating cast to e4m3."""
    return jnp.clip(y, -448, 448).astype(E4M3)


def _amax(y: jax.Array, s: jax.Array, t: jax.Array) -> tuple[jax.Array, ...]:
    y = y * s
    return quantized(y * t), jnp.max(jnp.abs(y))


MAIN = "amax"
"""The epilogue of a layer that is trained or calibrated in FP8; all shapes are measured with it."""

EPILOGUES: Mapping[str, Epilogue] = MappingProxyType(
    {
        MAIN: Epilogue("1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]scale(2);4:[f32]amax(2);", _amax, lambda y, s, t: y),
        "scale": Epilogue("1:[f32]conv();2:[f8e4m3fn]scale(1);", lambda y, s: (quantized(y * s),), lambda y, s: y),
        "bias+silu+residual": Epilogue(
            "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]silu(3);5:[f32]add(4);6:[f8e4m3fn]scale(5);",
            lambda y, s, b, r, t: (quantized((jax.nn.silu(y * s + b) + r.astype(jnp.float32)) * t),),
            lambda y, s, b, r, t: jax.nn.silu(y + b) + r,
            "bf16",
        ),
        "bias+fp8 residual+relu": Epilogue(
            "1:[f32]conv();2:[f32]scale(1);3:[f32]bias(2);4:[f32]add_scaled(3);5:[f32]relu(4);6:[f8e4m3fn]scale(5);",
            lambda y, s, b, r, u, t: (quantized(jax.nn.relu(y * s + b + r.astype(jnp.float32) * u) * t),),
            lambda y, s, b, r, u, t: jax.nn.relu(y + b + r),
            "f8e4m3fn",
        ),
        "channel scale+bias+gelu": Epilogue(
            "1:[f32]conv();2:[f32]channel_scale(1);3:[f32]bias(2);4:[f32]gelu_tanh(3);5:[f8e4m3fn]scale(4);",
            lambda y, c, b, t: (quantized(jax.nn.gelu(y * c + b) * t),),
            lambda y, c, b, t: jax.nn.gelu(y + b),
        ),
    }
)
"""The first two and the fourth XLA fuses itself; of the others it leaves all but the convolution outside."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table: a convolution with an epilogue, and who runs it."""

    shape: Shape
    epilogue: str
    networks: tuple[str, ...]
    contestants: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.shape} {self.epilogue}"

    @functools.cached_property
    def call(self) -> GraphCall:
        epilogue = EPILOGUES[self.epilogue]
        return call_of(self.shape, epilogue.graph, epilogue.residual)

    @property
    def bytes(self) -> int:
        """Read and written at least, in FP8."""
        return sum(s.element_count * numpy_dtype(s.element_type).itemsize for s in self._tensors)

    @property
    def _tensors(self) -> Iterator[Any]:
        return (s for s in (*self.call.operand_shapes, *self.call.output_shapes) if not s.is_scalar)


EVERYONE = ("mosaic", "highest", "cudnn", "xla_fp8", "xla_bf16", "gemm")
PEERS = ("xla_fp8", "xla_bf16")
KERNELS = ("mosaic", "highest", "cudnn")
"""This project's backends: they are tuned one at a time on a GPU. The others are XLA's, which tunes itself."""


def cases(tiny: bool = False) -> list[Case]:
    """Every row, in the order of measuring: the common shapes with all epilogues, then those of networks."""
    found = shapes.in_order(shapes.TINY if tiny else shapes.TIERS)
    common = (shapes.TINY if tiny else shapes.TIERS)[0]["common"]
    few = common[:2] + common[3:4] + common[9:12:2]
    rows = [Case(shape, MAIN, found[shape], EVERYONE) for shape in common]
    rows += [Case(s, MAIN, names, ("mosaic", *PEERS, "gemm")) for s, names in found.items() if s not in common]
    extra = [Case(shape, "scale", found[shape], ("mosaic", "highest", "cudnn", "xla_fp8")) for shape in common]
    others = [name for name in EPILOGUES if name not in (MAIN, "scale")]
    extra += [Case(s, name, found[s], ("mosaic", "cudnn", *PEERS)) for name in others for s in few]
    # After the first networks: what is cut off when time is short are the larger batches.
    first = len(shapes.in_order((shapes.TINY if tiny else shapes.TIERS)[:2]))
    return rows[:first] + extra + rows[first:]


def calls(operands: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Of how many calls a program is, each on an input of its own: eight, so that the device is timed and not the
    dispatch; fewer where two inputs are more than the L2 cache holds."""
    return min(8, max(2, 2**28 // (operands[0].size * operands[0].dtype.itemsize)))


@dataclasses.dataclass(frozen=True)
class Program:
    """Several calls of one function in one jit.

    Attributes:
        function: of x, w and side operands.
        operands: shapes and types of x, w and the side operands; each call has an x of its own.
        options: of XLA's compiler.
    """

    function: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    options: Mapping[str, bool]

    def lower(self, platform: str | None = None) -> Any:
        """The traced program; for this machine's platform, or for another one."""
        one = jax.jit(self.function)  # traced and lowered once; XLA inlines the calls

        def several(inputs: Sequence[jax.Array], *rest: jax.Array) -> list[Any]:
            return [one(x, *rest) for x in inputs]

        x, *rest = self.operands
        traced = jax.jit(several).trace([x] * calls(self.operands), *rest)
        return traced.lower(lowering_platforms=(platform,)) if platform else traced.lower()

    def compile(self) -> Any:
        return self.lower().compile(compiler_options=dict(self.options))


def call_of(shape: Shape, graph: str, residual: str = "") -> GraphCall:
    """A convolution with an epilogue as a graph string, in FP8; `residual` as in `Epilogue`."""
    s = shape
    pads = "x".join(f"{low}_{high}" for low, high in s.padding)
    return graph_call(
        graph,
        batch=s.n,
        image=(s.h, s.w),
        channels=s.c,
        features=s.k,
        filter=(s.r, s.r),
        window=f"{{size={s.r}x{s.r} stride={s.stride}x{s.stride} pad={pads}}}",
        side=residual or "f32",
        residual=residual or "f8e4m3fn",
    )


def arrays_of(call: GraphCall) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and types of a call's operands."""
    return tuple(jax.ShapeDtypeStruct(s.dimensions, numpy_dtype(s.element_type)) for s in call.operand_shapes)


def backend_of(contestant: str) -> Backend:
    """The backend of a contestant in `KERNELS`. The reference stands for it where there is no GPU."""
    if jax.default_backend() == "cpu":
        return BACKENDS["reference"]()
    if contestant == "highest":
        from xla_fp8.backends.mosaic.backend import MosaicBackend

        return MosaicBackend("highest")
    return BACKENDS[contestant]()


def operands_of(case: Case, contestant: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes and types of what a contestant is given."""
    m, n, k = case.shape.product
    if contestant == "gemm":
        return (
            jax.ShapeDtypeStruct((m, k), E4M3),
            jax.ShapeDtypeStruct((n, k), E4M3),
            jax.ShapeDtypeStruct((), jnp.float32),
        )
    found = arrays_of(case.call)
    if contestant != "xla_bf16":
        return found
    return tuple(o if not o.shape else jax.ShapeDtypeStruct(o.shape, jnp.bfloat16) for o in found)


def program(case: Case, contestant: str, backend: Backend | None = None, config: Config = None) -> Program:
    """The program of a contestant; one of `KERNELS` needs its backend and a config."""
    options: dict[str, bool] = {}
    if contestant in KERNELS:
        assert backend is not None
        function: Callable[..., Any] = backend.lower(case.call, config)
    elif contestant == "gemm":
        function = _product
        # XLA would prefer a kernel that it makes with Triton where that is faster: the yardstick is cuBLASLt's.
        options = {} if jax.default_backend() == "cpu" else {"xla_gpu_enable_triton_gemm": False}
    elif contestant == "xla_fp8":
        function = functools.partial(chain, case.shape, EPILOGUES[case.epilogue].chain)
    else:
        function = functools.partial(_bf16, case)
    return Program(function, operands_of(case, contestant), options)


def chain(
    shape: Shape, epilogue: Callable[..., tuple[jax.Array, ...]], x: jax.Array, w: jax.Array, *sides: jax.Array
) -> tuple[jax.Array, ...]:
    """A convolution in FP8 and what follows as JAX users write them, which XLA's own matcher fuses."""
    return epilogue(_convolution(shape, x.astype(jnp.float32), w.astype(jnp.float32)), *sides)


def _bf16(case: Case, x: jax.Array, w: jax.Array, *sides: jax.Array) -> jax.Array:
    return EPILOGUES[case.epilogue].bf16(_convolution(case.shape, x, w), *sides)


def _convolution(shape: Shape, x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (shape.stride, shape.stride), shape.padding, dimension_numbers=NHWC)


def _product(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    """The matrix product of a convolution, with its simplest epilogue; DEFAULT precision is fast accumulation."""
    y = lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return quantized(y * scale)
