"""The rows: a network, a batch, inference or training, and a variant. Imports no JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

Mode = Literal["inference", "training"]

BASELINE = "bf16"
XLA = "xla"


@dataclasses.dataclass(frozen=True)
class Row:
    """
    Attributes:
        model: "resnet50", "unet" or "convnext-t".
        recipe: of FP8: "static", "delayed" or "dynamic"; "bf16" for none.
        compiler: "xla" for `jax.jit`, else the backend of `xla_fp8.jit`.
    """

    model: str
    mode: Mode
    batch: int
    recipe: str
    compiler: str

    @property
    def case(self) -> str:
        """What all variants compute."""
        return f"{self.model} {self.mode} {self.batch}"

    @property
    def variant(self) -> str:
        return BASELINE if self.recipe == BASELINE else f"{self.recipe}/{self.compiler}"

    @property
    def name(self) -> str:
        return f"{self.case} {self.variant}"


_CASES: tuple[tuple[str, Mode, int], ...] = (
    ("resnet50", "inference", 64),
    ("resnet50", "training", 256),
    ("convnext-t", "inference", 256),
    ("unet", "inference", 16),
    ("unet", "inference", 2),
    ("resnet50", "inference", 256),
    ("unet", "training", 16),
    ("convnext-t", "training", 256),
)
_TINY: tuple[tuple[str, Mode, int], ...] = tuple(
    (model, mode, 2)
    for model in ("resnet50", "unet", "convnext-t")
    for mode in ("inference", "training")  # type: ignore[misc]
)


def rows(tiny: bool = False) -> list[Row]:
    """Every row, the most telling first: what is cut off when time is short is the end.

    First of each case bf16 and this project's FP8; XLA's FP8, which compiles for minutes, of one case before the last
    ones; then of all, dynamic scales, and one backend by its name.
    """
    cases = _TINY if tiny else _CASES
    first = {"inference": "static", "training": "delayed"}
    found: list[Row] = []
    for number, case in enumerate(cases):
        if number == 5:
            found.append(Row(*cases[0], first[cases[0][1]], XLA))
        found += [Row(*case, BASELINE, XLA), Row(*case, first[case[1]], "auto")]
    found += [Row(*case, first[case[1]], XLA) for case in cases[1:]]
    others = (XLA, "auto") if tiny else ("auto", XLA, "mosaic")
    found += [Row(*case, "dynamic", compiler) for case in cases if case[1] == "training" for compiler in others]
    found += [Row(*case, first[case[1]], "mosaic") for case in cases if not tiny]
    return found


def selected(every: list[Row], only: str, variants: str) -> list[Row]:
    """Rows that have one of the parts (by ";") in their name, and one of the parts (by ",") in their variant."""
    parts = [part for part in only.split(";") if part]
    kinds = [kind for kind in variants.split(",") if kind]
    return [
        row
        for row in every
        if (not parts or any(part in row.name for part in parts))
        and (not kinds or any(kind in row.variant for kind in kinds))
    ]
