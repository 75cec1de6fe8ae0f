"""One region through the compiler half: jaxpr → HLO text → passes → StableHLO with a marked call for each kernel."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from xla_fp8 import _jax_compat, hlo
from xla_fp8.backends.expand import expand_quantize_calls
from xla_fp8.backends.protocol import Backend, No, Yes
from xla_fp8.backends.quantize import from_call
from xla_fp8.backends.quantize.request import runs_on
from xla_fp8.backends.registry import backends_for, choose
from xla_fp8.hlo.attributes import quote
from xla_fp8.hlo.garbage import collection_paused
from xla_fp8.hlo.printer import computation_text
from xla_fp8.hlo.stack_frames import StackFrameTables
from xla_fp8.matmul import MatmulCall, matmul_of
from xla_fp8.passes import PipelineOptions, run
from xla_fp8.quantize_call import PlacedQuantizeCall, quantize_call_of
from xla_fp8.report import Report
from xla_fp8.target import GraphCall, Target, Verdict
from xla_fp8.tracing.errors import DumpWarning, RegionError
from xla_fp8.tracing.hlo_of_region import Family, Structure, hlo_module, structure_of
from xla_fp8.tracing.options import Options
from xla_fp8.tracing.transposes import TransposeCall, call_transposes

_Call = TypeVar("_Call")

MARK = "xla_fp8.call."
"""Target of the custom calls that stand for graphs, matmuls, quantizations and transposes until their code is there; a
number follows.

Window, dim_labels and backend_config of a custom call are lost between HLO and StableHLO: they are kept in `calls`.
"""


_SPLIT_BY_XLA = No(
    "it is a dot in a program that XLA splits over devices; XLA can split its own dots along any dimension",
    advice="leave it to XLA; or put the layer into jax.shard_map, where each device runs a kernel of its own",
)


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """A region behind the passes.

    Attributes:
        report: what became of each convolution and dot.
        calls: the graph calls in the order of their marks; none where the region stays as it was.
        matmuls: the matmul calls; their marks go on where those of `calls` end.
        quantizations: the quantize calls that kernels run; their marks go on where those of `matmuls` end.
        transposes: of FP8 tensors, that a kernel makes; their marks go on where those of `quantizations` end.
        backends: which backend runs each graph call.
        target: what the passes assumed.
        stablehlo: the module, as MLIR bytecode; empty where it stays as it was.
        name: of the module's main function, made of its content: the same in every process, another for another graph.
        failures: why lowering it failed, each time that it did; its reports tell.
    """

    report: Report
    calls: tuple[GraphCall, ...]
    matmuls: tuple[MatmulCall, ...]
    quantizations: tuple[PlacedQuantizeCall, ...]
    transposes: tuple[TransposeCall, ...]
    backends: tuple[Backend, ...]
    target: Target
    stablehlo: bytes
    name: str
    failures: list[str] = dataclasses.field(default_factory=list, compare=False)


def rewritten(
    jaxpr: Any, options: Options, platform: str, dump_dir: str | None = None, family: Family | None = None
) -> Rewritten:
    """Runs the passes on a region.

    Args:
        jaxpr: closed, of plain equations.
        family: the regions that it was cut with; they are lowered together.
        platform: what it is lowered for: "cpu", "cuda", ...
        dump_dir: a folder for the HLO before and after; made if it is not there.

    Raises:
        XlaFp8Error: passes, parser or backend refuse; the message says what.
    """
    structure = structure_of(jaxpr, family)
    if dump_dir:  # each time, because the folder may have been emptied
        _run(structure, options.for_passes, platform, dump_dir)
    return _rewritten(structure, options.for_passes, platform)


@functools.lru_cache(maxsize=1024)
@collection_paused()
def _rewritten(structure: Structure, options: Options, platform: str) -> Rewritten:
    region, hlo_text = _passed(structure, options, platform)
    family = structure.family() if structure.family is not None else None
    if hlo_text is None:
        return region
    converted = _converted_family(family, options, platform) if family is not None else {}
    return dataclasses.replace(
        region, stablehlo=converted.get(region.name) or _converted({region.name: hlo_text})[region.name]
    )


@functools.lru_cache(maxsize=1024)
def _passed(structure: Structure, options: Options, platform: str) -> tuple[Rewritten, HloText | None]:
    return _run(structure, options, platform, None)


@_jax_compat.weakref_lru_cache
def _converted_family(family: Family, options: Options, platform: str) -> dict[str, bytes]:
    """The StableHLO of a family's regions, by their names, without those that fail: each does where it is lowered."""
    regions: dict[StackFrameTables, dict[str, HloText]] = {}
    for structure in family.structures:
        try:
            region, hlo_text = _passed(structure, options, platform)
        except Exception:
            continue
        if hlo_text is not None:
            regions.setdefault(hlo_text.tables, {})[region.name] = hlo_text
    converted: dict[str, bytes] = {}
    for together in regions.values():
        with contextlib.suppress(Exception):
            converted |= _converted(together)
    return converted


