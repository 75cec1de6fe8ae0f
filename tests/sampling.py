"""Cases that show the same with other data: a run without the marker `slow` takes only a sample of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], count: int) -> list[Any]:
    """The cases for `pytest.mark.parametrize`: the first `count` as they are, the others marked `slow`."""
    return [case if at < count else pytest.param(case, marks=pytest.mark.slow) for at, case in enumerate(cases)]


def pairwise(*parameters: Sequence[Any]) -> list[Any]:
    """The product of parameters for `pytest.mark.parametrize`: cases that together have every pair of values of two
    parameters as they are, the others marked `slow`."""

    def pairs(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), 2))

    left = list(itertools.product(*(range(len(values)) for values in parameters)))
    missing = set().union(*map(pairs, left))
    chosen: list[tuple[int, ...]] = []
    while missing:
        best = max(left, key=lambda case: len(pairs(case) & missing))
        left.remove(best)
        chosen.append(best)
        missing -= pairs(best)
    cases = [tuple(values[i] for values, i in zip(parameters, case, strict=True)) for case in (*chosen, *left)]
    return [c if i < len(chosen) else pytest.param(*c, marks=pytest.mark.slow) for i, c in enumerate(cases)]
