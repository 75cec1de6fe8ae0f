"""Can cuDNN run a graph on a target? Asked of cuDNN itself where it is installed, GPU or not; else read off rules."""

from __future__ import annotations

import dataclasses
import functools
from importlib import resources

from xla_fp8.backends.cudnn import deviceless, library, rules
from xla_fp8.backends.cudnn.errors import CudnnError, CudnnMissingError
from xla_fp8.target import GraphCall, Target, format_version

_ANOTHER_TARGET = "compile for a newer target (--target), or update the library"
_ANOTHER_CUDNN = "try another version of cuDNN"


@dataclasses.dataclass(frozen=True)
class Support:
    """The answer, and who gave it.

    Attributes:
        ok: there is a plan. It is proposed and checked, but not yet built: that needs the device.
        reason: why there is none, as a sentence; "" where ok.
        source: who said so, e.g. "cuDNN 9.19.0, asked for NVIDIA H200 without a device".
        plans: how many plans were proposed; None from rules.
        rule: name of the rule that is broken, "" where none is known.
        advice: what to change so that there is a plan; "" where ok.
    """

    ok: bool
    reason: str
    source: str
    plans: int | None = None
    rule: str = ""
    advice: str = ""

    def __str__(self) -> str:
        if not self.ok:
            return f"no: {self.reason} [{self.source}]"
        count = "" if self.plans is None else f"{self.plans} plan{'s' if self.plans != 1 else ''}, none built yet; "
        return f"yes ({count}{self.source})"


_LEFT_TO_XLA = Support(
    False,
    "it is a dot, which XLA gives to cuBLASLt; as a convolution, cuDNN would be slower",
    "this package",
    advice="leave it to XLA, or run it with backend='mosaic' on Hopper",
)


def support(call: GraphCall, target: Target, properties: str | None = None) -> Support:
    """Whether cuDNN has a plan for `call` on `target`.

    Args:
        call: the graph call.
        target: its versions are checked first.
        properties: cuDNN's JSON of the device (`xla-fp8 doctor --save-target` writes it); what ships for the
            target's compute capability by default.
    """
    if call.is_dot:
        return _LEFT_TO_XLA
    if refusal := target.fp8_convolution_refusal():
        return Support(False, refusal, "the target's versions", rule="target", advice=_ANOTHER_TARGET)
    properties = properties or shipped_properties(target)
    if properties is None:
        capability = format_version(target.compute_capability)
        return _by_rules(call, f"no device properties ship for compute capability {capability}")
    if missing := library.why_missing():
        return _by_rules(call, missing)
    return _ask(call, target.compute_capability, properties)


def shipped_properties(target: Target) -> str | None:
    """cuDNN's JSON of a device like the target; None where none ships."""
    if target.compute_capability != (9, 0):
        return None
    return resources.files(__package__).joinpath("h200.json").read_text()


@functools.lru_cache(maxsize=4096)
def _ask(call: GraphCall, compute_capability: tuple[int, ...], properties: str) -> Support:
    try:
        answer = deviceless.shared().ask(call, properties, compute_capability)
    except CudnnMissingError as error:
        return _by_rules(call, str(error))
    except CudnnError as error:
        return Support(False, str(error), "cuDNN, which it ended", rule="crash", advice=_ANOTHER_CUDNN)
    version = format_version(answer.version)
    source = f"cuDNN {version}, asked without a device"
    if answer.plans:
        return Support(True, "", source, answer.plans)
    broken = rules.broken_rule(call)
    if broken is None:
        reason = f"cuDNN {version} has no plan for it: {answer.refusal}"
        return Support(False, reason, source, 0, "no-plan", _ANOTHER_CUDNN)
    rule, sentence = broken
    return Support(False, f"{sentence} (cuDNN {version}: {answer.refusal})", source, 0, rule.name, rule.advice)


def support_by_rules(call: GraphCall, target: Target) -> Support:
    """As `support`, from the rules alone: the same answer on every machine."""
    if call.is_dot:
        return _LEFT_TO_XLA
    if refusal := target.fp8_convolution_refusal():
        return Support(False, refusal, "the target's versions", rule="target", advice=_ANOTHER_TARGET)
    return _by_rules(call, "asked for by name")


def in_xla(answer: Support, call: GraphCall) -> Support:
    """`answer` where it is XLA that asks cuDNN for a plan, when it compiles the call; not this package.

    Of three spatial dimensions XLA compiles none: "All backends failed to find supported configs" (jax 0.11.2, H200).
    """
    if not answer.ok or len(call.window) < 3:
        return answer
    reason = f"XLA compiles no FP8 convolution of {len(call.window)} spatial dimensions (jax 0.11.2)"
    advice = f"run it with xla_fp8.jit, where cuDNN's front end is installed: {library.PIP_LINE}"
    return Support(False, reason, answer.source, rule="spatial-dimensions", advice=advice)


def _by_rules(call: GraphCall, why: str) -> Support:
    source = f"rules made with {rules.MADE_WITH} for compute capability 9.0: {why}"
    broken = rules.broken_rule(call)
    if broken is None:
        return Support(True, "", source)
    rule, sentence = broken
    return Support(False, sentence, source, rule=rule.name, advice=rule.advice)
