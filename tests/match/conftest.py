"""What the matcher's tests share: a computation from the lines of its body."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xla_fp8 import hlo


def parse_body(body: str) -> hlo.HloComputation:
    return hlo.parse(f"HloModule test\n\nENTRY main {{\n{body}\n}}\n").entry


@pytest.fixture(scope="session")
def computation() -> Callable[[str], hlo.HloComputation]:
    """`computation("p = f32[] parameter(0)")`; the last line is the root unless one is marked."""
    return parse_body
