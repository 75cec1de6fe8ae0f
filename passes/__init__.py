"""HLO in, HLO out: a file for each pass, named as it is; files of other names are what passes share, or run them."""

from __future__ import annotations

from xla_fp8.passes.base import Context, Pass, PassError, Refusal, UnknownPassError
from xla_fp8.passes.pipeline import DEFAULT_PIPELINE, PASSES, PipelineOptions, mentions_fp8, parse_pipeline, run

__all__ = [
    "DEFAULT_PIPELINE",
    "PASSES",
    "Context",
    "Pass",
    "PassError",
    "PipelineOptions",
    "Refusal",
    "UnknownPassError",
    "mentions_fp8",
    "parse_pipeline",
    "run",
]
