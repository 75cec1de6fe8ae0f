"""A row as a program: a function, and its arguments, as shapes to compile for and as arrays to run on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import xla_fp8
from benchmarks.models import recipes
from benchmarks.models.rows import XLA, Row
from examples.networks import convnext, resnet, unet
from examples.networks.layers import PLAIN, Ops, cross_entropy
from examples.networks.static import E4M3, is_depthwise, is_high, layer_at, static

RATE, MOMENTUM = 1e-3, 0.9
_POOL = 1 << 20


@dataclasses.dataclass(frozen=True)
class Random:
    """An array to be: normal numbers of a standard deviation, or zeros.

    As FP8 it is data and scale, so that its largest number is about the type's.
    """

    shape: tuple[int, ...]
    std: float = 1.0
    dtype: Any = jnp.float32

    def struct(self) -> Any:
        """Its shape and type."""
        data = jax.ShapeDtypeStruct(self.shape, self.dtype)
        if self.dtype != E4M3:
            return data
        return xla_fp8.Float8(data, jax.ShapeDtypeStruct((), jnp.float32))  # type: ignore[arg-type]

    def array(self) -> Any:
        """On the device. It is made on the host: nothing has to be compiled for it."""
        if self.dtype == E4M3:
            scale = jax.device_put(np.float32(self.std * 6 / 448))
            return xla_fp8.Float8(_filled(self.shape, 448 / 6, self.dtype), scale)
        return _filled(self.shape, self.std, self.dtype)


@functools.cache
def _pool() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal(_POOL, np.float32)


def _filled(shape: tuple[int, ...], std: float, dtype: Any) -> jax.Array:
    if not std:
        return jax.device_put(np.zeros(shape, dtype))
    return jax.device_put(np.resize((_pool() * np.float32(std)).astype(dtype), shape))


@dataclasses.dataclass(frozen=True)
class Program:
    """
    Attributes:
        function: (state, batch) → (state, result) where it trains. Else (state, batch) → result: to give hundreds of
            parameters back would keep the host busy for longer than some networks take.
        state, batch: trees of `Random` and arrays. Where it trains, all of the state but its last part may be written
            over. That is the scales: numbers, of which XLA would copy every one.
    """

    function: Callable[[Any, Any], Any]
    state: Any
    batch: Any
    compiler: str
    trains: bool

    def step(self, compiled: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """(state, batch) → (state, result), of the compiled function."""
        if self.trains:
            return lambda state, batch: compiled(state[:-1], state[-1], batch)
        return lambda state, batch: (state, compiled(state, batch))

    def _trained(self, written: Any, kept: Any, batch: Any) -> Any:
        return self.function((*written, kept), batch)

    def lower(self, tell: Callable[[Any], object], platforms: tuple[str, ...] | None = None) -> Any:
        """Traced and lowered.

        Args:
            tell: called with the report of `xla_fp8.jit`.
            platforms: for which, if not for this machine's.
        """
        function = self._trained if self.trains else self.function
        state = (self.state[:-1], self.state[-1]) if self.trains else (self.state,)
        donated = (0,) if self.trains else ()
        if self.compiler == XLA:
            jitted = jax.jit(function, donate_argnums=donated)
        else:
            jitted = xla_fp8.jit(function, donate_argnums=donated, backend=self.compiler, report=tell)
        traced = jitted.trace(*structs(state), structs(self.batch))
        return traced.lower(lowering_platforms=platforms) if platforms else traced.lower()


def structs(tree: Any) -> Any:
    """Shapes and types in place of arrays."""

    def of(leaf: Any) -> Any:
        return leaf.struct() if isinstance(leaf, Random) else jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype)

    return jax.tree.map(of, tree)


def arrays(tree: Any) -> Any:
    """The arrays themselves, on the device, each in a buffer of its own: they are given away."""

    def of(leaf: Any) -> Any:
        return leaf.array() if isinstance(leaf, Random) else jax.device_put(np.array(leaf))

    return jax.block_until_ready(jax.tree.map(of, tree))


_NETWORKS: dict[str, ModuleType] = {"resnet50": resnet, "unet": unet, "convnext-t": convnext}


def program_of(row: Row, tiny: bool = False) -> Program:
    """The program of a row."""
    network = _NETWORKS[row.model]
    config = network.TINY if tiny else network.init.__defaults__[0]
    params = network.init(lambda shape, std: Random(shape, std), config)
    make = _inference if row.mode == "inference" else _training
    return make(row, network, params, config, tiny)


def _inputs(row: Row, config: Any) -> tuple[Random, ...]:
    if row.model == "unet":
        size, channels = config.latent
        return (
            Random((row.batch, size, size, channels), 1, jnp.bfloat16),
            Random((row.batch,), 100),
            Random((row.batch, *config.context), 1, jnp.bfloat16),
        )
    return (Random((row.batch, config.image, config.image, 3), 1, jnp.bfloat16),)


def _apply(row: Row, network: ModuleType, config: Any, params: Any, inputs: Any, ops: Ops, trains: bool = False) -> Any:
    if row.model == "unet":
        return network.apply(params, *inputs, ops=ops, config=config, trains=trains)
    return network.apply(params, *inputs, ops=ops)


def _inference(row: Row, network: ModuleType, params: Any, config: Any, tiny: bool) -> Program:
    """Filters and matrices are stored in the type that is computed in, and are arguments. Vectors and scales are closed
    over, as a served network may: what depends on them alone XLA computes when it compiles. They differ, as those of a
    trained network do: of a vector whose entries are all alike XLA makes a broadcast, a kernel at each step."""
    scales: dict[str, Any] = {}
    of_vectors, of_scales = np.random.default_rng(0), np.random.default_rng(1)

    def stored(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, Random):
            return leaf + of_vectors.uniform(-0.1, 0.1, leaf.shape).astype(leaf.dtype)
        name = layer_at(path)
        if row.recipe != "bf16" and is_depthwise(name):
            channels, *window, _ = leaf.shape  # as `examples.networks.static.stored` has it
            return dataclasses.replace(leaf, dtype=jnp.bfloat16, shape=(*window, channels))
        if row.recipe == "bf16" or is_high(name):
            return dataclasses.replace(leaf, dtype=jnp.bfloat16)
        scales[name] = np.float32(recipes.AMAX / 448 * of_scales.uniform(1, 1.1))
        # Of a matrix the inputs are innermost, as `examples.networks.static.stored` has it.
        return dataclasses.replace(leaf, dtype=E4M3, shape=leaf.shape[::-1] if len(leaf.shape) == 2 else leaf.shape)

    leaves, tree = jax.tree.flatten(jax.tree_util.tree_map_with_path(stored, params))

    def function(state: Any, inputs: Any) -> Any:
        matrices = iter(state)
        merged = [next(matrices) if isinstance(leaf, Random) else leaf for leaf in leaves]
        ops = PLAIN if row.recipe == "bf16" else static(scales)
        return _apply(row, network, config, jax.tree.unflatten(tree, merged), inputs, ops)

    state = [leaf for leaf in leaves if isinstance(leaf, Random)]
    return Program(function, state, _inputs(row, config), row.compiler, trains=False)


def _training(row: Row, network: ModuleType, params: Any, config: Any, tiny: bool) -> Program:
    """A step of gradient descent with momentum, on parameters in f32."""
    is_image = row.model == "unet"

    def apply(params: Any, *inputs: Any) -> Any:
        if row.model == "resnet50":
            return network.apply_training(params, *inputs)
        return _apply(row, network, config, params, inputs, PLAIN, trains=True), {}

    def loss(params: Any, scaling: Any, batch: Any) -> Any:
        *inputs, target = batch
        state = (scaling,) if row.recipe == "delayed" else ()
        result, statistics = function(*state, params, *inputs)
        if is_image:
            return jnp.mean(jnp.square(result.astype(jnp.float32) - target.astype(jnp.float32))), statistics
        return cross_entropy(result, target), statistics

    def step(state: Any, batch: Any) -> Any:
        params, velocity, scaling = state
        found = jax.value_and_grad(loss, (0, 1), has_aux=True)(params, scaling, batch)
        (value, statistics), (gradient, observed) = found
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradient)
        params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
        if statistics:
            params = network.with_statistics(params, statistics)
        if scaling:
            scaling = xla_fp8.update_scaling(scaling, observed)
        return (params, velocity, scaling), value

    function = apply if row.recipe == "bf16" else recipes.converted(apply, row.recipe, tiny)
    inputs = _inputs(row, config)
    target = inputs[0] if is_image else Random((row.batch,), 0.0, jnp.int32)
    scaling = function.init(structs(params), *structs(inputs)) if row.recipe == "delayed" else {}
    velocity = jax.tree.map(lambda leaf: Random(leaf.shape, 0.0), params)
    return Program(step, (params, velocity, scaling), (*inputs, target), row.compiler, trains=True)
