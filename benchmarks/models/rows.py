"""The rows: a network, a batch, inference or training, and a variant. Imports no JAX."""

from __future__ import annotations

import dataclasses
from typing import Literal

Mode = Literal["inference", "training"]

BASELINE = "bf16"
XLA = "xla"
COMPILERS = ("auto", "mosaic")
"""Backends of `xla_fp8.jit`."""


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
    ("unet", "inference", 2),
    ("resnet50", "training", 256),
    ("resnet50", "inference", 256),
    ("unet", "inference", 16),
    ("unet", "training", 16),
    ("convnext-t", "inference", 256),
    ("convnext-t", "training", 256),
)
_TINY: tuple[tuple[str, Mode, int], ...] = tuple(
    (model, mode, 2)
    for model in ("resnet50", "unet", "convnext-t")
    for mode in ("inference", "training")  # type: ignore[misc]
)


def rows(tiny: bool = False) -> list[Row]:
    """Every row, the most telling first: what is cut off when time is short is the end."""
    found: list[Row] = []
    for model, mode, batch in _TINY if tiny else _CASES:
        recipes = ("static",) if mode == "inference" else ("delayed", "dynamic")
        compilers = (XLA, "auto") if tiny else (XLA, *COMPILERS)
        found.append(Row(model, mode, batch, BASELINE, XLA))
        found += [Row(model, mode, batch, recipe, compiler) for recipe in recipes for compiler in compilers]
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
