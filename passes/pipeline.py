"""Runs passes over a module, in order, and reports what became of each convolution and dot."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable

from xla_fp8.hlo import HloError, HloInstruction, HloModule, HloVerifyError, to_text, verify
from xla_fp8.passes.base import (
    Context,
    Pass,
    PassError,
    Refusal,
    UnknownPassError,
    described,
    rewritable_computations,
)
from xla_fp8.passes.call_inliner import CallInliner
from xla_fp8.passes.conv_canonicalizer import ConvCanonicalizer
from xla_fp8.passes.conv_fp8_fallback import ConvFp8Fallback
from xla_fp8.passes.conv_restorer import ConvRestorer
from xla_fp8.passes.conv_rewriter import ConvRewriter
from xla_fp8.passes.cudnn_fused_conv_rewriter import CudnnFusedConvRewriter
from xla_fp8.passes.dce import DeadCodeElimination
from xla_fp8.passes.dequantization import fed_by_fp8
from xla_fp8.passes.dynamic_quantize_rewriter import DynamicQuantizeRewriter
from xla_fp8.passes.fused_dot_rewriter import FusedDotRewriter
from xla_fp8.passes.gemm_rewriter import GemmRewriter
from xla_fp8.passes.simplify import Simplify
from xla_fp8.report import PassTiming, Report
from xla_fp8.target import Target

PASSES: dict[str, type[Pass]] = {
    cls.name: cls
    for cls in (
        CallInliner,
        Simplify,
        ConvCanonicalizer,
        ConvRewriter,
        CudnnFusedConvRewriter,
        ConvFp8Fallback,
        ConvRestorer,
        FusedDotRewriter,
        GemmRewriter,
        DynamicQuantizeRewriter,
        DeadCodeElimination,
    )
}
"""Every pass by its name."""

DEFAULT_PIPELINE = tuple(name for name in PASSES if name not in (GemmRewriter.name, DynamicQuantizeRewriter.name))
"""The passes that `run` runs when told nothing else, in order. XLA's GPU compiler takes the calls of gemm-rewriter only
behind its layout assignment, and rewrites most FP8 dots itself; those of dynamic-quantize-rewriter it does not know at
all. So these two run where they are asked for by name. fused-dot-rewriter comes last, since it needs nothing of the
others but whole chains, and what a convolution and a dot could both take is the convolution's, which XLA runs worse."""


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs.

    Attributes:
        verify_input: verify the module before the first pass; XLA's parser takes text that is not sound HLO, and passes
            cannot trust that. Not needed for a module that a compiler has just made.
        verify_each: verify the module after every pass and say which one broke it.
        fuel: stop after that many rewrites (bisecting); None for no limit.
        print_before, print_after: names of passes to print the module around.
        print_before_all, print_after_all: around every pass.
        emit: where those prints go.
        only_if_fp8: leave the module as it was when no FP8 graph came of it.
        undo: keep a copy for that. Without it such a module is not as it was: its report says unchanged, and it is to
            be thrown away.
    """

    verify_input: bool = True
    verify_each: bool = False
    fuel: int | None = None
    print_before: frozenset[str] = frozenset()
    print_after: frozenset[str] = frozenset()
    print_before_all: bool = False
    print_after_all: bool = False
    emit: Callable[[str], None] = _to_stderr
    only_if_fp8: bool = True
    undo: bool = True


def parse_pipeline(text: str) -> tuple[str, ...]:
    """`"a,b,c"` → names. Raises UnknownPassError, which lists the passes there are."""
    return _checked(name.strip() for name in text.split(",") if name.strip())


def _checked(names: Iterable[str]) -> tuple[str, ...]:
    names = tuple(names)
    for name in names:
        if name not in PASSES:
            raise UnknownPassError(f"unknown pass {name!r}; the passes are: {', '.join(PASSES)}")
    return names


def run(
    module: HloModule,
    passes: Iterable[str] | str | None = None,
    target: Target | str | None = None,
    *,
    dialect: str = "xla",
    options: PipelineOptions | None = None,
) -> Report:
    """Runs a pipeline on `module`, in place.

    Args:
        passes: names, in order, or one string of them ("a,b,c"); the default pipeline where None. With the default
            pipeline a module in which nothing becomes an FP8 graph is left exactly as it was.
        target: what to assume of the device; the local GPU, else an h200.
        dialect: of the graph string: "xla", or "extended" for the ops only this project's backends run.

    Returns:
        One entry for each convolution and dot. Which convolutions are FP8 graphs is decided by
        cudnn-fused-conv-rewriter; a pipeline without it reports the rest as not looked at.

    Raises:
        UnknownPassError: a name that is no pass.
        HloVerifyError: the module is not sound HLO; no pass was run (`verify_input`).
        PassError: with `verify_each`, the pass that left a broken module, and how it is broken.
    """
    options = options or PipelineOptions()
    if isinstance(passes, str):
        passes = parse_pipeline(passes)
    names = DEFAULT_PIPELINE if passes is None else _checked(passes)
    target = Target.parse(target) if isinstance(target, str) else target or Target.default()
    context = Context(dialect, options.fuel, only_fp8=passes is None and options.only_if_fp8)
    report = Report(target=str(target), has_metadata=_has_metadata(module))
    undo, all_or_nothing = None, passes is None and options.only_if_fp8
    if all_or_nothing:
        if not mentions_fp8(module):
            _record_rest(module, context)
            _fill(report, context, changed=False)
            return report
        undo = module.clone() if options.undo else None
    if names and options.verify_input:
        verify(module)
    changed = False
    for name in names:
        changed |= _run_pass(PASSES[name](context), module, target, options, report)
    _record_rest(module, context)
    if all_or_nothing and not context.fell_back and not any(entry.graph for entry in context.entries):
        changed = False
        if undo is not None:
            module.replace_contents_with(undo)
    _fill(report, context, changed)
    return report


def mentions_fp8(module: HloModule) -> bool:
    """Whether any instruction of the module has an FP8 shape: a quick look before any work."""
    return any(i.has_shape and i.shape.is_fp8 for computation in module.computations for i in computation)


def _run_pass(a_pass: Pass, module: HloModule, target: Target, options: PipelineOptions, report: Report) -> bool:
    name = a_pass.name
    if options.print_before_all or name in options.print_before:
        options.emit(f"// before {name}\n{to_text(module)}\n")
    before = a_pass.context.rewrites
    start = time.perf_counter()
    changed = a_pass.run(module, target)
    report.timings.append(PassTiming(name, time.perf_counter() - start, a_pass.context.rewrites - before))
    if options.print_after_all or name in options.print_after:
        options.emit(f"// after {name}\n{to_text(module)}\n")
    if options.verify_each:
        try:
            verify(module)
        except HloVerifyError as error:
            raise PassError(f"pass {name} left a module that does not verify: {error}") from error
    return changed


def _record_rest(module: HloModule, context: Context) -> None:
    """Entries for the convolutions and dots that no pass has decided about."""
    decided = {(entry.computation, entry.instruction) for entry in context.entries}
    rewritable = set(rewritable_computations(module))
    for computation in module.computations:
        for instruction in computation:
            if instruction.opcode not in ("convolution", "dot") or context.origin(instruction) in decided:
                continue
            is_fp8 = any(fed_by_fp8(operand) for operand in instruction.operands)
            refusal = _undecided(instruction, is_fp8, computation in rewritable)
            context.record(instruction, instruction.opcode, is_fp8=is_fp8, refusal=refusal)


def _undecided(instruction: HloInstruction, is_fp8: bool, is_rewritable: bool) -> Refusal:
    if not is_fp8:
        return Refusal(
            "not-fp8",
            f"{described(instruction)} has no FP8 tensor among what it is computed from",
            "quantize its operands to float8_e4m3fn or float8_e5m2",
            instruction,
        )
    if instruction.opcode == "dot":
        return Refusal(
            "dot",
            f"{described(instruction)} is a matrix product; the pipeline has no gemm-rewriter",
            "XLA rewrites most scaled FP8 dots to cuBLASLt itself; for others see gemm-rewriter (docs/matmul.md)",
            instruction,
        )
    if not is_rewritable:
        return Refusal(
            "inside-fusion",
            f"{described(instruction)} is inside a fusion, or applied by another instruction: it is no step of its own",
            "read the module from before XLA's optimizations (*before_optimizations* of --xla_dump_to)",
            instruction,
        )
    return Refusal(
        "not-looked-at",
        f"{described(instruction)} was not looked at: the pipeline has no cudnn-fused-conv-rewriter, or it ran dry",
        "run the default pipeline",
        instruction,
    )


def _fill(report: Report, context: Context, changed: bool) -> None:
    report.changed = changed
    # Of a dot that two passes have looked at, what the last one said.
    last = {(entry.op, entry.computation, entry.instruction): entry for entry in context.entries}
    for entry in last.values():
        (report.rewritten if entry.graph is not None else report.refused).append(entry)


def _has_metadata(module: HloModule) -> bool:
    for computation in module.computations:
        for instruction in computation:
            try:
                if instruction.has_attribute("metadata") and module.source_location(instruction):
                    return True
            except HloError:
                continue
    return False
