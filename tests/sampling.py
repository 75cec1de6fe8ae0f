"""Cases that show the same with other data: a run without the marker `slow` takes only a sample of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int) -> list[Any]:
    """The cases for `pytest.mark.parametrize`: the first `count` as they are, the others marked `slow`."""
    return [case if at < count else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]
