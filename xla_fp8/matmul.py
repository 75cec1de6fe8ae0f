"""The FP8 matmul custom call of XLA's GPU compiler, `__cublas$lt$matmul$f8`: what it computes, read and written.

One call computes, in f32 and in this order (cublasLtMatmul in NVIDIA's documentation; XLA's gemm_rewriter.cc)::

    t = lhs·rhs * lhs_scale * rhs_scale + bias + matrix
    t = relu(t) or gelu(t)
    amax = max|t|
    result = t * result_scale

Operands: lhs, rhs, [matrix], lhs_scale, rhs_scale, [bias], [result_scale]. Results: the tensor, [amax], a workspace.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from xla_fp8.errors import XlaFp8Error
from xla_fp8.hlo import HloInstruction, Shape

MATMUL_TARGET = "__cublas$lt$matmul$f8"
"""XLA's target of the call (kCublasLtMatmulF8CallTarget in cublas_cudnn.cc)."""

EPILOGUES: Mapping[tuple[bool, str], str] = MappingProxyType(
    {
        (False, ""): "DEFAULT",
        (True, ""): "BIAS",
        (False, "relu"): "RELU",
        (True, "relu"): "BIAS_RELU",
        (False, "gelu_tanh"): "GELU",
        (True, "gelu_tanh"): "BIAS_GELU",
    }
)
"""(whether there is a bias, activation) → GemmBackendConfig.Epilogue, without those that only ROCm or training have."""

_PARTS = {epilogue: parts for parts, epilogue in EPILOGUES.items()}


class MatmulError(XlaFp8Error):
    """A matmul custom call that is none of those described here; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulCall:
    """What one call computes.

    Attributes:
        operand_shapes: in the order at the top of this file.
        output_shapes: the result [batch..., m, n], then the amax; no workspace.
        lhs_contracting, rhs_contracting: the one dimension of each that is summed over.
        batch_rank: how many leading dimensions of every tensor are batches.
        has_matrix: whether a matrix of the result's shape is added.
        has_bias: whether a vector of the length of the result's rows is added to each of them.
        activation: "", "relu" or "gelu_tanh".
        has_amax: whether max|t| is a result.
        operand_precision: as HLO's dot has it; empty is `default`, with which sums may lose bits that f32 keeps.
        scale_type: the narrowest of bf16, f16 and f32 that holds every scale that the module around the call makes.
    """

    operand_shapes: tuple[Shape, ...]
    output_shapes: tuple[Shape, ...]
    lhs_contracting: int
    rhs_contracting: int
    batch_rank: int = 0
    has_matrix: bool = False
    has_bias: bool = False
    activation: str = ""
    has_amax: bool = False
    operand_precision: tuple[str, ...] = ()
    scale_type: str = "f32"

    @property
    def has_result_scale(self) -> bool:
        return self.output_shapes[0].is_fp8

    @property
    def roles(self) -> tuple[str, ...]:
        """What each operand is, by the names at the top of this file."""
        return (
            *("lhs", "rhs"),
            *(("matrix",) if self.has_matrix else ()),
            *("lhs_scale", "rhs_scale"),
            *(("bias",) if self.has_bias else ()),
            *(("result_scale",) if self.has_result_scale else ()),
        )

    @property
    def backend_config(self) -> str:
        """GpuBackendConfig, in XLA's compact JSON."""
        batch = [str(dimension) for dimension in range(self.batch_rank)]
        lhs, rhs = (shape.dimensions[self.batch_rank :] for shape in self.operand_shapes[:2])
        precision = self.operand_precision or ("default", "default")
        config = {
            "alpha_real": 1,
            "beta": int(self.has_matrix),
            "dot_dimension_numbers": {
                "lhs_contracting_dimensions": [str(self.lhs_contracting)],
                "rhs_contracting_dimensions": [str(self.rhs_contracting)],
                "lhs_batch_dimensions": batch,
                "rhs_batch_dimensions": batch,
            },
            "alpha_imag": 0,
            "precision_config": {
                "operand_precision": [name.upper() for name in precision],
                "algorithm": "ALG_UNSET",
            },
            "epilogue": EPILOGUES[self.has_bias, self.activation],
            "lhs_stride": str(lhs[0] * lhs[1]),
            "rhs_stride": str(rhs[0] * rhs[1]),
            "grad_x": False,
            "grad_y": False,
            "damax_output": self.has_amax,
        }
        return json.dumps({"gemm_backend_config": config}, separators=(",", ":"))

    @property
    def steps(self) -> tuple[str, ...]:
        """What follows the product and its scales, in the order of the arithmetic."""
        return (
            *(("bias",) if self.has_bias else ()),
            *(("matrix",) if self.has_matrix else ()),
            *((self.activation,) if self.activation else ()),
            *(("amax",) if self.has_amax else ()),
        )

    def __str__(self) -> str:
        """As a report shows it: `[f8e4m3fn]matmul(bias,relu,amax)`."""
        return f"[{self.output_shapes[0].element_type}]matmul({','.join(self.steps)})"