@dataclasses.dataclass(frozen=True)
class HloText:
    """What becomes of a region, for a module with others of its family: in one, XLA converts them in the time of two.

    Attributes:
        computations: the region's function, named as `Rewritten.name`, and what it calls, named after it.
        tables: the stack frames that the metadata names.
    """

    computations: str
    tables: StackFrameTables


def _converted(regions: Mapping[str, HloText]) -> dict[str, bytes]:
    """The StableHLO of regions by their names; all have the same tables."""
    module = hlo.HloModule("xla_fp8_regions")
    module.tables = next(iter(regions.values())).tables
    entry = "ENTRY %main () -> pred[] {\n  ROOT %none = pred[] constant(false)\n}\n"
    text = "\n".join([hlo.to_text(module), *(region.computations for region in regions.values()), entry])
    return _jax_compat.hlo_functions_to_stablehlo(text, tuple(regions))


def _run(
    structure: Structure, options: Options, platform: str, dump_dir: str | None
) -> tuple[Rewritten, HloText | None]:
    """A region behind the passes, without its StableHLO, and what that is made of; None where it stays as it was."""
    module = hlo_module(structure, platform)
    if dump_dir:
        module.drop_unused_frames()
    before = hlo.to_text(module) if dump_dir else ""
    backends = backends_for(options.backend, platform)
    target = options.target or Target.default()
    pipeline = PipelineOptions(verify_input=False, undo=bool(dump_dir))  # XLA has just made the module
    report = run(
        module, options.passes, _asking(target, backends, options.is_partitioned), dialect="extended", options=pipeline
    )
    if dump_dir:
        _dump(Path(dump_dir), f"xla_fp8_region.{_digest(_without_metadata(before))}", before, hlo.to_text(module))
    if not report.changed:
        return Rewritten(report, (), (), (), (), (), target, b"", ""), None
    calls = _marked(module, 0, _graph_call_of)
    matmuls = _marked(module, len(calls), matmul_of)
    quantize = functools.partial(_quantization_of, platform=platform)
    quantizations = _marked(module, len(calls) + len(matmuls), quantize)
    expand_quantize_calls(module)  # the others
    chosen = tuple(_chosen(backends, call, target) for call in calls)
    transposes: tuple[TransposeCall, ...] = ()
    if _kernels_transpose(platform, options, chosen):
        transposes = call_transposes(module, MARK, len(calls) + len(matmuls) + len(quantizations))
    text = _without_metadata(hlo.to_text(module))
    called = calls, matmuls, quantizations, transposes, chosen
    name = f"{module.name}_{_digest(text, *map(repr, called), str(target))}"
    module.rename_computations({c.name: name if c is module.entry else f"{name}.{c.name}" for c in module.computations})
    computations = "\n".join(computation_text(c, is_entry=False) for c in module.computations)
    region = Rewritten(report, calls, matmuls, quantizations, transposes, chosen, target, b"", name)
    return region, HloText(computations, module.tables)


