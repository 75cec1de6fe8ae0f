"""The backend: which graph calls the kernel runs, with which configs, and the JAX function around it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from xla_fp8.backends.cudnn.support import in_xla, support_by_rules
from xla_fp8.backends.mosaic import configs
from xla_fp8.backends.mosaic.configs import Config
from xla_fp8.backends.mosaic.epilogue import Epilogue, epilogue_of, saturating
from xla_fp8.backends.mosaic.problem import Problem, problem_of
from xla_fp8.backends.protocol import Implementation, No, Yes
from xla_fp8.backends.transpose.primitive import transpose
from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import FP8_TYPES
from xla_fp8.target import GraphCall, Target, Verdict, format_version

Precision = Literal["default", "highest"]
"""`default` sums in the tensor core, which keeps fewer bits than f32; `highest` adds to f32 every step.

A call that asks for exact sums gets those of `highest` from either."""

KERNEL_VERSION = 5
"""Grows whenever a change of the kernel may change which config is fastest."""


class MosaicError(XlaFp8Error):
    """A call that the backend was asked to lower although it does not support it; says why."""


@dataclasses.dataclass(frozen=True)
class MosaicBackend:
    """FP8 convolutions through `kernel.convolve`, on Hopper.

    Attributes:
        precision: see `Precision`, for calls that ask for none; outputs of `highest` equal the f32 reference, at about
            80% of the speed.
        platforms: what programs with it can be lowered for, and where its configs are timed.
    """

    precision: Precision = "default"
    name: str = "mosaic"
    opaque: bool = True
    platforms: tuple[str, ...] = ("cuda",)

    @property
    def version(self) -> str:
        """What a measured choice of config depends on, beside jaxlib: the kernel and its compiler in JAX's Python."""
        return f"kernel {KERNEL_VERSION}, JAX {jax.__version__}"

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        """Yes, or No with the reason: the target, the convolution, the epilogue, or that no tile fits the machine.

        With a rule where XLA, to which the chain would be left, has no FP8 kernel for it either: then it runs in bf16.
        """
        refusal = self._refusal(call, target)
        if not refusal:
            return Yes()
        left = in_xla(support_by_rules(call, target), call)
        return No(refusal, rule=left.rule, advice=left.advice)

    def _refusal(self, call: GraphCall, target: Target) -> str:
        # The tensor core instruction (wgmma) is Hopper's alone: neither Ada before nor Blackwell after has it.
        if target.compute_capability != (9, 0):
            return (
                "the kernel needs compute capability 9.0 (Hopper), and the target has "
                f"{format_version(target.compute_capability)}"
            )
        plan = _plan(call)
        if isinstance(plan, No):
            return plan.reason
        if not self._generate(call, plan):
            return (
                "no tile fits the shared memory of a multiprocessor beside what the graph "
                f"{call.graph} reads and stores"
            )
        return ""

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        """Tile sizes for the call, the one that the model of `configs` prefers first. Empty where not supported."""
        plan = _plan(call)
        return () if isinstance(plan, No) else self._generate(call, plan)

    def lower(self, call: GraphCall, config: object) -> Implementation:
        """A JAX function of input, filter and side operands, in the dimension order of the call's labels.

        Raises:
            MosaicError: the call is not supported.
        """
        plan = _plan(call)
        if isinstance(plan, No):
            raise MosaicError(f"the mosaic backend does not run this convolution: {plan.reason}")
        assert isinstance(config, Config), config
        return functools.partial(_run, call, plan, config)

    def _generate(self, call: GraphCall, plan: _Plan) -> tuple[Config, ...]:
        problem, promote = plan.problem, call.exact_sums or self.precision == "highest"
        if problem.base_dilation == (1, 1):
            return configs.generate(problem, plan.epilogue.footprint, promote, multiprocessors())
        # Phases share the machine. What has one phase alone is left out: splits, shared taps, a filter that stays.
        phases = math.prod(along.count for along in problem.phases)
        share = max(1, multiprocessors() // phases)
        candidates = configs.generate(problem.largest_phase, plan.epilogue.footprint, promote, share, limit=512)
        return tuple(config for config in candidates if config.splits == config.taps == 1 and not config.resident)[:8]


@functools.cache
def multiprocessors() -> int:
    """Of the local GPU, or of an H200 where there is none."""
    try:
        return int(jax.local_devices(backend="gpu")[0].core_count)
    except RuntimeError:
        return configs.MULTIPROCESSORS


@dataclasses.dataclass(frozen=True)
class _Plan:
    problem: Problem
    epilogue: Epilogue


def _plan(call: GraphCall) -> _Plan | No:
    types = [shape.element_type for shape in call.operand_shapes[:2]]
    if any(type not in FP8_TYPES for type in types):
        return No(f"the kernel multiplies {' and '.join(FP8_TYPES)}, and the operands are {' and '.join(types)}")
    if types[0] != types[1] and not _mixes_types():
        return No(f"JAX {jax.__version__} cannot multiply {types[0]} by {types[1]} in a kernel; 0.11 can")
    problem = problem_of(call)
    if isinstance(problem, No):
        return problem
    epilogue = epilogue_of(call)
    return epilogue if isinstance(epilogue, No) else _Plan(problem, epilogue)


def _mixes_types() -> bool:
    return tuple(jax.__version_info__) >= (0, 11)


def _run(call: GraphCall, plan: _Plan, config: Config, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The call on arrays in the order of its labels; transposes only where that order is not channels-last.

    An input gradient's filter is the forward convolution's with its output and input features exchanged.
    """
    from xla_fp8.backends.mosaic.kernel import convolve

    problem, labels = plan.problem, call.dim_labels
    to_output = _channels_last(labels.output)
    input = transpose(operands[0], _channels_last(labels.lhs)).reshape(problem.input_shape)
    filter = transpose(operands[1], _channels_last(labels.rhs)).reshape(problem.filter_shape)
    mirrored = [axis for axis, mirror in enumerate(problem.reversal, start=1) if mirror]
    filter = jnp.flip(filter, mirrored) if mirrored else filter
    sides = [
        side.transpose(to_output).reshape(problem.output_shape) if kind == "tensor" else side.astype(jnp.float32)
        for side, kind in zip(operands[2:], (side.kind for side in plan.epilogue.sides), strict=True)
    ]
    tensors, maxima = convolve(problem, config, plan.epilogue, multiprocessors(), input, filter, sides)

    tensor, maximum = iter(tensors), iter(maxima)
    output_dimensions = call.output_shapes[0].dimensions
    last_to_labels = tuple(sorted(range(len(to_output)), key=to_output.__getitem__))
    results = []
    for node, shape in zip((call.graph.output, *call.graph.aux_outputs), call.output_shapes, strict=True):
        if node.op == "amax":
            results.append(saturating(next(maximum), _dtype(shape.element_type)))
        else:
            in_order = [output_dimensions[d] for d in to_output]
            results.append(next(tensor).reshape(in_order).transpose(last_to_labels))
    return tuple(results)


def _dtype(type: str) -> np.dtype[Any]:
    from xla_fp8.hlo.literal import numpy_dtype

    return numpy_dtype(type)


def _channels_last(labels: str) -> tuple[int, ...]:
    """The permutation that brings a tensor with these labels to N, spatial, C (a filter: K, spatial, C)."""
    outer, inner = ("o", "i") if "o" in labels else ("b", "f")
    spatial = sorted(label for label in labels if label not in (outer, inner))
    return tuple(labels.index(label) for label in (outer, *spatial, inner))