def matmul_of(instruction: HloInstruction) -> MatmulCall | None:
    """The FP8 matmul that a custom call is; None where `instruction` is none.

    Reads calls with a workspace, as XLA leaves them, and without, as its gemm-rewriter makes them first.

    Raises:
        MatmulError: the call has an epilogue, operands or results that are not described here.
    """
    if instruction.opcode != "custom-call" or instruction.custom_call_target != MATMUL_TARGET:
        return None
    config = instruction.backend_config.get("gemm_backend_config")
    if not isinstance(config, dict):
        raise MatmulError(f"custom call %{instruction.name} has no gemm_backend_config")
    try:
        call = _read(instruction, config)
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise MatmulError(
            f"custom call %{instruction.name}: gemm_backend_config: {error!r} is not understood"
        ) from error
    if len(instruction.operands) != len(call.roles):
        raise MatmulError(
            f"custom call %{instruction.name} has {len(instruction.operands)} operands; its backend config asks for "
            f"{len(call.roles)}: {', '.join(call.roles)}"
        )
    return call


def _read(instruction: HloInstruction, config: dict[str, Any]) -> MatmulCall:
    alpha, beta = config.get("alpha_real", 0), config.get("beta", 0)
    if alpha != 1 or beta not in (0, 1):
        raise ValueError(f"alpha {alpha}, beta {beta}")
    has_bias, activation = _PARTS[config.get("epilogue", "DEFAULT")]
    numbers = config["dot_dimension_numbers"]
    (lhs_contracting,) = map(int, numbers["lhs_contracting_dimensions"])
    (rhs_contracting,) = map(int, numbers["rhs_contracting_dimensions"])
    batch = [int(dimension) for dimension in numbers.get("lhs_batch_dimensions", ())]
    if batch != list(range(len(batch))) or batch != list(map(int, numbers.get("rhs_batch_dimensions", ()))):
        raise ValueError("batch dimensions that do not lead")
    shape = instruction.shape
    results = shape.tuple_shapes if shape.is_tuple else (shape,)
    has_amax = bool(config.get("damax_output", False))
    precision = config.get("precision_config", {}).get("operand_precision", ())
    call = MatmulCall(
        tuple(operand.shape for operand in instruction.operands),
        results[: 1 + has_amax],
        lhs_contracting,
        rhs_contracting,
        len(batch),
        bool(beta),
        has_bias,
        activation,
        has_amax,
        tuple(str(name).lower() for name in precision),
    )
    scales = [o for o, role in zip(instruction.operands, call.roles, strict=False) if role.endswith("scale")]
    return dataclasses.replace(call, scale_type=_common_type(scales))


def _common_type(scales: Sequence[HloInstruction]) -> str:
    """The type that all scales were converted from, f32 where they differ; a constant 1 is of any."""
    types = set()
    for scale in scales:
        if scale.opcode == "constant" and scale.constant_value() == 1:
            continue
        types.add(scale.operand(0).shape.element_type if scale.opcode == "convert" else "f32")
    return types.pop() if len(types) == 1 and types <= {"bf16", "f16"} else "f32"
