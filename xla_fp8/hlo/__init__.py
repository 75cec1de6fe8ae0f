"""HLO as Python objects: parse, print, verify. Knows nothing of FP8 graphs, JAX arrays or devices."""

from __future__ import annotations

from xla_fp8.hlo.attributes import AttributeMap, ConvolutionDimensionNumbers, OpMetadata, Window, WindowDimension
from xla_fp8.hlo.computation import HloComputation
from xla_fp8.hlo.errors import HloAttributeError, HloError, HloMutationError, HloParseError, HloVerifyError
from xla_fp8.hlo.extract import extract
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.module import HloModule
from xla_fp8.hlo.parser import parse
from xla_fp8.hlo.printer import instruction_text, to_text
from xla_fp8.hlo.shape import Layout, Shape
from xla_fp8.hlo.stack_frames import SourceLocation, StackFrameTables
from xla_fp8.hlo.verifier import verify

__all__ = [
    "AttributeMap",
    "ConvolutionDimensionNumbers",
    "HloAttributeError",
    "HloComputation",
    "HloError",
    "HloInstruction",
    "HloModule",
    "HloMutationError",
    "HloParseError",
    "HloVerifyError",
    "Layout",
    "OpMetadata",
    "Shape",
    "SourceLocation",
    "StackFrameTables",
    "Window",
    "WindowDimension",
    "extract",
    "instruction_text",
    "parse",
    "to_text",
    "verify",
]
