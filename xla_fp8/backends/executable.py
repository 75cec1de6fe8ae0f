"""An HLO module compiled for one device, called with numpy arrays: for tests, `xla-fp8 run` and bug reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from xla_fp8 import _jax_compat
from xla_fp8.backends.expand import expand_graph_calls
from xla_fp8.errors import XlaFp8Error
from xla_fp8.graph import GRAPH_CALL_TARGET
from xla_fp8.hlo import HloAttributeError, HloModule, Shape, to_text
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.matmul import MATMUL_TARGET

_TRANSFERS = frozenset({"infeed", "outfeed", "send", "send-done", "recv", "recv-done"})
_GPU_TARGETS = ("__cudnn$", "__cublas$")


class ExecutionError(XlaFp8Error):
    """A module that cannot be compiled or run, or arguments that it does not take."""


class Executable:
    """A module, compiled: graph custom calls run through the reference backend, all else through XLA.

    Attributes:
        parameters: shape of each parameter.
        results: (output index, shape) of each array of the result, e.g. `("{1,0}", f32[2])`; a result that is no tuple
            has the index `{}`.
    """

    def __init__(
        self, module: HloModule, platform: str | None = None, flags: Mapping[str, bool | int | str] | None = None
    ) -> None:
        """Compiles a copy of `module`.

        Args:
            module: that it parses is known; text of strangers goes to XLA in a child process first.
            platform: "cpu", "cuda", ...; JAX's default where None.
            flags: debug options of XLA, by name.

        Raises:
            ExecutionError: elided constants, parameters that are no arrays, custom calls that only a compiled GPU
                module may hold, an unknown platform, or what XLA said.
            GraphError: a graph custom call whose graph does not fit it.
        """
        _refuse(module)
        self.parameters = [parameter.shape for parameter in module.entry.parameters]
        self.results = list(_leaves(module.entry.root.shape))
        plain = module.clone()
        expand_graph_calls(plain)
        try:
            self._executable = _jax_compat.compile_hlo_text(to_text(plain), platform, flags)
        except RuntimeError as error:
            raise ExecutionError(f"XLA cannot compile module {module.name}: {error}") from error

    def __call__(self, *arguments: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """The arrays of the result, in the order of `results`.

        Args:
            arguments: one array of the very shape and type of each parameter.

        Raises:
            ExecutionError: another number, shape or type, or the run failed.
        """
        if len(arguments) != len(self.parameters):
            raise ExecutionError(f"the module has {len(self.parameters)} parameters, but got {len(arguments)} arrays")
        for number, (array, shape) in enumerate(zip(arguments, self.parameters, strict=True)):
            if array.shape != shape.dimensions or array.dtype != numpy_dtype(shape.element_type):
                raise ExecutionError(f"parameter {number} is {shape}, but got an array of {array.dtype}{array.shape}")
        try:
            return _jax_compat.execute(self._executable, arguments)
        except RuntimeError as error:
            raise ExecutionError(f"the run failed: {error}") from error


def _refuse(module: HloModule) -> None:
    """Raises ExecutionError for what XLA would refuse less clearly, or not at all."""
    for computation in module.computations:
        for instruction in computation:
            where = f"%{instruction.name} in computation {computation.name}"
            if instruction.is_elided_constant:
                raise ExecutionError(
                    f"the value of constant {where} was left out of the dump: constant({{...}}). Dump again with "
                    "XLA_FLAGS=--xla_dump_large_constants=true (or HloPrintOptions.print_large_constants)"
                )
            if instruction.opcode in _TRANSFERS:  # XLA would wait for the other side forever
                raise ExecutionError(
                    f"{instruction.opcode} {where} waits for the process that feeds the program or reads its results, "
                    "which is not here. Take it out (xla-fp8 reduce can) and run the rest"
                )
            target = instruction.custom_call_target if instruction.opcode == "custom-call" else ""
            if "callback" in target:
                raise ExecutionError(
                    f"custom call {where} has target {target}: it calls a Python function of the process that made the "
                    "dump, which is not here. Dump the program without its callbacks"
                )
            if target.startswith(_GPU_TARGETS) and target not in (GRAPH_CALL_TARGET, MATMUL_TARGET):
                raise ExecutionError(
                    f"custom call {where} has target {target}, which only XLA's own GPU pipeline can run. The pass "
                    "conv-restorer makes plain convolutions of those that xla_fp8 wrote"
                )
    for parameter in module.entry.parameters:
        try:
            if not parameter.shape.is_array or any(parameter.shape.dynamic):
                raise HloAttributeError("not an array of fixed shape")
            numpy_dtype(parameter.shape.element_type)
        except HloAttributeError as error:
            raise ExecutionError(f"parameter %{parameter.name} of shape {parameter.shape}: {error}") from error


def _leaves(shape: Shape, index: tuple[int, ...] = ()) -> Iterator[tuple[str, Shape]]:
    """The arrays of a result, in order, each with its index as XLA prints one."""
    if not shape.is_tuple:
        yield "{" + ",".join(map(str, index)) + "}", shape
        return
    for position, inner in enumerate(shape.tuple_shapes):
        yield from _leaves(inner, (*index, position))