def _kernels_transpose(platform: str, options: Options, backends: Sequence[Backend]) -> bool:
    """Whether FP8 transposes are left to kernels: where graphs are, too. In plain JAX XLA moves what stands between."""
    return runs_on(platform).ok and not options.is_partitioned and any(backend.opaque for backend in backends)


def _asking(target: Target, backends: Sequence[Backend], is_partitioned: bool) -> Target:
    """`target`, which asks the backends as well as its own `supports`.

    Where XLA's partitioner comes after, a dot goes to no kernel that it cannot look into: weights may be split along
    any dimension (tensor parallelism), and a graph call is split along rows alone (`tracing.partition`).
    """

    def supports(call: GraphCall) -> Verdict:
        if target.supports is not None and not (verdict := target.supports(call)).ok:
            return verdict
        chosen = choose(backends, call, target)
        if isinstance(chosen, No):
            return chosen
        return _SPLIT_BY_XLA if call.is_dot and is_partitioned and chosen.opaque else Yes()

    return dataclasses.replace(target, supports=supports)


def _chosen(backends: Sequence[Backend], call: GraphCall, target: Target) -> Backend:
    chosen = choose(backends, call, target)
    if isinstance(chosen, No):
        raise RegionError(f"no backend runs the graph {call.graph}, which it was asked about before: {chosen.reason}")
    return chosen


def _marked(
    module: hlo.HloModule, first: int, call_of: Callable[[hlo.HloInstruction], _Call | None]
) -> tuple[_Call, ...]:
    """Gives each custom call that `call_of` knows a target that survives on the way through StableHLO, numbered from
    `first`, and returns what they were."""
    calls: list[_Call] = []
    for computation in module.computations:
        for instruction in computation:
            if instruction.opcode == "custom-call" and (call := call_of(instruction)) is not None:
                for attribute in ("window", "dim_labels", "feature_group_count", "backend_config", "operand_precision"):
                    instruction.attributes.pop(attribute, None)
                instruction.attributes["custom_call_target"] = quote(f"{MARK}{first + len(calls)}")
                calls.append(call)
    return tuple(calls)


def _graph_call_of(instruction: hlo.HloInstruction) -> GraphCall | None:
    call = GraphCall.of(instruction)
    if call is None and instruction.custom_call_target.startswith("__cudnn$"):
        raise RegionError(
            f"{instruction.name} is a custom call of {instruction.custom_call_target} without a graph, "
            "which only XLA's GPU compiler may make; the pipeline should end with conv-restorer"
        )
    return call


def _quantization_of(instruction: hlo.HloInstruction, platform: str) -> PlacedQuantizeCall | None:
    """A quantize call that kernels run on the platform."""
    call = quantize_call_of(instruction)
    if call is None or not from_call.runs(call, x := instruction.operands[0].shape, platform):
        return None
    return PlacedQuantizeCall(call, x)


def _digest(*content: str) -> str:
    return hashlib.sha256("\n".join(content).encode()).hexdigest()[:16]


def _without_metadata(text: str) -> str:
    """HLO text without what changes when the user's files move."""
    computations = re.search(r"^(ENTRY )?%", text, re.M)
    return re.sub(r", metadata=\{[^{}]*\}", "", text[computations.start() :] if computations else text)


def _dump(folder: Path, name: str, before: str, after: str) -> None:
    """Writes what a region was and what it became. Where that fails the region is rewritten all the same."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(folder, f"{name}.before.hlo", before)
        _write(folder, f"{name}.after.hlo", after)
    except OSError as error:
        _warn_of_dump(str(folder), error.strerror or str(error))


def _write(folder: Path, name: str, text: str) -> None:
    """Writes a file that is there as a whole or not at all, whoever else writes the same one."""
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, folder / name)


@functools.cache  # said once, not for each region
def _warn_of_dump(folder: str, why: str) -> None:
    warnings.warn(
        f"xla_fp8: no HLO is written: XLA_FP8_DUMP_DIR is {folder}, and that is no folder that can be written to: "
        f"{why}. Everything else is as without it.",
        DumpWarning,
        stacklevel=2,
    )
