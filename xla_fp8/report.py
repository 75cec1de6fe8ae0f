"""What a pipeline did: one entry for each convolution and dot, rewritten or refused, and why."""

from __future__ import annotations

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Entry:
    """What became of one convolution or dot.

    Attributes:
        instruction: its name in the module that was read.
        op: "convolution", "dot" or "custom-call".
        source: the user's "file.py:42", or None where the dump has no metadata.
        reason: for a refusal, the rule and the first thing that differed, with the instruction that did.
        advice: what would make it match.
        graph: the serialized graph of a rewritten one.
        computation: the computation it stands in.
        is_fp8: whether an FP8 tensor feeds it: a refusal of one that is not FP8 is no loss.
        rule: a short, stable name of the rule that refused ("missing-clamp", ...), or the pattern that matched.
    """

    instruction: str
    op: str
    source: str | None
    reason: str = ""
    advice: str = ""
    graph: str | None = None
    computation: str = ""
    is_fp8: bool = True
    rule: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class PassTiming:
    """How long one pass took, in seconds, and how many rewrites it made."""

    name: str
    seconds: float
    rewrites: int


@dataclasses.dataclass
class Report:
    """The outcome of `passes.run`.

    Attributes:
        rewritten, refused: entries in program order.
        changed: whether the module is another than it was.
        timings: one a pass, in order.
        target: what the passes assumed of the device.
        has_metadata: whether any instruction of the module had metadata (source lines need it).
    """

    rewritten: list[Entry] = dataclasses.field(default_factory=list)
    refused: list[Entry] = dataclasses.field(default_factory=list)
    changed: bool = False
    timings: list[PassTiming] = dataclasses.field(default_factory=list)
    target: str = ""
    has_metadata: bool = True

    @property
    def refused_fp8(self) -> list[Entry]:
        """The refusals that cost something: convolutions and dots fed by FP8 tensors."""
        return [entry for entry in self.refused if entry.is_fp8]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rewritten": [entry.to_dict() for entry in self.rewritten],
            "refused": [entry.to_dict() for entry in self.refused],
        }

    def to_json(self) -> str:
        """The report as JSON: `{"rewritten": [...], "refused": [...]}`."""
        return json.dumps(self.to_dict(), indent=2)
