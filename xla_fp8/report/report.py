"""What a pipeline did: one entry for each convolution and dot, rewritten or refused, and why."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_fp8.report.pictures import Modules


@dataclasses.dataclass(frozen=True)
class Entry:
    """What became of one convolution or dot.

    Attributes:
        instruction: its name in the module that was read.
        op: "convolution", "dot", "quantize" or "custom-call".
        source: the user's "file.py:42", or None where the dump has no metadata.
        reason: for a refusal, the rule and the first thing that differed, with the instruction that did; for a
            rewritten one, why its graph ends before the chain does.
        advice: what would make it match, or match more of it.
        graph: the serialized graph of a rewritten one.
        computation: the computation it stands in.
        is_fp8: whether an FP8 tensor feeds it: a refusal of one that is not FP8 is no loss.
        rule: a short, stable name of the rule that refused ("missing-clamp", ...), or the pattern that matched.
        saved_bytes: of memory traffic that a rewritten one no longer has: its own result, in the type that it has in
            the program, was written and read back by what followed; it is not where that follows in the graph.
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
    saved_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON holds them."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Cast:
    """What became of one cast to FP8 of a function that runs on a Hopper GPU.

    Attributes:
        types: of the cast's result, "f8e4m3fn[16,4096,320]"; of all that a kernel gives. In training a kernel may give
            other tensors and sums alone.
        source: the user's "file.py:42", or None.
        operations: how many equations the kernel computes, the cast among them; 0 where there is no kernel.
        reason: why there is none, so that XLA computes it; "" where there is one.
    """

    types: tuple[str, ...]
    source: str | None
    operations: int = 0
    reason: str = ""

    @property
    def is_fp8(self) -> bool:
        """Whether an FP8 tensor is among what it gives."""
        return any(type_.startswith("f8") for type_ in self.types)

    @property
    def place(self) -> str:
        """Where it is, or what."""
        return self.source or self.types[0]

    def to_dict(self) -> dict[str, Any]:
        """The fields, as JSON holds them."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class LeftCasts:
    """The casts that XLA computes for one reason.

    Attributes:
        count: how many.
        places: where they are, each once, in program order.
    """

    count: int
    places: tuple[str, ...]


def readable(size: int) -> str:
    """Bytes to three digits: "6.42 MB"."""
    for unit, bytes_ in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if size >= bytes_:
            return f"{size / bytes_:.3g} {unit}"
    return f"{size} bytes"


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
        casts: to FP8, in program order, and what other kernels beside them compute; of a function on a Hopper GPU.
    """

    rewritten: list[Entry] = dataclasses.field(default_factory=list)
    refused: list[Entry] = dataclasses.field(default_factory=list)
    changed: bool = False
    timings: list[PassTiming] = dataclasses.field(default_factory=list)
    target: str = ""
    has_metadata: bool = True
    casts: list[Cast] = dataclasses.field(default_factory=list)

    @property
    def refused_fp8(self) -> list[Entry]:
        """The refusals that cost something: convolutions and dots fed by FP8 tensors."""
        return [entry for entry in self.refused if entry.is_fp8]

    @property
    def refused_without_fp8(self) -> list[Entry]:
        """The convolutions and dots that no FP8 tensor feeds."""
        return [entry for entry in self.refused if not entry.is_fp8]

    @property
    def summary(self) -> str:
        """One sentence of counts, e.g. `2 rewritten, 1 refused, 3 without FP8 operands`."""
        return (
            f"{len(self.rewritten)} rewritten, {len(self.refused_fp8)} refused, "
            f"{len(self.refused_without_fp8)} without FP8 operands"
        )

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory traffic that a call no longer has: the sum over the entries."""
        return sum(entry.saved_bytes for entry in self.rewritten)

    @property
    def saved_note(self) -> str:
        """`saved_bytes` as a sentence; "" where there are none."""
        if not self.saved_bytes:
            return ""
        return f"saves {readable(self.saved_bytes)} of memory traffic: results that are no longer written and read back"

    @property
    def casts_note(self) -> str:
        """How many casts have kernels, as a sentence; "" where none is known."""
        if not self.casts:
            return ""
        fused = sum(cast.is_fp8 for cast in self.casts if cast.operations)
        others = sum(not cast.is_fp8 for cast in self.casts)
        left = sum(not cast.operations for cast in self.casts)
        more = f" (and {others} of other tensors and sums)" if others else ""
        return f"casts to FP8: {fused} by kernels with what is in front of them{more}, {left} left to XLA"

    @property
    def left_casts(self) -> dict[str, LeftCasts]:
        """The casts that XLA computes, by reason, in program order."""
        found: dict[str, list[str]] = {}
        for cast in self.casts:
            if cast.reason:
                found.setdefault(cast.reason, []).append(cast.place)
        return {reason: LeftCasts(len(places), tuple(dict.fromkeys(places))) for reason, places in found.items()}

    @property
    def metadata_note(self) -> str:
        """Why there are no source lines and how to get them; "" where the module has metadata."""
        if self.has_metadata:
            return ""
        return (
            "no source lines: this dump has no metadata. lowered.as_text('hlo') leaves it out; "
            "lowered.as_text('hlo', debug_info=True) keeps it."
        )

    def to_dict(self) -> dict[str, Any]:
        """`{"rewritten": [...], "refused": [...]}`, each entry a dict with the fields of `Entry`; where there are casts
        also "casts", with the fields of `Cast`."""
        found = {
            "rewritten": [entry.to_dict() for entry in self.rewritten],
            "refused": [entry.to_dict() for entry in self.refused],
        }
        return found | ({"casts": [cast.to_dict() for cast in self.casts]} if self.casts else {})

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def to_text(
        self,
        *,
        everything: bool = False,
        width: int | None = None,
        paint: Callable[[str, str], str] | None = None,
    ) -> str:
        """The report for a terminal or a log.

        Args:
            everything: also say why, and what to do, where there is no FP8 operand.
            width: columns to wrap sentences to; None leaves each on one line.
            paint: called with a text and what it is (a key of `xla_fp8.report.text.ROLES`); returns it coloured.
        """
        from xla_fp8.report import text

        return text.render(self, everything=everything, width=width, paint=paint or text.plain)

    def to_markdown(self, *, everything: bool = False) -> str:
        """The report as Markdown tables, for a pull request or an issue."""
        from xla_fp8.report import markdown

        return markdown.render(self, everything=everything)

    def to_html(self, title: str = "FP8 report", *, everything: bool = False, modules: Modules | None = None) -> str:
        """The report as one self-contained HTML page.

        Args:
            everything: as for `to_text`.
            modules: the module before the passes and after them, to draw what stood around each entry. Without them
                the graphs alone are drawn.
        """
        from xla_fp8.report import html

        return html.page(title, [html.Section("", self, modules)], everything=everything)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from xla_fp8.report import html

        return html.fragment(self)

    def __str__(self) -> str:
        return self.to_text()
