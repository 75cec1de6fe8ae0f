"""What a pipeline did to each convolution and dot: the data, and its text, Markdown, HTML and JSON."""

from __future__ import annotations

from xla_fp8.report.pictures import Modules
from xla_fp8.report.report import Cast, Entry, PassTiming, Report

__all__ = ["Cast", "Entry", "Modules", "PassTiming", "Report"]
